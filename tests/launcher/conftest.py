import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def nothing_is_left_in_tmp(tmp_path):
    """torch's agent makes files and folders in /tmp; the launcher leaves none."""
    names = ("torchelastic_", "pytorch-errorfile-", "pymp-", "watchdog_timer_")
    before = set(Path(tempfile.gettempdir()).iterdir())
    yield
    left = {path for path in set(Path(tempfile.gettempdir()).iterdir()) - before if path.name.startswith(names)}
    assert not [path for path in left if path.stat().st_uid == os.getuid()]
