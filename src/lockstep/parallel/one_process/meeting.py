"""Synchronised batch norm inside replicas: seats at a meeting before they run, and their leaving it afterwards."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from lockstep.parallel.batchnorm.layer import SyncBatchNorm
from lockstep.parallel.batchnorm.replicas import Meeting, Seat


def seat_layers(replicas: Sequence[nn.Module]) -> None:
    """Let the `lockstep.SyncBatchNorm` layers of the replicas of one forward meet."""
    meeting = Meeting(len(replicas))
    for place, replica in enumerate(replicas):
        for name, layer in replica.named_modules():
            if isinstance(layer, SyncBatchNorm) and len(replicas) > 1:
                # In its state, not by assignment: it is no part of the layer.
                layer.__dict__["_seat"] = Seat(meeting, place, f"SyncBatchNorm({layer.num_features}) {name!r}")
                replica.__dict__["_meeting"] = meeting


def run_met(replica: nn.Module, place: int, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run a replica; whether it ends or fails, those that wait for it learn of it."""
    meeting = replica.__dict__.get("_meeting")
    failed = True
    try:
        output = replica(*inputs, **options)
        failed = False
        return output
    finally:
        if meeting is not None:
            meeting.leave(place, failed)
