"""Every docstring and every page runs."""

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser
from sybil.parsers.rest import DocTestParser

pytest_collect_file = (
    Sybil([PythonCodeBlockParser(), SkipParser()], patterns=["*.md"])
    + Sybil([DocTestParser()], patterns=["*.py"], excludes=["conftest.py"])
).pytest()
