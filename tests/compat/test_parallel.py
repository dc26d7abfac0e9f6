"""apex.parallel on real ranks: DistributedDataParallel, Reducer, flat collectives, SyncBatchNorm."""

import json

import pytest
import torch
import torch.distributed as dist
from faces import apex
from ranks import run_ranks
from torch import nn

from tests.compat.traces import DTYPES, cases, classes, departures, fill, index, inputs, load, near, sequential

DDP_CASES = [
    pytest.param(half, number, id=f"{half} {json.dumps(case['ddp'])} times {case['loss_factor']:g}")
    for half in ("float32", "float16")
    for number, case in enumerate(cases(f"ddp-grads-{half}"))
]


def ddp_trace(rank, half, number):
    case = cases(f"ddp-grads-{half}")[number]
    model = fill(sequential(load(f"ddp-grads-{half}")["program"]["model"]["torch.nn.Sequential of"]), 5 * rank)
    model = model.half() if half == "float16" else model
    ddp = apex.parallel.DistributedDataParallel(model, **case["ddp"])
    found = [{name: param.detach().clone() for name, param in model.named_parameters()}]
    for b in (1, 2):
        ddp.zero_grad()
        s = 2 * b + rank
        out = ddp(inputs((8, 16), s).to(DTYPES[half])).float()
        (nn.functional.cross_entropy(out, classes(8, 4, s)) * case["loss_factor"]).backward()
        found.append({name: param.grad.clone() for name, param in model.named_parameters()})
    return found


@pytest.mark.parametrize(("half", "number"), DDP_CASES)
def test_golden_ddp_gives_the_recorded_gradients(half, number):
    golden = load(f"ddp-grads-{half}")
    case = golden["trace"]["cases"][number]
    recorded = [golden["trace"]["params_after_constructor_on_both_ranks"]]
    recorded += [backward["grads_on_both_ranks"] for backward in case["backwards"]]

    both = run_ranks(ddp_trace, 2, half, number)

    wrong = [
        (rank, step, name, found)
        for rank, steps in enumerate(both)
        for step, (expected, got) in enumerate(zip(recorded, steps, strict=False))
        for name in expected
        if (found := departures(expected[name], got[name], case["tolerance"]))
    ]
    assert [] == wrong
    assert all(
        torch.equal(a, b) for x, y in zip(*both, strict=True) for a, b in zip(x.values(), y.values(), strict=True)
    )


def described(tensors):
    return [{"dtype": str(x.dtype).removeprefix("torch."), "values": x.tolist()} for x in tensors]


def functions(rank):
    model = fill(sequential(load("parallel-functions")["program"]["model"]["torch.nn.Sequential of"]), 5 * rank)
    reducer = apex.parallel.Reducer(model)
    after = {name: param.detach().clone() for name, param in model.named_parameters()}
    nn.functional.cross_entropy(model(inputs((8, 16), 2 + rank)), classes(8, 4, 2 + rank)).backward()
    model[2].bias.grad = None
    reducer.reduce()
    grads = {name: param.grad for name, param in model.named_parameters()}

    def tensors():
        made = torch.tensor([1.0, 2.0]), torch.tensor([3.0]).half(), torch.tensor([[5.0, 7.0]]).double()
        return [x * (rank + 1) for x in made]

    summed, sent, listed = tensors(), tensors(), tensors()
    apex.parallel.distributed.flat_dist_call(summed, dist.all_reduce)
    apex.parallel.distributed.flat_dist_call(sent, dist.broadcast, (0,))
    apex.parallel.Reducer(listed).reduce()
    return after, grads, described(summed), described(sent), described(listed)


def test_golden_reducer_and_flat_dist_call():
    golden = load("parallel-functions")
    for rank, (after, grads, *lists) in enumerate(run_ranks(functions, 2)):
        trace = golden["trace"][f"rank{rank}"]
        recorded = (trace["params_after_Reducer"], trace["grads_after_Reducer_reduce"])
        wrong = [
            found
            for expected, got in zip(recorded, (after, grads), strict=True)
            for name in expected
            if (expected[name] is None) != (got[name] is None)
            or (expected[name] and (found := departures(expected[name], got[name], golden["tolerance"])))
        ]

        assert [] == wrong
        assert list(trace.values())[2:] == lists


def batchnorm_trace(rank, number):
    case = cases("sync-batchnorm")[number]
    arguments = dict(case["arguments"])
    use_z = arguments.pop("z given to forward")
    shape = case["shapes_per_rank"][rank]
    channels = shape[-1] if arguments["channel_last"] else shape[1]
    layer = apex.parallel.SyncBatchNorm(channels, **arguments)
    if arguments["affine"]:
        c = index(channels)
        with torch.no_grad():
            layer.weight.copy_(1 + torch.sin(0.7 * c) / 2)
            layer.bias.copy_(torch.cos(0.7 * c) / 5)
    n = index(*shape)
    first = 0.3 * (rank + 1) + (1 + 0.5 * rank) * torch.sin(0.23 * n + 0.017 * n * n + 0.9 * rank + 0.4)
    z = 0.5 * torch.cos(0.53 * n + 0.2 * rank)
    found = []
    for step in range(len(case["steps"])):
        x = (first if step == 0 else first * 1.5 + 0.25).float().requires_grad_()
        layer.zero_grad()
        y = layer(x, z.float()) if use_z else layer(x)
        y.backward(torch.cos(0.31 * n + 0.011 * n * n + 0.7 * rank).float())
        grads = [None if p is None else p.grad.clone() for p in (layer.weight, layer.bias)]
        stats = layer.running_mean.clone(), layer.running_var.clone(), int(layer.num_batches_tracked)
        found.append((y.detach(), x.grad, *grads, stats))
    layer.eval()
    after = layer(first.float(), z.float()) if use_z else layer(first.float())
    return found, after.detach()


@pytest.mark.parametrize("number", range(12), ids=[case["case"] for case in cases("sync-batchnorm")])
def test_golden_sync_batchnorm(number):
    case, tolerance = cases("sync-batchnorm")[number], load("sync-batchnorm")["tolerance"]
    sums = {"rtol": 1e-5, "atol": 1e-5}
    count = len(case["shapes_per_rank"])

    results = run_ranks(batchnorm_trace, count, number, backend="gloo" if count > 1 else None)

    wrong = []
    for rank, (steps, after) in enumerate(results):
        for recorded, (y, dx, dw, db, stats) in zip(case["steps"], steps, strict=True):
            mine = recorded["ranks"][rank]
            wrong += departures(mine["output"], y, tolerance, sums) + departures(
                mine["grad_input"], dx, tolerance, sums
            )
            for name, got in (("grad_weight", dw), ("grad_bias", db)):
                if (got is None) != (mine.get(name) is None) or (
                    got is not None and not near(mine[name], got, tolerance)
                ):
                    wrong.append((name, got, mine.get(name)))
            near_stats = [
                near(recorded[name], got, tolerance)
                for name, got in zip(("running_mean", "running_var"), stats, strict=False)
            ]
            if not all(near_stats) or recorded["num_batches_tracked"] != stats[2]:
                wrong.append((recorded["running_mean"], stats))
        if "eval_output_after" in case:
            wrong += departures(case["eval_output_after"][rank], after, tolerance, sums)
    assert [] == wrong
