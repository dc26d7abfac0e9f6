"""Real machines as far as one machine can be several: namespaces on a bridge, each with its own `lockstep run`."""

import ast
import sys

import pytest
from launching import SOAK
from namespaces import nodes, results, why_not
from ranks import run_ranks

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "can be")

TRAINING = """
import sys, torch, lockstep
from torch.nn.functional import cross_entropy

world = lockstep.init(seed=3)
torch.manual_seed(1)
inputs, labels = torch.randn(96, 6, dtype=torch.float64), torch.randint(0, 4, (96,))
plain = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
model = lockstep.replicate(plain.double())
update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
train = lockstep.DataLoader(torch.utils.data.TensorDataset(inputs, labels), batch_size=14, shuffle=True)
for epoch in range(3):
    for x, y in train:
        with update:
            update.backward(cross_entropy(model(x), y, reduction="none"))
found = [p.sum().item() for p in model.parameters()]
world.print([world.size, world.nodes, found])
"""
TELL = "import lockstep, torch, os\nw = lockstep.init()\nprint([w.rank, w.node, w.nodes, w.size], flush=True)\n"
QUICK = ("--rdzv-conf", "timeout=2")


def static(made, node, *more, size=None):
    """The options of one node."""
    return ("--nnodes", size or len(made), "--node-rank", node, "--master-addr", made[0].address, *more)


def ours(err):
    """Lockstep's own lines, without what it says of every run."""
    return [
        line for line in err.splitlines() if line.startswith("lockstep: ") and " meets the other nodes by " not in line
    ]


def alone(rank):
    """The same script in a process of its own."""
    space = {}
    exec(TRAINING, space)
    return space["found"]


@pytest.mark.parametrize("counts", [(2, 2), pytest.param((1, 2, 1), marks=SOAK)], ids=str)
def test_l11_training_on_several_nodes_equals_one_process(counts):
    """Gloo bound to loopback, or a wrong card: here no node's own name resolves, and gloo goes the way to node 0."""
    with nodes(len(counts)) as made:
        together = results([node.lockstep(TRAINING, "-n", counts[k], *static(made, k)) for k, node in enumerate(made)])

    assert [code for code, _, _ in together] == [0] * len(counts), together
    size, many, found = ast.literal_eval(together[0][1])
    assert (size, many) == (sum(counts), len(counts))
    assert found == pytest.approx(run_ranks(alone, 1, backend=None)[0], rel=1e-5)
    for node, (_, _, err) in zip(made, together, strict=True):
        assert f"lockstep: {node.name} meets the other nodes by eth0, {node.address} " in err


@SOAK
def test_l10_an_elastic_run_meets_at_an_alias_that_is_no_nodes_name():
    """Rendezvous endpoint given as an alias: nobody hosted the store."""
    with nodes(2) as made:
        hosts = f"127.0.0.1 localhost\n{made[0].address} meetingpoint\n"
        where = ("--nnodes", "1:4", "--rdzv-backend", "c10d", "--rdzv-endpoint", "meetingpoint:29401")
        quick = ("--rdzv-conf", "last_call_timeout=2")
        found = results([node.lockstep(TELL, "-n", "1", *where, *quick, hosts=hosts) for node in made])

    assert [code for code, _, _ in found] == [0, 0], found
    assert sorted(line for _, out, _ in found for line in out.splitlines()) == ["[0, 0, 2, 2]", "[1, 1, 2, 2]"]


def test_a_name_that_does_not_resolve():
    with nodes(1) as made:
        ((code, _, err),) = results(
            [made[0].lockstep(TELL, "--nnodes", "2", "--master-addr", "nowhere.invalid", *QUICK)]
        )

    assert code == 2
    (line,) = ours(err)
    assert line.startswith(f"lockstep: the name nowhere.invalid does not resolve on {made[0].name} (")


@SOAK
def test_a_name_that_resolves_to_loopback_on_one_node():
    """What Debian writes into /etc/hosts of the very node that is to be node 0."""
    with nodes(1) as made:
        ((code, _, err),) = results(
            [made[0].lockstep(TELL, "--nnodes", "2", "--master-addr", "master", hosts="127.0.1.1 master\n")]
        )

    assert code == 2
    (line,) = ours(err)
    assert line.startswith("lockstep: master resolves to 127.0.1.1 here, which is loopback")


@SOAK
def test_a_port_where_nobody_listens():
    with nodes(2) as made:
        ((code, _, err),) = results([made[1].lockstep(TELL, "-n", "1", *static(made, 1), *QUICK)])

    assert code == 2
    (line,) = ours(err)
    assert line.startswith(
        f"lockstep: node 0 could not be reached at {made[0].address}, port 29500, within 2 s from "
        f"{made[1].address} on eth0: nothing listens there."
    )


def test_a_firewalled_port_and_the_node_that_is_missing():
    """Node 1's packets are dropped by node 0: one says that nobody answers, the other who is missing."""
    with nodes(2) as made:
        made[0].ip("route", "add", "blackhole", f"{made[1].address}/32")
        node0 = made[0].lockstep(TELL, "-n", "1", *static(made, 0), "--rdzv-conf", "timeout=4")
        node1 = made[1].lockstep(TELL, "-n", "1", *static(made, 1), *QUICK)
        (code0, _, err0), (code1, _, err1) = results([node0, node1])

    assert (code0, code1) == (2, 2)
    assert ours(err0)[-1].startswith(f"lockstep: node 1 of 2 did not come within 4 s; node 0 ({made[0].name}) came.")
    assert "on eth0: no answer: a firewall drops the packets" in ours(err1)[-1]


@SOAK
@pytest.mark.parametrize("interface", ["lo", "ib7"])
def test_an_interface_that_cannot_be(interface):
    with nodes(1) as made:
        env = {"GLOO_SOCKET_IFNAME": interface}
        ((code, _, err),) = results([made[0].lockstep(TELL, "-n", "1", *static(made, 0, size=2), env=env)])

    assert code == 2
    assert ours(err)[0].startswith(f"lockstep: GLOO_SOCKET_IFNAME={interface}: ")
    assert ours(err)[0].endswith(f"The way to {made[0].address} is eth0.")


def add_dead_end(node):
    """An interface dead0 that is up and has an address, of a network that ends here."""
    node.ip("link", "add", "dead0", "type", "veth", "peer", "name", "dead1")
    node.ip("addr", "add", "10.99.0.2/24", "dev", "dead0")
    node.ip("link", "set", "dead0", "up")
    node.ip("link", "set", "dead1", "up")


@SOAK
def test_an_interface_that_other_nodes_do_not_reach():
    with nodes(2) as made:
        add_dead_end(made[1])
        node0 = made[0].lockstep(TELL, "-n", "1", *static(made, 0), *QUICK)
        node1 = made[1].lockstep(TELL, "-n", "1", *static(made, 1), *QUICK, env={"GLOO_SOCKET_IFNAME": "dead0"})
        found = results([node0, node1])

    assert [code for code, _, _ in found] == [2, 2]
    said = {ours(err)[-1] for _, _, err in found}
    assert len(said) == 1
    assert f"cannot reach node 1 ({made[1].name}) at 10.99.0.2 on dead0: " in said.pop()


@SOAK
def test_other_versions_are_said_by_both_nodes():
    patch = "from importlib import metadata; metadata.version = lambda name: '0.0.9'\n"
    older = [sys.executable, "-c", patch + "from lockstep_cli import main; main()"]
    with nodes(2) as made:
        node0 = made[0].lockstep(TELL, "-n", "1", *static(made, 0))
        node1 = made[1].lockstep(TELL, "-n", "1", *static(made, 1), launcher=older)
        found = results([node0, node1])

    assert [code for code, _, _ in found] == [2, 2]
    said = {ours(err)[-1] for _, _, err in found}
    assert len(said) == 1
    assert f"node 1 ({made[1].name}) has lockstep 0.0.9. Install the same on every node." in said.pop()


@SOAK
def test_two_launchers_with_one_number():
    """The second knows it, also where node 0 has given up before."""
    with nodes(3) as made:
        found = results(
            [
                node.lockstep(TELL, "-n", "1", *static(made, min(k, 1)), "--rdzv-conf", f"timeout={60 if k else 6}")
                for k, node in enumerate(made)
            ]
        )

    said = [ours(err)[-1] for _, _, err in found]
    assert [code for code, _, _ in found] == [2, 2, 2], found
    assert sum(line.startswith("lockstep: node 1 is there already: ") for line in said) == 1, said
    assert said[0].startswith("lockstep: node 2 of 3 did not come within 6 s; ")


@SOAK
def test_node_0_that_is_not_where_others_look_for_it_says_so():
    """What is left out most often: --node-rank, without which each node is node 0."""
    with nodes(2) as made:
        alike = ("-n", "1", "--nnodes", "2", "--master-addr", made[0].address)
        found = results([node.lockstep(TELL, *alike) for node in made])

    assert [code for code, _, _ in found] == [2, 2]
    late = "lockstep: node 1 of 2 did not come within 30 s"
    (first,), (second,) = (ours(err) for _, _, err in found)
    assert first.startswith(f"{late}; node 0 ({made[0].name}) came. ")
    assert second.startswith(
        f"{late}: this launcher is node 0, but {made[0].address} is no address of this machine, and the others look "
        f"for node 0 there. Write --node-rank on every node"
    )


@pytest.mark.parametrize("numbers", [(2, 3), pytest.param((3, 2), marks=SOAK)], ids=str)
def test_other_numbers_of_nodes_are_said_though_one_waits_for_more(numbers):
    with nodes(2) as made:
        found = results(
            [node.lockstep(TELL, "-n", "1", *static(made, k, size=numbers[k])) for k, node in enumerate(made)]
        )

    assert [code for code, _, _ in found] == [2, 2]
    for _, _, err in found:
        (line,) = ours(err)
        assert line == (
            f"lockstep: node 0 ({made[0].name}) has --nnodes {numbers[0]}, node 1 ({made[1].name}) has --nnodes "
            f"{numbers[1]}. Write the same on every node."
        )


@SOAK
@pytest.mark.parametrize("elastic", [False, True], ids=["static", "c10d"])
def test_a_server_of_another_kind_at_the_port(elastic):
    """It takes the connection and says nothing that a store would."""
    web = [sys.executable, "-m", "http.server", "29400", "--bind", "0.0.0.0"]
    with nodes(2) as made:
        made[0].start(*web)
        where = ("--nnodes", "2", "--rdzv-endpoint", f"{made[0].address}:29400", "--node-rank", "1")
        where += ("--rdzv-backend", "c10d") * elastic
        ((code, _, err),) = results([made[1].lockstep(TELL, "-n", "1", *where)])

    assert code == 2
    (line,) = ours(err)
    option = "--rdzv-endpoint" if elastic else "--master-port"
    assert f"on eth0: something else than lockstep answers there. Choose another port with {option}, " in line


@SOAK
def test_a_cable_that_is_out_from_the_beginning():
    with nodes(2) as made:
        made[1].unplug()
        ((code, _, err),) = results([made[1].lockstep(TELL, "-n", "1", *static(made, 1), *QUICK)])

    assert code == 2
    assert f"from {made[1].address} on eth0: eth0 is down: its cable or the switch behind it" in ours(err)[-1]


@SOAK
def test_an_elastic_node_that_others_do_not_reach():
    with nodes(2) as made:
        add_dead_end(made[1])
        where = ("-n", "1", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{made[0].address}:29400")
        node0 = made[0].lockstep(TELL, *where)
        node1 = made[1].lockstep(TELL, *where, env={"GLOO_SOCKET_IFNAME": "dead0"})
        found = results([node0, node1])

    assert [code for code, _, _ in found] == [2, 2]
    said = {ours(err)[-1] for _, _, err in found}
    assert len(said) == 1
    assert f"({made[1].name}) at 10.99.0.2 on dead0: " in said.pop()


def test_nothing_but_sentences_where_a_connection_ends():
    """Torch's C++ wrote its frames for each, also where all had gone well."""
    with nodes(2) as made:
        found = results([node.lockstep(TELL, "-n", "1", *static(made, k)) for k, node in enumerate(made)])
        ((_, _, lost),) = results([made[1].lockstep(TELL, "-n", "1", *static(made, 1), *QUICK)])

    for err in (lost, *(err for _, _, err in found)):
        assert all(line.startswith("lockstep: ") for line in err.splitlines()), err
