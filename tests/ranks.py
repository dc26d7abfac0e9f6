"""Run a function on several ranks: real processes, real collectives, a fresh world for every call."""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from multiprocessing import connection

# The server imports and runs nothing, so a child costs a fork and no thread pool is copied half-alive. An optimizer's
# constructor imports torch._dynamo, a second in every rank if the server had not done it.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "pytest", "lockstep"])


def run_ranks(function, world_size, *args, backend="gloo", timeout=60.0):
    """Return ``[function(rank, *args) for rank]``; a rank that fails, dies or is late raises here, by name.

    ``function`` lives at the top of its module, since it travels by name. ``backend=None`` starts no process group.
    """
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = {}, []
        try:
            for rank in range(world_size):
                here, there = _context.Pipe(duplex=False)
                job = (there, function, rank, world_size, f"{folder}/store", backend, args)
                processes.append(_context.Process(target=_be_a_rank, args=job))
                processes[-1].start()
                there.close()
                ends[here] = rank
            results = _collect(ends, processes, timeout)
            for process in processes:
                process.join(30.0)  # killed now, it would leave the names of a data loader's semaphores behind
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(ends, processes, timeout):
    results, deadline = {}, time.monotonic() + timeout
    while waiting := [end for end, rank in ends.items() if rank not in results]:
        ready = connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {sorted(ends[e] for e in waiting)} did not finish within {timeout:g} s")
        for end in ready:
            rank = ends[end]
            try:
                ok, value = pickle.loads(end.recv_bytes())
            except EOFError:
                processes[rank].join()
                raise AssertionError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
            if not ok:
                raise AssertionError(f"rank {rank} of {len(ends)} raised\n{value}")
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def _be_a_rank(end, function, rank, world_size, store, backend, args):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if backend is not None:
            dist.init_process_group(backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
            dist.barrier()  # a rank that is through at once must not leave while others still connect
        outcome = (True, function(rank, *args))
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        outcome = (False, traceback.format_exc())
    # Plain pickle: multiprocessing's own would hand tensors over by name, and this process is about to end.
    end.send_bytes(pickle.dumps(outcome))
