"""A run that is broken off and goes on, against one that was never broken off."""

import itertools

import pytest
import torch
from meeting import run_launched
from train.checkpoint.job import SAMPLES, Run

import lockstep


def broken_and_whole(rank, directory, stop_after, options):
    """A run, one that is broken off, and one that goes on from it."""
    whole = Run(f"{directory}/whole", **options).go(3)
    first = Run(f"{directory}/broken", **options).go(3, stop_after=stop_after)
    first.checkpoint.save(wait=True)
    rest = Run(f"{directory}/broken", **options).go(3)
    return [(run.seen, run.losses, run.epochs, run.weights()) for run in (whole, first, rest)]


RANDOM, ACCUMULATING = {"noise": 0.1, "dropout": 0.3}, {"accumulate": 2}


@pytest.mark.parametrize(
    ("size", "stop_after", "options"),
    [(1, 3, RANDOM), (2, 4, RANDOM), (2, 5, RANDOM), (2, 8, RANDOM), (1, 7, ACCUMULATING), (2, 9, ACCUMULATING)],
)
def test_the_same_number_of_ranks_goes_on_to_the_bit(tmp_path, size, stop_after, options):
    for whole, first, rest in run_launched(broken_and_whole, size, tmp_path, stop_after, options):
        assert whole[:2] == (first[0] + rest[0], first[1] + rest[1])
        assert whole[3] == rest[3]


def save_in_the_middle(rank, directory):
    run = Run(directory, double=True).go(2, stop_after=7)
    run.checkpoint.save(wait=True)
    return run.seen, run.losses


def go_on(rank, directory):
    run = Run(directory, double=True, every_steps=1000, keep=9).go(2)
    return run.seen, run.losses


@pytest.fixture(scope="module")
def saved_by_four(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved_by_four")
    return directory, run_launched(save_in_the_middle, 4, directory)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_another_number_of_ranks_goes_on(tmp_path, saved_by_four, size):
    directory, before = saved_by_four
    whole = run_launched(go_on, 1, tmp_path / "whole")[0]
    found = run_launched(go_on, size, _copy(directory, tmp_path / "copy"))

    for seen, losses in found:
        assert before[0][0] + seen == whole[0]
        assert before[0][1] + losses == pytest.approx(whole[1], rel=1e-6)
        epoch = sorted(itertools.chain(*(before[0][0] + seen)[5:10]))
        assert epoch == list(range(SAMPLES))


def _copy(directory, target):
    import shutil

    return shutil.copytree(directory, target)


def shares_of(rank, directory):
    lockstep.init(device="cpu", seed=0)
    model = lockstep.replicate(torch.nn.Linear(1000, 333))
    lockstep.Checkpoint(directory, model=model).save(wait=True)


def test_every_rank_writes_an_equal_share(tmp_path):
    run_launched(shares_of, 3, tmp_path)
    folder = lockstep.Checkpoint(tmp_path, model=torch.nn.Linear(1, 1)).latest()
    sizes = [path.stat().st_size for path in sorted(folder.glob("*.safetensors"))]

    assert len(sizes) == 3
    assert max(sizes) - min(sizes) < 1000
    assert sum(sizes) < 334 * 1000 * 4 + 3 * 20_000  # each has its own random numbers besides


class Own:
    """A part whose state is another one on every rank."""

    def __init__(self, rank, odd):
        self.state = {"large": torch.ones(100_000), "rank": rank} if odd else {"small": torch.full((3,), float(rank))}
        self.state["texts"] = [f"{rank}"] * (1 if not odd else rank + 1) if odd else "same"

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def own_states(rank, directory, odd):
    lockstep.init(device="cpu", seed=0)
    saved, loaded = Own(rank, odd), Own(17, odd)
    lockstep.Checkpoint(directory, own=saved).save(wait=True)
    lockstep.Checkpoint(directory, own=loaded).restore()
    return saved.state, loaded.state


@pytest.mark.parametrize("odd", [False, True], ids=["values", "structure"])
def test_what_differs_between_ranks_comes_back_to_each(tmp_path, odd):
    for saved, loaded in run_launched(own_states, 2, tmp_path, odd):
        assert str(saved) == str(loaded)


def draws(rank, directory, restore):
    world = lockstep.init(device="cpu", seed=0)
    checkpoint = lockstep.Checkpoint(directory, values={})
    if restore:
        assert checkpoint.restore()
    else:
        world.part_ways()
        checkpoint.save(wait=True)
    return torch.rand(3).tolist()


def test_more_ranks_than_saved_draw_numbers_that_nobody_has_drawn(tmp_path):
    before = run_launched(draws, 2, tmp_path, False)
    after = run_launched(draws, 3, tmp_path, True)

    assert after[:2] == before
    assert after[2] not in (*before, draws_of_a_new_third_rank())


def draws_of_a_new_third_rank():
    from lockstep.world import seeds

    generator = torch.Generator().manual_seed(seeds.derive_seed(0, 2))
    return torch.rand(3, generator=generator).tolist()
