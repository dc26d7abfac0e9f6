"""``apex.fused_dense``."""

from .fused_dense import (
    DenseNoBias,
    FusedDense,
    FusedDenseGeluDense,
    fused_dense_function,
    fused_dense_gelu_dense_function,
)

__all__ = [
    "DenseNoBias",
    "FusedDense",
    "FusedDenseGeluDense",
    "fused_dense_function",
    "fused_dense_gelu_dense_function",
]
