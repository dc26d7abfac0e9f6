"""Replicas that stay equal: the reducer, synchronised batch norm, one process with several devices."""
