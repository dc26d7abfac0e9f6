"""The next batch travels to the device while the current one is being used. CUDA only."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lockstep.collectives.nested import leaves, map_leaves

_END = object()


def ahead(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Give the batches on ``device``, each one copied on a stream of its own before it is asked for.

    Args:
        batches: Nested containers of tensors; in pinned memory, or the copy waits. What is neither a tensor nor has a
            method ``to`` stays as it is.
        device: A CUDA device.
    """
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    carry = _carrier(device)

    def fetch() -> Any:
        batch = next(batches, _END)
        if batch is _END:
            return _END
        with torch.cuda.stream(side):
            return map_leaves(carry, batch)

    coming = fetch()
    while coming is not _END:
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        for leaf in leaves(coming):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                # Made on the side stream, used on this one: its memory must not go before this one is through.
                leaf.record_stream(current)
        ready, coming = coming, fetch()
        yield ready


def _carrier(device: torch.device) -> Callable[[Any], Any]:
    def carry(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        move = getattr(leaf, "to", None)
        return move(device) if callable(move) else leaf

    return carry
