"""Layer norm over the last dimension."""

import torch
from torch import Tensor, nn

from ...normalization.fused_layer_norm import fused_layer_norm_affine


class FastLayerNorm(nn.Module):
    """Layer norm over the last dimension; gives the input's dtype.

    Args:
        hidden_size: Its size.
        eps: Added to the variance.
        memory_efficient: Accepted; it changes no number.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-5, memory_efficient: bool = False) -> None:
        super().__init__()
        self.epsilon, self.memory_efficient = eps, memory_efficient
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.bias = nn.Parameter(torch.empty(hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights of 1, biases of 0."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        return fused_layer_norm_affine(x, self.weight, self.bias, list(self.weight.shape), self.epsilon)
