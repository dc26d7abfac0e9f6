"""Iterable data sets over ranks and workers."""

import gc
import multiprocessing
import random

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch.utils import data as torch_data

import lockstep


def workers_of_a_rank(number):
    """See test_loader_ranks."""
    return {"num_workers": number, "multiprocessing_context": "fork" if number else None}


class Whole(torch_data.IterableDataset):
    """Does not know of workers; shuffles with python's random numbers, and augments with numpy's."""

    def __init__(self, n, shuffle=False):
        self.n, self.shuffle = n, shuffle

    def __iter__(self):
        order = list(range(self.n))
        if self.shuffle:
            random.shuffle(order)
        for each in order:
            yield each, float(np.random.rand())

    def __len__(self):
        return self.n


class Dividing(torch_data.IterableDataset):
    """Divides itself between workers; the first `skew` parts get nothing."""

    def __init__(self, n, skew=0):
        self.n, self.skew = n, skew

    def __iter__(self):
        info = torch_data.get_worker_info()
        number, count = (info.id, info.num_workers) if info else (0, 1)
        skew = min(self.skew, count - 1)
        if number >= skew:
            for each in range(number - skew, self.n, count - skew):
                yield each, random.random()


def read(rank, data, batch_size, workers, epochs=1, drop_last=False):
    random.seed(rank)
    np.random.seed(rank)
    loader = lockstep.DataLoader(data, batch_size, drop_last=drop_last, **workers_of_a_rank(workers))
    found = []
    for _ in range(epochs):
        found.append([])
        for batch in loader:
            found[-1].append(list(zip(*(column.tolist() for column in batch), strict=True)))
            np.random.rand()  # a step that draws random numbers of its own
    return found


def steps(ranks, epoch=0):
    assert len({len(found[epoch]) for found in ranks}) == 1
    return [sum(parts, []) for parts in zip(*(found[epoch] for found in ranks), strict=True)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("size", "workers"), [(1, 2), (2, 0), (3, 0), (2, 2), (3, 1)])
def test_d09_a_stream_is_divided_and_its_steps_depend_on_nobody(size, workers, drop_last):
    """D09: every rank and every worker gives the whole stream."""
    alone = run_ranks(read, 1, Whole(22, shuffle=True), 4, 0, 2, drop_last)
    split = run_ranks(read, size, Whole(22, shuffle=True), 4, workers, 2, drop_last)

    assert [steps(alone, epoch) for epoch in (0, 1)] == [steps(split, epoch) for epoch in (0, 1)]
    assert steps(alone, 0) != steps(alone, 1)
    assert sorted(each for each, _ in sum(steps(split), []))[: 20 if drop_last else 22] == sorted(
        each for each, _ in sum(steps(alone), [])
    )


def test_d09_a_stream_shorter_than_the_world():
    """D09: three samples on four ranks: one step, an empty batch for one of them."""
    ranks = run_ranks(read, 4, Whole(3), 4, 0)

    assert [0, 1, 1, 1] == sorted(len(found[0][0]) for found in ranks)
    assert [0, 1, 2] == [each for each, _ in steps(ranks)[0]]


@pytest.mark.parametrize("n", [0, 1, 23])
@pytest.mark.parametrize("skew", [0, 2])
def test_d10_ranks_that_run_out_get_empty_batches_until_all_are_through(n, skew):
    """D10: shards of unequal size, down to none at all: ranks stop at different steps, and the others hang."""
    ranks = run_ranks(read, 2, Dividing(n, skew), 4, 2)

    assert sorted(each for each, _ in sum(steps(ranks), [])) == list(range(n))


def test_d14_workers_of_a_dividing_stream_draw_different_numbers():
    """D14: worker w of every rank has the same random numbers."""
    ranks = run_ranks(read, 2, Dividing(24), 4, 2, 2)
    drawn = [number for epoch in (0, 1) for _, number in sum(steps(ranks, epoch), [])]

    assert len(drawn) == len(set(drawn)) == 48


class Late(torch_data.IterableDataset):
    def __iter__(self):
        yield 0
        yield torch_data.get_worker_info().num_workers


def test_a_division_that_begins_too_late_is_refused():
    loader = lockstep.DataLoader(Late(), 2, num_workers=1)
    with pytest.raises(lockstep.UsageError, match=r"Ask at the top of __iter__"):
        list(loader)
    del loader
    gc.collect()  # the error's traceback keeps the workers
    for worker in multiprocessing.active_children():
        worker.join()  # torch 2.9 ends it, and does not wait for that


class OwnRank(torch_data.IterableDataset):
    """Divides itself by rank, which nobody can notice but by what it gives."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        return iter(range(self.rank, 10, 2))


def own_rank(rank):
    try:
        list(lockstep.DataLoader(OwnRank(rank), 2))
    except lockstep.MismatchError as error:
        return str(error)


def test_streams_that_differ_between_ranks_are_refused():
    assert all("rank 0 and rank 1 read different streams" in message for message in run_ranks(own_rank, 2))


class Broken(Dividing):
    def __iter__(self):
        for each in super().__iter__():
            if each[0] == 5:
                raise OSError("the disk is gone")
            yield each


def broken(rank):
    try:
        list(lockstep.DataLoader(Broken(20), 4, **workers_of_a_rank(1)))
    except (OSError, lockstep.LostRankError) as error:
        return f"{type(error).__name__}: {error}"


def test_d10_a_stream_that_fails_on_one_rank_stops_all():
    """D10: the other ranks would wait for ever."""
    first, second = run_ranks(broken, 2)

    assert "LostRankError: rank 0: the data set failed on rank 1" in first
    assert "the disk is gone" in second


def test_its_length_is_exact_or_unknown():
    assert len(lockstep.DataLoader(Whole(22), 4)) == 6
    with pytest.raises(TypeError, match="has no len"):
        len(lockstep.DataLoader(Dividing(3), 4))
    loader = lockstep.DataLoader(Whole(22), 4, num_workers=1)
    with pytest.raises(TypeError, match="not known before the first one is there"):
        len(loader)
    assert len(list(loader)) == len(loader) == 6


def gathered(rank):
    loader = lockstep.DataLoader(Whole(10), 4)
    return lockstep.gather(torch.cat([batch[0] for batch in loader]), loader).tolist()


def test_m08_gathered_results_come_in_the_order_of_the_stream():
    """M08: evaluation of a stream."""
    assert [list(range(10))] * 3 == run_ranks(gathered, 3)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("data", [Whole(22, shuffle=True), Dividing(22)], ids=["whole", "dividing"])
def test_c06_a_stream_goes_on_in_the_middle(data, workers):
    """C04, C06, C10: the rest of the epoch, then a whole one."""

    def loader():
        return lockstep.DataLoader(data, 4, num_workers=workers, seed=1)

    def numbers(batches):
        return [batch[0].tolist() for batch in batches]

    first = loader()
    whole, states = [], []
    for batch in first:
        whole.append(batch[0].tolist())
        states.append(first.state_dict())
    following = numbers(first)
    resumed = loader()
    resumed.load_state_dict(states[2])

    assert whole[3:] == numbers(resumed)
    assert following == numbers(resumed)


def test_a_dividing_stream_goes_on_only_where_it_is_divided_alike():
    loaders = [lockstep.DataLoader(Dividing(22), 4, num_workers=workers) for workers in (1, 2)]
    for loader in loaders:
        next(iter(loader))
    with pytest.raises(lockstep.UsageError, match="the state was taken with parts 1, this loader has 2"):
        loaders[1].load_state_dict(loaders[0].state_dict())


class ByStart(torch_data.IterableDataset):
    """As in torch's documentation: worker_init_fn tells each copy which part is its own."""

    def __init__(self):
        self.start, self.step = 0, 1

    def __iter__(self):
        return iter(range(self.start, 10, self.step))


def own_part(worker):
    info = torch_data.get_worker_info()
    info.dataset.start, info.dataset.step = info.id, info.num_workers


def by_start(rank):
    loader = lockstep.DataLoader(ByStart(), 4, worker_init_fn=own_part, **workers_of_a_rank(1))
    return [number for _ in range(2) for batch in loader for number in batch.tolist()]


def test_d09_a_data_set_divided_by_worker_init_fn_is_noticed():
    """D09: torch's own example."""
    assert sorted(2 * list(range(10))) == sorted(sum(run_ranks(by_start, 2), []))


class Epochs(torch_data.IterableDataset):
    def __init__(self):
        self.epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield self.epoch


def test_d16_the_epoch_reaches_a_stream_in_workers_that_live_on():
    """D16: set_epoch of a data set does not reach persistent workers."""
    loader = lockstep.DataLoader(Epochs(), 2, num_workers=1)

    assert [0, 1, 2] == [batch.item() for _ in range(3) for batch in loader]


@pytest.mark.parametrize("start", ["fork", "forkserver"])
def test_a_stream_reaches_workers_however_they_start(start):
    """A generator of torch's in what travels would arrive as memory that is gone by then."""
    loader = lockstep.DataLoader(Whole(10), batch_size=4, num_workers=1, multiprocessing_context=start)

    assert [numbers.tolist() for numbers, _ in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    del loader
    gc.collect()
