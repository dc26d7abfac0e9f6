"""``lockstep doctor``: look at everything, judge it, print it."""

import sys
from typing import Any

import click

from lockstep_cli.doctor.line import Line, worst
from lockstep_cli.spelling import EITHER_SPELLING


@click.command(context_settings=EITHER_SPELLING)
@click.option("--json", "as_json", is_flag=True, help="Print everything, with the facts, as JSON.")
def doctor(as_json: bool) -> None:
    """Say what is wrong with this machine, and what to do about it.

    Looks at versions, GPUs, backends, cores, memory, limits and the network, and measures two ranks. Each line is fine,
    doubtful (it works, but slower than it could, or not in every case) or broken. Exits with 1 if anything is broken.
    """
    from lockstep_cli.doctor import page

    lines, facts = examine()
    if as_json:
        click.echo(page.as_json(lines, {name: page.plain(fact) for name, fact in facts.items()}))
    else:
        page.show(lines)
    sys.exit(1 if worst(lines) == "broken" else 0)


def examine() -> tuple[list[Line], dict[str, Any]]:
    """Look at everything and judge it: the lines, and the facts by name."""
    from lockstep_cli.doctor import (
        backends,
        cores,
        devices,
        inside,
        limits,
        memory,
        network,
        shared_memory,
        speed,
        versions,
    )

    torch, net = inside.look(), network.look()
    meet = network.judge_loopback(net).state == "fine"
    facts: dict[str, Any] = {
        "versions": versions.look(),
        "inside": torch,
        "driver": devices.look(),
        "cores": cores.look(),
        "memory": memory.look(),
        "shared_memory": shared_memory.look(),
        "files": limits.look(),
        "network": net,
        "speed": speed.look(speed.choose(torch, meet)),
    }
    lines = [
        *versions.judge(facts["versions"], torch),
        *devices.judge(facts["driver"], torch),
        *cores.judge(facts["cores"], torch),
        memory.judge(facts["memory"]),
        shared_memory.judge(facts["shared_memory"]),
        limits.judge(facts["files"]),
        *network.judge(net),
        *backends.judge(torch),
        *speed.judge(facts["speed"]),
    ]
    return lines, facts
