"""FusedAdam with the arguments, and the step, of before August 2019."""

from typing import Any

from ...optimizers import fused_adam


class FusedAdam(fused_adam.FusedAdam):
    """Adam whose eps is not corrected for bias, with clipping by group; see `lockstep.compat.formulas.old_adam`.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        bias_correction: Whether moments are corrected for their start at zero.
        betas: How much of the moments stays.
        eps: Added to the divisor.
        eps_inside_sqrt: Whether it is added before the root is taken.
        weight_decay: Decay.
        max_grad_norm: Clip each group's gradients to this norm.
        amsgrad: Not supported, as in apex.
        use_mt: Accepted.
        amp_scale_adjustment: Accepted.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        use_mt: bool = False,
        amp_scale_adjustment: float = 1.0,
    ) -> None:
        super().__init__(
            params,
            lr,
            bias_correction,
            betas,
            eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            eps_inside_sqrt=eps_inside_sqrt,
            max_grad_norm=max_grad_norm,
            use_mt=use_mt,
            amp_scale_adjustment=amp_scale_adjustment,
        )
