"""What ranks of a second start find of the first, on several nodes: two launchers on loopback, which need no root."""

import socket
import subprocess
import sys

import pytest
from launching import LOCKSTEP, PATIENCE

# Node 0's rank comes later than node 1's, which must wait for it rather than find what it wrote the time before.
AGAIN = """
import os, time, torch, torch.distributed as dist, lockstep

start, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if start and rank == 0:
    time.sleep(1.5)
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
    """Start both nodes; give (code, output, errors) of each."""
    script = folder / "train.py"
    script.write_text(source)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = ["-n", "1", "--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port), *options]
    nodes = [
        subprocess.Popen(
            [*LOCKSTEP, "run", *where, "--node-rank", str(node), str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    try:
        said = [node.communicate(timeout=PATIENCE) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    return [(node.returncode, *texts) for node, texts in zip(nodes, said, strict=True)]


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.1 for several nodes is tried on Linux")
@pytest.mark.parametrize("init", ["lockstep.init()", 'dist.init_process_group("gloo")'])
def test_a_second_start_does_not_find_the_keys_of_the_first(tmp_path, init):
    found = launch(tmp_path, AGAIN.format(init=init), "--max-restarts", "1")
    assert [(code, out.split()[-2:]) for code, out, _ in found] == [(0, ["sum", "2.0"])] * 2, found


def test_node_0_ends_when_another_has_failed_for_good_whatever_its_ranks_wait_for(tmp_path):
    (first, _, err), (second, _, _) = launch(tmp_path, GONE)
    assert (first, second) == (2, 5), err
    assert "node 1 has ended: its ranks failed, and it does not start them again." in err
