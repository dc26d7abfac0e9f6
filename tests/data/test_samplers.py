"""A user's own sampler or batch sampler on real ranks."""

import random
from collections import Counter

import pytest
import torch
from ranks import run_ranks
from torch.utils import data as torch_data

import lockstep


class ByLength(torch_data.Sampler):
    """Sorted by length, with arguments that nobody could guess."""

    def __init__(self, lengths, *, keep):
        self.order = sorted(range(len(lengths)), key=lengths.__getitem__)[:keep]

    def __iter__(self):
        return iter(self.order)

    def __len__(self):
        return len(self.order)


class Buckets:
    """A batch sampler that shuffles its batches with python's random numbers."""

    def __init__(self, sizes):
        self.sizes = sizes

    def __iter__(self):
        batches, at = [], 0
        for size in self.sizes:
            batches.append(list(range(at, at + size)))
            at += size
        random.shuffle(batches)
        return iter(batches)

    def __len__(self):
        return len(self.sizes)


def iterate(rank, make, epochs=2, n=12):
    random.seed(rank)
    torch.manual_seed(rank)
    loader = lockstep.DataLoader(torch.arange(n), **make(rank))
    found = [[batch.tolist() for batch in loader] for _ in range(epochs)]
    return found, len(loader), lockstep.gather(torch.tensor(sum(found[-1], []), dtype=torch.int64), loader).tolist()


def steps(ranks, epoch):
    return [sum(parts, []) for parts in zip(*(found[epoch] for found, *_ in ranks), strict=True)]


def weighted(rank):
    return {"batch_size": 100, "sampler": torch_data.WeightedRandomSampler([0.9, 0.1], 1000)}


def test_d06_a_weighted_sampler_is_drawn_once_for_all_ranks():
    """D06: no way to combine a WeightedRandomSampler with data parallel; ranks' own generators differ here."""
    alone, split = (run_ranks(iterate, size, weighted, 2, 2) for size in (1, 2))

    assert steps(alone, 0) == steps(split, 0)
    assert steps(alone, 1) == steps(split, 1)
    assert steps(alone, 0) != steps(alone, 1)
    assert 850 < Counter(sum(steps(split, 0), []))[0] < 950


def own_generator(rank):
    return {"batch_size": 4, "sampler": torch_data.RandomSampler(range(12), generator=torch.Generator().manual_seed(8))}


def test_d06_a_sampler_with_a_generator_of_its_own():
    """D06: reproducible, another order in every epoch, the same for any number of ranks."""
    alone, split = (run_ranks(iterate, size, own_generator) for size in (1, 3))

    assert steps(alone, 0) == steps(split, 0) != steps(split, 1)
    assert [split[0][2]] * 3 == [list(range(12))] * 3


def by_length(rank):
    return {"batch_size": 4, "sampler": ByLength([5, 3, 9, 1, 7, 8, 2, 6, 4, 0, 11, 10], keep=10)}


def test_d07_a_sampler_keeps_its_order():
    """D07: the framework shuffles what a sampler has sorted."""
    ranks = run_ranks(iterate, 2, by_length)

    assert [[9, 3, 6, 1], [8, 0, 7, 4], [5, 2]] == steps(ranks, 0) == steps(ranks, 1)
    assert [3, 3] == [length for _, length, _ in ranks]


def buckets(rank):
    return {"batch_sampler": Buckets([1, 5, 2, 4])}


def test_d08_each_batch_of_a_batch_sampler_is_a_global_one():
    """D08: a batch sampler of one's own is built anew, or refused."""
    alone, split = (run_ranks(iterate, size, buckets) for size in (1, 3))

    assert steps(alone, 0) == steps(split, 0)
    assert sorted(map(len, steps(split, 0))) == [1, 2, 4, 5]
    assert [4] * 3 == [length for _, length, _ in split]


def torchs_own(rank):
    return {"batch_size": 4, "sampler": torch_data.DistributedSampler(range(12), 2, rank)}


def ours_exact(rank):
    return {"batch_size": 4, "sampler": lockstep.DistributedSampler(range(9), 2, rank, exact=True)}


def batches_of_ours(rank):
    return {
        "batch_sampler": torch_data.BatchSampler(lockstep.DistributedSampler(range(9), 2, rank, exact=True), 2, False)
    }


@pytest.mark.parametrize(("make", "n"), [(torchs_own, 12), (ours_exact, 9), (batches_of_ours, 9)])
def test_d11_a_sampler_that_divides_already_is_left_alone(make, n):
    """D11: divided again, half of the data is never seen."""
    ranks = run_ranks(iterate, 2, make)

    for epoch in (0, 1):
        assert sorted(sum(steps(ranks, epoch), [])) == list(range(n))
    assert [3, 3] == [length for _, length, _ in ranks] == [len(found[0]) for found, *_ in ranks]
    assert steps(ranks, 0) != steps(ranks, 1)


def test_d11_its_set_epoch_wins():
    """D11: a script that resumes in epoch 5 tells its sampler so."""
    sampler = torch_data.DistributedSampler(range(8), 1, 0)
    sampler.num_replicas, sampler.rank = 1, 0
    loader = lockstep.DataLoader(torch.arange(8), 8, sampler=sampler)
    sampler.set_epoch(5)
    found = next(iter(loader)).tolist()

    assert found == list(sampler)
    assert loader.epoch == 5


def refused(rank, replicas, batch_size):
    sampler = torch_data.DistributedSampler(range(12), replicas, rank)
    try:
        list(lockstep.DataLoader(range(12), batch_size, sampler=sampler))
    except lockstep.UsageError as error:
        return str(error)


@pytest.mark.parametrize(("replicas", "batch_size", "words"), [(3, 4, "rank 0 of 3"), (2, 5, "write batch_size=6")])
def test_d11_a_division_that_does_not_fit_is_refused(replicas, batch_size, words):
    """D11: a sampler for other ranks would lose samples."""
    assert words in run_ranks(refused, 2, replicas, batch_size)[0]


def different(rank):
    sampler = list(range(12)) if rank else list(range(11, -1, -1))
    try:
        list(lockstep.DataLoader(range(12), 4, sampler=sampler))
    except lockstep.UsageError as error:
        return str(error)


def test_samplers_that_differ_between_ranks_are_refused():
    assert all("gives other indices on rank 1 than on rank 0" in message for message in run_ranks(different, 2))


def test_the_callers_random_numbers_stay_as_they_are():
    loader = lockstep.DataLoader(range(2), 2, sampler=torch_data.WeightedRandomSampler([1.0, 1.0], 50))
    torch.manual_seed(3)
    list(loader)
    found = torch.rand(1)
    torch.manual_seed(3)

    assert torch.equal(torch.rand(1), found)


@pytest.mark.parametrize("make", [weighted, own_generator, buckets, by_length])
def test_c04_resuming_draws_the_same_order(make):
    """C04: resumed in the middle, a random sampler starts another order."""
    n = 2 if make is weighted else 12
    whole, resumed = (lockstep.DataLoader(torch.arange(n), **make(0)) for _ in range(2))
    batches, states = [], []
    for batch in [*whole, *whole]:
        batches.append(batch.tolist())
    for batch in whole:
        batches.append(batch.tolist())
        states.append(whole.state_dict())
    resumed.load_state_dict(states[1])

    assert batches[2 * len(whole) + 2 :] == [batch.tolist() for batch in resumed]


class Named(torch_data.Dataset):
    def __getitem__(self, key):
        return {"a": 1, "b": 2, "c": 3}[key]

    def __len__(self):
        return 3


def test_keys_may_be_words():
    loader = lockstep.DataLoader(Named(), 2, sampler=["c", "a", "b"])

    assert [[3, 1], [2]] == [batch.tolist() for batch in loader]
    with pytest.raises(lockstep.UsageError, match="not whole numbers"):
        loader.positions()
