"""The rank's argument reaches the script's parser, whatever it is called there and on the command line."""

import argparse
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.compat.rank_argument import for_parser, watch_parsers


@pytest.fixture
def parse(monkeypatch):
    """Parse a command line with a parser's options, in a process whose local rank is 3."""
    undo = watch_parsers("3")

    def run(options, words, *given, **more):
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        parser = argparse.ArgumentParser()
        for names in options:
            parser.add_argument(*names, type=int, default=-1, **more)
        return parser.parse_args(*given)

    yield run
    undo()


WORDS = {
    "nothing": [],
    "underscore": ["--local_rank=3"],
    "dash": ["--local-rank=3"],
    "two words": ["--local-rank", "3"],
}


@pytest.mark.parametrize(
    "option", [("--local_rank",), ("--local-rank",), ("-r", "--local-rank", "--local_rank")], ids=str
)
@pytest.mark.parametrize("words", WORDS)
def test_every_command_line_reaches_every_parser(parse, option, words):
    assert parse([option, ("--lr",)], [*WORDS[words], "--lr", "5"]).local_rank == 3


def test_a_parser_that_has_no_such_option_is_not_given_one(parse):
    assert vars(parse([("--lr",)], ["--local_rank=3", "--lr", "5"])) == {"lr": 5}


def test_what_the_user_says_stands(parse):
    assert parse([("--local_rank",)], ["--local_rank", "7"]).local_rank == 7
    with pytest.raises(SystemExit):
        parse([("--lr",)], ["--local_rank=7"])


def test_arguments_that_a_script_makes_up_are_left_alone(parse):
    assert parse([("--local_rank",), ("--lr",)], ["--lr", "5"], ["--lr", "6"]).local_rank == -1
    assert parse([("--local_rank",)], ["--lr", "5"], []).local_rank == -1


def test_arguments_that_a_script_passes_on_are_the_command_lines(parse):
    assert parse([("--local_rank",), ("--lr",)], ["--lr", "5"], ["--lr", "5"]).local_rank == 3


def test_a_subcommands_parser_gets_it(parse, monkeypatch):
    parser = argparse.ArgumentParser()
    parser.add_subparsers(dest="command").add_parser("train").add_argument("--local_rank", type=int, default=-1)
    monkeypatch.setattr(sys, "argv", ["main.py", "--local_rank=3", "train"])

    assert parser.parse_args().local_rank == 3


def test_a_switch_takes_no_value(parse):
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", action="store_true")

    assert parser.parse_args(["--local_rank"]).local_rank is True
    assert parser.parse_known_args()[0].local_rank is False


def test_afterwards_parsers_are_as_they_were():
    before = argparse.ArgumentParser.parse_known_args
    watch_parsers("0")()

    assert argparse.ArgumentParser.parse_known_args is before


@given(st.lists(st.sampled_from(["--lr", "1", "--local_rank=2", "--local-rank=2", "--", "x"])))
def test_everything_else_arrives_in_its_order(words):
    def rest(args):
        end = args.index("--") if "--" in args else len(args)
        return [word for word in args[:end] if not word.startswith("--local")] + args[end:]

    assert rest(words) == rest(for_parser(words, ["--local_rank", "--lr"], True, "2"))
    assert rest(words) == for_parser(words, ["--lr"], True, "2")
