"""``lockstep run``: options to a LaunchPlan, then lockstep.launcher."""

import functools
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from lockstep_cli.spelling import EITHER_SPELLING

if TYPE_CHECKING:
    from lockstep.launcher.plan import LaunchPlan


@click.command(context_settings=EITHER_SPELLING | {"allow_interspersed_args": False})
@click.option(
    "-n",
    "--nproc-per-node",
    "--ranks",
    "nproc_per_node",
    default="auto",
    metavar="N",
    help="Ranks on this node: a number, auto, gpu or cpu.",
)
@click.option("--nnodes", default="1", metavar="N[:MOST]", help="Nodes.")
@click.option("--node-rank", default=0, help="This node's number, from 0.")
@click.option("--master-addr", default="", show_default=False, metavar="HOST", help="Node 0.")
@click.option("--master-port", type=click.IntRange(0, 65535), help="A free port there.")
@click.option("--standalone", is_flag=True, help="One node; what happens anyway without --nnodes.")
@click.option("--rdzv-backend", default="", show_default=False, metavar="NAME", help="How nodes meet: static or c10d.")
@click.option("--rdzv-endpoint", default="", show_default=False, metavar="HOST:PORT", help="Where nodes meet.")
@click.option("--rdzv-id", default="", show_default=False, metavar="ID", help="The job's name; the same on every node.")
@click.option(
    "--rdzv-conf", default="", show_default=False, metavar="KEY=VALUE,...", help="More settings for the backend."
)
@click.option("--local-addr", default="", show_default=False, metavar="HOST", help="How other nodes reach this one.")
@click.option("--max-restarts", type=click.IntRange(0), default=0, help="How often to start again after a failure.")
@click.option(
    "--compat/--no-compat",
    default=None,
    help="Old scripts: apex, --local_rank, names that are gone.  [default: if needed]",
)
@click.option("--trust-checkpoints", is_flag=True, help="torch.load may run code that files name, as until torch 2.5.")
@click.option("--grace", type=click.FloatRange(0), default=10.0, help="Seconds from a signal to end to SIGKILL.")
@click.option("--start", type=click.Choice(["fork", "spawn"]), default="fork", help="How ranks start; spawn is slower.")
@click.option(
    "--log-dir", default="", show_default=False, metavar="FOLDER", help="Also keep each rank's output in a file there."
)
@click.option("--debug", type=int, metavar="LOCAL_RANK", help="Give the terminal to this rank, for a debugger.")
@click.option("--device", type=click.Choice(["auto", "cpu"]), default="auto", help="cpu: rehearse a script for CUDA.")
@click.option("--hide-cuda", is_flag=True, help="With --device cpu: torch.cuda.is_available() says no.")
@click.option("--steps", type=click.IntRange(1), help="With --device cpu: end after N optimizer steps, with a report.")
@click.option(
    "--watch/--no-watch",
    default=None,
    help="Say where every rank is when none goes on.  [default: on if a terminal or CI is attached]",
)
@click.option(
    "--stall", type=click.FloatRange(0, min_open=True), default=120.0, help="Seconds without a step until then."
)
@click.option("--dry-run", is_flag=True, help="Print what would be done, and why.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as with python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(script: str, arguments: tuple[str, ...], module: bool, standalone: bool, dry_run: bool, **options: Any) -> None:
    """Run SCRIPT on every device of this machine, or of several.

    Without -n there is one rank for each GPU, or on a machine without one for each group of cores that share a cache.
    Everything after SCRIPT is the script's own.

    \b
    lockstep run train.py --epochs 3
    lockstep run -n 2 -m package.train
    lockstep run --nnodes 2 --node-rank 0 --master-addr node0 train.py
    lockstep run --device cpu -n 2 --steps 3 train.py    (a rehearsal, without a GPU)
    """  # noqa: D301  # click reads the character itself
    from lockstep.errors import UsageError
    from lockstep.launcher import front, machine, network, plan
    from lockstep.launcher.drop_in import prepare
    from lockstep.launcher.script import Job, missing, run_as_main
    from lockstep.launcher.slurm import follow
    from lockstep_cli import rehearse

    if standalone and (options["nnodes"] != "1" or options["rdzv_endpoint"]):
        raise click.UsageError("--standalone means one node, without --nnodes and --rdzv-endpoint.")
    job = Job(script, arguments, module)
    compat, trust = options.pop("compat"), options.pop("trust_checkpoints")
    rehearsing = {name: options.pop(name) for name in ("device", "hide_cuda", "steps")}
    job, wish = prepare(job, plan.Wish(**options), compat, trust)
    if what := missing(job):
        raise click.UsageError(what)
    rehearsal = rehearse.wanted(job, **rehearsing)
    try:
        wish = wish._replace(rehearsal=rehearsal, terminal=bool(sys.stderr and sys.stderr.isatty()))
        told = follow(wish, machine.look(), os.environ, alone=standalone)
        made = told.put_in(plan.make_plan(told.wish, told.machine, os.environ))
    except UsageError as error:
        raise click.UsageError(str(error)) from None
    made = _connect(made)
    if dry_run:
        click.echo(plan.in_full(made, str(job)), nl=False)
        return
    if told.note:
        click.echo(told.note, err=True)
    if options["nproc_per_node"] == "auto":
        click.echo(plan.in_one_line(made), err=True)
    if not made.one_node:
        click.echo(network.say(made), err=True)
    with rehearse.folder_for(made) as made:
        last = front.run(made, functools.partial(run_as_main, job))
        sys.stderr.write(last.text)
        rehearse.print_report(made, failed=last.code != 0)
    front.leave(last.code)


def _connect(made: "LaunchPlan") -> "LaunchPlan":
    """Find the way to the other nodes, if there are any."""
    from lockstep.errors import UsageError
    from lockstep.launcher import network

    if made.one_node:
        return made
    try:
        return network.put_in(made, network.find(made.meeting, os.environ), os.environ)
    except UsageError as error:  # nothing is wrong with the command
        sys.stderr.write(f"lockstep: {error}\n")
        sys.exit(2)
