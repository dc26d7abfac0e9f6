"""``lockstep doctor``: look at everything, judge it, print it."""

import os
import sys
from typing import TYPE_CHECKING, Any

import click

from lockstep_cli.doctor.line import Line, worst
from lockstep_cli.spelling import EITHER_SPELLING

if TYPE_CHECKING:
    from lockstep_cli.doctor import nodes


@click.command(context_settings=EITHER_SPELLING)
@click.option("--json", "as_json", is_flag=True, help="Print everything, with the facts, as JSON.")
@click.option("--nnodes", type=click.IntRange(1), default=1, help="Look at so many nodes; start it on each.")
@click.option("--node-rank", type=click.IntRange(0), default=0, help="This node's number, from 0.")
@click.option("--master-addr", default="", show_default=False, metavar="HOST", help="Node 0.")
@click.option("--master-port", type=click.IntRange(1, 65535), default=29500, help="A free port there.")
@click.option(
    "--timeout", type=click.FloatRange(1), default=60, metavar="SECONDS", help="How long nodes wait for each other."
)
def doctor(as_json: bool, nnodes: int, node_rank: int, master_addr: str, master_port: int, timeout: float) -> None:
    """Say what is wrong with this machine, and what to do about it.

    Looks at versions, GPUs, backends, cores, memory, limits and the network, and measures two ranks. Each line is fine,
    doubtful (it works, but slower than it could, or not in every case) or broken. Exits with 1 if anything is broken.

    With --nnodes, started on each node with its own --node-rank, it also says how the other nodes are, in what they
    differ, and how quickly they talk to each other.
    """
    from lockstep_cli.doctor import nodes, page

    if nnodes > 1:
        check(nnodes, node_rank, master_addr)
    lines, facts = examine()
    if nnodes > 1:
        lines += meet(nodes.Place(nnodes, node_rank, master_addr, master_port, timeout), lines, facts)
    if as_json:
        click.echo(page.as_json(lines, {name: page.plain(fact) for name, fact in facts.items()}))
    else:
        page.show(lines)
    sys.exit(1 if worst(lines) == "broken" else 0)


def check(nnodes: int, node_rank: int, master_addr: str) -> None:
    """Say at once what cannot be, before anything is measured.

    Raises:
        UsageError: Click's.
    """
    if not master_addr:
        raise click.UsageError(f"--nnodes {nnodes}: where is node 0? Write --master-addr HOST on every node.")
    if node_rank >= nnodes:
        raise click.UsageError(f"--node-rank {node_rank}: {nnodes} nodes count from 0 to {nnodes - 1}.")


def meet(place: "nodes.Place", lines: list[Line], facts: dict[str, Any]) -> list[Line]:
    """Meet the other nodes: the lines on all of them; the facts get what was found."""
    from lockstep_cli.doctor import nodes

    torch, (_, python, _) = facts["inside"], facts["versions"]
    page = {"host": os.uname().nodename, "lines": lines, "python": python, "nccl": torch.nccl, "gpus": torch.gpus}
    facts["nodes"] = nodes.look(page, place)
    return nodes.judge(facts["nodes"], place.node)


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
