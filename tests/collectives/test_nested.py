import collections
import dataclasses
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.collectives.nested import describe, leaves, map_leaves


class Pair(NamedTuple):
    a: object
    b: object


@dataclasses.dataclass(frozen=True)
class Output:
    loss: object
    logits: object = None


def containers(inner):
    return (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.builds(Pair, inner, inner)
        | st.builds(Output, inner, inner)
    )


nested = st.recursive(st.integers() | st.text(max_size=2) | st.none(), containers, max_leaves=12)


@given(nested)
def test_mapping_the_identity_changes_nothing(x):
    assert map_leaves(lambda leaf: leaf, x) == x


@given(nested)
def test_leaves_come_in_the_order_in_which_they_are_mapped(x):
    numbers = iter(range(100))
    counted = map_leaves(lambda _: next(numbers), x)

    assert leaves(counted) == list(range(len(leaves(x))))


@given(nested)
def test_the_description_tells_structures_apart_and_not_values(x):
    def name(leaf):
        return "x"

    assert describe(x, name) == describe(map_leaves(lambda _: 0, x), name)
    assert describe([x], name) != describe(x, name)


def test_containers_keep_their_types():
    x = collections.defaultdict(list, a=Pair(1, [Output(2)]), b=collections.OrderedDict(c=3))

    doubled = map_leaves(lambda leaf: leaf and leaf * 2, x)

    assert doubled == collections.defaultdict(list, a=Pair(2, [Output(4)]), b=collections.OrderedDict(c=6))
    assert (type(doubled), doubled.default_factory, type(doubled["b"])) == (
        collections.defaultdict,
        list,
        collections.OrderedDict,
    )


def test_tensors_strings_and_torch_sizes_are_leaves():
    x = torch.zeros(2)

    assert leaves({"x": x, "name": "abc"}) == [x, "abc"]
