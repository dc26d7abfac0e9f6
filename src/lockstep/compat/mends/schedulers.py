"""Arguments and methods that went from learning rate schedulers."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from lockstep.compat.mends.row import Mend, Note, Undo, module, replacement

_schedulers = module("torch.optim.lr_scheduler")


def _put_verbose(note: Note) -> Undo:
    """Every scheduler loses ``verbose``, by name or as the positional argument after the last one."""
    undo = [_without_verbose(kind, note) for kind in _kinds()]

    def undo_all() -> None:
        for one in undo:
            one()

    return undo_all


def _kinds() -> list[Any]:
    space = vars(_schedulers())
    base = space["LRScheduler"]
    kinds = (kind for kind in space.values() if isinstance(kind, type) and issubclass(kind, base))
    return [kind for kind in dict.fromkeys(kinds) if "__init__" in vars(kind)]


def _without_verbose(kind: Any, note: Note) -> Undo:
    init = kind.__init__
    names = list(inspect.signature(init).parameters)

    @functools.wraps(init)
    def without(self: object, *args: Any, **named: Any) -> None:
        if "verbose" not in names and "verbose" in named:
            note()
            del named["verbose"]
        kept = positional_without_verbose(args, names[1:])
        if len(kept) < len(args):
            note()
        init(self, *kept, **named)

    kind.__init__ = without

    def undo() -> None:
        kind.__init__ = init

    return undo


def positional_without_verbose(args: tuple[Any, ...], names: list[str]) -> tuple[Any, ...]:
    """Take ``verbose`` out of positional arguments.

    It was the last one everywhere but in ``ReduceLROnPlateau``, which until torch 1.4 had it in the middle.

    Example:
        >>> positional_without_verbose(("optimizer", 0.9, -1, True), ["optimizer", "gamma", "last_epoch"])
        ('optimizer', 0.9, -1)
        >>> names = ["optimizer", "mode", "factor", "patience", "threshold"]
        >>> positional_without_verbose(("optimizer", "min", 0.1, 10, True), names)
        ('optimizer', 'min', 0.1, 10)
    """
    if "threshold" in names:
        middle = names.index("threshold")
        if len(args) > middle and isinstance(args[middle], bool):
            args = args[:middle] + args[middle + 1 :]
    return args[:-1] if len(args) == len(names) + 1 and isinstance(args[-1], (bool, str)) else args


def _print_lr(_: object, note: Note) -> Callable[..., None]:
    def print_lr(self: object, is_verbose: bool, group: int, lr: float, epoch: int | None = None) -> None:
        del self
        note()
        if is_verbose:
            when = "" if epoch is None else f"Epoch {epoch:5d}: "
            print(f"{when}Adjusting learning rate of group {group} to {lr:.4e}.")  # noqa: T201  (what torch's did)

    return print_lr


_START = "import torch\noptimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)\nfrom torch.optim import lr_scheduler\n"

MENDS = (
    Mend(
        old="a scheduler's verbose",
        gone="torch 2.7",
        today="print(scheduler.get_last_lr()) where you want to see it",
        example=_START + "lr_scheduler.StepLR(optimizer, 30, verbose=True)\n"
        "lr_scheduler.ExponentialLR(optimizer, 0.9, -1, False)\n"
        "class Own(lr_scheduler.LRScheduler):\n"
        "    def __init__(self, optimizer, last_epoch=-1, verbose=False):\n"
        "        super().__init__(optimizer, last_epoch, verbose)\n"
        "    def get_lr(self):\n"
        "        return [0.5]\n"
        "assert Own(optimizer).get_last_lr() == [0.5]\n"
        "assert lr_scheduler.ReduceLROnPlateau(optimizer, 'min', 0.1, 10, True, 0.02).threshold == 0.02",
        put=_put_verbose,
    ),
    Mend(
        old="scheduler.print_lr",
        gone="torch 2.7",
        today="print(scheduler.get_last_lr())",
        example=_START + "lr_scheduler.StepLR(optimizer, 30).print_lr(False, 0, 0.1)",
        put=replacement(lambda: _schedulers().LRScheduler, "print_lr", _print_lr),
    ),
)
