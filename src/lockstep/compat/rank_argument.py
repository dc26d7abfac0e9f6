"""The rank's argument on its way to the script's parser: ``--local_rank`` or ``--local-rank``.

``torch.distributed.launch`` passed ``--local_rank=N`` until torch 2.0, ``--local-rank=N`` since then, and torchrun
passes nothing. Here a parser gets what it knows, whatever stands on the command line.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

from lockstep.compat.look import SPELLINGS


def for_parser(args: Sequence[str], known: Collection[str], takes_value: bool, rank: str) -> list[str]:
    """Write the rank's argument as a parser knows it.

    Args:
        args: What stands on the command line.
        known: The parser's option strings.
        takes_value: Whether its option for the rank, if it has one, takes a value.
        rank: This process's local rank.

    Example:
        >>> for_parser(["--local-rank=1", "--lr", "1"], ["--local_rank", "--lr"], True, "1")
        ['--local_rank=1', '--lr', '1']
        >>> for_parser(["--lr", "1"], ["--local_rank", "--lr"], True, "3")
        ['--local_rank=3', '--lr', '1']
        >>> for_parser(["--local_rank=1", "--lr", "1"], ["--lr"], False, "1")
        ['--lr', '1']
    """
    spelling = next((spelling for spelling in SPELLINGS if spelling in known), "")
    result: list[str] = []
    given = False
    rest = iter(args)
    for arg in rest:
        if arg == "--":
            result += [arg, *rest]
            break
        name, equals, value = arg.partition("=")
        if name not in SPELLINGS:
            result.append(arg)
        elif spelling:
            given = True
            result.append(f"{spelling}{equals}{value}")
        elif arg != f"{name}={rank}":
            result.append(arg)  # not the launcher's; the parser will say that it does not know it
    if spelling and takes_value and not given:
        result.insert(0, f"{spelling}={rank}")
    return result


def watch_parsers(rank: str) -> Callable[[], None]:
    """Have every argparse parser in this process get the rank's argument as it knows it; give what undoes it.

    Only for arguments that come from the command line: those that a script has made up itself are left as they are.
    """
    original = argparse.ArgumentParser.parse_known_args
    depth = 0

    @functools.wraps(original)
    def parse_known_args(self: Any, args: Any = None, namespace: Any = None, *more: Any, **named: Any) -> Any:
        nonlocal depth
        command_line = sys.argv[1:]
        given = command_line if args is None else list(args)
        # Within another one's call it is a subcommand's parser, which gets the rest of the command line.
        if args is None or depth or is_from_command_line(given, command_line):
            known = self._option_string_actions  # checked on Python 3.10 to 3.14
            actions = [known[spelling] for spelling in SPELLINGS if spelling in known]
            args = for_parser(given, known, bool(actions) and actions[0].nargs != 0, rank)
        depth += 1
        try:
            return original(self, args, namespace, *more, **named)
        finally:
            depth -= 1

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]

    def undo() -> None:
        argparse.ArgumentParser.parse_known_args = original  # type: ignore[method-assign]

    return undo


def is_from_command_line(args: Sequence[str], command_line: Sequence[str]) -> bool:
    """Whether these are the command line's arguments, or the last of them.

    Example:
        >>> is_from_command_line(["--lr", "1"], ["train", "--lr", "1"]), is_from_command_line([], ["train"])
        (True, False)
    """
    if not args:
        return not command_line
    return list(command_line[-len(args) :]) == list(args)
