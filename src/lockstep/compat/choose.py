"""Which of this package's parts a script needs."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from lockstep.compat import look


class Compat(NamedTuple):
    """What a rank does before an old script begins. Plain values, since they travel to the ranks.

    Attributes:
        argument: How the script's parser spells the rank's argument; empty if it is not passed.
        mends: Names of the mends that may be needed.
        trust: Whether torch.load may run code from files.
        slurm: Whether the script finds Slurm's variables.
        own_ranks: Whether the script starts its ranks itself, and so is started once, without a launcher's variables.
    """

    argument: str = ""
    mends: tuple[str, ...] = ()
    trust: bool = False
    slurm: bool = False
    own_ranks: bool = False


def choose(
    script: str,
    wanted: bool | None,
    *,
    trust: bool = False,
    pass_rank: bool = True,
    environ: Mapping[str, str] = os.environ,
) -> Compat | None:
    """Look at a script and decide.

    Args:
        script: Its path; empty if there is no text to look at.
        wanted: What the user said; None: on if the script imports apex or knows ``--local_rank``, or asks for Slurm's
            variables where there are none.
        trust: What ``--trust-checkpoints`` says; turns it on as well.
        pass_rank: Whether the rank's argument is passed where the script knows it.
        environ: The user's environment.
    """
    if wanted is False:
        return None
    text = look.read(Path(script)) if script else look.Text(frozenset(), frozenset(), ())
    argument = look.rank_argument(text.strings)
    slurm = look.reads_slurm(text.strings, environ)
    if not (wanted or trust or argument or slurm or look.imports_apex(text.imports)):
        return None
    from lockstep.compat.mends import table

    return Compat(
        argument=argument if pass_rank else "",
        mends=tuple(table.wanted(text.sources)),
        trust=trust,
        slurm=slurm,
        own_ranks=look.starts_its_own_ranks(text),
    )
