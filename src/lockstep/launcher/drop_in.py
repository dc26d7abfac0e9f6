"""``python -m lockstep.launch``: the command line of ``torch.distributed.launch``, of every year."""

import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from lockstep.compat.choose import choose
from lockstep.errors import UsageError
from lockstep.launcher import agent, front, machine, plan
from lockstep.launcher.script import Job, missing, path_of, run_as_main

# Options of torch's that have nothing to act on here, and what stands instead.
_WITHOUT_EFFECT = {
    "monitor_interval": "the launcher notices at once when a rank ends",
    "event_log_handler": "no events are logged",
    "role": "there is one role",
    "logs_specs": "write --log_dir",
    "redirects": "write --log_dir",
    "tee": "output is shown, and --log_dir keeps it too",
    "local_ranks_filter": "all ranks' output is shown",
    "log_line_prefix_template": "lines are shown as the ranks write them",  # torch 2.14
    "duplicate_stdout_filters": "lines are not filtered",
    "duplicate_stderr_filters": "lines are not filtered",
    "numa_binding": "ranks keep to their own cores by themselves",
    "signals_to_handle": "INT, TERM, HUP, QUIT, USR1 and USR2 reach the ranks",
    "virtual_local_rank": "each rank has its own LOCAL_RANK",
}
_SHORT = {"redirects": "-r", "tee": "-t"}
_FLAGS = ("virtual_local_rank",)


def _without_effect(command: Any) -> Any:
    for name in reversed(_WITHOUT_EFFECT):
        flag = name in _FLAGS
        names = [*filter(None, [_SHORT.get(name)]), f"--{name.replace('_', '-')}"]
        command = click.option(*names, name, is_flag=flag, default=False if flag else "", hidden=True)(command)
    return command


@click.command(
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "allow_interspersed_args": False,
        "show_default": True,
    }
)
@click.option(
    "-n", "--nproc-per-node", default="1", metavar="N", help="Ranks on this node: a number, auto, gpu or cpu."
)
# As in lockstep_cli.run, which does not import this: `lockstep --help` would wait for torch. A test compares them.
@click.option("--nnodes", default="1", metavar="N[:MOST]", help="Nodes.")
@click.option("--node-rank", default=0, help="This node's number, from 0.")
@click.option("--master-addr", default="", show_default=False, metavar="HOST", help="Node 0.")
@click.option("--master-port", type=click.IntRange(0, 65535), help="A free port there.")
@click.option("--use-env", is_flag=True, help="Pass no --local_rank; the script reads LOCAL_RANK.")
@click.option("-m", "--module", is_flag=True, help="SCRIPT is a module's name, as with python -m.")
@click.option("--no-python", is_flag=True, help="SCRIPT is a program; needs --use_env.")
@click.option("--run-path", is_flag=True, help="What happens anyway: the script runs in the rank's own process.")
@click.option("--standalone", is_flag=True, help="One node; what happens anyway without --nnodes.")
@click.option("--rdzv-backend", default="", show_default=False, metavar="NAME", help="How nodes meet: static or c10d.")
@click.option("--rdzv-endpoint", default="", show_default=False, metavar="HOST:PORT", help="Where nodes meet.")
@click.option("--rdzv-id", default="", show_default=False, metavar="ID", help="The job's name; the same on every node.")
@click.option(
    "--rdzv-conf", default="", show_default=False, metavar="KEY=VALUE,...", help="More settings for the backend."
)
@click.option("--local-addr", default="", show_default=False, metavar="HOST", help="How other nodes reach this one.")
@click.option("--max-restarts", type=click.IntRange(0), default=0, help="How often to start again after a failure.")
@click.option("--start-method", type=click.Choice(["fork", "spawn", "forkserver"]), default="fork", help="For ranks.")
@click.option("--shutdown-timeout", type=click.FloatRange(0), default=10.0, help="Seconds from a signal to SIGKILL.")
@click.option(
    "--log-dir",
    "--logdir",
    "log_dir",
    default="",
    show_default=False,
    metavar="FOLDER",
    help="Keep each rank's output there.",
)
@click.option("--compat/--no-compat", default=True, help="Old scripts: apex, names that are gone, --local_rank.")
@click.option("--trust-checkpoints", is_flag=True, help="torch.load may run code that files name, as until torch 2.5.")
@_without_effect
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def main(script: str, arguments: tuple[str, ...], **options: Any) -> None:
    """Run SCRIPT as torch.distributed.launch did.

    The script gets --local_rank=N in the spelling that it knows, or not at all; and torchrun's variables.
    """
    for name, instead in _WITHOUT_EFFECT.items():
        if options[name]:
            click.echo(f"lockstep: --{name} has no effect here: {instead}.", err=True)
    if options["no_python"] and not options["use_env"]:
        raise click.UsageError("--no_python needs --use_env: a program is passed no argument of the launcher's.")
    if options["no_python"] and options["module"]:
        raise click.UsageError("--no_python and -m exclude each other.")
    job = Job(script, arguments, options["module"], program=options["no_python"])
    if what := missing(job):
        raise click.UsageError(what)
    trust, pass_rank = options["trust_checkpoints"], not options["use_env"]
    job, wish = prepare(job, with_free_port(_wish(options)), options["compat"], trust, pass_rank=pass_rank)
    try:
        made = plan.make_plan(wish, machine.look(), os.environ)
    except UsageError as error:
        raise click.UsageError(str(error)) from None
    last = front.run(made, functools.partial(run_as_main, job))
    sys.stderr.write(last.text)
    front.leave(last.code)


def _wish(options: dict[str, Any]) -> plan.Wish:
    names = set(plan.Wish._fields) & set(options)
    wish = plan.Wish(**{name: options[name] for name in names - {"compat"}})
    method = options["start_method"]
    return wish._replace(start="fork" if method == "fork" else "spawn", grace=options["shutdown_timeout"])


def prepare(
    job: Job, wish: plan.Wish, compat: bool | None, trust: bool, *, pass_rank: bool = True
) -> tuple[Job, plan.Wish]:
    """Look at what is to be run, and add to both what an old script needs.

    Args:
        job: The script.
        wish: What else the user said.
        compat: What ``--compat`` and ``--no-compat`` say; None if neither is there.
        trust: Whether ``--trust-checkpoints`` is there.
        pass_rank: Whether the script is passed its rank where it knows the argument.
    """
    if taken := take_over(job, wish):
        job, wish = taken
    chosen = choose(path_of(job), compat, trust=trust, pass_rank=pass_rank)
    if chosen:
        job = job._replace(rank_argument=job.rank_argument or chosen.argument)
    return job, wish._replace(compat=chosen)


def with_free_port(wish: plan.Wish) -> plan.Wish:
    """On one node, a port that is taken need not stop anybody: jobs on one machine all had 29500."""
    if not wish.master_port or wish.nnodes not in ("1", "1:1") or wish.rdzv_backend or wish.rdzv_endpoint:
        return wish
    try:
        agent.listen(wish.master_port).close()
    except UsageError:
        click.echo(f"lockstep: port {wish.master_port} is taken; the ranks meet at a free one.", err=True)
        return wish._replace(master_port=None)
    return wish


def take_over(job: Job, wish: plan.Wish) -> tuple[Job, plan.Wish] | None:
    """Read a launcher of old that is given as the module: ``torch.distributed.launch``, ``apex.parallel.multiproc``.

    Returns:
        What it would have started; None if the module is none of them.
    """
    if not job.module:
        return None
    if job.target in ("torch.distributed.launch", "torch.distributed.run"):
        main.main(list(job.arguments), prog_name=f"python -m {job.target}")
    if job.target == "apex.parallel.multiproc":
        if not job.arguments:
            raise click.UsageError("python -m apex.parallel.multiproc needs a script.")
        return multiproc(job.arguments, wish)
    return None


def multiproc(words: Sequence[str], wish: plan.Wish) -> tuple[Job, plan.Wish]:
    """Read ``python -m apex.parallel.multiproc script.py ...``, which passed ``--world-size N`` and ``--rank i``.

    Example:
        >>> job, wish = multiproc(["main.py", "--world-size", "2", "--lr", "1"], plan.Wish())
        >>> job.target, job.arguments, job.rank_argument, wish.nproc_per_node
        ('main.py', ('--world-size', '2', '--lr', '1'), '--rank', '2')
    """
    script, *rest = words
    if "--world-size" in rest[:-1]:
        wish = wish._replace(nproc_per_node=rest[rest.index("--world-size") + 1])
    else:
        count, _ = plan.choose_ranks(wish.nproc_per_node, machine.look())
        rest = [*rest, "--world-size", str(count)]
        wish = wish._replace(nproc_per_node=str(count))
    return Job(script, tuple(rest), rank_argument="--rank"), wish
