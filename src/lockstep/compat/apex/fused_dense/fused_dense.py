"""A linear layer, and two with GELU between."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

fused_dense_function = F.linear


def fused_dense_gelu_dense_function(
    input: Tensor,  # noqa: A002
    weight1: Tensor,
    bias1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
) -> Tensor:
    """Linear, GELU, linear."""
    return F.linear(F.gelu(F.linear(input, weight1, bias1)), weight2, bias2)


class FusedDense(nn.Linear):
    """A linear layer, initialised as torch's; apex left its weights as they were in memory."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)


DenseNoBias = FusedDense


class FusedDenseGeluDense(nn.Module):
    """Linear, GELU, linear.

    Args:
        in_features: Of the input.
        intermediate_features: Between.
        out_features: Of the output.
        bias: Only True, as in apex.
    """

    def __init__(self, in_features: int, intermediate_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        if not bias:
            raise AssertionError("DenseGeluDense module without bias is currently not supported")
        self.in_features, self.intermediate_features, self.out_features = (
            in_features,
            intermediate_features,
            out_features,
        )
        first, second = nn.Linear(in_features, intermediate_features), nn.Linear(intermediate_features, out_features)
        self.weight1, self.bias1, self.weight2, self.bias2 = first.weight, first.bias, second.weight, second.bias

    def forward(self, input: Any) -> Tensor:  # noqa: A002
        """``(N, in_features)`` to ``(N, out_features)``."""
        return fused_dense_gelu_dense_function(input, self.weight1, self.bias1, self.weight2, self.bias2)
