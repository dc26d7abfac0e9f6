"""The loss scale: what a loss is multiplied by, when it shrinks and when it grows, and the pass that takes it out."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.world import current

SMALLEST_SCALE = 2.0**-14
"""Where a scale without a floor of its own stops shrinking. Below, a loss would underflow and 1/scale overflow."""

_FUSED_HALVES = (torch.float16, torch.float32, torch.float64)


class LossScaler:
    """One loss's scale, with apex's constants.

    A dynamic scale halves when a gradient is not finite and doubles after ``scale_window`` good updates in a row.
    A static one never moves and never skips.

    Args:
        loss_scale: ``"dynamic"``, or a number.
        init_scale: Where a dynamic scale begins, if ``max_loss_scale`` lets it.
        scale_factor: Taken and not used, as in apex: the factor is 2 both ways.
        scale_window: Good updates until a dynamic scale doubles.
        min_loss_scale: Where it stops shrinking; None and 0: at `SMALLEST_SCALE`.
        max_loss_scale: Where it stops growing.

    Example:
        >>> scaler = LossScaler("dynamic")
        >>> scaler.loss_scale()
        65536.0
    """

    def __init__(
        self,
        loss_scale: float | str,
        init_scale: float = 2.0**16,
        scale_factor: float = 2.0,  # noqa: ARG002
        scale_window: int = 2000,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        self.dynamic = loss_scale == "dynamic"
        self._loss_scale = min(max_loss_scale, init_scale) if loss_scale == "dynamic" else float(loss_scale)
        self._max_loss_scale = max_loss_scale
        self._min_loss_scale = min_loss_scale
        self._scale_seq_len = scale_window
        self._unskipped = 0
        self._has_overflow = False
        self.shrunk = 0  # times in a row
        self._earlier: Tensor | None = None  # as _found, of the update before
        self._told = False
        self._found: Tensor | None = None  # 1 element: more than 0 once a gradient was not finite

    def loss_scale(self) -> float:
        """The scale."""
        return self._loss_scale

    def clear_overflow_state(self) -> None:
        """Forget overflows that have not been acted on."""
        self._has_overflow, self._found = False, None

    def check_and_scale(self, grads: Sequence[Tensor], factor: float) -> None:
        """Multiply gradients by ``factor`` in place and note whether one was not finite: one pass, no waiting."""
        for device in dict.fromkeys(grad.device for grad in grads):
            mine = [_values(grad) for grad in grads if grad.device == device]
            found = torch.zeros(1, dtype=torch.float32, device=device)
            inverse = torch.full((), factor, dtype=torch.float32, device=device)
            for dtype in dict.fromkeys(grad.dtype for grad in mine):
                same = [grad for grad in mine if grad.dtype == dtype]
                if device.type == "cpu" or dtype in _FUSED_HALVES:
                    torch._amp_foreach_non_finite_check_and_unscale_(same, found, inverse)
                else:  # torch has no CUDA kernel for bf16 gradients
                    norms = torch._foreach_norm(same, float("inf"))
                    found += (~torch.stack([norm.float() for norm in norms]).isfinite()).any()
                    torch._foreach_mul_(same, factor)
            self._found = found if self._found is None else self._found + found.to(self._found.device)

    def found(self) -> Tensor:
        """More than 0 if a gradient was not finite since `clear_overflow_state`; one element."""
        return torch.zeros(1) if self._found is None else self._found

    def found_by_all(self) -> Tensor:
        """The same over all ranks, if there are several; each must come here."""
        found = self.found()
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            found = current().ranks.add_up(found)
        return found

    def decide(self, found: Tensor | None = None) -> bool:
        """Look at what was found (here, or by all ranks); waits for the device. Gives whether it is an overflow."""
        found = self._found if found is None else found
        if found is not None and self.dynamic:
            self._has_overflow = self._has_overflow or bool(found.item())
        return self._has_overflow

    def first_ignored_overflow(self) -> bool:
        """Whether a static scale meets its first overflow; on a GPU one update late, not to wait for it."""
        looked_at = self._found if self._found is None or self._found.device.type == "cpu" else self._earlier
        self._earlier = self._found
        if self.dynamic or self._told or looked_at is None or not bool(looked_at.item()):
            return False
        self._told = True
        return True

    def update_scale(self) -> bool:
        """Move the scale after an update. Gives whether the step has to be skipped."""
        self.decide()
        if self._has_overflow and self.dynamic:
            self._loss_scale = max(self._loss_scale / 2.0, self._min_loss_scale or SMALLEST_SCALE)
            self._unskipped = 0
            self.shrunk += 1
            return True
        self._unskipped += 1
        self.shrunk = 0
        if self.dynamic and self._unskipped == self._scale_seq_len:
            self._loss_scale = min(self._max_loss_scale, self._loss_scale * 2.0)
            self._unskipped = 0
        return False

    def unscale(
        self,
        model_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        unused_scale: object = None,  # noqa: ARG002
        models_are_masters: bool = False,
        scale_override: float | None = None,
    ) -> None:
        """Put ``model_grads`` / scale into ``master_grads`` (of any floating type), and check them.

        Example:
            >>> master = torch.zeros(3)
            >>> LossScaler(4.0).unscale([torch.tensor([1.0, 2.0, 3.0]).half()], [master])
            >>> master
            tensor([0.2500, 0.5000, 0.7500])
        """
        scale = self._loss_scale if scale_override is None else scale_override
        if not models_are_masters:
            torch._foreach_copy_(list(master_grads), list(model_grads))
        self.check_and_scale(master_grads, 1.0 / scale)

    def unscale_with_stashed(
        self,
        model_grads: Sequence[Tensor],
        stashed_master_grads: Sequence[Tensor],
        master_grads: Sequence[Tensor],
        scale_override: tuple[float, float, float] | None = None,
    ) -> None:
        """Put ``model_grads`` / scale + ``stashed_master_grads`` into ``master_grads``, checking ``model_grads``.

        Args:
            model_grads: Scaled gradients.
            stashed_master_grads: Gradients from before.
            master_grads: Where the sum goes.
            scale_override: The scale of the first, of the second, and that of the sum.
        """
        have, stashed_have, out = scale_override or (self._loss_scale, 1.0, 1.0)
        fresh = [grad.to(master.dtype, copy=True) for grad, master in zip(model_grads, master_grads, strict=True)]
        self.check_and_scale(fresh, out / have)
        torch._foreach_add_(fresh, list(stashed_master_grads), alpha=out / stashed_have)
        torch._foreach_copy_(list(master_grads), fresh)


def _values(grad: Tensor) -> Tensor:
    values = grad._values() if grad.is_sparse else grad
    return torch.view_as_real(values) if values.is_complex() else values
