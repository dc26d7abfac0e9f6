"""The script sees what it would see alone."""

import ast
import subprocess
import sys

from launching import LOCKSTEP, run

FACTS = """
import multiprocessing, os, sys, threading
facts = dict(argv=sys.argv, name=__name__, file=__file__, path=sys.path[0],
    spec=__spec__ and __spec__.name, package=__package__,
    main=sys.modules["__main__"].__dict__ is globals(), parent=multiprocessing.parent_process() is None,
    process=multiprocessing.current_process().name, method=multiprocessing.get_start_method(allow_none=True),
    signals=repr([__import__("signal").getsignal(n) for n in (2, 10, 12, 15)]),
    thread=threading.current_thread().name,
    threads=[t.name for t in threading.enumerate()], hook=sys.excepthook is sys.__excepthook__,
    annotations=__annotations__)
if os.environ.get("RANK", "0") == "0": print(facts)
"""


def alone_and_launched(command, folder, **more):
    """What a command prints when python runs it, and when lockstep does on two ranks."""
    return [
        ast.literal_eval(
            subprocess.run([*start, *command], capture_output=True, text=True, check=True, cwd=folder, **more).stdout
        )
        for start in ([sys.executable], [*LOCKSTEP, "run", "-n", "2"])
    ]


def test_a_script_sees_what_it_would_see_alone(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "train.py").write_text(FACTS)

    alone, launched = alone_and_launched(
        ["sub/train.py", "-n", "3", "--lr", "0.1", "--", "--nproc_per_node=9"], tmp_path
    )

    assert alone == launched


def test_a_module_with_relative_imports_sees_what_it_would_see_alone(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "part.py").write_text("value = 3\n")
    (tmp_path / "pack" / "train.py").write_text("from .part import value\n" + FACTS)

    alone, launched = alone_and_launched(["-m", "pack.train", "--lr", "0.1"], tmp_path)

    assert alone == launched


def test_a_folder_with_a_main_file_runs(tmp_path):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(FACTS)

    alone, launched = alone_and_launched(["app", "x"], tmp_path)

    assert alone == launched


def test_classes_of_main_travel_to_loader_workers_however_they_start(tmp_path):
    source = """
import torch
class Item:
    def __init__(self, i): self.i = i
class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return Item(i)
def collate(items): return items
if __name__ == "__main__":
    import os
    for method in ("fork", "spawn", "forkserver"):
        more = dict(num_workers=1, collate_fn=collate, multiprocessing_context=method)
        loader = torch.utils.data.DataLoader(Data(), batch_size=2, **more)
        if os.environ["RANK"] == "1": print(method, [item.i for batch in loader for item in batch], flush=True)
"""
    done = run(tmp_path, source, "-n", "2")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"[rank 1] {m} [0, 1, 2, 3]" for m in ("fork", "spawn", "forkserver")]


def test_what_python_does_after_the_last_line_is_done(tmp_path):
    source = f"""
import atexit, os, threading, time, zipfile
rank, folder = os.environ["RANK"], {str(tmp_path)!r}
atexit.register(lambda: open(f"{{folder}}/atexit{{rank}}", "w").write("x"))
def late():
    time.sleep(0.3)
    open(f"{{folder}}/thread{{rank}}", "w").write("x")
threading.Thread(target=late).start()
kept = open(f"{{folder}}/open{{rank}}", "w"); kept.write("x")
archive = zipfile.ZipFile(f"{{folder}}/zip{{rank}}", "w"); archive.writestr("a", "b")
"""
    done = run(tmp_path, source, "-n", "2")

    assert done.returncode == 0, done.stderr
    for rank in "01":
        assert [(tmp_path / f"{name}{rank}").read_text() for name in ("atexit", "thread", "open")] == ["x"] * 3
        import zipfile

        assert zipfile.ZipFile(tmp_path / f"zip{rank}").namelist() == ["a"]


def test_stdin_is_rank_0s(tmp_path):
    source = "import os, sys; print(os.environ['RANK'], repr(sys.stdin.read()))"

    done = run(tmp_path, source, "-n", "2", input="a line\n")

    assert sorted(done.stdout.splitlines()) == ["0 'a line\\n'", "[rank 1] 1 ''"]


def test_a_breakpoint_on_rank_0_reads_stdin(tmp_path):
    source = "import os\nx = 41\nif os.environ['RANK'] == '0':\n    breakpoint()\n    print('after', x)\n"

    done = run(tmp_path, source, "-n", "2", input="x = x + 1\nc\n")

    assert "after 42" in done.stdout, done.stderr


def test_the_spawn_start_runs_the_same_script(tmp_path):
    (tmp_path / "train.py").write_text(FACTS)

    alone = ast.literal_eval(
        subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    )
    done = subprocess.run(
        [*LOCKSTEP, "run", "-n", "2", "--start", "spawn", "train.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )

    assert alone == ast.literal_eval(done.stdout)
    assert done.stderr == ""


def test_a_process_that_the_script_forks_is_no_rank(tmp_path):
    """It must not leave the rank's groups at its end, nor be taken for the rank's."""
    source = (
        "import os, sys, lockstep\nworld = lockstep.init()\nchild = os.fork()\n"
        "if child == 0:\n    print('child', flush=True)\n    sys.exit(3)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3\nprint(lockstep.total(1))\n"
    )

    done = run(tmp_path, source, "-n", "2")

    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", "2", "[rank 1] 2", "[rank 1] child", "child"]


def test_the_command_runs_as_a_module_of_the_package(tmp_path):
    (tmp_path / "train.py").write_text("import os, sys\nprint(os.environ['WORLD_SIZE'], sys.argv[1:])\n")

    done = subprocess.run(
        [sys.executable, "-m", "lockstep", "run", "-n", "1", "train.py", "--lr", "0.1"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    assert done.stdout == "1 ['--lr', '0.1']\n", done.stderr
