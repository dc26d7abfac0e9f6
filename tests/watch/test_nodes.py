"""Ranks that hang on several nodes: two launchers on loopback, each of which sees its own ranks only."""

import contextlib
import functools
import os
import re
import subprocess
from datetime import timedelta

import pytest
import torch.distributed as dist
from launching import SOAK, two_nodes, until

from lockstep.launcher import others
from lockstep.launcher.others import Others
from lockstep.watch.verdict import Node, Seen, report

SCRIPT = """\
import time, torch, torch.distributed as dist, lockstep
{init}
x = torch.ones(4)
dist.all_reduce(x)
def load():
    time.sleep(1000)
if dist.get_rank() == {away}:
    load()
dist.all_reduce(x)
"""


@contextlib.contextmanager
def both(folder, source, ranks):
    """Two nodes that run a script; the files that take their errors."""
    files, started = [folder / "node0", folder / "node1"], []
    try:
        lines = two_nodes(folder, source, "-n", str(ranks), "--watch", "--stall", "0.5")
        for line, file in zip(lines, files, strict=True):
            with file.open("w") as errors:
                started.append(subprocess.Popen(line, stderr=errors, stdout=subprocess.DEVNULL))
        yield files
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


@pytest.mark.parametrize(
    ("init", "ranks", "call", "waiting"),
    [
        pytest.param('dist.init_process_group("gloo")', 1, "all_reduce #2 of 4 float32", "rank 0 waits", marks=SOAK),
        ("lockstep.init()", 2, "all_reduce #2 (sum) of 4 float32", "ranks 0, 1, 2 wait"),
    ],
    ids=["gloo", "hierarchy"],
)
def test_h07_each_node_names_the_rank_that_does_not_come_wherever_it_is(tmp_path, init, ranks, call, waiting):
    """What a rank elsewhere is at, its own launcher has told; stacks are printed where the rank is."""
    away = 2 * ranks - 1
    cause = (
        f"rank {away} never entered {call}, in which {waiting}, train.py:9; rank {away} is in `time.sleep(1000)`, "
        f"train.py:6, under `if dist.get_rank() == {away}`\n"
    )

    def said(node):
        """What is before and after the sentence, once all is written."""
        before, found, after = files[node].read_text().rpartition(cause)
        return (before, after) if found and f"lockstep: node {1 - node} (" in after else None

    with both(tmp_path, SCRIPT.format(init=init, away=away), ranks) as files:
        texts = [until(functools.partial(said, node), cause) for node in range(2)]

    for node, (before, after) in enumerate(texts):
        assert re.fullmatch(r"lockstep: no rank has finished a step for \d+ s: ", before.splitlines()[-1])
        numbers = [str(node * ranks + rank) for rank in range(ranks)]
        assert re.findall(r"^lockstep: rank (\d+): ", after, re.M) == numbers
        others = ", ".join(str((1 - node) * ranks + rank) for rank in range(ranks))
        assert f"({os.uname().nodename}) prints the stacks of rank{'s' * (ranks > 1)} {others}\n" in after
    assert ["in load\n" in after for _, after in texts] == [False, True]


def meeting(store, node, nodes):
    """What the agent of a node gets when the nodes have met."""
    here = Others()
    info = dist.elastic.rendezvous.RendezvousInfo(dist.PrefixStore("start", store), node, nodes, None)
    here.meet(info)
    return here


@pytest.fixture
def store():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))


def test_what_nodes_have_told_is_forgotten_when_ranks_go_on(store):
    first, second = (meeting(store, node, 2) for node in range(2))

    asked = first.ask([Seen(0, 7)], 60.0)
    answer = second.ask([Seen(1, 6, stack="  File", place="a.py:3")], 60.0)
    until(lambda: not asked.missing and not answer.missing, "both have answered")
    assert asked.came == [Node(1, os.uname().nodename, (Seen(1, 6, place="a.py:3"),))]
    assert [node.ranks for node in answer.came] == [(Seen(0, 7),)]

    second.forget()
    until(lambda: not store.check(["start/lockstep/stall/1"]), "it is gone")
    assert first.ask([Seen(0, 8)], 0.0).missing == [1]
    until(lambda: not first._works and not second._works, "all was tried")


def test_a_node_that_tells_nothing_holds_nobody_up_and_is_said(store):
    here = meeting(store, 0, 3)
    here._store.set(others._key(2), others.write(Node(2, "c", (Seen(2),))))

    asked = here.ask([Seen(0)], 1.0)
    until(lambda: not here._works, "it is given up")
    assert asked.missing == [1]

    said = report("why", [Seen(0)], 120.0, asked.came, asked.missing).splitlines()
    assert said[0] == "lockstep: no rank of this node has finished a step for 120 s: why"
    assert said[2] == "lockstep: node 2 (c) prints the stacks of rank 2"
    assert said[3].startswith("lockstep: node 1 has not told where its ranks are: ")


def test_a_node_alone_asks_nobody(store):
    assert meeting(store, 0, 1).ask([Seen(0)], 60.0).missing == []


def test_a_store_that_has_ended_is_an_answer_that_does_not_come():
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", kept.port, is_master=False, timeout=timedelta(seconds=1))
    here = meeting(client, 1, 2)
    del kept

    asked = here.ask([Seen(1)], 60.0)
    until(lambda: not here._works, "it was tried")

    assert asked.missing == [0]
