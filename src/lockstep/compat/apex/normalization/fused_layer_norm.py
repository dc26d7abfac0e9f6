"""Layer norm and RMS norm: torch's, in the dtypes of apex.

Plain ones give the input's dtype, mixed ones that of the parameters; statistics are float32 at least. Under autocast
the plain ones work in autocast's dtype, where torch's own layer norm gives float32.
"""

import numbers
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = int | Sequence[int]


def fused_layer_norm(
    input: Tensor,  # noqa: A002  (apex's name)
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm without parameters."""
    return fused_layer_norm_affine(input, None, None, normalized_shape, eps, memory_efficient)


def fused_layer_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm in the input's dtype; ``memory_efficient`` changes no number."""
    x = autocast(input)
    return layer_norm(x, weight, bias, normalized_shape, eps).to(x.dtype)


def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm in the dtype of the parameters."""
    return layer_norm(input, weight, bias, normalized_shape, eps).to(weight.dtype)


def fused_rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS norm without parameters."""
    x = autocast(input)
    return rms_norm(x, None, normalized_shape, eps).to(x.dtype)


def fused_rms_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS norm in the input's dtype."""
    x = autocast(input)
    return rms_norm(x, weight, normalized_shape, eps).to(x.dtype)


def mixed_dtype_fused_rms_norm_affine(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """RMS norm in the dtype of the parameters."""
    return rms_norm(input, weight, normalized_shape, eps).to(weight.dtype)


def manual_rms_norm(input: Tensor, normalized_shape: Shape, weight: Tensor | None, eps: float) -> Tensor:  # noqa: A002
    """RMS norm in plain operations: the input's dtype, or that of a half weight."""
    y = rms_norm(input, None, normalized_shape, eps).to(input.dtype)
    if weight is None:
        return y
    return weight * (y.to(weight.dtype) if weight.dtype.itemsize < 4 else y)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Shape, eps: float) -> Tensor:
    """Layer norm, computed and given in float32 at least."""
    with torch.autocast(x.device.type, enabled=False):
        w, b = (None if param is None else as_wide(param, x) for param in (weight, bias))
        return F.layer_norm(widen(x), as_list(shape), w, b, eps)


def rms_norm(x: Tensor, weight: Tensor | None, shape: Shape, eps: float) -> Tensor:
    """RMS norm, computed and given in float32 at least."""
    with torch.autocast(x.device.type, enabled=False):
        return F.rms_norm(widen(x), as_list(shape), None if weight is None else as_wide(weight, x), eps)


def widen(x: Tensor) -> Tensor:
    """The same in float32 at least."""
    return x.float() if x.dtype.itemsize < 4 else x


def as_wide(param: Tensor, x: Tensor) -> Tensor:
    """A parameter in the dtype in which ``x`` is computed."""
    return param.to(widen(x[:0]).dtype if x.dim() else x.dtype)


def as_list(shape: Shape) -> list[int]:
    """The dimensions that are normalised over."""
    return [int(shape)] if isinstance(shape, numbers.Integral) else [int(size) for size in shape]  # type: ignore[union-attr]


def autocast(x: Tensor) -> Tensor:
    """As autocast hands arguments to apex's kernels: in its dtype, if it is on."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


class _Norm(nn.Module):
    """What the four modules share: shape, eps and parameters."""

    def __init__(
        self, normalized_shape: Shape, eps: float, elementwise_affine: bool, memory_efficient: bool, bias: bool
    ) -> None:
        super().__init__()
        self.normalized_shape = torch.Size(as_list(normalized_shape))
        self.eps, self.elementwise_affine, self.memory_efficient = eps, elementwise_affine, memory_efficient
        self.register_parameter(
            "weight", nn.Parameter(torch.empty(self.normalized_shape)) if elementwise_affine else None
        )
        if bias:
            self.register_parameter(
                "bias", nn.Parameter(torch.empty(self.normalized_shape)) if elementwise_affine else None
            )
        self.reset_parameters()

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def reset_parameters(self) -> None:
        """Weights of 1, biases of 0."""
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            param = self._parameters.get(name)
            if param is not None:
                nn.init.constant_(param, value)

    def extra_repr(self) -> str:
        """Shape, eps and whether there are parameters."""
        return f"{tuple(self.normalized_shape)}, eps={self.eps}, elementwise_affine={self.elementwise_affine}"


class FusedLayerNorm(_Norm):
    """Layer norm over the last dimensions; gives the input's dtype.

    Args:
        normalized_shape: Those dimensions.
        eps: Added to the variance.
        elementwise_affine: Whether it has a weight and a bias.
        memory_efficient: Accepted; it changes no number.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, memory_efficient, bias=True)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise."""
        return fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class FusedRMSNorm(_Norm):
    """RMS norm over the last dimensions; gives the input's dtype.

    Args:
        normalized_shape: Those dimensions.
        eps: Added to the mean square.
        elementwise_affine: Whether it has a weight.
        memory_efficient: Accepted; it changes no number.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, memory_efficient, bias=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise."""
        if self.weight is None:
            return fused_rms_norm(input, self.normalized_shape, self.eps)
        return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)


class MixedFusedLayerNorm(FusedLayerNorm):
    """Layer norm with parameters; gives their dtype.

    Args:
        normalized_shape: The last dimensions.
        eps: Added to the variance.
        elementwise_affine: Only True.
        memory_efficient: Accepted; it changes no number.
    """

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        refuse_plain(kwargs, "MixedFusedLayerNorm")
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise."""
        assert self.weight is not None
        assert self.bias is not None
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(FusedRMSNorm):
    """RMS norm with a weight; gives its dtype.

    Args:
        normalized_shape: The last dimensions.
        eps: Added to the mean square.
        elementwise_affine: Only True.
        memory_efficient: Accepted; it changes no number.
    """

    def __init__(
        self, normalized_shape: Shape, eps: float = 1e-5, *, memory_efficient: bool = False, **kwargs: Any
    ) -> None:
        refuse_plain(kwargs, "MixedFusedRMSNorm")
        super().__init__(normalized_shape, eps, True, memory_efficient)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalise."""
        assert self.weight is not None
        return mixed_dtype_fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)


def refuse_plain(kwargs: dict[str, Any], who: str) -> None:
    """Mixed ones have parameters."""
    if not kwargs.pop("elementwise_affine", True):
        raise RuntimeError(f"{who} does not support `elementwise_affine = False`")
    if kwargs:
        raise TypeError(f"{who} got an unexpected keyword argument {next(iter(kwargs))!r}")
