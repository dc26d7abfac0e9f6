"""Every operation, type, shape and group size against gloo, and half types against float64."""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from shm import calls

SHAPES = [(1,), (7,), (3, 5), (2, 3, 4), (1000,), (129, 257), (20_001,), (140_003,)]
filled = st.sampled_from(SHAPES)
shapes = st.sampled_from([(), (0,), *SHAPES])
layouts = st.sampled_from(["contiguous", "strided", "transposed"])
# A run of ranks costs a second, a call a millisecond: few runs with many calls each. `make soak` does more.
# A failing list of calls names the calls that differ, so shrinking it, which takes minutes, is left out.
many = settings(
    max_examples=60 if os.environ.get("SOAK") else 2,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
cases_of = functools.partial(st.lists, min_size=40, max_size=60)


def reduction(known_to_gloo=False):
    dtypes = dict.fromkeys(calls.OPS, calls.FLOATING + calls.HALVES + calls.WHOLE)
    dtypes["AVG"] = calls.FLOATING + calls.HALVES
    dtypes["SUM"] += calls.WIDE + calls.OTHER
    for op in ("BAND", "BOR", "BXOR"):
        dtypes[op] = (*calls.WHOLE, torch.bool)
    if known_to_gloo:  # no halves here: it rounds at every step
        gloos = {*calls.FLOATING, *calls.WHOLE} - {torch.int16}
        dtypes = {op: [dtype for dtype in some if dtype in gloos] for op, some in dtypes.items()}
    return st.sampled_from(calls.OPS).flatmap(
        lambda op: st.tuples(
            st.sampled_from(list(calls.REDUCE)),
            st.just(op),
            st.sampled_from(dtypes[op]),
            filled if known_to_gloo else shapes,
            layouts,
            st.integers(0, 4),
            st.booleans(),
        )
    )


def move():
    dtypes = calls.FLOATING + calls.HALVES + calls.WHOLE + calls.WIDE + calls.OTHER + (torch.float8_e4m3fn,)
    return st.tuples(
        st.sampled_from(list(calls.MOVE)), st.sampled_from(dtypes), shapes, layouts, st.integers(0, 4), st.booleans()
    )


def finish(work, outs):
    if work is not None:
        work.wait()
    return outs


def reference(name, op, dtype, rank, root, everyone):
    """The reduction of all ranks' tensors, in this process."""
    rows = [[p[0] for p in everyone]] if name in ("all_reduce", "reduce") else [[p[rank] for p in everyone]]
    if name == "reduce" and rank != root:
        return []
    stack = torch.stack([x.to(torch.float64) if dtype in calls.HALVES else x for x in rows[0]])
    if op == "AVG":
        return [stack.mean(0).to(dtype)]
    if op == "SUM":
        return [stack.any(0) if dtype == torch.bool else stack.to(_wider(dtype)).sum(0).to(dtype)]
    if op == "PRODUCT":
        return [stack.prod(0).to(dtype)]
    if op in ("MIN", "MAX"):
        return [(stack.amin(0) if op == "MIN" else stack.amax(0)).to(dtype)]
    result = stack[0]
    for other in stack[1:]:
        result = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op](result, other)
    return [result]


def _wider(dtype):
    return torch.int64 if dtype in calls.WHOLE + calls.WIDE else dtype if dtype not in calls.HALVES else torch.float64


def differences_of_reductions(rank, cases):
    found, size = [], dist.get_world_size()
    for seed, (name, op, dtype, shape, layout, wanted, later) in enumerate(cases):
        root = wanted % size
        everyone = [calls.parts_of(r, size, shape, dtype, seed, layout) for r in range(size)]
        mine = calls.parts_of(rank, size, shape, dtype, seed, layout)
        how = {"op": getattr(dist.ReduceOp, op), "async_op": later}
        outs = finish(*calls.REDUCE[name](mine, root, None, **how))
        for out, expected in zip(outs, reference(name, op, dtype, rank, root, everyone), strict=True):
            close = {torch.float16: 1.1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5, torch.complex64: 1e-5}
            tolerance = close.get(dtype, 1e-12)
            try:
                torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
            except AssertionError as error:
                found.append(f"{name} {op} {dtype} {shape} {layout}: {error}")
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@many
@given(cases=cases_of(reduction()))
def test_reductions_give_what_one_process_gives(size, cases):
    found = run_ranks(differences_of_reductions, size, cases, backend="shm")

    assert [[]] * size == found


def differences_from_gloo(rank, cases):
    found, size, gloo = [], dist.get_world_size(), dist.new_group(backend="gloo")
    for seed, (name, op, dtype, shape, layout, root, later) in enumerate(cases):
        results = []
        for group in (None, gloo):
            parts = calls.parts_of(rank, size, shape, dtype, seed, layout)
            parts = parts if group is None else [part.contiguous() for part in parts]  # gloo takes no others
            how = {"op": getattr(dist.ReduceOp, op), "async_op": later}
            results.append(finish(*calls.REDUCE[name](parts, root % size, group, **how)))
        for mine, theirs in zip(*results, strict=True):
            tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 0)
            same = torch.equal if tolerance == 0 else lambda a, b, t=tolerance: torch.allclose(a, b, rtol=t, atol=t)
            if not same(mine, theirs):
                found.append(f"{name} {op} {dtype} {shape}")
    return found


@pytest.mark.parametrize("size", [2, 4])
@many
@given(cases=cases_of(reduction(known_to_gloo=True)))
def test_reductions_equal_gloos(size, cases):
    found = run_ranks(differences_from_gloo, size, cases, backend="shm")

    assert [[]] * size == found


def bits(x):
    flat = torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1))
    return flat.view(torch.uint8)


def differences_of_moves(rank, cases):
    found, size = [], dist.get_world_size()
    for seed, (name, dtype, shape, layout, wanted, later) in enumerate(cases):
        root = wanted % size
        everyone = [calls.parts_of(r, size, shape, dtype, seed) for r in range(size)]
        mine = calls.parts_of(rank, size, shape, dtype, seed)
        if layout == "strided":  # the same numbers, every second place in memory
            mine = [torch.stack((x, x), -1)[..., 0] for x in mine]
        if name == "all_to_all_single" and 0 in shape:
            continue
        outs = finish(*calls.MOVE[name](mine, root, None, async_op=later))
        for out, expected in zip(outs, calls.moved(name, rank, size, root, everyone), strict=True):
            if out.shape != expected.shape or not torch.equal(bits(out), bits(expected)):
                found.append(f"{name} {dtype} {shape} {layout}")
    return found


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@many
@given(cases=cases_of(move()))
def test_moves_bring_every_bit_to_its_place(size, cases):
    found = run_ranks(differences_of_moves, size, cases, backend="shm")

    assert [[]] * size == found


def all_bits(rank):
    results = []
    for count in (5, 300_007):
        x = torch.randn(count, generator=torch.Generator().manual_seed(rank)) * 10.0 ** (rank - 1)
        dist.all_reduce(x)
        results.append(x.numpy().tobytes())
    return results


def test_every_rank_gets_the_same_bits_and_the_next_run_too():
    first, again = run_ranks(all_bits, 3, backend="shm"), run_ranks(all_bits, 3, backend="shm")

    assert [first[0]] * 3 == first == again


def in_rank_order(rank):
    x = torch.tensor([1.0, 2.0**24, -(2.0**24)][rank])
    dist.all_reduce(x)
    return x.item()


def test_ranks_are_combined_in_their_order():
    # (1 + 2^24) - 2^24 is 0 in float32, 1 + (2^24 - 2^24) would be 1.
    assert run_ranks(in_rank_order, 3, backend="shm") == [0.0] * 3


def add_tiny_halves(rank):
    x = torch.full((4,), 1.0 if rank == 0 else 2.0**-11, dtype=torch.float16)
    dist.all_reduce(x)
    return x.tolist()


def test_half_types_are_rounded_once():
    # Each 2^-11 alone is lost beside 1 in float16 (a tie, to even); two together are not.
    assert run_ranks(add_tiny_halves, 3, backend="shm") == [[1.0 + 2.0**-10] * 4] * 3


def narrow_everything(rank):
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.float16)
    zero = torch.zeros(65536, dtype=torch.float16)
    x = every.clone() if rank == 0 else zero.clone()
    dist.all_reduce(x)
    wrong = ~((x == every) | (x.isnan() & every.isnan()))
    wide = torch.randn(200_000, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    wide = wide * 10.0 ** torch.randint(-9, 6, (200_000,), generator=torch.Generator().manual_seed(8))
    halves = [wide.to(torch.float16), (wide.roll(1) * 0.37).to(torch.float16)]
    y = halves[rank].clone()
    dist.all_reduce(y)
    expected = (halves[0].float() + halves[1].float()).to(torch.float16)
    different = (y != expected) & ~(y.isnan() & expected.isnan())
    return wrong.sum().item(), different.sum().item()


def test_every_float16_survives_and_sums_are_rounded_as_torch_rounds():
    assert run_ranks(narrow_everything, 2, backend="shm") == [(0, 0)] * 2


def a10(rank):
    x = torch.ones(3, dtype=torch.bfloat16) * (rank + 1)
    dist.all_reduce(x)
    return x.float().tolist()


def test_a10_bfloat16_is_summed():
    """A10: "Invalid scalar type" for bfloat16."""
    assert run_ranks(a10, 2, backend="shm") == [[3.0] * 3] * 2


def m06(rank, dtype):
    results = []
    for name in ("all_reduce", "reduce_scatter", "reduce"):
        x = calls.parts_of(rank, 2, (3,), dtype, seed=1)
        try:
            results.append([t.tolist() for t in finish(*calls.REDUCE[name](x, 0, None, op=dist.ReduceOp.AVG))])
        except ValueError as error:
            results.append(str(error))
    return results


def test_m06_the_mean_of_floats_is_right():
    """M06: AVG is wrong without a word."""
    parts = [calls.parts_of(rank, 2, (3,), torch.float32, seed=1) for rank in (0, 1)]
    first, second = [((parts[0][i] + parts[1][i]) / 2).tolist() for i in (0, 1)]

    assert [[[first], [first], [first]], [[first], [second], []]] == run_ranks(m06, 2, torch.float32, backend="shm")


def test_m06_the_mean_of_whole_numbers_is_refused():
    """M06: an int has no mean of its own kind; rounding would be a silent difference."""
    for rank, texts in enumerate(run_ranks(m06, 2, torch.int64, backend="shm")):
        for text in texts:
            assert text.startswith(f"rank {rank} of 2: shm has no AVG of int64 tensors.")
            assert "SUM" in text


def scaled(rank):
    x = torch.full((3,), float(rank + 1))
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
    return x.tolist()


def test_premul_sum_scales_before_it_adds():
    assert run_ranks(scaled, 2, backend="shm") == [[1.5] * 3] * 2


def keep_what_is_not_the_roots(rank):
    x = torch.full((200_000,), float(rank))
    dist.reduce(x, 1)
    return x.unique().tolist()


def test_reduce_changes_only_the_root():
    assert run_ranks(keep_what_is_not_the_roots, 3, backend="shm") == [[0.0], [3.0], [2.0]]


def nan_shows(rank, op):
    x = torch.tensor([float("nan") if rank == 1 else 1.0, 2.0])
    dist.all_reduce(x, op=op)
    return x.isnan().tolist()


@pytest.mark.parametrize("op", [dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.SUM], ids=["min", "max", "sum"])
def test_nan_is_passed_on(op):
    assert run_ranks(nan_shows, 3, op, backend="shm") == [[True, False]] * 3


def add_four_billion_bytes(rank):
    x = torch.zeros(2**32 + 64, dtype=torch.uint8)
    x[-1] = x[0] = rank + 1
    dist.all_reduce(x)
    return x[0].item(), x[-1].item(), x[1].item()


@pytest.mark.skipif("SOAK" not in os.environ, reason="9 GB and half a minute: make soak")
def test_more_than_two_to_the_32_bytes():
    assert run_ranks(add_four_billion_bytes, 2, backend="shm", timeout=110) == [(3, 3, 0)] * 2
