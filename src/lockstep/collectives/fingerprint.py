"""A checksum of a tensor, computed where the tensor is."""

import torch
from torch import Tensor

_CHUNK = 2**20
_PRIME = 1_000_003


def fingerprint(tensor: Tensor) -> Tensor:
    """A number that depends on every bit of a tensor and on where it stands, ``()`` int64 on the tensor's device."""
    if tensor.layout is not torch.strided:
        whole = tensor.detach().to_sparse().coalesce()
        return fingerprint(whole.indices()) * _PRIME + fingerprint(whole.values())
    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8)
    words = raw.view(torch.int32) if raw.numel() % 4 == 0 and raw.storage_offset() % 4 == 0 else raw
    weights = torch.arange(1, 2 * min(_CHUNK, words.numel()) + 1, 2, device=tensor.device) * _PRIME
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in torch.split(words, _CHUNK):
        total = total * _PRIME + (piece.long() * weights[: piece.numel()]).sum()
    return total
