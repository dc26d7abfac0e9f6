"""What went wrong with other tools, case by case; C09 is in test_signals.py."""

import contextlib
import random

import numpy as np
import pytest
import torch
from ranks import run_ranks
from torch import nn

import lockstep


def wrappings():
    return {
        "plain": lambda model: model,
        "DataParallel": nn.DataParallel,
        "lockstep's DDP": lockstep.DistributedDataParallel,
        "both": lambda model: nn.DataParallel(lockstep.DistributedDataParallel(model)),
    }


@pytest.mark.parametrize("loaded", wrappings())
@pytest.mark.parametrize("saved", wrappings())
def test_c01_wrapped_and_plain_models_load_each_others(tmp_path, saved, loaded):
    """'module.' prefix mismatch both ways."""
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    checkpoint = lockstep.Checkpoint(tmp_path, model=wrappings()[saved](first))
    checkpoint.save(wait=True)
    lockstep.Checkpoint(tmp_path, model=wrappings()[loaded](second)).restore()

    assert torch.equal(first.weight, second.weight)
    assert "module." not in (checkpoint.latest() / "manifest.json").read_text()


def damage(path, how):
    data = bytearray(path.read_bytes())
    if how == "truncated":
        data = data[: len(data) // 2]
    elif how == "flipped":
        data[len(data) // 2] ^= 4
    path.unlink()
    if how != "gone":
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "flipped", "gone"])
@pytest.mark.parametrize("pattern", ["*.safetensors", "manifest.json"])
def test_c02_a_damaged_one_is_named_and_the_one_before_it_used(tmp_path, pattern, how):
    """Kill during save leaves truncated file and no older one. The kills themselves are in test_restarts.py."""
    state = {"n": 1, "x": torch.randn(1000)}
    checkpoint = lockstep.Checkpoint(tmp_path, values=state)
    checkpoint.save(wait=True)
    state["n"] = 2
    checkpoint.save(wait=True)
    (path,) = checkpoint.latest().glob(pattern)
    damage(path, how)
    found = {}
    with pytest.warns(UserWarning, match=f"000002-step-0: rank 0: {path.name}"):
        assert lockstep.Checkpoint(tmp_path, values=found).restore()

    assert found["n"] == 1


def restore_damaged(rank, directory):
    found = {}
    with contextlib.suppress(UserWarning):
        checkpoint = lockstep.Checkpoint(directory, values=found)
        with pytest.warns(UserWarning, match="share-0001-of-0002") if rank == 0 else contextlib.nullcontext():
            checkpoint.restore()
    return found["n"], checkpoint.step_count


def save_two(rank, directory):
    state = {"x": torch.arange(100_000)}
    checkpoint = lockstep.Checkpoint(directory, values=state)
    for state["n"] in (1, 2):
        checkpoint.step()
        checkpoint.save(wait=True)


def test_c02_all_ranks_leave_out_what_one_finds_damaged(tmp_path):
    run_ranks(save_two, 2, tmp_path)
    damage(tmp_path / "000002-step-2" / "share-0001-of-0002.safetensors", "flipped")

    assert run_ranks(restore_damaged, 3, tmp_path) == [(1, 1)] * 3


def test_where_none_is_whole_nothing_begins_anew_by_itself(tmp_path):
    checkpoint = lockstep.Checkpoint(tmp_path, values={})
    checkpoint.save(wait=True)
    damage(checkpoint.latest() / "manifest.json", "flipped")

    with pytest.warns(UserWarning, match="left out"), pytest.raises(lockstep.CheckpointError, match="none can be used"):
        lockstep.Checkpoint(tmp_path, values={}).restore()


def save_often(rank, directory):
    state = {"x": torch.zeros(500_000)}
    checkpoint = lockstep.Checkpoint(directory, values=state, keep=2)
    for number in range(20):
        state["x"] = torch.full((500_000,), float(number))
        checkpoint.save()
    checkpoint.save(wait=True)
    found = {}
    lockstep.Checkpoint(directory, values=found).restore()
    return found["x"].unique().tolist()


def test_c03_ranks_that_save_at_once_write_one_whole_checkpoint(tmp_path):
    """Every rank writes the same file -> corrupt."""
    assert run_ranks(save_often, 2, tmp_path) == [[19.0]] * 2
    assert len(list(tmp_path.iterdir())) == 2


def test_c04_c10_in_the_middle_of_a_later_epoch_every_sample_comes_once_in_the_same_order(tmp_path):
    """Mid-epoch resume repeats/skips samples; epoch-boundary/len bookkeeping after skip loses epoch number."""

    def run(directory, stop_after=None):
        lockstep.init(device="cpu", seed=0)
        train = lockstep.DataLoader(torch.arange(64), batch_size=4, shuffle=True)
        checkpoint = lockstep.Checkpoint(directory, train=train)
        seen = []
        for epoch in checkpoint.epochs(3):
            assert train.epoch == epoch
            for batch in train:
                seen.append((epoch, batch.tolist()))
                checkpoint.step()
                if checkpoint.step_count == stop_after:
                    checkpoint.save(wait=True)
                    return seen
        return seen

    whole = run(tmp_path / "whole")
    parts = run(tmp_path / "parts", 20) + run(tmp_path / "parts", 37) + run(tmp_path / "parts")

    assert whole == parts
    assert len(whole) == 48


def test_c10_a_loader_that_is_left_in_the_middle_of_every_epoch_begins_a_new_one_after_going_on(tmp_path):
    def run(directory, epochs):
        lockstep.init(device="cpu", seed=0)
        train = lockstep.DataLoader(torch.arange(64), batch_size=4, shuffle=True)
        seen = []
        for _ in lockstep.Checkpoint(directory, train=train).epochs(epochs):
            for batch in train:
                seen.append(batch.tolist())
                if len(seen) % 3 == 0:
                    break
        return seen

    assert run(tmp_path / "whole", 3) == run(tmp_path / "parts", 2) + run(tmp_path / "parts", 3)


# C05, another number of ranks: test_going_on.py, test_another_number_of_ranks_goes_on


class Slow(torch.utils.data.Dataset):
    def __init__(self):
        self.asked = []

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        self.asked.append(index)
        return index


def test_c06_going_on_far_into_an_epoch_loads_nothing_that_was_seen(tmp_path):
    """Skipping to resume position loads and collates everything (6-12 h)."""
    train = lockstep.DataLoader(Slow(), batch_size=10, shuffle=True)
    train.load_state_dict(train.state_dict() | {"position": 500_000})
    lockstep.Checkpoint(tmp_path, train=train).save(wait=True)
    again = lockstep.DataLoader(data := Slow(), batch_size=10, shuffle=True)
    lockstep.Checkpoint(tmp_path, train=again).restore()
    next(iter(again))

    assert len(data.asked) == 10


def test_c07_generators_and_plain_values_need_no_pickle(tmp_path):
    """torch>=2.6 weights_only breaks loading RNG/numpy/hparams."""
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    random.gauss(0, 1), np.random.randn()
    hyper = {
        "lr": np.float64(0.1),
        "rng": np.random.get_state(),
        "python": random.getstate(),
        "torch": torch.get_rng_state(),
    }
    lockstep.Checkpoint(tmp_path, hyper=hyper).save(wait=True)
    expected = random.gauss(0, 1), np.random.randn(), torch.rand(1), random.random(), np.random.rand()
    found = {}
    lockstep.Checkpoint(tmp_path, hyper=found).restore()

    assert expected == (random.gauss(0, 1), np.random.randn(), torch.rand(1), random.random(), np.random.rand())
    assert str(hyper) == str(found)
    random.setstate(found["python"])
    np.random.set_state(found["rng"])


def test_c08_no_device_number_is_saved_and_tensors_come_to_this_ranks_device(tmp_path):
    """Loading on every rank puts tensors on the device they were saved from. On GPUs: tests/gpu."""
    checkpoint = lockstep.Checkpoint(tmp_path, model=nn.Linear(2, 2), values={"x": torch.ones(2)})
    checkpoint.save(wait=True)
    found = {}
    lockstep.Checkpoint(tmp_path, values=found).restore()

    assert found["x"].device == lockstep.init().device == torch.device("cpu")
    assert "cuda:" not in (checkpoint.latest() / "manifest.json").read_text()
