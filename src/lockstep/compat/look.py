"""What an old script needs, told from its text and that of its own modules. Nothing is run."""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

_MOST = 300  # files

SPELLINGS = ("--local_rank", "--local-rank")


class Text(NamedTuple):
    """What is said in a script's files.

    Attributes:
        strings: The string literals.
        imports: The modules that are imported, as they are written; with dots in front if relative.
        sources: The texts themselves.
    """

    strings: frozenset[str]
    imports: frozenset[str]
    sources: tuple[str, ...]


def read(script: Path) -> Text:
    """Read a script and the modules beside it that it imports, directly or by way of others."""
    root, todo, seen = script.parent, [script], dict[Path, str]()
    while todo and len(seen) < _MOST:
        path = todo.pop()
        if path in seen:
            continue
        try:
            seen[path] = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        todo += [found for name in parse(seen[path]).imports for found in _files(name, path, root)]
    parts = [parse(source) for source in seen.values()]
    return Text(
        frozenset().union(*(part.strings for part in parts)),
        frozenset().union(*(part.imports for part in parts)),
        tuple(seen.values()),
    )


def _files(name: str, importer: Path, root: Path) -> Iterator[Path]:
    """Files that an import may mean; a name that is imported from a package may be a module in it."""
    bare = name.lstrip(".")
    dots = len(name) - len(bare)
    base = importer.parents[dots - 1] if 0 < dots <= len(importer.parents) else root
    parts = bare.split(".") if bare else []
    for end in range(1, len(parts) + 1):
        place = base.joinpath(*parts[:end])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                yield file


def parse(source: str) -> Text:
    r"""Find strings and imports in a text; also in one that this Python cannot parse, roughly.

    Example:
        >>> text = parse("from apex import amp\nparser.add_argument('--local_rank', type=int)")
        >>> sorted(text.imports), sorted(text.strings)
        (['apex', 'apex.amp'], ['--local_rank'])
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # async=True, or Python 2
        strings = re.findall(r"""["']([^"'\n]*)["']""", source)
        imports = re.findall(r"^\s*(?:from|import)\s+([\w.]+)", source, re.MULTILINE)
        return Text(frozenset(strings), frozenset(imports), (source,))
    literals: set[str] = set()
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            literals.add(node.value)
        elif isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            modules.add(module)
            modules.update(f"{module}{'' if module.endswith('.') else '.'}{alias.name}" for alias in node.names)
    return Text(frozenset(literals), frozenset(modules), (source,))


def rank_argument(strings: Iterable[str]) -> str:
    """How the script's parser spells the rank's argument; empty if it has none.

    A parser of any kind counts (argparse, click, ``DEFINE_integer("local_rank", ...)``, a look at ``sys.argv``), since
    they all have the name as a string.

    Example:
        >>> rank_argument({"--local-rank", "--lr"}), rank_argument({"--local_rank="}), rank_argument({"--lr"})
        ('--local-rank', '--local_rank', '')
    """
    found = {string.strip().rstrip("=") for string in strings}
    return next((spelling for spelling in SPELLINGS if spelling in found), "")


def imports_apex(imports: Iterable[str]) -> bool:
    """Whether apex, or a module that was compiled with it, is imported.

    Example:
        >>> imports_apex({"apex.parallel"}), imports_apex({"apexpy"})
        (True, False)
    """
    return any(name.split(".")[0] in ("apex", "amp_C", "apex_C") for name in imports)


def reads_slurm(strings: Iterable[str], environ: Mapping[str, str]) -> bool:
    """Whether the script asks for Slurm's variables, where there are none.

    Example:
        >>> reads_slurm({"SLURM_PROCID"}, {}), reads_slurm({"SLURM_PROCID"}, {"SLURM_PROCID": "0"})
        (True, False)
    """
    return any(string.startswith("SLURM_") for string in strings) and not any(
        name.startswith("SLURM_") for name in environ
    )


def starts_its_own_ranks(text: Text) -> bool:
    """Whether the script calls ``mp.spawn`` and has no other way of being told its rank.

    Example:
        >>> starts_its_own_ranks(parse("mp.spawn(main_worker, nprocs=torch.cuda.device_count())"))
        True
        >>> starts_its_own_ranks(parse("mp.spawn(f) if args.spawn else f(os.environ['LOCAL_RANK'])"))
        False
    """
    if text.strings & {*SPELLINGS, "LOCAL_RANK", "RANK", "SLURM_PROCID"}:
        return False
    return any(re.search(r"\b(?:mp|multiprocessing)\.(?:spawn|start_processes)\(", source) for source in text.sources)
