"""How far from one process 20 steps end: the usual recipe (a mean loss per rank, averaged gradients) beside
lockstep.Update.

Float64, SGD with momentum, 3 ranks. Prints the largest difference of any parameter from one process on the whole batch,
and the largest parameter.
"""

import multiprocessing
import tempfile

from common import keep, machine

RANKS, STEPS = 3, 20


def share(n, rank, size):
    return slice(rank * n // size, (rank + 1) * n // size)


def samples(step, n):
    import torch

    generator = torch.Generator().manual_seed(step)
    x = torch.randn(n, 6, dtype=torch.float64, generator=generator)
    return x, (x[:, :3] * 2).argmax(1), torch.randint(1, 9, (n,), generator=generator)


def losses_of(model, x, y, tokens, masked):
    """A loss per sample; or per token, of which a sample has 1 to 8, all with its label."""
    import torch
    from torch.nn.functional import cross_entropy

    losses = cross_entropy(model(x), y, reduction="none")
    if not masked:
        return losses, None
    mask = torch.arange(8)[None] < tokens[:, None]
    return losses[:, None].expand(-1, 8), mask


def network():
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)).double()


def train(rank, size, task, exact):
    import torch

    import lockstep

    model = lockstep.replicate(network()) if exact else torch.nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    parts = task["micro-batches"]
    update = lockstep.Update(model, optimizer, accumulate=parts) if exact else None
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(parts):
            whole = samples(step, task["samples"][step % len(task["samples"])])
            part = [t[share(len(t), number, parts)] for t in whole]
            x, y, tokens = (t[share(len(t), rank, size)] for t in part)
            if exact:
                with update:
                    update.backward(*losses_of(model, x, y, tokens, task["masked"]))
            else:
                losses, mask = losses_of(model, x, y, tokens, task["masked"])
                loss = losses.mean() if mask is None else losses[mask].mean()
                (loss / parts).backward()
        if not exact:
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def one_process(task):
    """The reference, by hand: each step is one whole batch and one backward."""
    import torch

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(STEPS):
        losses, mask = losses_of(model, *samples(step, task["samples"][step % len(task["samples"])]), task["masked"])
        optimizer.zero_grad()
        (losses.mean() if mask is None else (losses * mask).sum() / mask.sum()).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def be_a_rank(rank, store, task, exact, out):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    parameters = train(rank, RANKS, task, exact)
    if rank == 0:
        out.put(parameters.tolist())
    dist.destroy_process_group()


def run(task, exact):
    import torch

    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            context.Process(target=be_a_rank, args=(rank, f"{folder}/store", task, exact, out)) for rank in range(RANKS)
        ]
        for job in jobs:
            job.start()
        result = torch.tensor(out.get(timeout=120), dtype=torch.float64)
        for job in jobs:
            job.join()
    return result


TASKS = {
    "12 samples a step": {"samples": [12], "masked": False, "micro-batches": 1},
    "13 samples a step": {"samples": [13], "masked": False, "micro-batches": 1},
    "12 samples, last batch of an epoch 5": {"samples": [12, 12, 12, 5], "masked": False, "micro-batches": 1},
    "texts of 1 to 8 tokens": {"samples": [12], "masked": True, "micro-batches": 1},
    "texts, 2 micro-batches": {"samples": [12], "masked": True, "micro-batches": 2},
}


def main():
    print(f"{machine()}\n")
    print(f"| {RANKS} ranks, {STEPS} steps | mean loss, DDP's average | lockstep.Update | largest parameter |")
    print("|---|---|---|---|")
    rows = {}
    for name, task in TASKS.items():
        expected = one_process(task)
        usual, ours = (float((run(task, exact) - expected).abs().max()) for exact in (False, True))
        rows[name] = {"usual": usual, "lockstep": ours, "largest": float(expected.abs().max())}
        print(f"| {name} | {usual:.2g} | {ours:.1g} | {rows[name]['largest']:.2g} |")
    keep("exactness", rows)


if __name__ == "__main__":
    main()
