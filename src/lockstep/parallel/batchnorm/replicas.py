"""Batch norm over the replicas that one process runs in threads: they meet in forward, and autograd does the rest.

Ranks have to meet in backward too (`function.py`). Replicas cannot: one thread may run the backward of all of them, and
would wait for itself. Nor need they, since one graph holds them all.
"""

import threading
import time
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import batch_norm

from lockstep.errors import LateRankError, LostRankError, MismatchError, UsageError
from lockstep.parallel.batchnorm.function import Running, learn
from lockstep.parallel.batchnorm.kernels import statistics_dtype

_PATIENCE = 1800.0  # seconds, as for ranks; a replica that fails or ends is noticed at once


class Moments(NamedTuple):
    """What a replica tells the others of its values."""

    values: int  # per channel
    mean: Tensor  # (C,)
    variance: Tensor  # (C,), mean squared deviation from it


class Meeting:
    """Where the replicas of one forward exchange what they know, all of them in the same rounds."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.over = False
        self._changed = threading.Condition()
        self._rounds = [0] * size  # how many each replica has begun
        self._said: dict[int, dict[int, tuple[str, Moments]]] = {}
        self._gone: dict[int, bool] = {}  # which replicas will not come any more, and whether they failed

    def exchange(self, place: int, layer: str, moments: Moments) -> list[Moments]:
        """Give the moments of all replicas, by replica.

        Raises:
            LostRankError: Another replica failed.
            MismatchError: Another replica ended its forward without this layer, or is at another one.
            LateRankError: Another replica did not come.
        """
        end = time.monotonic() + _PATIENCE
        with self._changed:
            number = self._rounds[place]
            self._rounds[place] += 1
            said = self._said.setdefault(number, {})
            said[place] = (layer, moments)
            self._changed.notify_all()
            while len(said) < self.size:
                self._check_missing(place, layer, [other for other in range(self.size) if other not in said])
                if not self._changed.wait(end - time.monotonic()):
                    raise LateRankError(f"replica {place} of {self.size}: {layer} waited {_PATIENCE:g} s for another.")
            if all(self._rounds[other] > number for other in range(self.size)):
                self._said.pop(number, None)
        other = next((other for other in range(self.size) if said[other][0] != layer), None)
        if other is not None:
            raise MismatchError(
                f"replica {place} of {self.size} is at {layer}, replica {other} at {said[other][0]}. {_SAME}"
            )
        return [said[other][1] for other in range(self.size)]

    def leave(self, place: int, failed: bool) -> None:
        """Say that a replica will not come any more."""
        with self._changed:
            self._gone[place] = failed
            self.over = len(self._gone) == self.size
            self._changed.notify_all()

    def _check_missing(self, place: int, layer: str, missing: list[int]) -> None:
        for other in missing:
            waited = f"replica {place} of {self.size}: {layer} waited for replica {other}, which"
            if self._gone.get(other):
                raise LostRankError(f"{waited} failed.")
            if other in self._gone:
                raise MismatchError(f"{waited} ended its forward without it. {_SAME}")


_SAME = (
    "Every replica must run the same synchronised layers in the same order while the model is in training mode, "
    "whatever its samples are."
)


class Seat:
    """One layer's place at the meeting, in one replica; also what it heard there, for checkpointing."""

    def __init__(self, meeting: Meeting, place: int, layer: str) -> None:
        self._meeting, self._place, self._layer = meeting, place, layer
        self._heard: list[tuple[bool, list[Moments]]] = []

    def exchange(self, moments: Moments) -> list[Moments]:
        """Give the moments of all replicas; in a forward that checkpointing repeats, those of the first time."""
        if self._meeting.over:
            return self._repeat(moments)
        rows = self._meeting.exchange(self._place, self._layer, moments)
        # Without their graphs, which hold this object in their turn.
        kept = [
            Moments(n, *(x.detach().requires_grad_(x.requires_grad) for x in (mean, variance)))
            for n, mean, variance in rows
        ]
        self._heard.append((torch.is_grad_enabled(), kept))
        return rows

    def _repeat(self, moments: Moments) -> list[Moments]:
        same = [heard for heard in self._heard if torch.equal(heard[1][self._place].mean, moments.mean)]
        if not (same or len(self._heard) == 1):
            raise UsageError(
                f"{self._layer}: a checkpoint repeats the forward of a replica with other values than before. Leave "
                f"its inputs as they are until backward, and keep preserve_rng_state=True."
            )
        recorded, rows = (same or self._heard)[0]
        if not recorded and torch.is_grad_enabled():
            raise UsageError(
                f"{self._layer} inside DataParallel: checkpoint(use_reentrant=True) loses the gradients that go from "
                f"one replica to another. Write checkpoint(..., use_reentrant=False)."
            )
        return [*rows[: self._place], moments, *rows[self._place + 1 :]]


def batch_norm_over_replicas(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running | None, *, eps: float, seat: Seat
) -> Tensor:
    """Normalise by the statistics of all replicas' values; every replica calls it.

    Args:
        x: This replica's values, ``(N, C, ...)``; ``N`` may differ between replicas, and be 0.
        weight: Scale, ``(C,)``, or None.
        bias: Shift, ``(C,)``, or None.
        running: What learns the statistics, or None.
        eps: Added to the variance.
        seat: The layer's place among the replicas.

    Returns:
        The normalised values, in the dtype of ``x``.

    Raises:
        ValueError: All replicas together have one value per channel; in every replica.
        UsageError: In a checkpoint with ``use_reentrant=True``.
        LostRankError: Another replica failed.
        MismatchError: Another replica does not run this layer.
    """
    dims, view = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
    wide = x.to(statistics_dtype(x))
    rows = seat.exchange(_measure(wide, dims, view))
    everything = sum(row.values for row in rows)
    if everything == 1:
        raise ValueError(
            f"Expected more than 1 value per channel when training, got input size {list(x.shape)}, and one value per "
            f"channel over all {len(rows)} replicas"
        )
    if everything == 0:
        return batch_norm(x, None, None, weight, bias, True, 0.0, eps)
    # Chan's formula as in `moments.py`, which writes in place; these have gradients.
    share = wide.new_tensor([[row.values / everything] for row in rows])  # (replicas, 1)
    means = torch.stack([row.mean.to(x.device) for row in rows])  # (replicas, C)
    variances = torch.stack([row.variance.to(x.device) for row in rows])
    mean = (means * share).sum(0)
    variance = (((means - mean).square() + variances) * share).sum(0)
    if running is not None:
        with torch.no_grad():
            learn(running, mean, variance * (everything / (everything - 1)))
    scale = (variance + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.to(scale.dtype)
    y = (wide - mean.view(view)) * scale.view(view)
    if bias is not None:
        y = y + bias.to(scale.dtype).view(view)
    return y.to(x.dtype)


def _measure(wide: Tensor, dims: list[int], view: tuple[int, ...]) -> Moments:
    if wide.numel() == 0:
        none = wide.sum(dims)
        return Moments(0, none, none)
    mean = wide.mean(dims)
    return Moments(wide.numel() // wide.shape[1], mean, (wide - mean.view(view)).square().mean(dims))
