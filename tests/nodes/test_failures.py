"""The cable pulled in mid-step, a node killed and replaced, a node that leaves: on namespaces, with real launchers."""

import os
import signal

import pytest
from launching import SOAK, until
from namespaces import nodes, results, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "can be")

# Goes on until it is started again; what happens is seen in a folder.
WORK = """
import os, sys, pathlib, torch, lockstep

folder, starts = pathlib.Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
world = lockstep.init(timeout=60 if starts else 6)
(folder / f"began{starts}-{world.rank}").write_text(str(os.getpid()))
try:
    for step in range(10 if starts else 1000000):
        lockstep.total(torch.ones(3000))
except lockstep.LockstepError as error:
    (folder / f"lost{world.rank}").write_text(f"{type(error).__name__}: {error}")
    raise
print([world.rank, world.size, starts], flush=True)
"""

# Alone it waits for another node to come; with one it adds up and ends.
JOIN = """
import os, sys, time, pathlib, torch, torch.distributed as dist, lockstep

{init}
if os.environ["WORLD_SIZE"] == "1":
    (pathlib.Path(sys.argv[1]) / "alone").touch()
    time.sleep(1000)
x = torch.ones(1)
dist.all_reduce(x)
print([os.environ["RANK"], x.item(), os.environ["TORCHELASTIC_RESTART_COUNT"]], flush=True)
"""


def begin(made, folder, *options, ranks=1, numbers=None):
    where = ("-n", ranks, "--nnodes", len(made), "--master-addr", made[0].address, *options)
    return [made[k].lockstep(WORK, *where, "--node-rank", k, arguments=(folder,)) for k in numbers or range(len(made))]


def seen(folder, *names):
    until(
        lambda: all((folder / name).exists() for name in names),
        lambda: f"{names} in {sorted(path.name for path in folder.iterdir())}",
    )


def errors(found):
    """To be read when a test fails."""
    return "\n".join(err for _, _, err in found)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=SOAK)])
def test_a_pulled_cable_is_reported_on_both_sides_and_the_run_goes_on_when_it_is_back(tmp_path, ranks):
    size = 2 * ranks
    with nodes(2) as made:
        started = begin(made, tmp_path, "--max-restarts", "2", ranks=ranks)
        seen(tmp_path, *(f"began0-{rank}" for rank in range(size)))
        made[1].unplug()
        # The launcher ends the ranks of a node as soon as one has failed: the others may not come to say it.
        for node in range(2):
            own = [tmp_path / f"lost{rank}" for rank in range(node * ranks, (node + 1) * ranks)]
            until(lambda own=own: any(path.exists() for path in own), f"a rank of node {node} has heard")
        made[1].plug()
        found = results(started)
        said = [path.read_text() for path in tmp_path.glob("lost*")]

    assert [code for code, _, _ in found] == [0, 0], errors(found)
    assert all(text.startswith(("LateRankError: ", "LostRankError: ")) for text in said), said
    for _, _, err in found:
        assert "lockstep: restart 1 of 2: rank " in err


@SOAK
def test_a_node_that_was_killed_is_replaced(tmp_path):
    with nodes(2) as made:
        started = begin(made, tmp_path, "--max-restarts", "1")
        seen(tmp_path, "began0-0", "began0-1")
        os.killpg(started[1].pid, signal.SIGKILL)
        (again,) = begin(made, tmp_path, "--max-restarts", "1", numbers=[1])
        found = results([started[0], again])

    assert [code for code, _, _ in found] == [0, 0], errors(found)
    assert [out.splitlines()[-1] for _, out, _ in found] == ["[0, 2, 1]", "[1, 2, 1]"]


@pytest.mark.parametrize(
    "init", ["lockstep.init()", pytest.param('dist.init_process_group("gloo")', marks=SOAK)], ids=["lockstep", "gloo"]
)
def test_a_node_that_comes_late_joins_an_elastic_run(tmp_path, init):
    """Torch tells the address of the ranks' store once: a later node waited for it in vain, and all for that node."""
    with nodes(2) as made:
        options = ("-n", 1, "--nnodes", "1:2", "--rdzv-backend", "c10d", "--max-restarts", "3")
        where = ("--rdzv-endpoint", f"{made[0].address}:29400", "--rdzv-conf", "last_call_timeout=1")
        started = [made[0].lockstep(JOIN.format(init=init), *options, *where, arguments=(tmp_path,))]
        seen(tmp_path, "alone")
        started.append(made[1].lockstep(JOIN.format(init=init), *options, *where, arguments=(tmp_path,)))
        found = results(started)

    assert [code for code, _, _ in found] == [0, 0], errors(found)
    assert sorted(out.splitlines()[-1] for _, out, _ in found) == ["['0', 2.0, '1']", "['1', 2.0, '1']"]


@SOAK
def test_l13_others_go_on_without_a_node_that_leaves_an_elastic_run(tmp_path):
    """Node leaves: others hung, or found the rendezvous closed."""
    with nodes(2) as made:
        options = ("-n", 1, "--nnodes", "1:2", "--rdzv-backend", "c10d", "--max-restarts", "3")
        where = ("--rdzv-endpoint", f"{made[0].address}:29400")
        quick = ("--rdzv-conf", "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3")
        started = [node.lockstep(WORK, *options, *where, *quick, arguments=(tmp_path,)) for node in made]
        seen(tmp_path, "began0-0", "began0-1")
        started[1].terminate()
        found = results(started)

    assert [code for code, _, _ in found] == [0, 143], errors(found)
    assert found[0][1].splitlines()[-1] == "[0, 1, 1]"
