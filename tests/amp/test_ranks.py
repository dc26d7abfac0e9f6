"""Amp on several ranks: apex's recorded numbers, one decision for the world, any order of wrapping."""

import math
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from amp.programs import Comparison, build, inputs, load, make_optimizer, names, norms, printed, scales, targets
from meeting import run_launched
from ranks import run_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import lockstep
from lockstep import amp


def use(half):
    os.environ["LOCKSTEP_HALF"] = {"float16": "fp16"}.get(half, "bf16")


def recorded_program(rank, name):
    """Run a two-rank program with lockstep's DistributedDataParallel; give what is wrong."""
    record = load(name)
    use(record["half"])
    program, trace = record["program"], record["trace"][f"rank{rank}"]
    compare = Comparison(record, tight=False)
    model = build(program["model"], 5 * rank)
    optimizer = make_optimizer(program["optimizer"], model.parameters())
    with printed():
        model, optimizer = amp.initialize(model, optimizer, **program["initialize"])
    ddp = lockstep.DistributedDataParallel(model, broadcast_buffers=False)
    q = 0
    for step in range(1, program["steps"] + 1):
        optimizer.zero_grad()
        losses, recorded = [], next(s for s in trace["steps"] if s["step"] == step)
        for micro in range(1, program["micro_steps"] + 1):
            q += 1
            x, target = inputs([8, 16], 2 * q + rank), targets({"kind": "class", "classes": 4}, 2 * q + rank, 8)
            loss = nn.functional.cross_entropy(ddp(x), target)
            times = program["loss_times"]
            factor = float(times.get(f"{step}/{rank}", times.get(f"{step}.{micro}/{rank}", 1)))
            with amp.scale_loss(loss * factor / program["micro_steps"], optimizer) as scaled:
                scaled.backward()
            losses.append(loss.item())
        grad_norms = norms(optimizer)
        with printed() as lines:
            optimizer.step()
        own = recorded["loss_of_this_rank"]
        compare.near(f"step {step} loss", "loss", own, losses if isinstance(own, list) else losses[0])
        compare.exact(f"step {step}", [recorded["loss_scale"], recorded["unskipped"]], [s[0] for s in scales()])
        compare.exact(f"step {step} lines", recorded.get("printed", []), lines)
        if recorded["grad_norms"]:
            compare.near(f"step {step} gradient", "grad_norms", recorded["grad_norms"], grad_norms)
    return compare.wrong, [p.detach().float() for p in model.parameters()]


@pytest.mark.parametrize("name", names("ddp-amp-"))
def test_two_ranks_give_what_apex_recorded(name):
    (wrong, first), (other_wrong, second) = run_ranks(recorded_program, 2, name)

    assert wrong + other_wrong == []
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True] * len(first)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


WRAPPERS = {
    "torch": TorchDDP,
    "lockstep": lockstep.DistributedDataParallel,
    "replicate": lockstep.replicate,
}


def train(rank, level, wrapper, order, options, overflow_at=None):
    """Each rank starts elsewhere; gives the story and the end."""
    use("bfloat16")
    torch.manual_seed(rank)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wrap = WRAPPERS[wrapper]
    options = {"opt_level": level, "loss_scale": "dynamic", "verbosity": 0} | options
    if order == "wrapped first":
        called, optimizer = amp.initialize(wrap(model), optimizer, **options)
    else:
        model, optimizer = amp.initialize(model, optimizer, **options)
        called = wrap(model)
    story = []
    for number in range(4):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 24).reshape(6, 4)[rank::2] + number
        loss = called(x).float().square().mean() * (math.inf if (number, rank) == overflow_at else 1.0)
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        story.append((scales(), optimizer._amp_stash.already_patched))
        optimizer.step()
    return story, [p.detach().float() for p in model.parameters()]


def equal(left, right):
    return [torch.equal(a, b) for a, b in zip(left, right, strict=True)] == [True] * len(left)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_order_of_wrapping_does_not_matter_and_ranks_stay_equal(level, wrapper):
    """Every rank initialises other weights; those of rank 0 win, in the masters too."""
    (_, before), (_, other) = run_ranks(train, 2, level, wrapper, "wrapped first", {})
    (_, after), (_, second) = run_ranks(train, 2, level, wrapper, "wrapped last", {})

    assert equal(before, other)
    assert equal(after, second)
    assert level == "O2" or equal(before, after)
    for a, b in zip(before, after, strict=True):  # O2: before, batch norm and masters know rank 0's weights unrounded
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def without_communication(rank):
    """Each rank trains alone, as in model parallel training; rank 1 overflows."""
    use("bfloat16")
    torch.manual_seed(rank)
    model = Net()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O2", verbosity=0)
    before = [p.detach().clone() for p in model.parameters()]
    with amp.scale_loss(model(torch.ones(2, 4)).sum() * (math.inf if rank else 1.0), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    return scales(), equal(before, list(model.parameters()))


@pytest.mark.parametrize("world", ["torch's process group", "lockstep.init"])
def test_a01_an_overflow_on_one_rank_skips_the_step_on_all(world):
    results = run_launched(started, 2) if world == "lockstep.init" else run_ranks(without_communication, 2)

    assert results == [(([32768.0], [0]), True)] * 2


def started(rank):
    lockstep.init(device="cpu")
    return without_communication(rank)


def accumulate(rank, level, wrapper, quiet, blocks):
    """Micro-steps without communication, then one with; or none with."""
    use("bfloat16")
    torch.manual_seed(0)
    model = Net()
    options = {"opt_level": level, "loss_scale": "dynamic", "verbosity": 0}
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.5), **options)
    called = WRAPPERS[wrapper](model)
    x = torch.linspace(-1, 1, 4 * 2 * blocks).reshape(2 * blocks, 4)
    for block in range(blocks):
        mine = x[2 * block + rank : 2 * block + rank + 1]

        def backward(mine=mine):
            with amp.scale_loss(called(mine).float().square().mean() / blocks, optimizer) as scaled:
                scaled.backward()

        if block in quiet:
            with called.no_sync() if wrapper != "replicate" else lockstep.no_sync(model):
                backward()
        else:
            backward()
    optimizer.step()
    return [p.detach().float() for p in model.parameters()]


QUIET = {"first two": (0, 1), "middle": (1,), "all": (0, 1, 2)}


@pytest.mark.parametrize(
    ("level", "wrapper", "quiet"),
    [
        ("O1", "torch", "first two"),  # torch's engine averages nothing at the step, so it needs a loud last block
        *(("O1", "lockstep", quiet) for quiet in QUIET),
        *(("O2", "lockstep", quiet) for quiet in QUIET),
        ("O2", "replicate", "first two"),
        ("O3", "replicate", "all"),
    ],
)
def test_pain20_accumulating_without_communication_loses_nothing(level, wrapper, quiet):
    quiet = QUIET[quiet]
    first, second = run_ranks(accumulate, 2, level, wrapper, quiet, 3)
    loud, _ = run_ranks(accumulate, 2, level, wrapper, (), 3)

    assert equal(first, second)
    for a, b in zip(first, loud, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=4e-3 if level != "O3" else 2e-2)


def loss_scale_of_many_overflows(rank):
    model = Net()
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), verbosity=0)
    lines = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with amp.scale_loss(
                model(torch.ones(2, 4)).float().sum() * (math.inf if rank else 1.0), optimizer
            ) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
    lines += [str(w.message) for w in caught]
    return [line for line in lines if "shrunk" in line]


def test_every_rank_says_whose_gradients_are_not_finite():
    (first,), (second,) = run_ranks(loss_scale_of_many_overflows, 2)

    assert first.startswith("rank 0 of 2: loss scaler 0 has shrunk three times in a row")
    assert first.endswith("another rank's; see its own message.")
    assert "rank 1 of 2" in second
    assert "is 'first.weight', shape (8, 4)" in second
    assert not dist.is_initialized()
