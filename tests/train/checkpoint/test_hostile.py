"""Checkpoints made by somebody who means ill: a clear error, nothing outside touched, no more memory than the files."""

import contextlib
import copy
import json
import os
import resource
import shutil
import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import run_ranks

import lockstep
from lockstep.train.checkpoint import manifest

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint with something of each kind."""
    directory = tmp_path_factory.mktemp("good")
    values = {
        "weights": torch.randn(20, 30).T,
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "plain": [1, (2.5, float("nan")), {3: b"4"}, None, torch.Size([2]), torch.float16],
    }
    checkpoint = lockstep.Checkpoint(directory, values=values)
    checkpoint.save(wait=True)
    return checkpoint.latest()


def content_of(folder):
    return json.loads((folder / "manifest.json").read_text())["content"]


def forge(folder, content):
    """Write a manifest whose own checksum fits, and the right sums of the files unless they are to be wrong."""
    for name in [*content.get("files", {})] if isinstance(content, dict) and isinstance(content["files"], dict) else []:
        with contextlib.suppress(OSError, ValueError):
            data = (folder / name).read_bytes()
            content["files"][name] = [len(data), zlib.crc32(data)]
    text = json.dumps(content).encode()
    (folder / "manifest.json").write_bytes(b'{"crc32": "%08x", "content": ' % zlib.crc32(text) + text + b"}\n")


def use(folder):
    """Restore from a folder; whatever it holds, it works or says what is wrong."""
    said = ""
    try:
        lockstep.Checkpoint(folder.parent, values={}).restore(folder)
    except (lockstep.CheckpointError, lockstep.UsageError) as error:
        said = str(error)
    assert not said or str(folder) in said
    return said


def places(tree, path=()):
    """Every place in a JSON value."""
    yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from places(value, (*path, key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from places(value, (*path, number))


NASTY = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 2**31, 2**62, 2**63, 10**30, 1e308, float("nan"), "", "..", "../x", "/etc/passwd", "!"]
    ),
    st.sampled_from([[], {}, [[]], [-1], [2**40, 2**40], {"!": "tensor", "name": "values/weights"}, {"!": "nothing"}]),
    st.sampled_from(
        ["float64", "complex32", "bits8", "qint8", "int4", "../../secret.safetensors", "sparse_coo", "bsr"]
    ),
    st.recursive(st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3), max_leaves=4),
)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_manifest_with_anything_in_any_place_is_read_or_refused(tmp_path, good, data):
    folder = tmp_path / "forged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    content = content_of(folder)
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from([place for place in places(content) if place]))
        target = content
        for key in path:
            target = target[key]
        if data.draw(st.booleans()):
            target[last] = copy.deepcopy(data.draw(NASTY))  # the same list twice, one in the other, has no end
        else:
            del target[last]
    before = {path.name for path in tmp_path.iterdir()}
    with contextlib.suppress(KeyError, TypeError, AttributeError):  # forging may need what is gone
        forge(folder, content)
    use(folder)

    assert before == {path.name for path in tmp_path.iterdir()}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_tensor_file_with_other_bytes_is_read_or_refused(tmp_path, good, data):
    folder = tmp_path / "forged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good, folder)
    (path,) = folder.glob("*.safetensors")
    found = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 900))  # the header
        found[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    path.write_bytes(found[: data.draw(st.sampled_from([None, None, 4, 8, 300, -5]))])
    forge(folder, content_of(folder))
    use(folder)


def with_file(content, name):
    """Take the file's place in the manifest by another name."""
    (old,) = content["files"]
    content["files"] = {name: content["files"][old]}
    for entry in content["common"]["tensors"].values():
        entry["pieces"] = [[name, key] for _, key in entry["pieces"]]


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/tmp/secret.safetensors", "a/b.safetensors", ".safetensors"]
)
def test_a_file_name_that_leads_elsewhere_is_refused_unread(tmp_path, good, name):
    folder = Path(shutil.copytree(good, tmp_path / "forged"))
    content = content_of(folder)
    with_file(content, name)
    forge(folder, content)

    assert "names a file" in use(folder)


def test_a_link_is_not_followed(tmp_path, good):
    folder = Path(shutil.copytree(good, tmp_path / "forged"))
    (path,) = folder.glob("*.safetensors")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")

    assert f"{path.name} cannot be opened" in use(folder)


def test_a_pipe_does_not_block(tmp_path, good):
    folder = Path(shutil.copytree(good, tmp_path / "forged"))
    (path,) = folder.glob("*.safetensors")
    path.unlink()
    os.mkfifo(path)

    assert f"{path.name} is no plain file" in use(folder)


def test_a_link_in_place_of_a_checkpoint_is_no_checkpoint(tmp_path, good):
    (tmp_path / "000001-step-0").symlink_to(good)

    assert not lockstep.Checkpoint(tmp_path, values={}).restore()


def large_shape(content):
    content["common"]["tensors"]["values/weights"]["shape"] = [2**20, 2**20]


def large_pieces(content):
    entry = content["common"]["tensors"]["values/weights"]
    entry["pieces"] *= 100_000
    entry["shape"] = [100_000 * 20, 30]


def large_sparse(content):
    content["common"]["trees"]["values"]["csr"]["parts"]["size"] = [2**40, 2**20]


LARGE = {"shape": large_shape, "pieces": large_pieces, "sparse": large_sparse}


def use_in_little_memory(rank, folder):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000, -1))
    said = use(Path(folder))
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    return said


@pytest.mark.parametrize("kind", LARGE)
def test_sizes_that_are_made_up_take_no_memory(tmp_path, good, kind):
    folder = Path(shutil.copytree(good, tmp_path / "forged"))
    content = content_of(folder)
    LARGE[kind](content)
    forge(folder, content)
    (said,) = run_ranks(use_in_little_memory, 1, str(folder), backend=None)

    assert "cannot be used" in said
    assert "alloc" not in said


def test_nesting_without_end_is_refused(tmp_path, good):
    folder = Path(shutil.copytree(good, tmp_path / "forged"))
    text = json.dumps(content_of(folder)).replace('"epoch": 0', '"epoch": ' + "[" * 200_000 + "]" * 200_000).encode()
    (folder / "manifest.json").write_bytes(b'{"crc32": "%08x", "content": ' % zlib.crc32(text) + text + b"}\n")

    assert "manifest.json is not JSON (RecursionError)" in use(folder)


def test_nothing_of_a_checkpoint_is_loaded_if_a_later_part_of_it_is_no_good(tmp_path, good):
    folder = Path(shutil.copytree(good, tmp_path / "forged"))
    content = content_of(folder)
    content["common"]["trees"]["other"] = {"!": "tensor", "name": "nowhere"}
    forge(folder, content)
    found = {"mine": 1}
    with pytest.raises(lockstep.CheckpointError, match="there is no tensor 'nowhere'"):
        lockstep.Checkpoint(tmp_path, values=found, other={}).restore(folder)

    assert found == {"mine": 1}


def test_a_checkpoint_of_a_later_version_is_not_passed_over(tmp_path, good):
    """Nothing is wrong with it: to go on from the one before would lose what was made since."""
    shutil.copytree(good, tmp_path / "000001-step-0")
    folder = Path(shutil.copytree(good, tmp_path / "000002-step-0"))
    forge(folder, content_of(folder) | {"format": "lockstep checkpoint 2", "more": 3})

    with pytest.raises(lockstep.CheckpointError, match=r"000002-step-0 cannot be used: .* a later version of lockstep"):
        lockstep.Checkpoint(tmp_path, values={}).restore()


def test_a_manifest_comes_back_as_it_was(good):
    data = (good / "manifest.json").read_bytes()

    assert data == manifest.write(manifest.read(data))
