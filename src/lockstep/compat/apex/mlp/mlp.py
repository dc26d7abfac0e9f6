"""A chain of linear layers with one activation."""

from collections.abc import Sequence
from itertools import pairwise
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_ACTIVATIONS = {"none": lambda x: x, "relu": torch.relu, "sigmoid": torch.sigmoid}
_NUMBERED = ("none", "relu", "sigmoid")


def mlp_function(bias: int, activation: int, input: Tensor, *params: Tensor) -> Tensor:  # noqa: A002
    """Linear layers, each followed by the activation, the last one too.

    Args:
        bias: Whether biases follow the weights in ``params``.
        activation: 0 for none, 1 for relu, 2 for sigmoid.
        input: ``(N, mlp_sizes[0])``.
        *params: All weights, then all biases.
    """
    count = len(params) // 2 if bias else len(params)
    biases: Sequence[Tensor | None] = params[count:] if bias else [None] * count
    act = _ACTIVATIONS[_NUMBERED[activation]]
    for weight, shift in zip(params[:count], biases, strict=True):
        input = act(F.linear(input, weight, shift))  # noqa: A001
    return input


class MLP(nn.Module):
    """Linear layers of the given sizes, each followed by the activation, the last one too.

    Args:
        mlp_sizes: The input's size and each layer's.
        bias: Whether layers have biases.
        activation: ``"none"``, ``"relu"`` or ``"sigmoid"``.
    """

    def __init__(self, mlp_sizes: Sequence[int], bias: bool = True, activation: str = "relu") -> None:
        super().__init__()
        if activation not in _NUMBERED:
            raise TypeError(f"activation must be one of {', '.join(_NUMBERED)}, not {activation!r}")
        self.num_layers = len(mlp_sizes) - 1
        self.mlp_sizes = list(mlp_sizes)
        self.bias = 1 if bias else 0
        self.activation = _NUMBERED.index(activation)
        for number, (inner, outer) in enumerate(pairwise(mlp_sizes)):
            self.register_parameter(f"weight_{number}", nn.Parameter(torch.empty(outer, inner)))
            if bias:
                self.register_parameter(f"bias_{number}", nn.Parameter(torch.empty(outer)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal values; the variance of weights is 2 / (in + out), that of biases 1 / out."""
        with torch.no_grad():
            for name, param in self.named_parameters():
                variance = 2.0 / sum(param.shape) if name.startswith("weight") else 1.0 / param.shape[0]
                nn.init.normal_(param, 0.0, sqrt(variance))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """``(N, mlp_sizes[0])`` to ``(N, mlp_sizes[-1])``."""
        weights = [self.get_parameter(f"weight_{number}") for number in range(self.num_layers)]
        biases = [self.get_parameter(f"bias_{number}") for number in range(self.num_layers)] if self.bias else []
        return mlp_function(self.bias, self.activation, input, *weights, *biases)

    def extra_repr(self) -> str:
        """Sizes, bias and activation."""
        return f"MLP sizes: {self.mlp_sizes}, Bias={self.bias}, activation={_NUMBERED[self.activation]}"
