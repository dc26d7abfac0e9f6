"""The page: every line with its state and its remedy, as text or as JSON."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import click

from lockstep_cli.doctor.line import STATES, Line, worst

_STYLES = {"fine": "green", "doubtful": "yellow", "broken": "bold red"}


def verdict(lines: Sequence[Line]) -> str:
    """The last line of the page.

    Example:
        >>> verdict([Line("a", "fine", ""), Line("b", "doubtful", "", "Do it."), Line("c", "doubtful", "", "Do it.")])
        '1 fine, 2 doubtful, 0 broken'
    """
    return ", ".join(f"{sum(line.state == state for line in lines)} {state}" for state in STATES)


def as_json(lines: Sequence[Line], facts: Mapping[str, Any]) -> str:
    """Everything, for a program: the worst state, the lines, and the facts that they were judged by.

    Example:
        >>> as_json([Line("gloo", "fine", "there")], {}).splitlines()[1]
        '  "state": "fine",'
    """
    page = {"state": worst(lines), "lines": [line._asdict() for line in lines], "facts": facts}
    return json.dumps(page, indent=2, ensure_ascii=False)


def plain(value: Any) -> Any:
    """Turn facts into what JSON knows: a named tuple becomes an object.

    Example:
        >>> plain([Line("gloo", "fine", "there")])
        [{'about': 'gloo', 'state': 'fine', 'found': 'there', 'remedy': ''}]
    """
    if hasattr(value, "_asdict"):
        return {name: plain(part) for name, part in value._asdict().items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return value


def show(lines: Sequence[Line]) -> None:
    """Print the page; in colour on a terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120
    table = Table.grid(padding=(0, 2))
    for line in lines:
        found = Text(line.found)
        if line.remedy:
            found.append(f"\n{line.remedy}", style="bold")
        table.add_row(Text(line.state, style=_STYLES[line.state]), line.about, found)
    with console.capture() as captured:
        console.print(table)
    for row in captured.get().splitlines():
        click.echo(row.rstrip())
    click.echo(verdict(lines))
