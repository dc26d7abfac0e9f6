import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left_in_tmp(monkeypatch):
    """Torch's agent makes files and folders in /tmp; the launcher leaves none. A short name: sockets live there."""
    folder = Path(tempfile.mkdtemp(prefix="ls"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield
    left = [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]  # torch's own, kept
    shutil.rmtree(folder)
    assert not left
