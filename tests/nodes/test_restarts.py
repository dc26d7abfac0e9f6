"""What ranks of a second start find of the first, on several nodes: two launchers on loopback, which need no root."""

import subprocess

import pytest
from launching import PATIENCE, two_nodes

# What a rank of the first start has written must be gone; whatever the order in which they come, all find each other.
AGAIN = """
import os, torch, torch.distributed as dist, lockstep

start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
meeting = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
assert start == 0 or not meeting.check(["of the first start"])
if start == 0:
    meeting.set("of the first start", "")
{init}
x = torch.ones(2000)
dist.all_reduce(x)
if start == 0:
    os._exit(3)
print("sum", x[0].item(), flush=True)
"""

GONE = """
import os, sys, time, lockstep

if int(os.environ["RANK"]) == 1:
    sys.exit(5)
lockstep.init(timeout=1000)
"""


def launch(folder, source, *options):
    """Run both nodes to their end; give (code, output, errors) of each."""
    nodes = [
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for line in two_nodes(folder, source, "-n", "1", *options)
    ]
    try:
        said = [node.communicate(timeout=PATIENCE) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    return [(node.returncode, *texts) for node, texts in zip(nodes, said, strict=True)]


@pytest.mark.parametrize("init", ["lockstep.init()", 'dist.init_process_group("gloo")'])
def test_a_second_start_does_not_find_the_keys_of_the_first(tmp_path, init):
    found = launch(tmp_path, AGAIN.format(init=init), "--max-restarts", "1")
    assert [(code, out.split()[-2:]) for code, out, _ in found] == [(0, ["sum", "2.0"])] * 2, found


def test_node_0_ends_when_another_has_failed_for_good_whatever_its_ranks_wait_for(tmp_path):
    (first, _, err), (second, _, _) = launch(tmp_path, GONE)
    assert (first, second) == (2, 5), err
    assert "node 1 has ended: its ranks failed, and it does not start them again." in err
