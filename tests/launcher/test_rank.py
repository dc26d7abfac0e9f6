"""What the launcher knows of one rank's end."""

import signal

import pytest

from lockstep.launcher.reports import Report
from lockstep.launcher.watch import Rank


@pytest.mark.parametrize(("seen", "number", "told"), [(-9, 9, False), (-15, 15, True), (None, 15, True)])
def test_a_signal_that_only_torchs_agent_saw_is_the_cause_unless_it_was_ours(seen, number, told):
    rank = Rank(2, pipe=-1)
    rank.report, rank.died = Report(pid=1, rank=2), 2.0
    rank.told, rank.told_at = {signal.SIGTERM}, 1.0

    end = rank.end(seen)

    assert (number, told) == (end.signal, end.told)


def test_an_exit_code_that_only_torchs_agent_saw_counts():
    rank = Rank(2, pipe=-1)
    rank.report, rank.died = Report(pid=1, rank=2), 2.0

    assert rank.end(3).code == 3
