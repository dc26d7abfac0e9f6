"""The loader on real ranks: which samples come where, and what is told when ranks disagree."""

import os
import warnings

import pytest
import torch
from meeting import run_launched
from ranks import run_ranks
from torch.utils import data as torch_data

import lockstep


def workers_of_a_rank(number):
    """Workers by fork, as under a launcher; a rank of these tests would start a server first, for seconds."""
    return {"num_workers": number, "multiprocessing_context": "fork" if number else None}


class Noise(torch_data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.rand(()).item()


def whole_batches(rank, cases, epochs):
    """For each (samples, batch size): this rank's local batches, epoch by epoch, and the length."""
    found = []
    for n, batch_size in cases:
        loader = lockstep.DataLoader(torch.arange(n), batch_size, shuffle=True, seed=n)
        found.append((len(loader), [[batch.tolist() for batch in loader] for _ in range(epochs)]))
    return found


def test_m01_every_sample_once_and_the_same_steps_whatever_the_number_of_ranks():
    """M01: sizes 1 to 33, five batch sizes, 1 to 4 ranks; the union of each step is that of one process."""
    cases = [(n, batch_size) for n in range(1, 34) for batch_size in range(4, 9)]
    (alone,) = run_ranks(whole_batches, 1, cases, 2)
    for size in (2, 3, 4):
        ranks = run_ranks(whole_batches, size, cases, 2)
        for number, (length, epochs) in enumerate(alone):
            assert all(rank[number][0] == length for rank in ranks)
            for epoch, steps in enumerate(epochs):
                local = [rank[number][1][epoch] for rank in ranks]
                assert [length] * size == [len(batches) for batches in local]
                assert steps == [sum(parts, []) for parts in zip(*local, strict=True)]
                assert sorted(sum(steps, [])) == list(range(cases[number][0]))


def evaluate(rank, n, batch_size, shuffle, workers):
    loader = lockstep.DataLoader(torch.arange(n) * 10, batch_size, shuffle=shuffle, **workers_of_a_rank(workers))
    seen = list(loader)
    return lockstep.gather(torch.cat(seen), loader).tolist(), [tuple(batch.shape) for batch in seen]


@pytest.mark.parametrize(("shuffle", "workers"), [(False, 0), (True, 0), (True, 1)])
def test_m08_gathered_results_come_in_the_order_of_the_data_set(shuffle, workers):
    """M08: the evaluation set complete and in its own order."""
    ranks = run_ranks(evaluate, 3, 10, 4, shuffle, workers)

    assert [list(range(0, 100, 10))] * 3 == [values for values, _ in ranks]
    assert [(0,), (1,), (1,)] == [shapes[-1] for _, shapes in ranks]


def mean_of_batches(rank):
    """M02's sum: 7 items in batches of 4 on 2 ranks."""
    loader = lockstep.DataLoader(torch.arange(7.0), 4)
    return [lockstep.mean(batch.sum(), len(batch)).item() for batch in loader]


def test_m02_the_mean_of_a_short_batch_is_over_its_true_samples():
    """M02: padding in the last batch counts in a mean."""
    assert [[1.5, 5.0]] * 2 == run_ranks(mean_of_batches, 2)


def noise(rank, workers):
    lockstep.init(seed=0)
    loader = lockstep.DataLoader(Noise(), 4, **workers_of_a_rank(workers))
    return [number for _ in range(2) for batch in loader for number in batch.tolist()]


@pytest.mark.parametrize("workers", [0, 2])
def test_d14_random_numbers_differ_between_ranks(workers):
    """D14: worker w of every rank has the same random numbers."""
    ranks = run_ranks(noise, 2, workers)

    assert len({number for rank in ranks for number in rank}) == 32
    assert ranks == run_ranks(noise, 2, workers)


def small_batch(rank):
    lockstep.DataLoader(range(10), 2)


def test_a_batch_smaller_than_the_world_is_refused():
    with pytest.raises(
        AssertionError, match="batch_size=2 counts the samples of all ranks together, so it must be at least 3"
    ):
        run_ranks(small_batch, 3)


def disagree(rank, what):
    loader = lockstep.DataLoader(
        range(10 + rank * (what == "samples")),
        4 + rank * (what == "batch_size"),
        shuffle=True,
        seed=rank * (what == "seed"),
    )
    if what == "epoch" and rank:
        loader.set_epoch(3)
    try:
        list(loader)
    except lockstep.MismatchError as error:
        return str(error)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("samples", "11 samples"),
        ("batch_size", "batches of 5"),
        ("seed", "seed 1"),
        ("epoch", "epoch 3 from position 0"),
    ],
)
def test_ranks_that_disagree_are_told_before_the_first_batch(what, words):
    for message in run_ranks(disagree, 2, what):
        assert words in message


def unconnected(rank):
    os.environ.update(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    with pytest.raises(lockstep.UsageError, match=r"Call lockstep.init\(\)"):
        iter(lockstep.DataLoader(range(10), 2))


def test_ranks_that_are_not_connected_are_told_so():
    run_ranks(unconnected, 1, backend=None)


def resumed(rank, states, n, batch_size, workers):
    loader = lockstep.DataLoader(torch.arange(n), batch_size, shuffle=True, **workers_of_a_rank(workers))
    found = []
    for state in states:
        loader.load_state_dict(state)
        found.append([[batch.tolist() for batch in loader], loader.positions().tolist(), [b.tolist() for b in loader]])
    return found


def stopped(rank, n, batch_size, workers, steps):
    """The whole of two epochs, and the states in the middle of the first of them."""
    loader = lockstep.DataLoader(torch.arange(n), batch_size, shuffle=True, **workers_of_a_rank(workers), seed=5)
    whole, states = [], []
    for _ in range(2):
        for batch in loader:
            whole.append(batch.tolist())
            states.append(loader.state_dict())
    return whole, [states[step] for step in steps]


@pytest.mark.parametrize(("before", "after", "workers"), [(2, 2, 1), (2, 3, 0), (3, 1, 0), (1, 4, 0)])
def test_c05_c10_training_goes_on_with_another_number_of_ranks(before, after, workers):
    """C04, C05, C10: mid-epoch resuming repeats samples, needs the same number of ranks, loses the epoch."""
    steps = (0, 3, 5, 8)  # 6 batches an epoch
    (first, *_) = old = run_ranks(stopped, before, 23, 4, workers, steps)
    whole = [sum(parts, []) for parts in zip(*(each for each, _ in old), strict=True)]
    assert all(states == first[1] for _, states in old)

    new = run_ranks(resumed, after, first[1], 23, 4, workers)
    for number, step in enumerate(steps):
        rest = [sum(parts, []) for parts in zip(*(rank[number][0] for rank in new), strict=True)]
        following = [sum(parts, []) for parts in zip(*(rank[number][2] for rank in new), strict=True)]
        end = 6 if step < 6 else 12
        assert whole[step + 1 : end] == rest
        assert all(rank[number][1] == sum(rank[number][0], []) for rank in new)
        assert end == 12 or whole[6:] == following


def warnings_on_a_core_of_its_own(rank):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    lockstep.init(device="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = lockstep.DataLoader(torch.arange(8), batch_size=4, num_workers=2)
        assert sum(len(batch) for batch in loader) == 4
    return [str(warning.message) for warning in caught]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="four workers are too many for one core")
def test_workers_are_counted_against_the_cores_of_all_ranks():
    """`lockstep run` keeps each rank to its own cores: 4 workers each of 8 ranks with 8 cores each are not too many."""
    assert run_launched(warnings_on_a_core_of_its_own, 2) == [[], []]
