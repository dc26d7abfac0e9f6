"""Ranks that find each other as under a launcher: by the environment, at a store that another process keeps."""

import os
from contextlib import contextmanager

import torch.distributed as dist
from ranks import run_ranks


@contextmanager
def agent_store():
    """The variables that torchrun leaves, for a store at a port that was free."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }


def run_launched(function, size, *args, missing=(), timeout=60.0):
    """Run ``function(rank, *args)`` on ranks that have a launcher's variables and no process group yet."""
    with agent_store() as environ:
        return run_ranks(_be_launched, size, environ, size, missing, function, args, backend=None, timeout=timeout)


def _be_launched(rank, environ, size, missing, function, args):
    if rank in missing:
        return None
    os.environ.update(environ)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    return function(rank, *args)
