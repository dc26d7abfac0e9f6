"""A network in half precision with batch norm in float32, and float32 copies of its parameters."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_ as clip_grad_norm

from lockstep.amp.levels import half_for

__all__ = [
    "BN_convert_float",
    "FP16Model",
    "clip_grad_norm",
    "convert_module",
    "convert_network",
    "master_params_to_model_params",
    "model_grads_to_master_grads",
    "network_to_half",
    "prep_param_lists",
    "to_python_float",
    "tofp16",
]


def half() -> torch.dtype:
    """float16 on every device, as the names say, unless ``LOCKSTEP_HALF`` says bf16."""
    return half_for(("cuda",), None)


class tofp16(nn.Module):
    """Casts its input to half."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Cast."""
        return input.to(half())


def BN_convert_float(module: nn.Module) -> nn.Module:
    """Take every affine batch norm in a module to float32."""
    for child in module.modules():
        if _keeps_float(child):
            child.float()
    return module


def _keeps_float(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.affine is True


def network_to_half(network: nn.Module) -> nn.Module:
    """A network that casts its input to half and runs in it, but for batch norm; keys begin with ``1.``."""
    return nn.Sequential(tofp16(), BN_convert_float(network.to(half())))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating parameters, gradients and buffers of one module, without its children."""
    for param in module.parameters(recurse=False):
        if param.is_floating_point():
            param.data = param.data.to(dtype)
            if param.grad is not None:
                param.grad.data = param.grad.data.to(dtype)
    for buffer in module.buffers(recurse=False):
        if buffer.is_floating_point():
            buffer.data = buffer.data.to(dtype)


def convert_network(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a network, but for affine batch norm."""
    for module in network.modules():
        if _keeps_float(module):
            continue
        convert_module(module, dtype)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    return network


class FP16Model(nn.Module):
    """A network in half, but for batch norm, that casts its inputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = convert_network(network, dtype=half())

    def forward(self, *inputs: Tensor) -> Any:
        """Cast and run."""
        return self.network(*(x.to(half()) for x in inputs))


def prep_param_lists(model: nn.Module, flat_master: bool = False) -> tuple[list[nn.Parameter], list[Any]]:
    """A model's trained parameters, and float32 copies of them.

    Args:
        model: The model.
        flat_master: One flat copy for all of them, with a gradient.

    Raises:
        RuntimeError: One flat copy of several dtypes.
    """
    params = [param for param in model.parameters() if param.requires_grad]
    if not flat_master:
        return params, [param.detach().clone().float().requires_grad_() for param in params]
    if len({param.dtype for param in params}) > 1:
        message = "model may contain a mixture of parameters of different types.  Use flat_master=False."
        print(f"Error in prep_param_lists:  {message}")
        raise RuntimeError(f"prep_param_lists: {message}")
    flat = nn.Parameter(_flatten_dense_tensors([param.data for param in params]).float())  # type: ignore[no-untyped-call]
    flat.grad = torch.empty_like(flat)
    return params, [flat]


def model_grads_to_master_grads(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy gradients to the masters, in the masters' dtype."""
    if flat_master:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad.data for p in model_params]
        flat = _flatten_dense_tensors(grads).to(master_params[0].dtype)  # type: ignore[no-untyped-call]
        master_params[0].grad = flat if master_params[0].grad is None else master_params[0].grad.copy_(flat)
        return
    for model, master in zip(model_params, master_params, strict=True):
        if model.grad is None:
            master.grad = None
            continue
        if master.grad is None:
            master.grad = torch.empty_like(master)
        master.grad.data.copy_(model.grad.data)


def master_params_to_model_params(
    model_params: Sequence[Tensor], master_params: Sequence[Tensor], flat_master: bool = False
) -> None:
    """Copy the masters' values to the model, rounded to its dtype."""
    masters: Sequence[Tensor] = master_params
    if flat_master:
        masters = _unflatten_dense_tensors(master_params[0].data, model_params)  # type: ignore[no-untyped-call]
    for model, master in zip(model_params, masters, strict=True):
        model.data.copy_(master.data)


def to_python_float(t: Any) -> Any:
    """The number in a tensor of one element."""
    return t.item() if hasattr(t, "item") else t[0]
