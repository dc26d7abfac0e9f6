"""``lockstep.launch``: both a module, for ``python -m lockstep.launch``, and what is called: ``lockstep.launch(fn)``.

Python binds a module's name on its package as soon as anything imports it, so the module itself is what can be called.
`lockstep.launcher.function.launch` says what the call does.

Example:
    >>> import lockstep
    >>> lockstep.launch(lambda x: x + lockstep.init().rank, 40, ranks=2)
    [40, 41]
"""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


class _Launch(ModuleType):
    def __call__(self, fn: Callable[..., T], *args: Any, ranks: int | None = None) -> list[T]:
        from lockstep.launcher.function import launch

        return launch(fn, *args, ranks=ranks)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        # By its name, as other modules: functions that mention it are sent to ranks and to batch systems.
        return importlib.import_module, (self.__name__,)


if __name__ == "__main__":
    from lockstep.launcher.drop_in import main

    main(prog_name="python -m lockstep.launch")

launch = sys.modules[__name__]  # what `from lockstep import launch` gets
launch.__class__ = _Launch
