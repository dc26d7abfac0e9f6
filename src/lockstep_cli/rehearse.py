"""``lockstep run --device cpu``: what is asked for, and the report at the end."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator

import click

from lockstep.launcher.plan import LaunchPlan, Rehearsal
from lockstep.launcher.script import Job, source_of


def wanted(job: Job, device: str, hide_cuda: bool, steps: int | None) -> Rehearsal | None:
    """Turn options into a wish; None without ``--device cpu``.

    Raises:
        click.UsageError: Options of a rehearsal without one.
    """
    if device != "cpu":
        if hide_cuda or steps:
            raise click.UsageError(f"{'--hide-cuda' if hide_cuda else '--steps'} belongs to a rehearsal: --device cpu.")
        return None
    # Every rank needs it, and takes more than a second for it; imported here, it is there in each that is forked.
    import torch._dynamo  # noqa: F401

    from lockstep.compat.rehearsal.starts import wants_one_process

    return Rehearsal(hide_cuda=hide_cuda, steps=steps or 0, own_ranks=wants_one_process(source_of(job)))


@contextlib.contextmanager
def folder_for(plan: LaunchPlan) -> Iterator[LaunchPlan]:
    """Give a rehearsal its private folder while it lasts."""
    if plan.rehearsal is None:
        yield plan
        return
    # Not a TemporaryDirectory: it also ends with each of the processes that are forked from this one.
    folder = tempfile.mkdtemp(prefix="lockstep-")
    try:
        yield plan._replace(rehearsal=plan.rehearsal._replace(folder=folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def print_report(plan: LaunchPlan, failed: bool) -> None:
    """Print what the ranks have left, if they were asked to and, where the script failed, if there is something."""
    if plan.rehearsal is None or not plan.rehearsal.steps:
        return
    from lockstep.compat.rehearsal.report import facts, page, words

    report = page.put_together(facts.read_all(plan.rehearsal.folder))
    if report.ranks or not failed:
        click.echo("\n".join(words.lines(report)))
