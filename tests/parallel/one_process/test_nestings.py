"""DataParallel equals the plain module for all nestings of inputs and outputs; what does not fit is said."""

import collections
import copy
import dataclasses
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lockstep
from lockstep.collectives.nested import leaves, map_leaves
from lockstep.parallel import data_parallel

Pair = namedtuple("Pair", ["first", "second"])


@dataclasses.dataclass
class Record:
    x: Any
    note: Any = None


class Spread(nn.Module):
    """Uses every tensor it is given, and gives them back in the nesting they came in."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3).double()

    def forward(self, *inputs, **options):
        return map_leaves(lambda x: torch.tanh(self.layer(x)) if isinstance(x, torch.Tensor) else x, [*inputs, options])


LEAVES = st.one_of(st.just("tensor"), st.just("tensor"), st.none(), st.integers(0, 3), st.text(max_size=2))
NESTINGS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.builds(Pair, inner, inner),
        st.builds(Record, inner, inner),
    ),
    max_leaves=8,
)


@given(
    inputs=st.lists(NESTINGS, max_size=3),
    options=st.dictionaries(st.sampled_from(["u", "v"]), NESTINGS, max_size=2),
    samples=st.integers(1, 9),
    devices=st.integers(1, 4),
    dim=st.sampled_from([0, 1, -2]),
)
def test_outputs_and_gradients_are_those_of_the_module(inputs, options, samples, devices, dim):
    torch.manual_seed(0)
    plain = Spread()
    module = copy.deepcopy(plain)
    model = lockstep.DataParallel(module, ["cpu"] * devices, dim=dim)
    shape = (2, samples, 3) if dim else (samples, 2, 3)

    def fill(leaf):
        return torch.randn(*shape, dtype=torch.float64, requires_grad=True) if leaf == "tensor" else leaf

    mine = map_leaves(fill, (inputs, options))
    theirs = map_leaves(lambda x: x.detach().clone().requires_grad_() if isinstance(x, torch.Tensor) else x, mine)
    found, expected = model(*mine[0], **mine[1]), plain(*theirs[0], **theirs[1])

    assert str(map_leaves(lambda _: 0, found)) == str(map_leaves(lambda _: 0, expected))
    compare(leaves(found), leaves(expected))
    for outputs in (found, expected):
        total = sum(x.square().sum() for x in leaves(outputs) if isinstance(x, torch.Tensor))
        total.backward() if isinstance(total, torch.Tensor) else None
    compare([x.grad for x in module.parameters()], [x.grad for x in plain.parameters()])
    compare(*([x.grad if isinstance(x, torch.Tensor) else x for x in leaves(one)] for one in (mine, theirs)))


def compare(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
        else:
            assert mine == theirs


class Echo(nn.Module):
    def forward(self, *inputs):
        return inputs


def two(module=None, **options):
    return lockstep.DataParallel(module or Echo(), ["cpu", "cpu"], **options)


def test_a_tensor_without_dimensions_goes_to_every_replica():
    x, temperature = torch.arange(4.0), torch.tensor(2.0, requires_grad=True)

    class Divide(nn.Module):
        def forward(self, x, temperature):
            return x / temperature

    y = two(Divide())(x, temperature)
    y.sum().backward()

    assert (y.tolist(), temperature.grad.item()) == ([0, 0.5, 1, 1.5], -1.5)


def test_a_user_dict_and_a_defaultdict_are_split_and_joined():
    x = torch.arange(4)
    batch = collections.UserDict(x=x), collections.defaultdict(list, x=x)
    found = two()(*batch)

    assert (type(found[0]), found[1].default_factory) == (collections.UserDict, list)
    assert torch.equal(torch.cat([found[0]["x"], found[1]["x"]]), torch.cat([x, x]))


def test_a_dict_that_is_a_dataclass_too_is_joined_as_one():
    @dataclasses.dataclass
    class Output(collections.OrderedDict):  # as transformers' outputs are
        logits: Any = None

        def __post_init__(self):
            super().__setitem__("logits", self.logits)

        def update(self, *args, **kwargs):
            raise TypeError("You cannot use update on this")

    class Model(nn.Module):
        def forward(self, x):
            return Output(logits=x * 2)

    found = two(Model())(torch.arange(4))

    assert (found.logits.tolist(), found["logits"].tolist()) == ([0, 2, 4, 6], [0, 2, 4, 6])


def test_replicas_may_write_to_their_inputs_and_the_callers_stay():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return self.layer(x.relu_().add_(1))

    x, model = torch.randn(6, 3), two(Writes())
    before = x.clone()
    model(x).sum().backward()

    assert torch.equal(x, before)


def test_without_a_tensor_the_module_runs_once():
    calls = []

    class Calls(nn.Module):
        def forward(self, word):
            calls.append(word)
            return word

    assert two(Calls())("once") == "once"
    assert calls == ["once"]


def test_an_empty_batch():
    assert two(nn.Linear(3, 2))(torch.empty(0, 3)).shape == (0, 2)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.ones(4, 2), torch.ones(1, 2)), "not all into as many pieces: shape \\[1, 2\\] in 1, \\[4, 2\\] in 2"),
        (
            (nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]),),
            "PackedSequence cannot be split.*Pack inside",
        ),
    ],
)
def test_what_cannot_be_split_is_said(inputs, message):
    with pytest.raises(lockstep.UsageError, match=message):
        two()(*inputs)


def test_a_dimension_that_is_not_there_is_said():
    with pytest.raises(lockstep.UsageError, match=r"dim=1, which one of shape \[4\] does not have"):
        two(dim=1)(torch.ones(4))


class Gives(nn.Module):
    def __init__(self, give):
        super().__init__()
        self.give = give

    def forward(self, x):
        return self.give(x)


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (lambda x: x if x[0] else None, "replica 0 gave NoneType, but replica 1 gave Tensor"),
        (lambda x: [x] * int(x.sum()), "replica 0 gave .* but replica 1 gave"),
        (lambda x: int(x.sum()), "gave 1, 5 in the same place"),
        (lambda x: x[None].expand(int(x.sum()), 2), None),
        (lambda x: x[None].expand(2, int(x.sum()), 2), "cannot be joined along dimension 0.*padding"),
        (lambda x: nn.utils.rnn.pack_sequence([x]), "PackedSequence cannot be joined"),
    ],
)
def test_outputs_that_cannot_be_joined_are_said(give, message):
    x = torch.arange(4)
    if message is None:
        assert two(Gives(give))(x).shape == (6, 2)
        return
    with pytest.raises(lockstep.UsageError, match=message):
        two(Gives(give))(x)


def test_what_is_no_tensor_must_be_the_same_in_all():
    assert two(Gives(lambda x: {"n": 3, "w": "ab", "y": x}))(torch.arange(4))["n"] == 3


def test_the_hint_about_scalars_is_given_once(capsys):
    from lockstep.parallel.one_process.hints import say_once

    say_once.cache_clear()
    model = two(Gives(lambda x: x.sum()))
    for _ in range(3):
        assert model(torch.arange(4)).tolist() == [1, 5]

    lines = capsys.readouterr().err.splitlines()
    assert [("scalar" in line, "lockstep run" in line) for line in lines] == [(False, True), (True, False)]


def test_data_parallel_the_function():
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)

    class Keywords(nn.Module):
        def forward(self, x, *, y):
            return layer(x) + y

    torch.testing.assert_close(data_parallel(layer, x, ["cpu"] * 3), layer(x))
    torch.testing.assert_close(
        data_parallel(Keywords(), (x,), ["cpu"] * 3, module_kwargs={"y": x[:, :2]}), layer(x) + x[:, :2]
    )
    torch.testing.assert_close(data_parallel(layer, x, ["cpu"]), layer(x))
