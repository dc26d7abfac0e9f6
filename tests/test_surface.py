"""What users can rely on being there, and what an import costs them. Growing a list here is a decision."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import lockstep

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src").rglob("*.py"))

NAMES = [
    "Checkpoint",
    "CheckpointError",
    "DataLoader",
    "DataParallel",
    "DistributedDataParallel",
    "DistributedSampler",
    "LateRankError",
    "LockstepError",
    "LostRankError",
    "MismatchError",
    "NotFiniteError",
    "SyncBatchNorm",
    "Update",
    "UsageError",
    "World",
    "amp",
    "check_in_step",
    "convert_sync_batchnorm",
    "create_syncbn_process_group",
    "first",
    "gather",
    "init",
    "launch",
    "load_weights",
    "mean",
    "no_sync",
    "progress",
    "replicate",
    "revert_sync_batchnorm",
    "save_weights",
    "sync_buffers",
    "sync_gradients",
    "total",
    "unwrap",
]


def test_the_public_names_are_these():
    assert sorted(lockstep.__all__) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there_and_documented(name):
    assert inspect.getdoc(getattr(lockstep, name))


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("Error")])
def test_every_public_name_has_an_example_that_runs(name):
    assert ">>> " in inspect.getdoc(getattr(lockstep, name))


def test_a_misspelt_name_raises_as_in_any_module():
    with pytest.raises(AttributeError, match="'lockstep' has no attribute 'replicat'"):
        _ = lockstep.replicat


def loaded_by(statement):
    code = f"{statement}; import sys; print(*sys.modules)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_p01_import_lockstep_loads_nothing_but_torch_and_itself():
    added = set(loaded_by("import torch, lockstep")) - set(loaded_by("import torch"))

    assert sorted(name for name in added if not name.startswith("lockstep")) == []
    assert len([name for name in added if name.startswith("lockstep")]) <= 3


def test_the_command_line_starts_without_torch():
    assert {"torch", "numpy", "rich", "psutil"} & set(loaded_by("import lockstep_cli")) == set()


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_a_file_has_one_subject(path):
    assert len(path.read_text().splitlines()) <= 400


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_every_file_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text()))


def test_the_readme_shows_the_example_as_it_is():
    example = (ROOT / "examples" / "digits.py").read_text()

    assert f"```python\n{example}```" in (ROOT / "README.md").read_text()
