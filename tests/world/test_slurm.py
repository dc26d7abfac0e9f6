import pytest

from lockstep.errors import UsageError
from lockstep.world.slurm import first_host, port_of_job


@pytest.mark.parametrize(
    ("nodelist", "expected"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("gpu[01-04]", "gpu01"),
        ("gpu[3,5-6]", "gpu3"),
        ("rack[1-2]n[001-016]", "rack1n001"),
        ("gpu[7-9]-ib,login", "gpu7-ib"),
        ("host-1.example.org,host-2.example.org", "host-1.example.org"),
    ],
)
def test_the_first_host_of_a_node_list_is_found(nodelist, expected):
    assert first_host(nodelist) == expected


@pytest.mark.parametrize("nodelist", ["", "[", "gpu[1-2", ",a"])
def test_what_is_no_node_list_raises_and_is_shown(nodelist):
    with pytest.raises(UsageError) as error:
        first_host(nodelist)

    assert repr(nodelist) in str(error.value)


def test_ports_of_jobs_lie_below_those_that_linux_hands_out():
    assert {15000 <= port_of_job(str(job)) < 32768 for job in range(0, 10**6, 997)} == {True}
