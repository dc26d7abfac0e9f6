"""Every replacement of a rehearsal is needed: a piece of a script that runs with it, and not without."""

import io
import multiprocessing.spawn
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.nn.parallel import comm
from torch.utils.data.distributed import DistributedSampler

from lockstep.compat.rehearsal.entry import put_in_place
from lockstep.compat.rehearsal.follow import Follow
from lockstep.compat.rehearsal.install import entries
from lockstep.compat.rehearsal.report.watching import Watch
from lockstep.compat.rehearsal.settings import Settings
from lockstep.errors import UsageError
from tests.compat.rehearsal.pieces import PIECES

OF_RANKS = {"torch.nn.SyncBatchNorm.forward"}
"""Needed where there are several ranks: test_ranks.py."""

BUILT_FOR_CUDA = torch.version.cuda is not None
OF_CPU_BUILDS = {
    *("torch.device", "torch._C._nn._parse_to", "torch.accelerator.current_accelerator", "torch.version.cuda"),
    *("torch.cuda.get_arch_list", "torch.cuda.ipc_collect", "torch.cuda.memory_snapshot"),
    *("torch.cuda.memory.memory_snapshot", "torch.backends.cudnn.is_available", "torch.backends.cudnn.version"),
    *(f"torch.cuda.nvtx.{name}" for name in ("range_push", "range_pop", "mark", "range_start", "range_end")),
    "torch.distributed.is_nccl_available",
}
"""What a torch that is built for CUDA does by itself, on a machine without a GPU too."""


def everything():
    mode = Follow(print)
    found = [str(entry) for entry in entries(Settings(2), mode, Watch(Settings(2), mode))]
    return [name for name in found if name not in OF_RANKS]


def run(piece, folder, without=()):
    """Run a piece of a script in a rehearsal; torch is as it was before when this returns."""
    settings = Settings(devices=2, folder=str(folder))
    mode = Follow(lambda _: None)
    watch = Watch(settings, mode)
    space = {
        "comm": comm,
        "dist": dist,
        "folder": str(folder),
        "io": io,
        "multiprocessing": multiprocessing,
        "noted": lambda: mode.misplaced,
        "numpy": np,
        "refused": refused,
        "sampler": lambda: DistributedSampler(range(8), num_replicas=2, rank=0),
        "threading": threading,
        "torch": torch,
        "watch": watch.sum_up,
    }
    keep = torch.get_rng_state(), torch.get_autocast_dtype("cpu"), torch.get_autocast_dtype("cuda")
    undo = put_in_place(entry for entry in entries(settings, mode, watch) if str(entry) not in without)
    try:
        with warnings.catch_warnings(), mode:
            warnings.simplefilter("ignore")  # old calls are deprecated; that is not what is tested
            exec(piece, space)
    finally:
        undo()
        torch.set_rng_state(keep[0])
        torch.set_autocast_dtype("cpu", keep[1])
        torch.set_autocast_dtype("cuda", keep[2])
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_enabled("cuda", False)
        torch.set_default_device(None)


def refused(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except UsageError:
        return
    raise AssertionError("not refused")


@pytest.mark.parametrize("name", everything())
def test_a_script_needs_it(name, tmp_path):
    run(PIECES[name], tmp_path)
    if BUILT_FOR_CUDA and name in OF_CPU_BUILDS:
        return

    with pytest.raises(Exception):  # noqa: B017, PT011  (whatever torch raises without it, or a failed assertion)
        run(PIECES[name], tmp_path, without=(name,))


def test_every_piece_belongs_to_an_entry():
    assert set(PIECES) == set(everything())


def test_undone_everything_is_as_before():
    mode = Follow(print)
    watch = Watch(Settings(2), mode)
    before = (
        torch.zeros,
        torch.Tensor.to,
        torch.Tensor.device,
        torch.cuda.is_available(),
        vars(torch.nn.Parameter)["__new__"],
    )

    put_in_place(entries(Settings(2), mode, watch))()

    assert before[:3] == (torch.zeros, torch.Tensor.to, torch.Tensor.device)
    assert before[3:] == (torch.cuda.is_available(), vars(torch.nn.Parameter)["__new__"])
