"""One process that drives several devices: split the batch, run a replica on each, gather what they give."""

from lockstep.parallel.one_process.front import DataParallel, data_parallel

__all__ = ["DataParallel", "data_parallel"]
