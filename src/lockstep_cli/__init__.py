"""The command line. Starts without importing torch."""

import importlib
from pathlib import Path

import click

# Every command and the module that it lives in, which is loaded when the command is named.
_HOMES = {
    "doctor": "lockstep_cli.doctor.command",
    "run": "lockstep_cli.run",
    "slurm": "lockstep_cli.slurm",
}


class LazyGroup(click.Group):
    """Commands that are loaded when they are named."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Every command's name."""
        return sorted(_HOMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Load one."""
        if cmd_name not in _HOMES:
            return None
        command: click.Command = getattr(importlib.import_module(_HOMES[cmd_name]), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; a script in its place tells what was meant."""
        if args[0] not in _HOMES and Path(args[0]).suffix == ".py":
            ctx.fail(f"No such command {args[0]!r}. Did you mean 'lockstep run {args[0]}'?")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lockstep-torch")
def main() -> None:
    """Run a training script on every device you have, with the same numbers."""
