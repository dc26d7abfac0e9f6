"""A checksum of a tensor, computed where the tensor is."""

import torch
from torch import Tensor

_CHUNK = 2**20
_PRIME = 1_000_003
_STEP, _MIX = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64  # as int64, in which products wrap around


def fingerprint(tensor: Tensor) -> Tensor:
    """A number that depends on every bit of a tensor and on where it stands, ``()`` int64 on the tensor's device."""
    if tensor.is_meta:
        return torch.zeros((), dtype=torch.int64)  # it has no values
    if tensor.is_quantized:
        tensor = tensor.int_repr()  # other views of it end the process
    if tensor.layout is not torch.strided:
        whole = tensor.detach().to_sparse().coalesce()
        return fingerprint(whole.indices()) * _PRIME + fingerprint(whole.values())
    flat = tensor.detach().contiguous().reshape(-1)
    raw = flat.view(torch.uint8)
    words = raw.view(torch.int32) if raw.numel() % 4 == 0 and raw.storage_offset() % 4 == 0 else raw
    weights = _weights(min(_CHUNK, words.numel()), tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in torch.split(words, _CHUNK):
        total = total * _PRIME + (piece.long() * weights[: piece.numel()]).sum()
    return total


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers without a pattern, the same everywhere, mixed as in splitmix64 (Steele, Lea and Flood, 2014).

    With evenly spaced ones, 1 + 7 = 3 + 5: values that change places with their neighbours would not be noticed.
    """
    steps = torch.arange(1, count + 1, device=device) * _STEP
    return ((steps ^ (steps >> 30)) * _MIX) | 1
