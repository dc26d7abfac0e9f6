"""The command line. Starts without importing torch."""

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="lockstep-torch")
def main() -> None:
    """Run a training script on every device you have, with the same numbers."""
