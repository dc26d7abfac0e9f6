"""apex.amp together with apex.parallel: the recorded runs of DistributedDataParallel and LARC at O0 to O2."""

import contextlib
import io

import pytest
import torch
from amp import programs
from amp.programs import Comparison, half_is, load, names, run_plain
from faces import apex
from ranks import run_ranks
from torch.nn.functional import cross_entropy


@contextlib.contextmanager
def as_recorded(half):
    """The half type, and without oneDNN, whose half-precision products round differently on another processor."""
    before, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    try:
        with half_is(half):
            yield
    finally:
        torch.backends.mkldnn.enabled = before


@pytest.mark.parametrize("name", names("larc-O", "larc-adam", "larc-noclip"))
def test_golden_larc_under_amp(name, monkeypatch):
    record = load(name)
    compare = Comparison(record)
    make = programs.make_optimizer
    monkeypatch.setattr(
        programs, "make_optimizer", lambda spec, params: apex.parallel.LARC(make(spec, params), **spec["LARC"])
    )

    with as_recorded(record["half"]):
        run_plain(record, compare)

    compare.check()


def ddp_run(rank, name):
    """The program of the file on one rank; what departs from the record, and the parameters at the end."""
    record = load(name)
    program, trace = record["program"], record["trace"][f"rank{rank}"]
    compare = Comparison(record, tight=False)  # the files of two ranks name one tolerance
    with as_recorded(record["half"]):
        model = programs.build(program["model"], 5 * rank)
        optimizer = programs.make_optimizer(program["optimizer"], model.parameters())
        with contextlib.redirect_stdout(io.StringIO()):
            model, optimizer = apex.amp.initialize(model, optimizer, **program["initialize"])
        ddp = apex.parallel.DistributedDataParallel(model, **program["ddp"])
        for recorded in trace["steps"]:
            step, micro_steps = recorded["step"], program["micro_steps"]
            optimizer.zero_grad()
            losses = []
            for micro in range(1, micro_steps + 1):
                s = 2 * ((step - 1) * micro_steps + micro) + rank
                loss = cross_entropy(
                    ddp(programs.inputs((8, 16), s)), programs.targets({"kind": "class", "classes": 4}, s, 8)
                )
                losses.append(loss.item())
                key = f"{step}/{rank}" if micro_steps == 1 else f"{step}.{micro}/{rank}"
                factor = float(program["loss_times"].get(key, 1))
                with apex.amp.scale_loss(loss * factor / micro_steps, optimizer) as scaled:
                    scaled.backward()
            grad_norms = programs.norms(optimizer)
            after = [[programs.scales()[0][0], programs.scales()[1][0]]]
            with programs.printed() as lines:
                optimizer.step()
            mine = {key: value for key, value in recorded.items() if key != "loss_of_this_rank"}
            mine["loss"] = recorded["loss_of_this_rank"]
            mine.pop("after_each_micro_step", None)
            programs.compare_step(compare, mine, losses, after, grad_norms, lines)
        compare.exact("keys", trace["final"]["state_dict_keys"], list(ddp.state_dict()))
        compare.tensors("buffer", trace["final"]["buffers"], dict(model.named_buffers()))
        params = {key: param.detach().clone() for key, param in model.named_parameters()}
        masters = [param.detach().clone() for param in apex.amp.master_params(optimizer)]
        if rank == 0:
            compare.tensors("parameter", trace["final"]["params"], params)
            compare.tensors("master", trace["final"].get("masters", []), masters)
    return compare.wrong, list(params.values()) + masters


@pytest.mark.parametrize("name", names("ddp-amp-"))
def test_golden_ddp_under_amp(name):
    (first, params), (second, others) = run_ranks(ddp_run, 2, name)

    assert [] == first + second
    assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def unlike_everywhere(rank, level):
    """Ranks that begin with different values, which also wrote into their parameters after initialize."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = apex.amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    with torch.no_grad():
        model[0].weight.data.copy_(torch.full((8, 4), 0.25 + rank))
    ddp = apex.parallel.DistributedDataParallel(model)
    written = model[0].weight.detach().float().clone()
    for step in range(3):
        optimizer.zero_grad()
        x = torch.randn(6, 4)
        for micro in range(2):
            local = micro == 0 and step == 2
            context = ddp.no_sync() if local else contextlib.nullcontext()
            with context, apex.amp.scale_loss(ddp(x).float().square().mean() / 2, optimizer) as scaled:
                scaled.backward()
        optimizer.step()
    params = [param.detach().clone() for param in model.parameters()]
    return written, params, [param.detach().clone() for param in apex.amp.master_params(optimizer)]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_ranks_that_began_unlike_train_as_one(level):
    """Different seeds, initialize, DDP, three steps, the last accumulated under no_sync."""
    (written, *mine), (_, *theirs) = run_ranks(unlike_everywhere, 2, level)

    assert torch.equal(torch.full((8, 4), 0.25), written)
    assert all(torch.equal(a, b) for x, y in zip(mine, theirs, strict=True) for a, b in zip(x, y, strict=True))
