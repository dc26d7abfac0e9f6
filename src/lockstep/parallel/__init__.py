"""Replicas that stay equal: the reducer, synchronised batch norm, one process with several devices."""

from lockstep.parallel.one_process import data_parallel

__all__ = ["data_parallel"]
