"""The loss beside each output, and the mean over the whole batch from the replicas' means."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.collectives.nested import leaves
from lockstep.errors import UsageError


class WithLoss(nn.Module):
    """Module and loss in one: gives the mean of the losses of its share of the batch, and how many they are."""

    def __init__(self, module: nn.Module, loss: Callable[..., Any], dim: int) -> None:
        super().__init__()
        self.module, self.loss, self.dim = module, loss, dim

    def forward(self, *inputs: Any, **kwargs: Any) -> tuple[Tensor, Tensor | float]:
        """Run the module on all but the last of ``inputs``, and the loss on its output and the last."""
        if not inputs:
            raise UsageError(
                "DataParallel(..., loss=) takes the targets as its last positional argument: model(inputs, targets)."
            )
        *given, targets = inputs
        return _weighed(self.loss(self.module(*given, **kwargs), targets), (targets, given, kwargs), self.dim)


def _weighed(loss: Any, batch: tuple[Any, ...], dim: int) -> tuple[Tensor, Tensor | float]:
    if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[0], Tensor) and loss[0].dim() == 0:
        mean, count = loss
        return mean, count if isinstance(count, Tensor) else float(count)
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"DataParallel(..., loss=): the loss is {type(loss).__name__}. It has to be a tensor: a scalar, the mean "
            f"over its samples; one loss for each sample; or a pair of a mean and how many it is the mean of."
        )
    if loss.dim():
        # The mean over nothing is not a number; its sum is 0 and keeps the graph.
        return (loss.mean() if loss.numel() else loss.sum()), float(loss.numel())
    samples = next((x.shape[dim] for part in batch for x in leaves(part) if isinstance(x, Tensor) and x.dim()), 1)
    return loss, float(samples)


def mean_over(parts: Sequence[tuple[Tensor, Tensor | float]], device: torch.device) -> Tensor:
    """Give the mean over all losses from the mean and number of each replica's.

    Example:
        >>> mean_over([(torch.tensor(1.0), 3.0), (torch.tensor(5.0), 1.0)], torch.device("cpu"))
        tensor(2.)
    """
    if len(parts) == 1:
        return parts[0][0].to(device)
    means = torch.stack([mean.to(device) for mean, _ in parts])
    counts = torch.stack([torch.as_tensor(count, dtype=means.dtype, device=device) for _, count in parts])
    return torch.where(counts > 0, means * (counts / counts.sum()), 0).sum()
