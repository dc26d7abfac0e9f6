"""The loss scale, under the path by which checkpoints name it."""

from typing import Any

import torch

from lockstep.amp import scaler as engine

_SCALE = ("_loss_scale", "_unskipped", "_scale_seq_len", "_min_loss_scale", "_max_loss_scale")


class LossScaler(engine.LossScaler):
    """lockstep.amp's loss scaler; pickled as apex's, it loads in both."""

    warned_no_fused_kernel = False
    warned_unscaling_non_fp32_grad = False
    has_fused_kernel = True

    def __getstate__(self) -> dict[str, Any]:
        """What apex kept, and nothing else."""
        state = {name: self.__dict__[name] for name in ("dynamic", "_has_overflow", *_SCALE)}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return state | {"_overflow_buf": torch.zeros(1, dtype=torch.int32, device=device)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take apex's, or ours."""
        self.__dict__.update(engine.LossScaler(1.0).__dict__ | state)
        self.__dict__.pop("_overflow_buf", None)


def restored(saved: Any) -> LossScaler:
    """A scaler with the state of a saved one, be it amp's or an older one of apex.fp16_utils."""
    if isinstance(saved, engine.LossScaler):
        scaler = LossScaler("dynamic" if saved.dynamic else saved._loss_scale)
        for name in _SCALE:
            setattr(scaler, name, getattr(saved, name))
        scaler._has_overflow = saved._has_overflow
        return scaler
    if not hasattr(saved, "cur_iter"):
        return LossScaler(saved.cur_scale)
    scaler = LossScaler("dynamic", init_scale=saved.cur_scale, scale_window=saved.scale_window)
    scaler._loss_scale = float(saved.cur_scale)
    scaler._unskipped = (saved.cur_iter - saved.last_overflow_iter - 1) % saved.scale_window
    return scaler


# Optimizer checkpoints hold one. They have numbers in them and nothing else, so torch.load may make them.
torch.serialization.add_safe_globals([LossScaler])
