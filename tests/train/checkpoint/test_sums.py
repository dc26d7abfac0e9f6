"""Checksums that come with the copy, and files that go to the disk past the system's memory."""

import mmap
import random
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep.train.checkpoint import files, sums

with_the_c_part = pytest.mark.skipif(not sums.WHILE_COPYING, reason="this processor has no carry-less multiplication")
BYTES = torch.frombuffer(bytearray(random.Random(0).randbytes(5000)), dtype=torch.uint8)


@with_the_c_part
@given(
    start=st.integers(0, 70),
    size=st.integers(0, 300) | st.integers(0, 4900),
    to=st.integers(0, 70),
    crc=st.integers(0, 2**32 - 1),
)
def test_a_copy_gives_the_bytes_and_zlibs_sum_and_touches_nothing_else(start, size, to, crc):
    source, memory = BYTES[start : start + size], torch.zeros(5100, dtype=torch.uint8)
    found = sums.copy(memory[to : to + len(source)], source, crc)

    assert zlib.crc32(source.numpy(), crc) == found == sums.crc32(memoryview(source.numpy()), crc)
    assert torch.equal(memory[to : to + len(source)], source)
    assert not memory[:to].any()
    assert not memory[to + len(source) :].any()


@pytest.fixture(scope="module")
def pages():
    found = mmap.mmap(-1, 100_000)
    found.write(random.Random(1).randbytes(100_000))
    return memoryview(found)


@pytest.mark.parametrize("begins", [0, 8], ids=["at a page", "elsewhere"])
@pytest.mark.parametrize("size", [0, 1, 9000, 12_288, 12_289, 65_536, 90_000])
def test_a_file_has_what_was_written(tmp_path, monkeypatch, pages, size, begins):
    """Some file systems cannot write directly, and most not from memory that begins in the middle of a page."""
    monkeypatch.setattr(files, "_CHUNK", 8192)
    monkeypatch.setattr(files, "_AT_ONCE", 16_384)
    data = pages[begins : begins + size]

    assert files.write(tmp_path / "file", data) == (size, zlib.crc32(data))
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("c_part", [pytest.param(True, marks=with_the_c_part), False], ids=["C", "zlib"])
def test_files_have_the_sums_that_the_manifest_says(tmp_path, monkeypatch, c_part):
    """Odd sizes too, behind which nothing lies where it is quick to write."""
    if not c_part:
        monkeypatch.setattr(sums, "_sums", None)
        monkeypatch.setattr(sums, "WHILE_COPYING", False)
    state = {str(n): torch.randn(n, generator=torch.Generator().manual_seed(n)).half() for n in (7, 1000, 3, 70_001)}
    checkpoint = lockstep.Checkpoint(tmp_path, values=state | {"bits": BYTES.clone()})
    checkpoint.save(wait=True)
    (path,) = checkpoint.latest().glob("*.safetensors")
    facts = f"[{path.stat().st_size},{zlib.crc32(path.read_bytes())}]"

    assert facts in (checkpoint.latest() / "manifest.json").read_text()
    found = {}
    assert lockstep.Checkpoint(tmp_path, values=found).restore()
    assert all(torch.equal(found[name], value) for name, value in state.items())


def test_a_process_that_is_forked_while_a_save_is_written_does_without_its_memory(tmp_path):
    checkpoint = lockstep.Checkpoint(tmp_path, values={"x": torch.zeros(3_000_000)})
    checkpoint.save()
    data = torch.utils.data.DataLoader(range(4), num_workers=2, multiprocessing_context="fork")

    assert sorted(int(value) for value in data) == [0, 1, 2, 3]
    checkpoint.wait()
    assert lockstep.Checkpoint(tmp_path, values={}).restore()
