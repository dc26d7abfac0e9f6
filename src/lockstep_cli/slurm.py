"""``lockstep slurm``: prints a job script, to read and to submit."""

import shlex
import shutil
import sys
from pathlib import PurePath
from typing import NamedTuple

import click

from lockstep_cli.spelling import EITHER_SPELLING

RETURN = 75
"""What `lockstep.Checkpoint` ends with after a signal (docs/checkpoint.md)."""

_TO_SPARE = 20
"""Seconds between the last moment for a save and the end of the notice that Slurm gives."""


class Job(NamedTuple):
    """What the job script says; ``sbatch`` are the lines of sbatch's own options."""

    sbatch: tuple[str, ...]
    about: str
    task: tuple[str, ...]
    run: tuple[str, ...]


class Command(click.Command):
    """Says where an option belongs that it doesn't know: it may be the script's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            message = f"{error.message} Options of the script's own go behind --."
            raise click.NoSuchOption(error.option_name, message, error.possibilities, error.ctx) from None


@click.command(cls=Command, context_settings=EITHER_SPELLING, short_help="Print a Slurm job script that runs SCRIPT.")
@click.option("--nodes", type=click.IntRange(1), default=1, help="Nodes.")
@click.option("--gpus", "--gpus-per-node", "gpus", type=click.IntRange(0), default=0, help="GPUs on each node.")
@click.option("--cpus", type=click.IntRange(1), help="Processors on each node.  [default: whole nodes]")
@click.option("-n", "--ranks", type=click.IntRange(1), help="Ranks on each node.  [default: as lockstep run]")
@click.option("--time", "limit", default="", show_default=False, metavar="[D-]H:MM:SS", help="Time limit.")
@click.option("--partition", default="", show_default=False, metavar="NAME", help="Partition.")
@click.option("--account", default="", show_default=False, metavar="NAME", help="Account.")
@click.option("--name", default="", show_default=False, metavar="NAME", help="The job's name.  [default: the script's]")
@click.option("--notice", type=click.IntRange(_TO_SPARE + 10), default=120, help="Seconds from signal to end.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as with python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def slurm(
    script: str,
    arguments: tuple[str, ...],
    nodes: int,
    gpus: int,
    cpus: int | None,
    ranks: int | None,
    limit: str,
    partition: str,
    account: str,
    name: str,
    notice: int,
    module: bool,
) -> None:
    """Print a Slurm job script that runs SCRIPT on NODES nodes and goes on by itself after a preemption.

    Options of the script's own go behind --, as in: lockstep slurm --nodes 2 train.py -- --lr 0.1
    """
    options = {
        "job-name": name or (script if module else PurePath(script).stem),
        "partition": partition,
        "account": account,
        "time": limit,
        "nodes": str(nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(gpus or ""),
        "cpus-per-task": str(cpus or ""),
        "exclusive": "" if cpus else "yes",
        "signal": f"USR1@{notice}",
    }
    job = Job(
        sbatch=tuple(option(key, value) for key, value in options.items() if value),
        about=about(nodes, gpus),
        task=(f"--ntasks={nodes}", "--ntasks-per-node=1", *([f"--cpus-per-task={cpus}"] if cpus else [])),
        run=(
            *program(),
            "run",
            *(["-n", str(ranks)] if ranks else []),
            *("--grace", str(notice - _TO_SPARE)),
            *(["-m"] if module else []),
            script,
            *arguments,
        ),
    )
    click.echo(written(job), nl=False)


def option(name: str, value: str) -> str:
    """Write one of sbatch's options.

    Raises:
        click.UsageError: The value would not stay on its line or in its word.

    Example:
        >>> option("nodes", "2"), option("exclusive", "yes")
        ('--nodes=2', '--exclusive')
    """
    if any(not character.isprintable() or character.isspace() or character in "\"'\\#" for character in value):
        raise click.UsageError(f"{value!r} cannot stand in a line of #SBATCH: write it without spaces, quotes and #.")
    return "--exclusive" if name == "exclusive" else f"--{name}={value}"


def about(nodes: int, gpus: int) -> str:
    """Say in a line what is asked for.

    Example:
        >>> about(2, 8), about(1, 0)
        ('2 nodes with 8 GPUs each', '1 node')
    """
    where = f"{nodes} node{'s' * (nodes > 1)}"
    return where + (f" with {gpus} GPU{'s' * (gpus > 1)}{' each' * (nodes > 1)}" if gpus else "")


def program() -> tuple[str, ...]:
    """How the job calls lockstep: by its name where the shell finds it, since sbatch passes PATH on."""
    return ("lockstep",) if shutil.which("lockstep") else (sys.executable, "-m", "lockstep_cli")


def written(job: Job) -> str:
    """Write the script.

    Example:
        >>> job = Job(("--nodes=2",), "2 nodes", ("--ntasks=2",), ("lockstep", "run", "train.py", "a b"))
        >>> print(written(job).splitlines()[-6])
        srun --ntasks=2 lockstep run train.py 'a b'
    """
    lines = [
        "#!/bin/bash",
        f"# {job.about}. Submit it with: sbatch FILE",
        "# One task on each node: lockstep run, which starts the ranks and reads nodes and meeting place from Slurm.",
        *(f"#SBATCH {line}" for line in job.sbatch),
        "# After a requeue the output goes on in the same file.",
        "#SBATCH --output=%x-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --requeue",
        "",
        f"srun {shlex.join((*job.task, *job.run))}",
        "code=$?",
        f"if [ $code -eq {RETURN} ]; then  # lockstep.Checkpoint has saved after a signal",
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"
