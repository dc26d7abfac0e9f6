"""`lockstep doctor --nnodes`: real launchers on loopback; in namespaces, all of it."""

import concurrent.futures
import json
import socket

import pytest
from click.testing import CliRunner
from launching import SOAK
from namespaces import LOCKSTEP, nodes, results, why_not

from lockstep_cli.doctor.command import doctor
from lockstep_cli.doctor.line import broken, fine
from lockstep_cli.doctor.nodes import Place, Together, judge, look
from lockstep_cli.doctor.speed import Speed

PAGE = {"host": "a", "lines": [], "python": "3.11.2", "nccl": "2.27.3", "gpus": ["H100", "H100"]}


def place(node, seconds=30.0, port=None):
    if port is None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    return Place(2, node, "127.0.0.1", port, seconds)


def states(together, node=0):
    return {line.about: (line.state, line.found) for line in judge(together, node)}


def test_nodes_show_each_other_their_pages_and_measure_the_way_between_them(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    pages = [{**PAGE, "gpus": [], "lines": [fine("gloo", "there")]}, {**PAGE, "gpus": [], "host": "ünder"}]
    pages[1]["lines"] = [broken("/dev/shm", "not there", "Mount it.")]
    here = place(0)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = list(pool.map(look, pages, [here, here._replace(node=1)]))

    for node, together in enumerate(found):
        assert together.trouble == ""
        assert list(together.pages) == json.loads(json.dumps(pages))
        (speed,) = together.speed
        assert (speed.backend, speed.trouble) == ("gloo", "")
        assert speed.latency > 0
        assert speed.bandwidth > 0
        assert together.interface == "lo"
        assert ", by lo" in states(together, node)["2 nodes, gloo"][1]
    assert states(found[0], 0)["node 1 (ünder)"] == ("broken", "/dev/shm: not there")
    assert states(found[1], 1)["node 0 (a)"] == ("fine", "1 fine, 0 doubtful, 0 broken")
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_does_not_come_is_a_broken_line_and_no_hang():
    together = look(PAGE, place(0, seconds=1.0))

    (line,) = judge(together, 0)
    assert (line.about, line.state) == ("nodes", "broken")
    assert line.found.startswith("node 1 of 2 did not come within 1 s; node 0 (")
    assert line.remedy.startswith("Start `lockstep doctor` there too, ")
    assert line.remedy.endswith("Longer: --timeout SECONDS.")


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({}, {}),
        ({"python": "3.12.1"}, {"python": ("doubtful", "3.11.2 on node 0, 3.12.1 on node 1")}),
        ({"nccl": ""}, {"nccl": ("doubtful", "2.27.3 on node 0, none on node 1")}),
        ({"gpus": ["H100"]}, {"gpus": ("doubtful", "2 x H100 on node 0, 1 x H100 on node 1")}),
    ],
)
def test_what_differs_between_nodes_is_said(other, expected):
    found = states(Together((PAGE, {**PAGE, **other})))
    del found["node 1 (a)"]

    assert found == expected


@pytest.mark.parametrize(
    ("speed", "state"),
    [
        (Speed("gloo", 200.0, 0.11), "fine"),
        (Speed("gloo", 200.0, 0.011), "doubtful"),
        (Speed("gloo", 20_000.0, 0.11), "doubtful"),
        (Speed("nccl", 200.0, 0.11), "doubtful"),
        (Speed("nccl", trouble="LateRankError: rank 1"), "broken"),
    ],
)
def test_a_network_far_slower_than_ordinary_ones_is_doubtful(speed, state):
    assert states(Together((PAGE, PAGE), (speed,)))[f"2 nodes, {speed.backend}"][0] == state


def test_what_a_rank_left_counts_although_the_run_failed_later():
    found = states(Together((PAGE, PAGE), (Speed("gloo", 200.0, 0.11),), "eth0", "rank 1 of 2 died"))

    assert found["nodes"] == ("broken", "rank 1 of 2 died")
    assert found["2 nodes, gloo"][0] == "fine"


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--nnodes=2"], "where is node 0?"), (["--nnodes=2", "--node-rank=2", "--master-addr=a"], "from 0 to 1")],
)
def test_options_that_cannot_be_are_refused_before_anything_is_measured(options, words):
    done = CliRunner().invoke(doctor, options)

    assert done.exit_code == 2
    assert words in done.output


@SOAK
@pytest.mark.skipif(bool(why_not()), reason=why_not() or "can be")
def test_the_doctor_of_two_machines_ends_with_1_on_both_if_one_has_something_broken():
    with nodes(2) as made:
        where = ("doctor", "--json", "--nnodes", 2, "--master-addr", made[0].address)
        healthy = made[0].start(*LOCKSTEP, *where, "--node-rank", 0)
        ill = made[1].start("sh", "-c", 'ulimit -n 200 && exec "$@"', "sh", *LOCKSTEP, *where, "--node-rank", 1)
        found = results([healthy, ill])

    assert [code for code, _, _ in found] == [1, 1], found
    lines = [{line["about"]: line for line in json.loads(out)["lines"]} for _, out, _ in found]
    assert lines[0][f"node 1 ({made[1].name})"]["found"].startswith("open files: 200 a process")
    assert all(page["2 nodes, gloo"]["found"].endswith(", by eth0") for page in lines)
