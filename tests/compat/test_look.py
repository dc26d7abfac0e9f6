"""What a script needs, told from its text."""

import pytest

from lockstep.compat import look
from lockstep.compat.choose import choose


def write(folder, **files):
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder / "main.py")


PARSERS = {
    "argparse": ("parser.add_argument('--local_rank', type=int)", "--local_rank"),
    "dash": ("parser.add_argument('--local-rank', type=int)", "--local-rank"),
    "both": ("parser.add_argument('--local-rank', '--local_rank')", "--local_rank"),
    "click": ("@click.option('--local_rank')\ndef f(): pass", "--local_rank"),
    "by hand": ("rank = [a for a in sys.argv if a.startswith('--local_rank=')]", "--local_rank"),
    "not parsable today": ("parser.add_argument('--local_rank')\nx.cuda(async=True)", "--local_rank"),
    "none": ("print(local_rank)", ""),
}


@pytest.mark.parametrize("kind", PARSERS)
def test_the_spelling_that_a_script_knows_is_found(tmp_path, kind):
    source, spelling = PARSERS[kind]

    assert spelling == look.rank_argument(look.read(tmp_path / write(tmp_path, main=source)).strings)


def test_parsers_in_other_files_of_the_script_are_found(tmp_path):
    script = write(
        tmp_path,
        main="from lib import train\nimport json",
        lib____init__="",
        lib__train="from .options import get",
        lib__options="import argparse\nargparse.ArgumentParser().add_argument('--local_rank')",
        unrelated="'--local-rank'",
    )

    assert choose(script, None, environ={}).argument == "--local_rank"


REASONS = {
    "apex": "from apex import amp",
    "compiled parts of apex": "import amp_C",
    "argument": "parser.add_argument('--local_rank')",
    "Slurm": "rank = os.environ['SLURM_PROCID']",
}


@pytest.mark.parametrize("reason", REASONS)
def test_it_is_on_where_a_script_needs_it_and_off_where_it_is_told(tmp_path, reason):
    script = write(tmp_path, main=REASONS[reason])

    assert choose(script, None, environ={})
    assert choose(script, False, environ={}) is None


def test_it_is_off_for_other_scripts_and_on_when_asked_for(tmp_path):
    script = write(tmp_path, main="import lockstep\nimport torch")

    assert choose(script, None, environ={}) is None
    assert choose(script, True, environ={}).mends
    assert choose(script, None, trust=True, environ={}).trust


def test_where_slurm_is_there_it_stays(tmp_path):
    script = write(tmp_path, main="os.environ['SLURM_PROCID']")

    assert choose(script, True, environ={"SLURM_PROCID": "0"}).slurm is False
    assert choose(script, True, environ={}).slurm is True


def test_modules_that_import_each_other_and_a_missing_script_do_no_harm(tmp_path):
    script = write(tmp_path, main="import main, other", other="from main import x")

    assert choose(script, None, environ={}) is None
    assert choose(str(tmp_path / "nothing.py"), None, environ={}) is None
