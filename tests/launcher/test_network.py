"""Decisions about the network, by table; real machines are in tests/nodes."""

import errno

import pytest

from lockstep.errors import UsageError
from lockstep.launcher import cards, elastic, network
from lockstep.launcher.cards import Card
from lockstep.launcher.link import Link
from lockstep.launcher.plan import Machine, Meeting, Wish, make_plan

INTERFACES = {"lo": ("127.0.0.1", "::1"), "eth0": ("10.0.0.2", "fd00::2"), "ib0": ("10.1.0.2",), "tun0": ()}
LINK = Link("a", "10.0.0.1", 29500, "10.0.0.2", "eth0", is_here=False)
CARD = Card("a", 7, "1.0", "2.13.0", 2, "2", "10.0.0.1", 4000, "eth0", 0, "2")


@pytest.mark.parametrize(
    ("host", "address", "refused"),
    [
        ("gpu0", "127.0.1.1", True),  # Debian's own line in /etc/hosts
        ("gpu0", "::1", True),
        ("gpu0", "10.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", False),  # several nodes on one machine, as in tests
        ("localhost", "127.0.0.1", False),
    ],
)
def test_a_name_that_is_loopback_is_refused_and_an_address_that_was_written_is_meant(host, address, refused):
    assert bool(network.loopback_name(host, address)) == refused


@pytest.mark.parametrize(
    ("address", "here"),
    [("10.0.0.2", True), ("fd00::2", True), ("127.0.0.2", True), ("10.0.0.3", False), ("fd00::3", False)],
)
def test_l10_whoever_has_the_address_keeps_the_store(address, here):
    """Rendezvous endpoint given as an address or alias: nobody hosted the store."""
    assert network.is_here(address, INTERFACES) == here


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ("", ""),
        ("eth0", ""),
        ("ib0", ""),  # another network, which the trial between neighbours tells
        ("eth0,ib0", ""),
        ("eth1", "there is no interface eth1 that is up here, but lo and eth0 and ib0 and tun0."),
        ("lo", "lo is loopback"),
        ("tun0", "tun0 has no address"),
    ],
)
def test_l11_an_interface_that_cannot_work_is_said(wanted, words):
    """Gloo bound to loopback or to the wrong interface."""
    said = network.wrong_interface(wanted, LINK, INTERFACES)

    assert words in said
    assert bool(said) == bool(words)


def test_l11_ranks_keep_to_the_interface_that_leads_to_node_0_unless_the_user_named_another():
    plan = make_plan(Wish(nproc_per_node="2", nnodes="2", master_addr="a"), Machine(0, ((0, 1),)), {})
    environ = {"NCCL_SOCKET_IFNAME": "ib"}

    put = network.put_in(plan, LINK, environ)

    assert [seat.environment.get("GLOO_SOCKET_IFNAME") for seat in put.seats] == ["eth0", "eth0"]
    assert [seat.environment.get("NCCL_SOCKET_IFNAME") for seat in put.seats] == [None, None]
    assert "meets the other nodes by eth0, 10.0.0.2 (the way to a (10.0.0.1))" in network.say(put)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), "nothing listens there"),
        (TimeoutError(), "a firewall drops the packets"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no route to host: the network is down, or a firewall"),
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign"), "Cannot assign"),
    ],
)
def test_each_obstacle_has_its_words(error, words):
    assert words in network.obstacle(error)


@pytest.mark.parametrize(
    ("settings", "first", "seconds"),
    [({}, True, 30), ({}, False, 600), ({"timeout": 5}, False, 5), ({"join_timeout": 7}, True, 7)],
)
def test_how_long_nodes_wait(settings, first, seconds):
    assert network.patience(Meeting("static", "a:1", "", settings), first) == seconds


@pytest.mark.parametrize(
    ("endpoint", "found"),
    [("a:1", ("a", 1)), ("a", ("a", 29400)), ("[fd00::1]:5", ("fd00::1", 5)), ("fd00::1", ("fd00::1", 29400))],
)
def test_endpoints(endpoint, found):
    assert network.read_endpoint(endpoint) == found


@pytest.mark.parametrize("endpoint", ["a:b", "a:70000", "a:"])
def test_an_endpoint_without_a_port_number_is_refused(endpoint):
    with pytest.raises(UsageError, match=r"HOST:PORT"):
        network.read_endpoint(endpoint)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({}, ""),
        ({"ranks": 3, "wanted": "3"}, ""),  # written on both: meant
        ({"ranks": 3, "wanted": "auto"}, "node 1 (b) 3, and nobody wrote these numbers"),
        ({"torch": "2.12.0"}, "node 0 (a) has torch 2.13.0, node 1 (b) has torch 2.12.0."),
        ({"lockstep": "0.9"}, "node 1 (b) has lockstep 0.9."),
        ({"restarts": 2}, "--max-restarts 0, node 1 (b) has 2"),
        ({"nodes": "3"}, "node 0 (a) has --nnodes 2, node 1 (b) has --nnodes 3."),
    ],
)
def test_what_does_not_fit_between_nodes(other, words):
    said = cards.disagreement([CARD, CARD._replace(host="b", **other)])

    assert words in said
    assert bool(said) == bool(words)


def test_what_does_not_fit_is_seen_before_all_have_come():
    assert "node 2 (b) has lockstep 0.9." in cards.disagreement([CARD, None, CARD._replace(host="b", lockstep="0.9")])


def test_a_time_that_is_no_number_is_refused():
    with pytest.raises(UsageError, match="--rdzv-conf timeout=3s: write a number of seconds"):
        network.patience(Meeting("static", "a:1", "", {"timeout": "3s"}))


def test_a_backend_that_torch_does_not_have_is_refused():
    link = Link("a", "127.0.0.1", 1, "127.0.0.1", "lo", is_here=True)
    with pytest.raises(UsageError, match="--rdzv-backend c10 cannot be used: "):
        elastic.join(Meeting("c10", "a:1", "", {}), link, 0)


def test_the_nodes_that_are_missing_are_named():
    said = cards.missing([CARD, None, CARD._replace(host="c"), None], 30.0)

    assert said.startswith("nodes 1 and 3 of 4 did not come within 30 s; node 0 (a), node 2 (c) came.")


def test_a_card_survives_the_way_through_the_store():
    assert cards.read(CARD.write()) == CARD
