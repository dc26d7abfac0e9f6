"""Who is to blame, from plain values."""

import itertools

import pytest

from lockstep.launcher.failure import End, exit_code, find_first

RAISED = End(0, 0, "a", when=2.0, code=1, error="ValueError: x")
ECHOED = End(1, 1, "a", when=1.0, code=1, error="RuntimeError: Connection closed by peer", echo=True)
KILLED = End(2, 2, "a", when=3.0, code=None, signal=9)
ENDED = End(3, 3, "a", when=0.5, code=None, signal=15)
TOLD = End(4, 4, "a", when=0.1, code=None, signal=9, told=True)
CLEAN = End(5, 5, "a", when=0.0, code=0)


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ([CLEAN], None),
        ([CLEAN, TOLD], TOLD),
        ([TOLD, ENDED], ENDED),
        ([TOLD, ENDED, ECHOED], ENDED),
        ([ENDED, KILLED, TOLD], KILLED),
        ([ECHOED, KILLED], KILLED),
        ([ECHOED, RAISED, KILLED], RAISED),
    ],
)
def test_the_first_failure_is_the_cause_not_the_echo_or_what_we_did(ends, first):
    found = {find_first(order) for order in itertools.permutations(ends)}

    assert found == {first}


def test_the_exit_code_is_that_of_the_first():
    assert [exit_code(find_first([end])) for end in (CLEAN, RAISED, KILLED, ENDED)] == [0, 1, 137, 143]
