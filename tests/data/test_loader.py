"""The loader in a world of one, and what it refuses."""

import os

import numpy as np
import pytest
import torch
from torch.utils import data as torch_data

import lockstep
from lockstep.data.arguments import cores_of_node, crowded
from lockstep.world import current


def lists(loader):
    return [batch.tolist() for batch in loader]


class Told(torch_data.Dataset):
    """Gives the epoch that it was told, and the process that it runs in."""

    def __init__(self):
        self.epoch = -1
        self.bonus = 0

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.tensor([self.epoch + self.bonus, os.getpid()])

    def set_epoch(self, epoch):
        self.epoch = epoch


def test_without_shuffling_it_gives_what_torch_gives():
    data = torch_data.TensorDataset(torch.arange(10), torch.rand(10, 3))
    theirs = list(torch_data.DataLoader(data, 4))
    ours = list(lockstep.DataLoader(data, 4))

    assert [[leaf.tolist() for leaf in batch] for batch in theirs] == [
        [leaf.tolist() for leaf in batch] for batch in ours
    ]


def test_it_is_one_of_torchs_loaders():
    loader = lockstep.DataLoader(range(10), 4, drop_last=True)

    assert isinstance(loader, torch_data.DataLoader)
    assert (loader.batch_size, loader.dataset, loader.drop_last, loader.num_workers) == (4, range(10), True, 0)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [0, 4, 5, 11, 12])
def test_its_length_is_what_comes_out(n, drop_last):
    if n == 0 or n >= 4:
        loader = lockstep.DataLoader(range(n), 4, drop_last=drop_last)

        assert len(loader) == len(list(loader))


def test_each_iteration_has_an_order_of_its_own():
    loader = lockstep.DataLoader(range(20), 20, shuffle=True)
    first, second = lists(loader), lists(loader)

    assert first != second
    assert sorted(first[0]) == sorted(second[0]) == list(range(20))


def test_an_iteration_that_was_broken_off_counts_as_an_epoch():
    whole, broken = (lockstep.DataLoader(range(20), 5, shuffle=True) for _ in range(2))
    next(iter(broken))
    lists(whole)

    assert lists(whole) == lists(broken)


def test_set_epoch_wins():
    loader = lockstep.DataLoader(range(20), 20, shuffle=True, seed=3)
    orders = [lists(loader) for _ in range(3)]
    loader.set_epoch(1)

    assert orders[1] == lists(loader)
    assert orders[2] == lists(loader)


def test_the_seed_is_the_worlds_unless_said_otherwise():
    def order(**options):
        return lists(lockstep.DataLoader(range(50), 50, shuffle=True, **options))

    assert order() == order(seed=current().seed)
    assert order(seed=1) == order(generator=torch.Generator().manual_seed(1))
    assert order(seed=1) != order(seed=2)


def test_shuffling_draws_nothing_from_the_global_generators():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    lists(lockstep.DataLoader(range(20), 5, shuffle=True))

    assert torch.equal(expected, torch.rand(1))


def test_d03_shuffle_beside_a_sampler_that_divides_says_what_to_write():
    """D03: 'mutually exclusive', and no word on what to do."""
    sampler = torch_data.DistributedSampler(range(10), 2, 0)
    with pytest.raises(lockstep.UsageError, match="Leave the sampler out and keep shuffle=True"):
        lockstep.DataLoader(range(10), 2, shuffle=True, sampler=sampler)


class Endless:
    def __getitem__(self, index):
        return index


class Numbers(torch_data.IterableDataset):
    def __iter__(self):
        return iter(range(10))


REFUSED = {
    "shuffle and sampler": ((range(9),), {"shuffle": True, "sampler": [1]}, "the sampler decides on the order"),
    "batch_sampler and batch_size": ((range(9), 3), {"batch_sampler": [[1]]}, "batch_sampler makes the batches"),
    "batch_sampler and shuffle": ((range(9),), {"batch_sampler": [[1]], "shuffle": True}, "leave them out"),
    "batch_sampler and drop_last": ((range(9),), {"batch_sampler": [[1]], "drop_last": True}, "leave them out"),
    "no batch size": ((range(9), None), {}, r"Write batch_size=\.\.\."),
    "no length": ((Endless(),), {}, "Endless has no __len__"),
    "out of order": ((range(9),), {"in_order": False}, "Leave it out"),
    "two seeds": ((range(9),), {"seed": 1, "generator": torch.Generator()}, "write one of them"),
    "nothing left": ((range(9), 10), {"drop_last": True}, "9 samples in global batches of 10"),
    "a stream shuffled": ((Numbers(), 2), {"shuffle": True}, "a stream has an order of its own"),
    "a stream with a sampler": ((Numbers(), 2), {"sampler": [1]}, "sampler with an IterableDataset"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contradictions_say_what_to_write(name):
    arguments, options, message = REFUSED[name]
    with pytest.raises(lockstep.UsageError, match=message):
        lockstep.DataLoader(*arguments, **options)


def test_d16_the_epoch_reaches_workers_that_live_on():
    """D16: set_epoch of a data set does not reach persistent workers. D17: workers start anew in every epoch."""
    loader = lockstep.DataLoader(Told(), 4, num_workers=1)
    found = [next(iter(loader)) for _ in range(3)]

    assert [0, 1, 2] == [batch[0, 0].item() for batch in found]
    assert len({batch[0, 1].item() for batch in found}) == 1


def test_d16_the_epoch_reaches_a_data_set_inside_another():
    """D16: a Subset hides set_epoch."""
    loader = lockstep.DataLoader(torch_data.Subset(Told(), [0, 1]), 2)

    assert [[0, 0], [1, 1]] == [next(iter(loader))[:, 0].tolist() for _ in range(2)]


def test_d17_workers_start_anew_when_the_data_set_was_changed():
    """D17: reused where that is right: an attribute that is set anew must reach the workers."""
    data = Told()
    loader = lockstep.DataLoader(data, 4, num_workers=1)
    before = next(iter(loader))
    data.bonus = 10
    after = next(iter(loader))

    assert (before[0, 0].item(), after[0, 0].item()) == (0, 11)
    assert before[0, 1] != after[0, 1]


def test_d17_far_too_many_workers_are_named():
    """D17: workers of all ranks oversubscribe the cores."""
    world = lockstep.World.__new__(lockstep.World)
    world.rank, world.local_size = 0, 4

    assert "num_workers=8 on 4 ranks are 32 processes on 8 cores. num_workers=2 would do" in crowded(8, world, cores=8)
    assert crowded(4, world, cores=8) is None


def test_where_the_system_does_not_say_which_cores_are_ours_they_all_count(monkeypatch):
    """As on macOS."""
    monkeypatch.delattr(os, "sched_getaffinity")

    assert cores_of_node() == os.cpu_count()
    assert [batch.tolist() for batch in lockstep.DataLoader(range(3), 2)] == [[0, 1], [2]]


def test_a_second_iteration_with_workers_stops_the_first():
    loader = lockstep.DataLoader(range(8), 1, num_workers=1)
    first = iter(loader)
    next(first)
    second = iter(loader)

    with pytest.raises(lockstep.UsageError, match="another iteration of this lockstep"):
        next(first)
    assert [0, 1, 2, 3, 4, 5, 6, 7] == [batch.item() for batch in second]


class Noise(torch_data.Dataset):
    """One random number of torch and one of numpy for each sample."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.rand(()).item(), float(np.random.rand())


def noise(loader):
    return [number for batch in loader for column in batch for number in column.tolist()]


def test_d15_random_numbers_differ_between_workers_and_epochs():
    """D15: numpy gives every worker, and every epoch, the same numbers."""
    loader = lockstep.DataLoader(Noise(), 2, num_workers=2)
    found = noise(loader) + noise(loader)

    assert len(found) == len(set(found)) == 32


def test_d15_random_numbers_do_not_depend_on_the_number_of_workers():
    """D15: and they come again with the same seed, whoever makes the batch."""
    one, two = (noise(lockstep.DataLoader(Noise(), 2, num_workers=workers, seed=4)) for workers in (1, 2))

    assert one == two


class Self(torch_data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return torch_data.get_worker_info().dataset is self and getattr(self, "opened", None)


def open_it(worker):
    torch_data.get_worker_info().dataset.opened = 10 + worker


def test_a_worker_finds_its_own_data_set():
    loader = lockstep.DataLoader(Self(), 2, num_workers=1, worker_init_fn=open_it)

    assert [[10, 10]] == lists(loader)
