import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import data as torch_data

import lockstep
from lockstep import DistributedSampler


def parts(n, size, **options):
    return [list(DistributedSampler(range(n), size, rank, **options)) for rank in range(size)]


@given(n=st.integers(0, 60), size=st.integers(1, 9), drop_last=st.booleans())
def test_without_shuffling_it_gives_what_torch_gives(n, size, drop_last):
    if not n or (drop_last and n < size):
        return
    theirs = [list(torch_data.DistributedSampler(range(n), size, rank, False, 0, drop_last)) for rank in range(size)]

    assert theirs == parts(n, size, shuffle=False, drop_last=drop_last)


@given(n=st.integers(0, 60), size=st.integers(1, 9), shuffle=st.booleans(), seed=st.integers(0, 99))
def test_d01_exact_gives_each_index_on_one_rank_once(n, size, shuffle, seed):
    """D01: evaluation depends on the number of processes, since leading samples are repeated."""
    found = parts(n, size, shuffle=shuffle, seed=seed, exact=True)
    lengths = {len(part) for part in found}

    assert sorted(index for part in found for index in part) == list(range(n))
    assert len(lengths) < 2 or max(lengths) - min(lengths) == 1


@given(n=st.integers(1, 60), size=st.integers(1, 9), drop_last=st.booleans(), exact=st.booleans())
def test_lengths_are_what_comes_out(n, size, drop_last, exact):
    if drop_last and (exact or n < size):
        return
    samplers = [DistributedSampler(range(n), size, rank, drop_last=drop_last, exact=exact) for rank in range(size)]
    found = [list(sampler) for sampler in samplers]

    assert [len(sampler) for sampler in samplers] == [len(part) for part in found]
    assert samplers[0].longest == max(map(len, found))
    assert samplers[0].total_size == sum(map(len, found))


def test_the_order_does_not_depend_on_the_number_of_ranks():
    whole = parts(100, 1)[0]
    split = parts(100, 4)

    assert whole == [split[position % 4][position // 4] for position in range(100)]


def test_d02_each_iteration_is_a_new_epoch():
    """D02: set_epoch forgotten, the same order in every epoch."""
    sampler = DistributedSampler(range(50), 1, 0)
    first, second = list(sampler), list(sampler)
    sampler.set_epoch(0)

    assert first != second
    assert first == list(sampler)


def test_d02_set_epoch_wins():
    """D02: scripts that do call set_epoch get that epoch."""
    told, counting = DistributedSampler(range(50), 1, 0), DistributedSampler(range(50), 1, 0)
    orders = []
    for epoch in (0, 1, 2, 2):
        told.set_epoch(epoch)
        orders.append(list(told))
    counted = [list(counting) for _ in range(3)]

    assert [*counted, counted[2]] == orders


@pytest.mark.parametrize("workers", [0, 1])
def test_d02_torchs_own_loader_asks_once_an_epoch(workers):
    """D02: torch's loader makes an iterator too many, which must not count as an epoch."""
    sampler = DistributedSampler(range(20), 2, 1)
    loader = torch_data.DataLoader(
        range(20), batch_size=None, sampler=sampler, num_workers=workers, persistent_workers=workers > 0
    )
    found = [list(map(int, loader)) for _ in range(3)]
    alone = DistributedSampler(range(20), 2, 1)

    assert [list(alone) for _ in range(3)] == found


def test_d04_a_hundred_million_samples_start_without_a_list(monkeypatch):
    """D04: the sampler makes a list of the whole data set: gigabytes, and seconds before the first index."""
    import tracemalloc

    sampler = DistributedSampler(range(10**8), 4, 1)
    next(iter(sampler))  # what numpy makes once
    tracemalloc.start()
    iterator = iter(sampler)
    for _ in range(20_000):
        next(iterator)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 10_000_000


def test_d12_fewer_samples_than_ranks_are_padded():
    """D12: a data set smaller than the world."""
    assert [[0], [1], [2], [0], [1], [2], [0], [1]] == parts(3, 8, shuffle=False)


def test_d12_dropping_everything_is_refused():
    """D12: drop_last that leaves nothing."""
    with pytest.raises(lockstep.UsageError, match="3 samples on 8 ranks with drop_last=True leave nothing"):
        DistributedSampler(range(3), 8, 0, drop_last=True)


def test_d13_no_replicas_is_said_of_num_replicas():
    """D13: num_replicas=0 blamed on the rank."""
    with pytest.raises(lockstep.UsageError, match="num_replicas=0"):
        DistributedSampler(range(10), 0, 0)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank={rank} does not fit into num_replicas=2"):
        DistributedSampler(range(10), 2, rank)


def test_exact_and_drop_last_contradict_each_other():
    with pytest.raises(lockstep.UsageError, match="write one of them"):
        DistributedSampler(range(10), 2, 0, drop_last=True, exact=True)


@given(
    n=st.integers(1, 60),
    before=st.integers(1, 5),
    after=st.integers(1, 5),
    taken=st.integers(0, 30),
    seed=st.integers(0, 9),
)
def test_c05_another_number_of_ranks_goes_on_where_it_was(n, before, after, taken, seed):
    """C05: resuming needs the same number of ranks."""
    whole = list(DistributedSampler(range(n), 1, 0, seed=seed))
    taken = min(taken, n // before)
    sampler = DistributedSampler(range(n), before, 0, seed=seed)
    iterator = iter(sampler)
    for _ in range(taken):
        next(iterator)
    resumed = [DistributedSampler(range(n), after, rank, exact=True) for rank in range(after)]
    for each in resumed:
        each.load_state_dict(sampler.state_dict())
    rest = [list(each) for each in resumed]

    if taken < -(-n // before):
        assert sorted(whole[taken * before :]) == sorted(index for part in rest for index in part)
    assert n == sum(len(list(each)) for each in resumed)


def test_c10_the_epoch_after_a_resumed_one_is_whole_and_the_next():
    """C10: the epoch number is lost after resuming."""
    sampler = DistributedSampler(range(40), 1, 0)
    epochs = [list(sampler) for _ in range(3)]
    resumed = DistributedSampler(range(40), 1, 0)
    resumed.load_state_dict({"epoch": 1, "position": 30, "seed": 0, "samples": 40})
    resumed.set_epoch(1)  # as a training loop does

    assert [epochs[1][30:], epochs[2]] == [list(resumed), list(resumed)]


def test_a_state_of_another_data_set_is_refused():
    state = DistributedSampler(range(10), 1, 0).state_dict()
    with pytest.raises(lockstep.UsageError, match="10 samples, this one has 11"):
        DistributedSampler(range(11), 1, 0).load_state_dict(state)


def test_it_is_one_of_torchs_samplers():
    assert isinstance(DistributedSampler(range(3), 1, 0), torch_data.Sampler)
    assert torch.equal(torch.tensor(parts(3, 1, shuffle=False)[0]), torch.arange(3))
