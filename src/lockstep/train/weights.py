"""How much the losses of a micro-batch weigh."""

import torch
from torch import Tensor

from lockstep.errors import UsageError

_WIDE = (torch.float32, torch.float64)


def share_of(losses: Tensor, weights: Tensor | None, count: float | None) -> tuple[Tensor, float, float | Tensor]:
    """Sum up one micro-batch.

    Args:
        losses: One loss per sample, token or pixel, any shape; or a scalar, the mean of ``count`` of them.
        weights: What each loss weighs; any shape that can be expanded to the losses', any dtype. None: 1 each.
        count: Of how many a scalar is the mean; None: 1.

    Returns:
        A scalar that gradients flow through, in float32 at least; what it has to be multiplied by to be the weighted
        sum of the losses; and the sum of the weights, a number where it is known without looking at a tensor.

    Raises:
        UsageError: Arguments that contradict each other.

    Example:
        >>> share_of(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 0, 1]), None)
        (tensor(5.), 1.0, tensor(2.))
    """
    wide = losses if losses.dtype in _WIDE else losses.float()
    if losses.ndim == 0:
        if weights is not None:
            raise UsageError("weights= goes with unreduced losses; this loss is a scalar. Write reduction='none'.")
        of = 1.0 if count is None else float(count)
        # The mean of nothing is NaN, which no weight of zero makes a zero.
        return wide if of else wide.nan_to_num(0.0), of, of
    if count is not None:
        raise UsageError("count= goes with a scalar loss, the mean of so many; these losses are counted by themselves.")
    if weights is None:
        number = float(losses.numel())
        return (wide.mean(), number, number) if number else (wide.sum(), 1.0, 0.0)
    try:
        each = weights.to(wide.device, wide.dtype).expand_as(wide)
    except RuntimeError:
        raise UsageError(
            f"weights of shape {tuple(weights.shape)} do not fit losses of shape {tuple(losses.shape)}. Give one "
            f"weight for each loss, in the same shape or in one that torch can expand to it."
        ) from None
    return (wide * each).sum(), 1.0, each.sum().detach()
