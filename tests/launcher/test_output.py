"""Whole lines with their rank, bars left whole, logs; on pipes and on a real terminal."""

import array
import fcntl
import os
import pty
import re
import select
import subprocess
import termios
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import PATIENCE, command, run, until

from lockstep.launcher.output import Output
from lockstep.launcher.screen import Screen


def test_l09_lines_of_several_ranks_come_whole_and_with_their_rank_under_load(tmp_path):
    """Log prefix lacks node and global rank; lines interleave."""
    source = (
        "import os, sys\nrank = os.environ['RANK']\n"
        "for i in range(300):\n    os.write(1, f'{rank} {i} '.encode()); os.write(1, rank.encode() * 5000 + b'\\n')\n"
    )

    done = run(tmp_path, source, "-n", "3")

    lines = done.stdout.splitlines()
    for rank in range(3):
        prefix = f"[rank {rank}] " * (rank > 0)
        mine = [line for line in lines if line.startswith(f"{prefix}{rank} ")]
        assert mine == [f"{prefix}{rank} {i} {str(rank) * 5000}" for i in range(300)]
    assert len(lines) == 900


def test_output_and_errors_stay_apart_and_in_order_where_they_are_one(tmp_path):
    source = "import sys\nfor i in range(50):\n    print('o', i); print('e', i, file=sys.stderr)\n"

    apart = run(tmp_path, source, "-n", "2")
    one = subprocess.run(
        command(tmp_path, source, "-n", "2"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True
    )

    assert [line for line in apart.stdout.splitlines() if line[0] != "["] == [f"o {i}" for i in range(50)]
    assert [line for line in apart.stderr.splitlines() if line[0] != "["] == [f"e {i}" for i in range(50)]
    for prefix in ("", "[rank 1] "):
        mine = [line for line in one.stdout.splitlines() if line.startswith("[") == bool(prefix)]
        assert mine == [f"{prefix}{kind} {i}" for i in range(50) for kind in "oe"]


def test_logs_hold_each_ranks_output_and_its_traceback(tmp_path):
    source = (
        "import os, time\nrank = os.environ['RANK']\nprint('hello', rank, flush=True)\n"
        f"open({str(tmp_path)!r} + '/here' + rank, 'w').close()\n"
        f"while rank == '1' and not os.path.exists({str(tmp_path)!r} + '/here0'): time.sleep(0.01)\n"
        "if rank == '1': raise ValueError('no')\ntime.sleep(1000)\n"
    )

    run(tmp_path, source, "-n", "2", "--log-dir", str(tmp_path / "logs"))

    assert (tmp_path / "logs" / "rank0.log").read_text() == "hello 0\n"
    log = (tmp_path / "logs" / "rank1.log").read_text()
    assert log.startswith("hello 1\nTraceback")
    assert log.endswith("ValueError: no\n")


def test_a_log_that_cannot_be_written_does_not_keep_the_ranks(tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank0.log").symlink_to("/dev/full")
    source = "import os\nfor i in range(100_000): print('line', i, os.environ['RANK'])\n"

    done = run(tmp_path, source, "-n", "2", "--log-dir", str(tmp_path / "logs"))

    assert (done.returncode, done.stdout.count("\n")) == (0, 200_000)
    assert done.stderr.count("rank0.log cannot be written any more (No space left on device); the ranks go on") == 1
    assert (tmp_path / "logs" / "rank1.log").read_text().count("\n") == 100_000


def test_logs_of_several_nodes_in_one_folder_have_names_of_their_own(tmp_path):
    for host in ("ant ", "bee "):
        output = Output(1, owner=0, direct=True, host=host, log_dir=str(tmp_path))
        output.start()
        output.join(None)

    assert sorted(path.name for path in tmp_path.iterdir()) == ["ant-local_rank0.log", "bee-local_rank0.log"]


def on_a_terminal(arguments, keys=(), env=None):
    """Run on a real terminal; give the exit code and every byte that it showed.

    ``keys`` are typed one after the other: each a pair, of what is waited for and what is typed then. Ctrl-C is typed
    again while nothing happens, as people do: between writing a prompt and reading, python does not look for it.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(arguments[0], arguments, os.environ | (env or {}))
    shown, read, keys, typed, end = b"", 0, list(keys), b"", time.monotonic() + PATIENCE
    while True:
        if not select.select([terminal], [], [], 3)[0]:
            assert time.monotonic() < end, shown
            if typed == b"\x03":
                os.write(terminal, typed)
            continue
        try:
            data = os.read(terminal, 65536)
        except OSError:
            break
        shown, end = shown + data, time.monotonic() + PATIENCE
        if keys and keys[0][0] in shown[read:]:
            read, typed = len(shown), keys.pop(0)[1]
            os.write(terminal, typed)
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


class Emulator:
    """The little of a terminal that bars use: line feed, carriage return, erase to the end of the line."""

    def __init__(self):
        self.rows, self.column = [""], 0

    def feed(self, data):
        for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\r\n\x1b]+", data.decode()):
            if piece == "\n":
                self.rows.append("")
            elif piece == "\r":
                self.column = 0
            elif piece.endswith("K"):
                self.rows[-1] = self.rows[-1][: self.column]
            elif not piece.startswith("\x1b"):
                row = self.rows[-1].ljust(self.column)
                self.rows[-1] = row[: self.column] + piece + row[self.column + len(piece) :]
                self.column += len(piece)
        return self


def test_a_bar_of_rank_0_beside_warnings_of_another_stays_whole_on_a_terminal(tmp_path):
    source = (
        "import os, sys, time, pathlib\nrank = os.environ['RANK']\nhere = pathlib.Path(__file__).parent\n"
        "assert rank != '0' or (sys.stdout.isatty() and sys.stderr.isatty())\n"
        "for i in range(1, 21):\n"
        "    if rank == '0':\n        sys.stderr.write(f'\\repoch {i:2}/20 ' + '#' * i); sys.stderr.flush()\n"
        "        (here / f'bar{i}').touch()\n"
        "    else:\n"
        "        while not (here / f'bar{i}').exists(): time.sleep(0.001)\n"
        "        if i % 5 == 0: print('loss is high at', i, file=sys.stderr)\n"
        "    time.sleep(0.01)\n"
        "if rank == '0': print(file=sys.stderr)\n"
    )

    code, shown = on_a_terminal(command(tmp_path, source, "-n", "2"), env={"NO_COLOR": "1"})

    rows = [row.rstrip() for row in Emulator().feed(shown).rows if row.strip()]
    assert code == 0
    assert [row for row in rows if row.startswith("[rank 1]")] == [
        f"[rank 1] loss is high at {i}" for i in (5, 10, 15, 20)
    ]
    assert [row for row in rows if not row.startswith("[rank 1]")] == ["epoch 20/20 " + "#" * 20]


def test_ranks_are_dim_on_a_terminal_and_plain_elsewhere(tmp_path):
    source = "import os; os.environ['RANK'] == '1' and print('x')"

    _, shown = on_a_terminal(command(tmp_path, source, "-n", "2"))

    assert b"\x1b[2m[rank 1]\x1b[0m x" in shown
    assert run(tmp_path, source, "-n", "2").stdout == "[rank 1] x\n"


def test_ctrl_c_on_a_terminal_reaches_every_rank_once(tmp_path):
    """The launcher passes signals on in order: when USR1 has come through it, a second ctrl-C would have come too."""
    source = (
        "import os, sys, time, signal, pathlib\n"
        "rank = os.environ['RANK']\nhere = pathlib.Path(__file__).parent\ncount = 0\nthrough = False\n"
        "def note(number, frame):\n    global count\n    count += 1\n"
        "def last(number, frame):\n    global through\n    through = True\n"
        "signal.signal(signal.SIGINT, note)\nsignal.signal(signal.SIGUSR1, last)\n(here / f'up{rank}').touch()\n"
        "while not all((here / f'up{r}').exists() for r in '01'): time.sleep(0.01)\n"
        "if rank == '0': print('READY', flush=True)\n"
        "while not count: time.sleep(0.01)\n"
        "(here / f'had{rank}').touch()\n"
        "while not all((here / f'had{r}').exists() for r in '01'): time.sleep(0.01)\n"
        "front = int(pathlib.Path(f'/proc/{os.getppid()}/stat').read_text().rsplit(')')[1].split()[1])\n"
        "if rank == '0': os.kill(front, signal.SIGUSR1)\n"
        "while not through: time.sleep(0.01)\n"
        "(here / f'count{rank}').write_text(str(count))\n"
    )

    code, _ = on_a_terminal(command(tmp_path, source, "-n", "2"), keys=[(b"READY", b"\x03")])

    assert code == 0
    assert [(tmp_path / f"count{rank}").read_text() for rank in "01"] == ["1", "1"]


def test_the_debugger_gets_the_terminal_and_ctrl_c(tmp_path):
    source = "import os\nx = 41\nif os.environ['RANK'] == '1':\n    breakpoint()\n    print('after', x)\n"

    code, shown = on_a_terminal(
        command(tmp_path, source, "-n", "2", "--debug", "1", "--grace", "0"),
        keys=[(b"(Pdb) ", b"\x03"), (b"(Pdb) ", b"x = x + 1\n"), (b"(Pdb) ", b"c\n")],
    )

    assert code == 0, shown
    assert b"after 42" in shown


@given(pieces=st.lists(st.tuples(st.sampled_from("oab"), st.text("xy\n", max_size=6)), max_size=20))
def test_in_a_file_no_line_is_torn_whatever_the_pieces(pieces):
    screen, out, said = Screen(terminal=False), b"", dict.fromkeys("oab", "")
    for who, text in pieces:
        said[who] += text
        out += screen.own(text.encode()) if who == "o" else screen.other(who, who, text.encode())
    out += screen.release() + b"".join(screen.finish(who, who) for who in "ab")

    written = out.decode()
    for who in "ab":
        assert "".join(
            f"[{who}] {line}\n" for line in said[who].removesuffix("\n").split("\n") if said[who]
        ) == "".join(line for line in written.splitlines(keepends=True) if line.startswith(f"[{who}]"))
    own = "".join(line for line in written.splitlines(keepends=True) if not line.startswith("["))
    assert own.rstrip("\n") == said["o"].rstrip("\n")


@pytest.mark.parametrize("standing", ["50%", "x\r50%", "\r50%", "a\nb\r50%"])
def test_a_line_of_another_rank_leaves_the_owners_where_it_was(standing):
    screen = Screen(terminal=True)
    shown = screen.own(standing.encode()) + screen.other("e", "rank 1", b"careful\n")

    # The terminal itself makes both of a line feed.
    assert Emulator().feed(shown.replace(b"\n", b"\r\n")).rows[-2:] == ["[rank 1] careful", "50%"]


def test_a_pipe_that_does_not_wait_loses_nothing(tmp_path):
    """As node.js leaves its own: a rank would get a broken pipe as soon as the reader is behind."""
    source = "import os\nfor i in range(3000): print(os.environ['RANK'], i, 'x' * 50)\n"
    here, there = os.pipe()
    os.set_blocking(there, False)
    with (
        subprocess.Popen(command(tmp_path, source, "-n", "2"), stdout=there) as process,
        os.fdopen(here, "rb", buffering=0) as reader,
    ):
        os.close(there)
        until(lambda: array.array("i", fcntl.ioctl(here, termios.FIONREAD, b"    "))[0] > 60_000, "the pipe is full")
        lines = reader.readall().decode().splitlines()

    assert process.returncode == 0
    assert [line for line in lines if line.startswith("0")] == [f"0 {i} {'x' * 50}" for i in range(3000)]
    assert len(lines) == 6000


def test_an_error_in_no_encoding_comes_through_and_into_the_log(tmp_path):
    """A file name that is no UTF-8, for one."""
    # The other waits to be ended: of two that fail, the later one may be ended before it has written a word.
    source = "import os, time\nif os.environ['RANK'] == '0': raise ValueError('no \\udcff')\ntime.sleep(60)\n"
    done = run(tmp_path, source, "-n", "2", "--log-dir", str(tmp_path / "logs"))

    assert done.returncode == 1
    assert "failed first: ValueError: no " in done.stderr
    assert "ValueError: no \\udcff" in (tmp_path / "logs" / "rank0.log").read_text()


def test_a_log_folder_that_cannot_be_made_is_said_in_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    done = run(tmp_path, "print('began')", "-n", "2", "--log-dir", str(tmp_path / "file" / "logs"))

    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"lockstep: --log-dir {tmp_path / 'file' / 'logs'}: ")
    assert "cannot be written (not a directory)" in done.stderr


def test_torchs_own_words_in_c_are_a_ranks_not_the_launchers(tmp_path):
    """The launcher is silent where it loses a connection, and says so itself; a script sees what it would see alone."""
    source = (
        "import datetime, torch.distributed as dist\n"
        "try: dist.TCPStore('127.0.0.1', 1, is_master=False, timeout=datetime.timedelta(seconds=1))\n"
        "except dist.DistError: print('told')\n"
    )
    done = run(tmp_path, source, "-n", "1")

    assert done.stdout == "told\n"
    assert "[c10d] The client socket has timed out after 1000ms" in done.stderr
