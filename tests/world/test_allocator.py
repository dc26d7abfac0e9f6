"""What a step frees is there for the next one: seen by the pages that the kernel has to give anew."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="of glibc")

SOURCE = """
import lockstep, resource, torch

{start}

def step():
    return [torch.ones(2**18) for _ in range(64)]  # a MiB each, 16384 pages in all

for _ in range(8):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(start, **environment):
    """Pages that the last of a few equal steps had to be given."""
    done = subprocess.run(
        [sys.executable, "-c", SOURCE.format(start=start)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | environment,
    )
    return int(done.stdout)


def test_a_rank_on_the_cpu_keeps_what_it_frees():
    assert faults("lockstep.init(device='cpu')") < 1_000


def test_who_has_set_the_allocator_keeps_that():
    assert faults("lockstep.init(device='cpu')", MALLOC_MMAP_THRESHOLD_="131072") > 10_000
