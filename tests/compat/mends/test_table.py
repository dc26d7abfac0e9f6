"""Every row of the table: its example stops without the mend and runs with it, and says where it was needed."""

import importlib
import re
import sys
import warnings
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import torch

from lockstep import UsageError
from lockstep.compat.mends import loading, table
from lockstep.compat.mends.book import Book, caller


def run(mend, path):
    """Run an example as a script is run."""
    path.write_text(mend.example)
    loader = SourceFileLoader("__main__", str(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's and numpy's own words about what goes next
        exec(loader.source_to_code(mend.example, str(path)), {"__name__": "example"})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", sys.dont_write_bytecode)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delattr("numpy.Inf", raising=False)  # torchmetrics, which other tests use, puts it back
    return tmp_path


@pytest.mark.parametrize("mend", table.TABLE, ids=lambda mend: mend.old)
def test_the_example_stops_without_the_mend_and_runs_with_it(mend, folder):
    path, book = folder / "example.py", Book()
    others = [other.old for other in table.TABLE if other is not mend]
    take_away = table.put_in_place(others, Book())  # no other row may do it
    try:
        with pytest.raises((Exception, SyntaxError)):
            run(mend, path)
    finally:
        take_away()
    take_away = table.put_in_place([mend.old], book)
    try:
        run(mend, path)
    finally:
        take_away()
    with pytest.raises((Exception, SyntaxError)):
        run(mend, path)

    heading, line = book.lines()
    assert re.match(r"  example\.py:\d+", line)
    assert f"{mend.old} (gone since {mend.gone}); write: {mend.today}" in line
    assert "mended 1 thing" in heading


@pytest.mark.parametrize("mend", [mend for mend in table.TABLE if mend.sign], ids=lambda mend: mend.old)
def test_what_is_put_in_place_by_sign_finds_its_own_example(mend):
    assert mend.old in table.wanted([mend.example])
    assert mend.old not in table.wanted(["import torch"])


def test_names_are_unique():
    names = [mend.old for mend in table.TABLE]

    assert sorted(set(names)) == sorted(names)


def test_the_page_lists_every_row():
    page = (Path(__file__).parents[3] / "docs" / "old_scripts.md").read_text()

    assert [mend.old for mend in table.TABLE if f"`{mend.old}`" not in page] == []


def test_nothing_changes_for_what_is_right(folder):
    book = Book()
    take_away = table.put_in_place([mend.old for mend in table.TABLE], book)
    try:
        x = torch.arange(6.0, requires_grad=True)
        optimizer = torch.optim.SGD([x], lr=0.1)
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "min", 0.1, 10, 1e-3).step(1.0)
        mask = x > 2
        y = x.masked_fill(mask, 0.0).view(2, 3)[0] - 1
        (1 - y).sum().backward(retain_graph=True)
        torch.save(x.detach(), folder / "x.pt")
        assert torch.equal(torch.load(folder / "x.pt"), x.detach())
        with pytest.raises(IndexError):
            x[9]
        with pytest.raises(IndexError):
            x.sum()[1]
        with pytest.raises(RuntimeError, match="shape"):
            x.view(7)
        with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
            _ = torch.nonsense
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("torch._seven")
        with pytest.raises(TypeError, match="nonsense"):
            torch.optim.lr_scheduler.StepLR(optimizer, 30, nonsense=True)
    finally:
        take_away()

    assert book.lines() == []


def test_a_line_that_is_passed_often_stands_there_once_and_many_lines_are_cut():
    book = Book()
    for line in (1, 2, 2, 3, 4):
        book.enter(table.TABLE[0], f"train.py:{line}")

    assert "  train.py:1, train.py:2, train.py:3, ...  async=True" in book.lines()[1]


def test_the_place_is_the_scripts_line_even_if_a_library_does_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = {"caller": caller}
    library = compile("def call():\n    return caller()", "/lib/site-packages/library.py", "exec")
    exec(library, space)
    exec(compile("\nplace = call()", str(tmp_path / "train.py"), "exec"), space)

    assert space["place"] == "train.py:2"


class Odd:
    """A class that no table knows."""


@pytest.mark.parametrize("wrap", [loading.naming_the_classes, loading.trusting], ids=["safe", "trusting"])
def test_a_file_with_other_classes_is_refused_by_name_or_trusted(tmp_path, wrap):
    torch.save({"model": torch.ones(1), "odd": Odd()}, tmp_path / "odd.pt")
    load = wrap(torch.load)
    if wrap is loading.trusting:
        assert isinstance(load(tmp_path / "odd.pt")["odd"], Odd)
        with pytest.raises(Exception, match="weights_only"):
            load(tmp_path / "odd.pt", weights_only=True)
        return
    with pytest.raises(UsageError, match=rf"code that it names: {Odd.__module__}.Odd. .* --trust-checkpoints"):
        load(tmp_path / "odd.pt")
