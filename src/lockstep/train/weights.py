"""How much the losses of a step weigh, over micro-batches and ranks, and whether they are numbers at all."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.errors import UsageError
from lockstep.world import World

_NAMED = 52


class Share(NamedTuple):
    """One micro-batch's part of a step on one rank.

    Attributes:
        value: A scalar that gradients flow through, in float32 at least.
        times: The weighted sum of the losses is ``value * times``.
        weight: The sum of the weights; a number where it is known without looking at a tensor.
    """

    value: Tensor
    times: float
    weight: float | Tensor


def share_of(losses: Tensor, weights: Tensor | None, count: float | None) -> Share:
    """Sum up one micro-batch.

    Args:
        losses: One loss per sample, token or pixel, any shape; or a scalar, the mean of ``count`` of them.
        weights: What each loss weighs; any shape that can be expanded to the losses', any dtype. None: 1 each.
        count: Of how many a scalar is the mean; None: 1.

    Raises:
        UsageError: Arguments that contradict each other.

    Example:
        >>> share_of(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 0, 1]), None)
        Share(value=tensor(5.), times=1.0, weight=tensor(2.))
    """
    wide = losses if losses.dtype in (torch.float32, torch.float64) else losses.float()
    if losses.ndim == 0:
        if weights is not None:
            raise UsageError("weights= goes with unreduced losses; this loss is a scalar. Write reduction='none'.")
        of = 1.0 if count is None else float(count)
        return Share(wide, of, of)
    if count is not None:
        raise UsageError("count= goes with a scalar loss, the mean of so many; these losses are counted by themselves.")
    if weights is None:
        number = float(losses.numel())
        return Share(wide.mean(), number, number) if number else Share(wide.sum(), 1.0, 0.0)
    try:
        each = weights.to(wide.device, wide.dtype).expand_as(wide)
    except RuntimeError:
        raise UsageError(
            f"weights of shape {tuple(weights.shape)} do not fit losses of shape {tuple(losses.shape)}."
        ) from None
    return Share((wide * each).sum(), 1.0, each.sum().detach())


class Tally(NamedTuple):
    """What one step amounts to in the world: weight, weighted sum of losses, and the ranks whose losses are NaN."""

    weight: float
    loss: float
    bad_ranks: tuple[int, ...]


def send_tally(world: World, weight: float | Tensor, loss: float | Tensor) -> Callable[[], Tally]:
    """Start adding up over the ranks; the function that comes back waits for the result.

    Sent before the step's last backward pass, it is there when that ends: nobody waits for it.

    Args:
        world: The world.
        weight: This rank's sum of weights over the step's micro-batches.
        loss: This rank's weighted sum of losses; a number where that is known without waiting for a device.
    """
    if isinstance(loss, Tensor):
        return _send_from_cuda(world, weight, loss)
    if world.size == 1:
        tally = Tally(float(weight), loss, (0,) if math.isnan(loss) else ())
        return lambda: tally
    bad = math.isnan(loss)
    message = torch.tensor([float(weight), 0.0 if bad else loss, bad * _bit(world)], dtype=torch.float64)
    wait = world.ranks.add_up_later(message)
    return lambda: _read(wait())


def _send_from_cuda(world: World, weight: float | Tensor, loss: Tensor) -> Callable[[], Tally]:
    """The same on a stream of its own: the host later waits for this stream only, not for the backward pass."""
    side: torch.cuda.Stream = torch.cuda.Stream(loss.device)  # type: ignore[no-untyped-call]
    loss = loss.double()
    bad = loss.isnan().double()
    message = torch.stack((torch.as_tensor(weight).to(bad), loss.nan_to_num(0.0), bad * _bit(world)))
    side.wait_stream(torch.cuda.current_stream(loss.device))
    with torch.cuda.stream(side):
        total = world.ranks.add_up_later(message)()
        there = torch.empty(total.shape, dtype=total.dtype, pin_memory=True)
        there.copy_(total, non_blocking=True)

    def result() -> Tally:
        side.synchronize()
        assert message is not None  # keeps the memory until the stream is through with it
        return _read(there)

    return result


def _bit(world: World) -> float:
    """This rank as a power of two: 53 different ones add up exactly in float64; the last stands for all others."""
    return 2.0 ** min(world.rank, _NAMED)


def _read(message: Tensor) -> Tally:
    weight, loss, bits = message.tolist()
    return Tally(weight, loss, tuple(rank for rank in range(_NAMED + 1) if int(bits) >> rank & 1))
