"""O0 to O3 as a table, and what the user may change of it: decisions only, no effects but words on the screen."""

import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from lockstep.errors import UsageError


class Level(NamedTuple):
    """What one optimization level means before the user's overrides."""

    brief: str
    cast_model_type: torch.dtype | None
    patch_torch_functions: bool
    keep_batchnorm_fp32: bool | None
    master_weights: bool | None
    loss_scale: float | str


LEVELS = {
    "O0": Level("O0:  Pure FP32 training.\n", torch.float32, False, None, False, 1.0),
    "O1": Level(
        "O1:  Insert automatic casts around Pytorch functions and Tensor methods.\n", None, True, None, None, "dynamic"
    ),
    "O2": Level(
        "O2:  FP16 training with FP32 batchnorm and FP32 master weights.\n", torch.float16, False, True, True, "dynamic"
    ),
    "O3": Level("O3:  Pure FP16 training.", torch.float16, False, False, False, 1.0),
}

OPTIONS = (
    "enabled",
    "opt_level",
    "cast_model_type",
    "patch_torch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)

HALF_TYPES = (torch.float16, torch.bfloat16)

_HALVES_BY_NAME = {"fp16": torch.float16, "float16": torch.float16, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}


class Properties:
    """The options of one `initialize`, as ``amp._amp_state.opt_properties`` shows them.

    ``half`` is what a half is here; where it was not asked for by name it depends on the device, and
    ``cast_model_type`` goes on showing what was asked for.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.opt_level: str | None = None
        self.cast_model_type: Any = None
        self.patch_torch_functions: Any = False
        self.keep_batchnorm_fp32: Any = None
        self.master_weights: Any = None
        self.loss_scale: float | str = 1.0
        self.half: torch.dtype = torch.float16

    @property
    def options(self) -> dict[str, Any]:
        """The seven options in the order in which they are printed."""
        return {name: getattr(self, name) for name in OPTIONS}

    @property
    def model_dtype(self) -> torch.dtype | None:
        """What a model is cast to; None: it is left alone."""
        if not self.cast_model_type:
            return None
        wanted: torch.dtype = self.cast_model_type
        return self.half if wanted in HALF_TYPES else wanted


def defaults_of(opt_level: object) -> Properties:
    """The properties of a level.

    Raises:
        RuntimeError: There is no such level.

    Example:
        >>> defaults_of("O2").keep_batchnorm_fp32
        True
    """
    if not isinstance(opt_level, str) or opt_level not in LEVELS:
        raise RuntimeError(
            f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3'.  Note that in `O0`, `O1`, "
            "etc., the prefix O is the letter O, not the number zero."
        )
    found = Properties()
    found.enabled, found.opt_level = True, opt_level
    for name, value in LEVELS[opt_level]._asdict().items():
        if name != "brief":
            setattr(found, name, value)
    return found


def override(properties: Properties, name: str, value: Any, complain: Callable[[str], None]) -> None:
    """Set one option as the user wants it; ``complain`` is told what does not go with the level.

    Raises:
        AssertionError: ``keep_batchnorm_fp32`` is neither a bool nor the word for one.
        ValueError: ``loss_scale`` is neither ``"dynamic"`` nor a number.
    """
    problem = _problem(properties.opt_level, name, value)
    if problem:
        complain(problem)
    if name == "keep_batchnorm_fp32":
        value = {"True": True, "False": False}.get(value, value) if isinstance(value, str) else value
        if value not in (True, False, None):
            raise AssertionError(
                "keep_batchnorm_fp32 must be a boolean, the string 'True' or 'False', or None, found "
                f"keep_batchnorm_fp32={value}"
            )
    elif name == "loss_scale" and value != "dynamic":
        value = float(value)
    setattr(properties, name, value)


def _problem(opt_level: str | None, name: str, value: Any) -> str:
    if name == "patch_torch_functions" and value and opt_level != "O1":
        return "Currently, patch_torch_functions=True should only be set by selecting opt_level='O1'."
    if opt_level != "O1":
        return ""
    if name == "cast_model_type" and value is not False and value is not torch.float32:
        return (
            "O1 inserts casts around Pytorch functions rather than model weights, so with O1, the model weights "
            "themselves should remain FP32. If you wish to cast the model to a different type, use opt_level='O2' or "
            f"'O3'. cast_model_type was {value}"
        )
    if name == "keep_batchnorm_fp32":
        return (
            "With opt_level O1, batchnorm functions are automatically patched to run in FP32, so keep_batchnorm_fp32 "
            f"should be None. keep_batchnorm_fp32 was {value}"
        )
    if name == "master_weights":
        return (
            "It doesn't make sense to use master_weights with O1. With O1, your model weights themselves should be "
            "FP32."
        )
    return ""


def half_for(device_types: Iterable[str], asked: Any, environ: Any = os.environ) -> torch.dtype:
    """What "half" is: the type asked for by name, else ``LOCKSTEP_HALF``, else fp16 on CUDA and bf16 on the CPU.

    On a CPU fp16 is ten to a hundred times slower than bf16, with the same casts in the same places.

    Example:
        >>> half_for(["cpu"], None, {}), half_for(["cuda"], None, {}), half_for(["cpu"], torch.float16, {})
        (torch.bfloat16, torch.float16, torch.float16)
    """
    if asked in HALF_TYPES:
        half: torch.dtype = asked
        return half
    named = environ.get("LOCKSTEP_HALF", "")
    if named:
        if named not in _HALVES_BY_NAME:
            raise UsageError(f"LOCKSTEP_HALF={named!r} is not a half type: write fp16 or bf16.")
        return _HALVES_BY_NAME[named]
    return torch.bfloat16 if set(device_types) <= {"cpu"} else torch.float16
