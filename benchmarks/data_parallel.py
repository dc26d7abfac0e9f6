"""What DataParallel costs around the arithmetic: copies kept between steps, beside copying the model on every step.

Two CPU devices in one process. First the copying alone, as milliseconds per forward: nothing changed since the last one
(evaluation, accumulation), a tenth of it changed (a new head on a frozen body), all of it changed (training), and all
copied on every forward, which is what torch's does on GPUs. Then splitting and gathering, then whole steps.
"""

import sys
from pathlib import Path

from common import alternate, keep, machine, median, seconds

ROUNDS = 15


def models():
    """The same number of parameters in few tensors and in many."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return {
        "8 tensors of 4 MiB": nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(8)]),
        "512 tensors of 64 KiB": nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(512)]),
    }


def copying(module):
    """Milliseconds to have replicas ready, by what changed."""
    import torch

    from lockstep.parallel.one_process.front import _Keeper

    keeper, devices = _Keeper(), [torch.device("cpu")] * 2
    parameters = list(module.parameters())

    def after(changed):
        def measure():
            keeper.replicas(module, devices)  # sums of copies that the case before made
            with torch.no_grad():
                for parameter in changed:
                    parameter.mul_(1.0)
            return seconds(lambda: keeper.replicas(module, devices)) * 1e3

        return measure

    keeper.replicas(module, devices)
    return {
        "kept, nothing changed": after([]),
        "kept, a tenth changed": after(parameters[-len(parameters) // 10 :]),
        "kept, all changed": after(parameters),
        "copied each step": lambda: seconds(lambda: _Keeper().replicas(module, devices)) * 1e3,
    }


def moving():
    """Milliseconds to split and to gather 16 MiB."""
    import torch

    from lockstep.parallel.one_process.split import join, split

    x, devices = torch.randn(512, 8192), [torch.device("cpu")] * 2
    pieces = split(x, devices, 0)
    return {
        "split 16 MiB": lambda: seconds(lambda: split(x, devices, 0)) * 1e3,
        "gather 16 MiB": lambda: seconds(lambda: join(pieces, devices[0], 0)) * 1e3,
    }


def evaluating(module, width):
    """Milliseconds of a whole forward of 8 samples, copies kept or not."""
    import torch

    import lockstep
    from lockstep.parallel import data_parallel

    model, x = lockstep.DataParallel(module, ["cpu", "cpu"]), torch.randn(8, width)

    def measure(run):
        def once():
            with torch.no_grad():
                return seconds(run) * 1e3

        return once

    return {
        "forward, kept": measure(lambda: model(x)),
        "forward, copied each step": measure(lambda: data_parallel(module, x, ["cpu", "cpu"])),
        "forward, the plain module": measure(lambda: module(x)),
    }


def main():
    import torch

    torch.set_num_threads(1)
    print(machine())
    rows = {"moving": alternate(moving(), ROUNDS)}
    for name, module in models().items():
        rows[name] = alternate(copying(module) | evaluating(module, module[0].in_features), ROUNDS)
    for title, cases in rows.items():
        print(f"\n{title}: ms, median of {ROUNDS} rounds")
        for name, values in cases.items():
            print(f"  {name:28} {median(values):8.2f}")
    keep("data_parallel", rows)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    main()
