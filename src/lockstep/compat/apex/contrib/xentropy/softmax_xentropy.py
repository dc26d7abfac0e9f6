"""Cross entropy with label smoothing, one loss for each sample."""

import torch
import torch.nn.functional as F
from torch import Tensor


def softmax_cross_entropy_loss(
    logits: Tensor, labels: Tensor, smoothing: float = 0.0, padding_idx: int = 0, half_to_float: bool = False
) -> Tensor:
    """Each sample's loss.

    Args:
        logits: ``(N, classes)``.
        labels: ``(N,)``, integers.
        smoothing: How much of the target is spread over all classes.
        padding_idx: The label of samples whose loss is 0.
        half_to_float: Whether half logits give float32 losses.

    Returns:
        ``(N,)``, in the dtype of the logits.
    """
    wide = logits.float() if logits.dtype.itemsize < 4 else logits
    with torch.autocast(logits.device.type, enabled=False):
        padding = labels == padding_idx
        losses = F.cross_entropy(wide, labels.masked_fill(padding, 0), reduction="none", label_smoothing=smoothing)
        losses = losses.masked_fill(padding, 0.0)
    return losses if half_to_float else losses.to(logits.dtype)


class SoftmaxCrossEntropyLoss:
    """What scripts call as ``SoftmaxCrossEntropyLoss.apply(logits, labels, smoothing, padding_idx, half_to_float)``."""

    apply = staticmethod(softmax_cross_entropy_loss)
