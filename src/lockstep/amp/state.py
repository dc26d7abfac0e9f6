"""What amp knows of this process, and apex's format for keeping it."""

import sys
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from lockstep.amp.levels import Properties
    from lockstep.amp.scaler import LossScaler


class AmpState:
    """The process's state. ``opt_properties`` and ``loss_scalers`` are there once `initialize` has been.

    Attributes:
        hard_override: Print instead of raising where an option does not go with the level.
        allow_incoming_model_not_fp32: Take models that are not in fp32.
        verbosity: 0 prints nothing.
        opt_properties: The options of the last `initialize`.
        loss_scalers: One for each loss.
        handle: Turns O1's casts on and off.
        min_loss_scale: As given to the last `initialize`.
        max_loss_scale: As given to the last `initialize`.
    """

    opt_properties: "Properties"
    loss_scalers: "list[LossScaler]"
    handle: Any
    min_loss_scale: float | None
    max_loss_scale: float

    def __init__(self) -> None:
        self.hard_override = False
        self.allow_incoming_model_not_fp32 = False
        self.verbosity: int = 1


_amp_state = AmpState()


def maybe_print(message: str, rank0: bool = False) -> None:
    """Print if amp is not silenced; with ``rank0`` on rank 0 only."""
    if _amp_state.verbosity > 0 and not (
        rank0 and dist.is_available() and dist.is_initialized() and dist.get_rank() != 0
    ):
        sys.stdout.write(message + "\n")


def warn_or_err(message: str) -> None:
    """Raise, or with ``hard_override`` print.

    Raises:
        RuntimeError: With the message.
    """
    if not _amp_state.hard_override:
        raise RuntimeError(message)
    sys.stdout.write("Warning:  " + message + "\n")


def master_params(optimizer: Any) -> Iterator[Tensor]:
    """Every parameter that an optimizer updates; where a half one has a master, the master.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(2, 1)
        >>> len(list(master_params(torch.optim.SGD(layer.parameters(), lr=0.1))))
        2
    """
    for group in optimizer.param_groups:
        yield from group["params"]


def state_dict(destination: Any = None) -> Any:
    """The scale of every loss, and its count of updates since it last moved.

    Args:
        destination: A mapping to put them in; None makes one.

    Returns:
        ``{"loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0}, ...}``; nothing where amp is off.

    Example:
        >>> list(state_dict())
        []
    """
    if destination is None:
        destination = OrderedDict()
    for number, scaler in enumerate(getattr(_amp_state, "loss_scalers", [])):
        destination[f"loss_scaler{number}"] = {
            "loss_scale": scaler.loss_scale(),
            "unskipped": scaler._unskipped,
        }
    return destination


def load_state_dict(state_dict: Any) -> None:
    """Take over what `state_dict` gave, here or in apex. The position of an entry decides, not its number.

    Raises:
        RuntimeError: A key is not that of a loss scaler.
    """
    scalers = getattr(_amp_state, "loss_scalers", None)
    if scalers is None:
        return
    if len(state_dict) != len(scalers):
        sys.stdout.write(
            f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} loss_scalers are used\n"
        )
    unexpected = [key for key in state_dict if "loss_scaler" not in key]
    for number, key in enumerate(key for key in state_dict if "loss_scaler" in key):
        if number >= len(scalers):
            sys.stdout.write(f"Skipping loss_scaler[{number}], since num_losses was set to {len(scalers)}\n")
            continue
        scalers[number]._loss_scale = state_dict[key]["loss_scale"]
        scalers[number]._unskipped = state_dict[key]["unskipped"]
    if unexpected:
        raise RuntimeError(
            "Error(s) in loading state_dict. Unexpected key(s) in state_dict: "
            + ", ".join(f'"{key}"' for key in unexpected)
            + ". "
        )
