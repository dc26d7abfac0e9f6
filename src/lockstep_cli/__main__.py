"""``python -m lockstep_cli``: the command line of this very interpreter."""

from lockstep_cli import main

main(prog_name="lockstep")
