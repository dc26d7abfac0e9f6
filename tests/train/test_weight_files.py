"""One file of weights: written whole by rank 0, read into any model that it fits, else refused by name."""

import argparse
import errno
import os
import resource
import signal
import stat
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from safetensors.torch import load_file, load_model, save_file
from torch import nn

import lockstep
from lockstep import LostRankError, MismatchError, UsageError
from lockstep.train import weight_files
from lockstep.train.weight_names import find_weights, match_names, plain_names

ENDINGS = [".safetensors", ".pt"]


class Net(nn.Module):
    """Batch norm, a tied pair, a scalar buffer, and a parameter that is not contiguous."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.norm.running_mean.normal_()
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight
        self.tilted = nn.Parameter(torch.randn(3, 2).t())


def values(model):
    return {name: tensor.tolist() for name, tensor in lockstep.unwrap(model).state_dict().items()}


def compiled(model):
    return torch.compile(model, backend="eager")


WRAPPED = {
    "plain": lambda model: model,
    "DataParallel": nn.DataParallel,
    "compiled": compiled,
    "compiled in DataParallel": lambda model: nn.DataParallel(compiled(model)),
    "replicated": lockstep.replicate,
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("into", WRAPPED)
@pytest.mark.parametrize("out", WRAPPED)
def test_wrapped_and_plain_models_load_each_others_files(tmp_path, out, into, ending):
    path = tmp_path / f"net{ending}"
    lockstep.save_weights(WRAPPED[out](Net(1)), path)
    model = WRAPPED[into](Net(2))

    assert lockstep.load_weights(model, path) == ([], [])
    assert values(Net(1)) == values(model)


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_file_has_plain_names_and_others_read_it(tmp_path, ending):
    path = tmp_path / f"net{ending}"
    lockstep.save_weights(nn.DataParallel(Net(1)), path)
    model = Net(2)
    if ending == ".pt":
        model.load_state_dict(torch.load(path, weights_only=True))
    else:
        load_model(model, path)

    assert values(Net(1)) == values(model)


def test_tied_tensors_are_written_once_and_stay_tied(tmp_path):
    for ending in ENDINGS:
        lockstep.save_weights(Net(1), tmp_path / f"net{ending}")
    model = Net(2)
    lockstep.load_weights(model, tmp_path / "net.safetensors")
    again = torch.load(tmp_path / "net.pt")

    assert "head.weight" not in load_file(tmp_path / "net.safetensors")
    assert again["head.weight"].data_ptr() == again["embed.weight"].data_ptr()
    assert model.head.weight is model.embed.weight


def test_a_tied_tensor_that_a_file_has_under_one_name_is_not_missing(tmp_path):
    state = Net(1).state_dict()
    del state["embed.weight"]
    torch.save(state, tmp_path / "net.pt")
    model = Net(2)
    lockstep.load_weights(model, tmp_path / "net.pt")

    assert values(Net(1)) == values(model)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_tensor_that_is_part_of_a_larger_one_brings_only_itself(tmp_path, ending):
    model, large = nn.Linear(2, 2, bias=False), torch.arange(100_000.0)
    model.weight = nn.Parameter(large[2:6].view(2, 2))
    lockstep.save_weights(model, tmp_path / f"net{ending}")
    other = nn.Linear(2, 2, bias=False)
    lockstep.load_weights(other, tmp_path / f"net{ending}")

    assert (tmp_path / f"net{ending}").stat().st_size < 5000
    assert [[2.0, 3.0], [4.0, 5.0]] == other.weight.tolist()


@pytest.mark.parametrize("ending", ENDINGS)
def test_two_views_of_one_storage_both_arrive(tmp_path, ending):
    model = nn.Module()
    model.register_buffer("flat", torch.arange(4.0))
    model.register_buffer("square", model.flat.view(2, 2))
    lockstep.save_weights(model, tmp_path / f"net{ending}")
    other = nn.Module()
    other.register_buffer("flat", torch.zeros(4))
    other.register_buffer("square", torch.zeros(2, 2))
    lockstep.load_weights(other, tmp_path / f"net{ending}")

    assert ([0.0, 1.0, 2.0, 3.0], [[0.0, 1.0], [2.0, 3.0]]) == (other.flat.tolist(), other.square.tolist())


# What people have written.

CHECKPOINTS = {
    "state_dict": lambda sd: {"epoch": 3, "best": torch.tensor(0.5), "state_dict": sd, "optimizer": {"state": {}}},
    "model": lambda sd: {"model": sd, "args": {"lr": 0.1}, "rng": torch.get_rng_state()},
    "two models": lambda sd: {"discriminator": {"x": torch.ones(1)}, "generator": sd},
    "model and its average": lambda sd: {"ema": {k: v + 1 for k, v in sd.items()}, "model": sd},
    "nested": lambda sd: {"ckpt": {"net": sd}},
    "data parallel": lambda sd: {f"module.{k}": v for k, v in sd.items()},
    "compiled in DDP": lambda sd: {"model": {f"module._orig_mod.{k}": v for k, v in sd.items()}},
    "DDP in DDP": lambda sd: OrderedDict((f"module.module.{k}", v) for k, v in sd.items()),
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "before torch 1.6"])
@pytest.mark.parametrize("form", CHECKPOINTS)
def test_checkpoints_that_people_write_are_read(tmp_path, form, legacy):
    path = tmp_path / "checkpoint.pth.tar"
    torch.save(CHECKPOINTS[form](Net(1).state_dict()), path, _use_new_zipfile_serialization=not legacy)
    model = Net(2)
    lockstep.load_weights(model, path)

    assert values(Net(1)) == values(model)


def test_several_sets_that_fit_equally_are_refused(tmp_path):
    torch.save({"G_A": Net(1).state_dict(), "G_B": Net(2).state_dict()}, tmp_path / "gan.pt")

    with pytest.raises(UsageError, match=r"several sets .* \['G_A', 'G_B'\]"):
        lockstep.load_weights(Net(), tmp_path / "gan.pt")


def test_a_file_of_something_else_is_refused(tmp_path):
    torch.save({"epoch": 3}, tmp_path / "x.pt")

    with pytest.raises(UsageError, match=r"x.pt: there are no weights in it, but the keys \['epoch'\]"):
        lockstep.load_weights(Net(), tmp_path / "x.pt")


def test_a_file_that_needs_code_names_it_and_how_to_allow_it(tmp_path):
    path = tmp_path / "x.pt"
    torch.save({"state_dict": Net(1).state_dict(), "args": argparse.Namespace(lr=1)}, path)
    model = Net(2)
    with pytest.raises(UsageError, match=r"holds more than weights: argparse.Namespace. .*safe_globals"):
        lockstep.load_weights(model, path)
    with torch.serialization.safe_globals([argparse.Namespace]):
        lockstep.load_weights(model, path)

    assert values(Net(1)) == values(model)


def test_a_batch_norm_without_a_counter_loads_as_torch_does(tmp_path):
    state = {k: v for k, v in Net(1).state_dict().items() if k != "norm.num_batches_tracked"}
    torch.save(dict(state), tmp_path / "of_2017.pt")

    assert lockstep.load_weights(Net(2), tmp_path / "of_2017.pt") == ([], [])


def test_an_older_form_of_weight_norm_is_read_through_the_models_own_hooks(tmp_path):
    plain = nn.Linear(2, 3)
    with pytest.warns(FutureWarning, match="weight_norm"):
        torch.nn.utils.weight_norm(plain)
    torch.save({f"module.{k}": v for k, v in plain.state_dict().items()}, tmp_path / "old.pt")
    model = torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    lockstep.load_weights(model, tmp_path / "old.pt")

    assert torch.equal(plain(torch.ones(1, 2)), model(torch.ones(1, 2)))


# What does not fit.


def test_everything_that_does_not_fit_stands_in_one_error_and_nothing_is_changed(tmp_path):
    state = Net(1).state_dict()
    del state["head.bias"]
    state |= {"tail.bias": torch.ones(1), "tilted": torch.ones(7)}
    save_file({k: v.contiguous() for k, v in state.items() if k != "head.weight"}, tmp_path / "net.safetensors")
    model, before = Net(2), values(Net(2))

    with pytest.raises(UsageError) as raised:
        lockstep.load_weights(model, tmp_path / "net.safetensors")
    for line in (
        "missing in the file (1): head.bias",
        "not in the model (1): tail.bias",
        "other shapes (1): tilted: (7,) in the file, (2, 3) in the model",
    ):
        assert line in str(raised.value)
    assert before == values(model)


@pytest.mark.parametrize("change", ["missing", "unexpected"])
def test_without_strict_what_fits_is_loaded_and_the_rest_is_returned(tmp_path, change):
    state = Net(1).state_dict()
    if change == "missing":
        del state["head.bias"]
    else:
        state["tail.bias"] = torch.ones(1)
    torch.save(state, tmp_path / "net.pt")
    model, before = Net(2), values(Net(2))
    with pytest.raises(UsageError, match=r"missing in the file|not in the model"):
        lockstep.load_weights(model, tmp_path / "net.pt")

    assert before == values(model)
    loaded = lockstep.load_weights(model, tmp_path / "net.pt", strict=False)
    assert {"missing": (["head.bias"], []), "unexpected": ([], ["tail.bias"])}[change] == loaded
    assert values(Net(1))["norm.running_mean"] == values(model)["norm.running_mean"]


def test_a_model_without_values_is_refused(tmp_path):
    lockstep.save_weights(Net(1), tmp_path / "net.pt")

    with pytest.raises(UsageError, match="meta device"):
        lockstep.load_weights(Net(2).to("meta"), tmp_path / "net.pt")


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("size", [0, 7, 100, 2000])
def test_a_truncated_file_is_called_damaged(tmp_path, ending, size):
    path = tmp_path / f"net{ending}"
    lockstep.save_weights(Net(1), path)
    os.truncate(path, size)
    model, before = Net(2), values(Net(2))

    with pytest.raises(UsageError, match="damaged"):
        lockstep.load_weights(model, path)
    assert before == values(model)


def test_a_missing_file_raises_as_everywhere(tmp_path):
    with pytest.raises(FileNotFoundError):
        lockstep.load_weights(Net(1), tmp_path / "nothing.pt")


@pytest.mark.filterwarnings("ignore:Validating sparse tensor")  # torch 2.14 says at each load that it looks
def test_an_unknown_ending_and_a_tensor_without_a_place_are_refused(tmp_path):
    model = nn.Module()
    model.register_buffer("sparse", torch.eye(2).to_sparse())

    with pytest.raises(UsageError, match="the ending says the format"):
        lockstep.save_weights(model, tmp_path / "net.weights")
    with pytest.raises(UsageError, match=r"'sparse' is a torch.sparse_coo torch.float32 tensor"):
        lockstep.save_weights(model, tmp_path / "net.safetensors")
    lockstep.save_weights(model, tmp_path / "net.pt")
    other = nn.Module()
    other.register_buffer("sparse", torch.zeros(2, 2).to_sparse())
    lockstep.load_weights(other, tmp_path / "net.pt")
    assert torch.equal(torch.eye(2), other.sparse.to_dense())


# Whole or not at all.


def test_the_file_gets_the_usual_permissions_and_replaces_what_a_link_leads_to(tmp_path):
    real, link = tmp_path / "real.safetensors", tmp_path / "link.safetensors"
    real.write_text("old")
    link.symlink_to(real)
    os.umask(before := os.umask(0))
    lockstep.save_weights(Net(1), link)

    assert link.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o666 & ~before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.safetensors", "real.safetensors"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_full_disk_raises_and_leaves_what_was_there(tmp_path, ending):
    path = tmp_path / f"net{ending}"
    lockstep.save_weights(nn.Linear(2, 2), path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    action = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # the kernel refuses to write more
    try:
        with pytest.raises(OSError, match="File too large"):
            lockstep.save_weights(nn.Linear(100, 100), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, action)

    assert before == path.read_bytes()
    assert [path] == list(tmp_path.iterdir())


# Names.


@given(
    names=st.sets(st.lists(st.sampled_from(["module", "a", "b"]), min_size=1, max_size=3).map(".".join), min_size=1),
    added=st.sampled_from(["", "module.", "module._orig_mod.", "_orig_mod.module.module."]),
)
def test_added_segments_never_matter_and_a_models_own_ones_stay(names, added):
    match = match_names([added + name for name in names], names)

    assert {added + name: name for name in names} == match.taken
    assert ([], []) == (match.missing, match.unexpected)


def test_names_of_wrappers_within_a_model_are_plain_and_its_own_module_stays():
    model = nn.Module()
    model.module = nn.Linear(1, 1)
    model.encoder = nn.DataParallel(nn.Linear(1, 1))
    names = plain_names(nn.DataParallel(model), nn.DataParallel(model).state_dict())

    assert ["module.weight", "module.bias", "encoder.weight", "encoder.bias"] == list(names.values())


def test_a_state_dict_with_an_entry_called_model_is_itself():
    state = {"model": torch.ones(1), "state_dict": torch.ones(1)}

    assert find_weights(state, ["model", "state_dict"]) is state


# Ranks.


def save_from_all(rank, folder):
    torch_ddp = nn.parallel.DistributedDataParallel(Net(1))
    lockstep.save_weights(torch_ddp, f"{folder}/torch.safetensors")
    there = Path(f"{folder}/torch.safetensors").exists()
    ours = lockstep.DistributedDataParallel(Net(2))
    lockstep.load_weights(ours, f"{folder}/torch.safetensors")
    replicated = lockstep.replicate(Net(3))
    lockstep.load_weights(replicated, f"{folder}/torch.safetensors")
    return there, values(ours), values(replicated), sorted(path.name for path in Path(folder).iterdir())


def test_ranks_save_one_file_and_all_load_it(tmp_path):
    results = run_ranks(save_from_all, 2, str(tmp_path))

    assert [(True, values(Net(1)), values(Net(1)), ["torch.safetensors"])] * 2 == results


def kind_and_words(call, *args):
    try:
        call(*args)
    except Exception as error:
        return type(error).__name__, getattr(error, "errno", None), str(error)
    return None


def fail_to_save(rank, folder):
    model = lockstep.replicate(nn.Linear(2, 1))
    found = [kind_and_words(lockstep.save_weights, model, f"{folder}/{name}") for name in ("nowhere/x.pt", "x.doc")]
    if rank == 0:
        weight_files.write_whole = lambda *_: {}["unforeseen"]
    found.append(kind_and_words(lockstep.save_weights, model, f"{folder}/x.pt"))
    dist.barrier()
    return found


def test_what_rank_0_cannot_write_is_raised_on_all(tmp_path):
    first, second = run_ranks(fail_to_save, 2, str(tmp_path))

    assert [("FileNotFoundError", errno.ENOENT), ("UsageError", None), ("KeyError", None)] == [e[:2] for e in first]
    assert [("FileNotFoundError", errno.ENOENT), ("UsageError", None), (LostRankError.__name__, None)] == [
        e[:2] for e in second
    ]
    assert "rank 1 of 2: rank 0 could not write" in second[0][2]
    assert first[1][2] == second[1][2]
    assert "KeyError: 'unforeseen'" in second[2][2]


def load_different(rank, folder):
    model = lockstep.replicate(nn.Linear(2, 1, bias=False))
    before = model.weight.tolist()
    found = [kind_and_words(lockstep.load_weights, model, f"{folder}/{name}{rank}.pt") for name in ("some", "part")]
    return found, model.weight.tolist() == before


def test_ranks_that_read_other_files_raise_and_change_nothing(tmp_path):
    for name, value in (("some0", 0.0), ("some1", 1.0), ("part1", 1.0)):
        torch.save({"weight": torch.full((1, 2), value)}, tmp_path / f"{name}.pt")
    (first, kept), (second, kept_too) = run_ranks(load_different, 2, str(tmp_path))

    assert kept
    assert kept_too
    assert [MismatchError.__name__, "FileNotFoundError"] == [error[0] for error in first]
    assert [MismatchError.__name__] * 2 == [error[0] for error in second]
    assert "holds other weights on rank 1 than on rank 0" in first[0][2]
    assert "rank 0 could not load" in second[1][2]


def save_before_init(rank, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    return kind_and_words(lockstep.save_weights, nn.Linear(1, 1), f"{folder}/x.pt")[2], list(Path(folder).iterdir())


def test_ranks_that_are_not_connected_are_told_so(tmp_path):
    for text, files in run_ranks(save_before_init, 2, str(tmp_path), backend=None):
        assert "Call lockstep.init()" in text
        assert files == []
