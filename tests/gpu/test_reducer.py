"""The list of `parallel/cases.py` with models on GPUs: over gloo on one, over nccl on one and where there are two."""

import functools

import pytest
import torch
import torch.distributed as dist
from parallel.cases import CASES, Tool
from ranks import run_ranks

import lockstep
from lockstep.parallel import attach, peers, transport

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

# bfloat16 is rounded in another order there.
NAMES = [name for name in CASES if "half" not in name]


class OnGpu(Tool):
    """Models on this rank's GPU; where all ranks share one, the reducer is attached without asking whose it is."""

    def wrap(self, model):
        device = torch.device("cuda", torch.cuda.current_device())
        model.to(device)
        if dist.is_initialized():
            ranks = peers.Peers()
            attach.attach(model, ranks, transport.Summed(ranks), device, caps=(1.0, 25.0))
        return model

    def no_sync(self, model):
        return lockstep.no_sync(model)

    def sync(self, model):
        lockstep.sync_gradients(model)


def everything(rank, gpus):
    torch.cuda.set_device(rank % gpus)
    torch.set_default_device("cuda")
    found = {}
    for name in NAMES:
        result = CASES[name](OnGpu([rank]))
        found[name] = {key: None if value is None else value.cpu() for key, value in result.items()}
    return found


@functools.cache
def on_ranks(backend, size):
    return run_ranks(everything, size, torch.cuda.device_count(), backend=backend, timeout=110)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("backend", "size"), [("gloo", 2), ("cpu:gloo,cuda:nccl", 1), ("cpu:gloo,cuda:nccl", 2)])
def test_ranks_on_gpus_do_as_one_process(backend, size, name):
    if "nccl" in backend and size > torch.cuda.device_count():
        pytest.skip("needs a GPU for each rank")
    with torch.device("cuda"):  # weights are drawn there too
        expected = CASES[name](Tool(range(size)))

    for found in on_ranks(backend, size):
        for key, value in expected.items():
            assert (value is None) == (found[name][key] is None), key
            if value is not None:
                torch.testing.assert_close(found[name][key], value.cpu(), rtol=1e-5, atol=1e-6)
