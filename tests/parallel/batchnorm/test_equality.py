"""What the ranks compute together is what ordinary batch norm computes on the concatenated batch."""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from parallel.batchnorm.cases import Case, assert_joined, cases, reference, results
from ranks import run_ranks

import lockstep

# A draw is a dozen cases on fresh processes: shrinking it would take minutes, and the message names the case.
PLAIN = {"deadline": None, "suppress_health_check": list(HealthCheck), "phases": [Phase.explicit, Phase.generate]}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-4, torch.bfloat16: 6e-2, torch.float16: 1e-2}


def on_rank(rank, drawn):
    """One training step of each case."""
    found = []
    for case in drawn:
        x, dy = (case.laid_out(whole[case.share(rank)]) for whole in case.batch())
        x = x.detach().requires_grad_()
        mine = results(case.layer(lockstep.SyncBatchNorm), x, dy)
        if x.numel() and case.layout == "channels_last" and x.dim() in (4, 5):
            last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
            assert mine["y"].is_contiguous(memory_format=last)
            assert mine["dx"].is_contiguous(memory_format=last)
        assert mine["y"].dtype == mine["dx"].dtype == case.dtype
        found.append(mine)
    return found


def compare(drawn, ranks):
    """Run the cases on ranks and in one process."""
    by_rank = run_ranks(on_rank, ranks, drawn) if ranks > 1 else [on_rank(0, drawn)]
    for case, *mine in zip(drawn, *by_rank, strict=True):
        expected = reference(case)
        assert_joined(case, mine, expected, TOLERANCE[case.dtype])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@settings(max_examples=5, **PLAIN)
@given(data=st.data())
def test_float64_equals_one_process(ranks, data):
    """Any shape, memory format and options; equal, uneven and empty local batches."""
    compare(data.draw(st.lists(cases(ranks), min_size=12, max_size=12)), ranks)


@settings(max_examples=3, **PLAIN)
@given(data=st.data())
def test_narrower_types_are_as_near_as_they_can_be(data):
    """float32, bfloat16 and float16, the latter two against one process in float64."""
    narrow = cases(2, (torch.float32, torch.bfloat16, torch.float16))
    compare([case for case in data.draw(st.lists(narrow, min_size=12, max_size=12)) if sum(case.sizes) > 2], 2)


def test_b01_cpu_tensors_are_normalised_together():
    """B01: torch's layer refuses CPU; ours gives there what BN gives on the joint batch."""
    compare([Case(sizes=(3, 3))], 2)


def test_b03_one_value_on_a_rank_is_enough_if_another_has_one():
    """B03: batch 1 per rank and 1x1 planes; what counts is the global number of values."""
    compare([Case(sizes=(1, 1), rest=(1, 1)), Case(sizes=(1, 1), rest=())], 2)


def test_b04_an_empty_local_batch_takes_part():
    """B04: no samples on rank 0 and two on rank 1 are two samples."""
    compare([Case(sizes=(0, 2)), Case(sizes=(2, 0), rest=())], 2)


def test_b09_channels_last_with_65_channels():
    """B09: apex's channels-last kernel was wrong for a number of channels that is no power of two."""
    compare([Case(sizes=(2, 3), channels=65, layout="channels_last")], 2)


def test_large_contiguous_planes_in_float32():
    """They are measured in another way than small ones."""
    compare([Case(sizes=(4, 4), rest=(16, 16), dtype=torch.float32)], 2)
