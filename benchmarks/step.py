"""Training steps on two CPU ranks: torch's DDP on gloo, the same on shm, lockstep.replicate on shm; a thread a rank.

    python benchmarks/step.py                   all models
    python benchmarks/step.py mlp cnn           some

Samples a second over all ranks, and efficiency: that, over twice what one rank alone does. All variants train in the
same processes, in turn. Two of them only say what the machine allows: ranks that send nothing, and ranks that send
nothing but wait for each other after every step, as everyone who averages gradients must. The rest is to be read
against the second.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

from common import keep, machine, median

ROUNDS = 7
IN_STEP = "nothing sent, in step"
MODELS = {"mlp": (64, 200), "cnn": (32, 6), "transformer": (16, 3)}  # samples a rank and step, steps a block


def build(name):
    import torch
    from torch import nn

    torch.manual_seed(0)
    if name == "mlp":
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
        return net, lambda n: torch.randn(n, 64)
    if name == "cnn":
        layers, width = [], 3
        for out in (32, 64, 64, 128):
            layers += [nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
            layers += [nn.MaxPool2d(2)] if out != 128 else [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)]
            width = out
        return nn.Sequential(*layers), lambda n: torch.randn(n, 3, 32, 32)
    block = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    net = nn.Sequential(
        nn.TransformerEncoder(block, 6, enable_nested_tensor=False), nn.Flatten(), nn.Linear(64 * 256, 10)
    )
    return net, lambda n: torch.randn(n, 64, 256)


def variants(name):
    """The same model in every variant that this process can run."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import lockstep

    if not dist.is_initialized():
        return {"alone": build(name)[0]}
    gloo = dist.new_group(backend="gloo")
    found = {
        "nothing sent": build(name)[0],
        IN_STEP: build(name)[0],
        "DDP on gloo": DistributedDataParallel(build(name)[0], process_group=gloo),
        "DDP on shm": DistributedDataParallel(build(name)[0]),
    }
    if hasattr(lockstep, "replicate"):
        found["lockstep.replicate"] = lockstep.replicate(build(name)[0])
        if name == "cnn":  # as in DDP, batch norm over each rank's own samples
            found["without sync batch norm"] = lockstep.replicate(build(name)[0], sync_batchnorm=False)
    return found


def measure(name):
    """In a rank: a block of steps of each variant in turn; rank 0 prints medians of samples a second."""
    import torch

    import lockstep

    torch.set_num_threads(1)
    world = lockstep.init(device="cpu")
    samples, steps = MODELS[name]
    models, (_, draw) = variants(name), build(name)
    x, y = draw(samples), torch.randint(10, (samples,))
    speeds = {variant: [] for variant in models}
    optimizers = {variant: torch.optim.SGD(model.parameters(), lr=0.01) for variant, model in models.items()}
    for number in range(ROUNDS + 1):
        for variant, model in models.items():
            world.barrier()
            start = time.perf_counter()
            for _ in range(steps):
                optimizers[variant].zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizers[variant].step()
                if variant == IN_STEP:
                    world.barrier()
            world.barrier()
            if number:
                speeds[variant].append(world.size * samples * steps / (time.perf_counter() - start))
    world.print(json.dumps({variant: median(rows) for variant, rows in speeds.items()}))


def launch(name, ranks):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*torchrun, __file__, "--in-rank", name], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main():
    kept = {}
    print(f"{machine()}\n\n{'':14}{'':24}{'samples/s':>12}{'of gloo':>10}{'efficiency':>12}{'of in step':>12}")
    for name in sys.argv[1:] or MODELS:
        alone, together = launch(name, 1)["alone"], launch(name, 2)
        kept[name] = {"alone": alone, **together}
        print(f"{name:14}{'one rank':24}{alone:>12.0f}")
        for variant, speed in together.items():
            print(
                f"{'':14}{variant:24}{speed:>12.0f}{speed / together['DDP on gloo']:>10.2f}{speed / alone / 2:>12.2f}"
                f"{speed / together[IN_STEP]:>12.2f}"
            )
    keep("step", kept)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-rank"]:
        measure(sys.argv[2])
    else:
        main()
