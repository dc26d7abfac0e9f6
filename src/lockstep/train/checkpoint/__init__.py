"""Checkpoints: everything that a run is, so that it can go on at the very next batch."""

from lockstep.train.checkpoint.checkpoint import Checkpoint as Checkpoint

__all__ = ["Checkpoint"]
