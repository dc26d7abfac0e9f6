"""Makes ``import apex`` work in this process, and in no other: `install` puts a finder in front of python's own.

The finder answers to three names only, `FACES`, and to what an apex had that is not provided here, so nothing is
loaded, or slower, in a script that imports none of them. The files are loaded under the names that scripts know: what
is pickled there loads where NVIDIA's apex is, and the other way round.

Whose apex a script gets is decided when it imports one: ``LOCKSTEP_APEX_PREFER`` says it (``nvidia`` or ``shim``); else
the installed one if it is whole, that is, if it still has ``apex.amp`` and ``apex.parallel``.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from lockstep.compat.missing import replacement
from lockstep.errors import UsageError

PREFER = "LOCKSTEP_APEX_PREFER"

_HERE = Path(__file__).parent

FACES = {
    "apex": _HERE / "apex" / "__init__.py",
    "amp_C": _HERE / "compiled" / "amp_C.py",
    "apex_C": _HERE / "compiled" / "apex_C.py",
}
"""The names that can be imported once this is installed, and where they lie."""

NEEDED = ("amp", "parallel")
"""What an installed apex must have to be left alone."""

NVIDIAS = ("optimizers", "normalization", "multi_tensor_apply")
"""What every apex of NVIDIA's has, and the unrelated package of that name on PyPI has not."""


class Choice(NamedTuple):
    """Whose apex it is.

    Attributes:
        ours: Whether it is the one in this package.
        note: What the user should know of it; empty if nothing.
    """

    ours: bool
    note: str


def choose(place: str | None, parts: Sequence[str], prefer: str | None) -> Choice:
    """Decide whose apex ``import apex`` gets.

    Args:
        place: Where an apex is installed; None if none is.
        parts: The packages in it.
        prefer: What the user asked for: ``"nvidia"``, ``"shim"`` or None.

    Raises:
        UsageError: There is no such wish, or none of NVIDIA's to fulfil it.

    Example:
        >>> choose(None, [], None), choose("/lib/apex", ["amp", "optimizers", "parallel"], None)
        (Choice(ours=True, note=''), Choice(ours=False, note=''))
        >>> choose("/lib/apex", ["optimizers"], None).note.partition(". ")[0]
        "import apex gives lockstep's: the apex in /lib/apex has no apex.amp"
    """
    if prefer not in (None, "", "nvidia", "shim"):
        raise UsageError(f"{PREFER}={prefer!r}: write 'nvidia' or 'shim', or leave it out.")
    nvidias = any(part in parts for part in NVIDIAS)
    if prefer == "nvidia":
        if place is None or not nvidias:
            raise UsageError(f"{PREFER}=nvidia, but there is no apex of NVIDIA's. Install it, or leave {PREFER} out.")
        return Choice(False, f"import apex gives the one in {place}, as {PREFER} says.")
    if place is None:
        return Choice(True, "")
    if not nvidias:
        return Choice(
            True,
            f"import apex gives lockstep's: the package in {place} is another one of that name, not NVIDIA's. "
            f"Remove it with: pip uninstall apex.",
        )
    if prefer == "shim":
        return Choice(True, f"import apex gives lockstep's instead of the one in {place}, as {PREFER} says.")
    lacking = [part for part in NEEDED if part not in parts]
    if not lacking:
        return Choice(False, "")
    return Choice(
        True,
        f"import apex gives lockstep's: the apex in {place} has no apex.{lacking[0]}. {PREFER}=nvidia gives that one.",
    )


class ApexFinder(MetaPathFinder):
    """Finds the names in `FACES`, and says what to use instead of what is not provided."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Give our module's spec, or None for whoever comes next."""
        if fullname in FACES:
            return self._find_face(fullname)
        if fullname.startswith("apex.") and is_ours(sys.modules.get("apex")):
            text = replacement(fullname)
            if text:
                raise ModuleNotFoundError(text)  # without a name: `from apex import x` would swallow it
        return None

    def _find_face(self, name: str) -> ModuleSpec | None:
        installed = PathFinder.find_spec(name)
        if name == "apex":
            choice = choose(*_look(installed), self._environ.get(PREFER))
            if choice.note and self._environ.get("RANK", "0") == "0":
                sys.stderr.write(f"lockstep: {choice.note}\n")
            if not choice.ours:
                return None
        elif installed is not None and installed.origin is not None:
            return None
        face = FACES[name]
        folder = [str(face.parent)] if face.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, face, submodule_search_locations=folder)


def _look(installed: ModuleSpec | None) -> tuple[str | None, list[str]]:
    """Where an apex is installed, and the packages in it; it is not imported."""
    folders = [Path(folder) for folder in (installed.submodule_search_locations or ())] if installed else []
    if installed is None or (installed.origin is None and not folders):
        return None, []
    parts = [part for folder in folders for part in NEEDED + NVIDIAS if (folder / part / "__init__.py").exists()]
    return str(folders[0] if folders else installed.origin), parts


def is_ours(module: ModuleType | None) -> bool:
    """Whether an imported apex is the one in this package."""
    return module is not None and getattr(module, "__file__", None) == str(FACES["apex"])


def install() -> None:
    """Make `FACES` importable in this process. The second call does nothing.

    Raises:
        UsageError: Another apex, one without ``apex.amp``, is imported already.

    Example:
        >>> from lockstep.compat.install import install
        >>> install()
        >>> from apex.normalization import FusedLayerNorm
    """
    if installed():
        return
    other = sys.modules.get("apex")
    if other is not None and not is_ours(other):
        folders = [Path(folder) for folder in getattr(other, "__path__", ())]
        if not any((folder / part).exists() for folder in folders for part in NEEDED):
            raise UsageError(
                f"the apex in {folders[0] if folders else other} was imported before lockstep.compat.apex.install, and "
                "has no apex.amp. Import lockstep.compat.apex.install first, at the top of the script."
            )
    sys.meta_path.insert(0, ApexFinder(os.environ))


def installed() -> bool:
    """Whether `install` was called."""
    return any(isinstance(finder, ApexFinder) for finder in sys.meta_path)


def uninstall() -> None:
    """Take the finder away, and forget what was imported through it."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, ApexFinder)]
    for name in [name for name, module in sys.modules.items() if _came_from_here(name, module)]:
        del sys.modules[name]


def _came_from_here(name: str, module: ModuleType) -> bool:
    return name.partition(".")[0] in FACES and str(getattr(module, "__file__", "")).startswith(str(_HERE))
