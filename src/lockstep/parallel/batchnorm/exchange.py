"""What the ranks of a group tell each other: one message in forward, one in backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import LateRankError, LockstepError, LostRankError, MismatchError

# What a rank will do in backward, where who wants a gradient waits for everyone. Told in forward: later nobody can be
# asked.
DEAF = 0  # records nothing: its backward will never come
READY = 1  # records; its own input needs no gradient
WANTS = 2  # needs the gradient of its input, which depends on every rank


class LayerPeers(NamedTuple):
    """Whom a layer talks to, and what it is called in messages."""

    group: Any  # None for all ranks
    size: int
    layer: str


class Rows(NamedTuple):
    """One row from each rank of the group, in the order of ranks."""

    values: Tensor  # how many per channel, (ranks, 1)
    mean: Tensor  # (ranks, C)
    variance: Tensor  # (ranks, C)
    counts: list[int]
    roles: list[int]


def role(x: Tensor) -> int:
    """What this rank will do in backward."""
    if not torch.is_grad_enabled():
        return DEAF
    return WANTS if x.requires_grad else READY


def backward_meets(roles: list[int], peers: LayerPeers) -> bool:
    """Whether the ranks exchange sums in backward.

    Args:
        roles: ``DEAF``, ``READY`` or ``WANTS`` of each rank of the group.
        peers: The ranks, for the message.

    Raises:
        MismatchError: Some wait for others that will never come; on every rank.

    Example:
        >>> peers = LayerPeers(None, 2, "SyncBatchNorm(8)")
        >>> backward_meets([WANTS, READY], peers), backward_meets([DEAF, DEAF], peers)
        (True, False)
    """
    if WANTS not in roles:
        return False
    if DEAF in roles:
        raise MismatchError(
            f"rank {dist.get_rank(peers.group)} of {peers.size}: {peers.layer} in training mode records gradients on "
            f"rank {roles.index(WANTS)} but runs without on rank {roles.index(DEAF)} (torch.no_grad or "
            f"inference_mode), so the former's backward would wait for ever. Use the same mode on all ranks, or call "
            f".eval() to do without the other ranks."
        )
    return True


def gather_rows(count: int, mean: Tensor, variance: Tensor, role: int, peers: LayerPeers) -> Rows:
    """Give every rank the moments of each.

    Args:
        count: Values per channel on this rank.
        mean: Their mean, ``(C,)``.
        variance: Their mean squared deviation from it, ``(C,)``.
        role: What this rank will do in backward.
        peers: The ranks that take part.
    """
    # Twice new_full takes half as long as torch.tensor((count, role)).
    message = torch.cat((mean.new_full((1,), count), mean.new_full((1,), role), mean, variance))  # (2 + 2 C,)
    length = len(message)
    rows = message.new_empty(peers.size * length)
    _with_reason(_gather, "forward", peers, rows, message)
    rows = rows.view(-1, length)
    heads = rows[:, :2].tolist()
    values, _, means, variances = rows.split_with_sizes((1, 1, len(mean), len(mean)), 1)
    return Rows(values, means, variances, [int(n) for n, _ in heads], [int(role) for _, role in heads])


# torch 2.12 renamed it.
_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


def add_up(x: Tensor, peers: LayerPeers) -> Tensor:
    """Sum ``x`` over the ranks of the group, in place."""
    _with_reason(dist.all_reduce, "backward", peers, x)
    return x


def _with_reason(collective: Callable[..., Any], direction: str, peers: LayerPeers, *tensors: Any) -> None:
    """Run the collective; if a rank does not come or is gone, say what that usually means here."""
    try:
        collective(*tensors, group=peers.group)
    except LockstepError:
        raise  # the shm backend names the rank itself
    except RuntimeError as error:
        kind = LateRankError if "timed out" in str(error).lower() else LostRankError
        raise kind(
            f"rank {dist.get_rank(peers.group)} of {peers.size}: {peers.layer} waited in {direction} for the other "
            f"ranks of its group in vain. {_REASONS[direction]} torch says: {error}"
        ) from error


_REASONS = {
    "forward": "Every rank must run the same synchronised layers in the same order while the model is in training "
    "mode; for a forward on some ranks only, call .eval() first. A rank without samples brings an empty batch.",
    "backward": "Every rank's loss must depend on the layer's output, and every rank must call backward: a rank "
    "without samples calls it too, on the sum over its empty batch; a branch that a rank does not use is added "
    "as 0 * output.sum().",
}
