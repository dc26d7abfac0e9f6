"""The user's modules under amp: copied, pickled, compiled, called from threads, with anything going in and out."""

import copy
import dataclasses
import io
import threading
import typing
from collections import OrderedDict, UserDict

import pytest
import torch
from amp.programs import half_is
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep import amp
from lockstep.amp.nested import cast_nested

LEVELS = ["O0", "O1", "O2", "O3"]


class Pair(typing.NamedTuple):
    x: torch.Tensor
    n: int


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    note: str = "kept"


@dataclasses.dataclass
class ModelOutput(OrderedDict):
    """As transformers has it: a dict and a dataclass at once."""

    logits: torch.Tensor = None

    def __post_init__(self):
        OrderedDict.__setitem__(self, "logits", self.logits)

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Batch(UserDict):
    pass


class Echo(nn.Module):
    """Remembers the types that came in, gives a container of what it computed."""

    def __init__(self, give):
        super().__init__()
        self.linear, self.give, self.seen = nn.Linear(3, 3), give, None

    def forward(self, value, **kwargs):
        self.seen = value, kwargs
        return self.give(self.linear(find(value)))


def find(value):
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict | UserDict):
        return find(next(iter(value.values())))
    if dataclasses.is_dataclass(value):
        return value.logits
    return find(value[0]) if isinstance(value, list | tuple) else find(value.data)


X = torch.ones(2, 3)
CONTAINERS = {
    "tensor": lambda x: x,
    "list": lambda x: [x, 1],
    "tuple": lambda x: (x, "a"),
    "namedtuple": lambda x: Pair(x, 3),
    "dict": lambda x: {"x": x, "n": None},
    "ordered": lambda x: OrderedDict(x=x),
    "mapping": lambda x: Batch(x=x),
    "dataclass": Output,
    "model output": lambda x: ModelOutput(logits=x),
    "nested": lambda x: {"a": [(x,), {"n": 1}]},
}


@pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS)
def test_o2_casts_what_goes_in_and_out_and_keeps_its_kind(make):
    model = amp.initialize(Echo(make), opt_level="O2", verbosity=0)
    given = make(X)
    out = model(given, k=make(X))
    received, kwargs = model.seen

    assert (type(received), type(kwargs["k"]), type(out)) == (type(given),) * 3
    assert (find(received).dtype, find(kwargs["k"]).dtype) == (torch.bfloat16, torch.bfloat16)
    assert find(out).dtype == torch.float32
    assert find(given).dtype == torch.float32


def test_packed_sequences_are_cast():
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(5, 2, 3), torch.tensor([5, 3]))

    assert cast_nested(packed, torch.float16).data.dtype == torch.float16


@pytest.mark.parametrize(
    "value", [torch.ones(2, dtype=torch.int64), "text", None, 3, (i for i in "ab"), nn.Linear(1, 1)]
)
def test_what_is_not_floating_comes_through_as_the_same_object(value):
    assert cast_nested(value, torch.float16) is value


def make(level, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)


def step(model, optimizer):
    optimizer.zero_grad()
    with amp.scale_loss(model(torch.linspace(-1, 1, 12).reshape(3, 4)).float().square().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@pytest.mark.parametrize("level", LEVELS)
def test_pain9_a_deep_copy_runs_on_its_own_weights(level):
    model, optimizer = make(level)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for param in copied.parameters():
            param.zero_()
    copied.eval()
    out = copied(torch.ones(3, 4))

    assert out.float().abs().max() == 0
    assert copied.state_dict()["0.weight"].abs().max() == 0
    step(model, optimizer)


@pytest.mark.parametrize("level", LEVELS)
def test_pain9_a_model_can_be_pickled_whole(level):
    model, optimizer = make(level)
    step(model, optimizer)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.linspace(-1, 1, 12).reshape(3, 4)

    assert torch.equal(model.eval()(x), loaded.eval()(x))
    assert {n: t.dtype for n, t in model.state_dict().items()} == {n: t.dtype for n, t in loaded.state_dict().items()}


@pytest.mark.parametrize("level", LEVELS)
def test_a_compiled_model_gives_the_same_numbers(level):
    model, _ = make(level)
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    expected = model.eval()(x)
    compiled = torch.compile(model, backend="aot_eager")

    torch.testing.assert_close(compiled(x), expected, rtol=1e-2, atol=1e-2)
    assert compiled(x).dtype == expected.dtype
    assert torch._dynamo.explain(model)(x).graph_break_count == 0
    torch._dynamo.reset()


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_the_user_see_fp32_outputs_at_o2(when):
    seen = []
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    if when == "before":
        model.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    amp.initialize(model, opt_level="O2", verbosity=0)
    if when == "after":
        model.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    model(torch.ones(1, 4))

    assert seen == [torch.float32]


def test_parameters_stay_the_objects_they_are_and_forward_is_not_replaced():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = list(model.parameters())
    amp.initialize(model, opt_level="O2", verbosity=0)

    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert "forward" not in vars(model)


def test_norms_other_than_affine_batch_norm_are_cast_at_o2():
    parts = {
        "batch": nn.BatchNorm1d(4),
        "plain batch": nn.BatchNorm1d(4, affine=False),
        "layer": nn.LayerNorm(4),
        "group": nn.GroupNorm(2, 4),
        "instance": nn.InstanceNorm1d(4, affine=True),
    }
    amp.initialize(nn.ModuleDict(parts), opt_level="O2", verbosity=0)

    assert {name: next(iter([*m.parameters(), *m.buffers()])).dtype for name, m in parts.items()} == {
        "batch": torch.float32,
        "plain batch": torch.bfloat16,
        "layer": torch.bfloat16,
        "group": torch.bfloat16,
        "instance": torch.bfloat16,
    }


def test_gradients_and_recurrent_weights_are_cast_with_the_model():
    model = nn.LSTM(3, 4)
    model(torch.ones(5, 2, 3))[0].sum().backward()
    amp.initialize(model, opt_level="O3", verbosity=0)

    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(torch.ones(5, 2, 3))[0].dtype == torch.float32


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_checkpointing_gives_the_same_gradients(level, reentrant):
    def gradients(through):
        model, optimizer = make(level)
        model[1].eval()
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        dtype = model[0].weight.dtype
        hidden = through(model[0], x.to(dtype))
        loss = model[2](torch.relu(hidden)).float().square().sum()
        with amp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        return [p.grad.float() for p in amp.master_params(optimizer) if p.grad is not None]

    plain = gradients(lambda part, x: part(x))
    again = gradients(lambda part, x: checkpoint(part, x, use_reentrant=reentrant))

    assert [torch.equal(a, b) for a, b in zip(plain, again, strict=True)] == [True] * 4


def test_a_thread_that_calls_the_model_casts_at_o1():
    model, _ = make("O1")
    model.eval()
    seen = []
    thread = threading.Thread(target=lambda: seen.append(model(torch.ones(3, 4)).dtype))
    thread.start()
    thread.join()

    assert seen == [torch.bfloat16]


def test_disable_casts_holds_for_a_model_that_is_called_inside():
    model, _ = make("O1")
    with amp.disable_casts():
        assert model.eval()(torch.ones(3, 4)).dtype == torch.float32


def test_pain13_evaluating_loading_and_evaluating_again_sees_the_new_weights():
    model, _ = make("O1")
    model.eval()
    x = torch.ones(3, 4)
    model(x)
    model.load_state_dict({name: torch.zeros_like(t) for name, t in model.state_dict().items()})

    assert model(x).abs().max() == 0


def test_a_weight_that_is_used_twice_has_both_gradients():
    """IndexError in apex on today's torch."""
    with half_is("bfloat16"):
        layer = nn.Linear(4, 4)
        _, optimizer = amp.initialize(layer, torch.optim.SGD(layer.parameters(), lr=0.1), verbosity=0)
        with amp.scale_loss(layer(layer(torch.ones(2, 4))).float().sum(), optimizer) as scaled:
            scaled.backward()
        both = layer.bias.grad.clone()
    reference = copy.deepcopy(layer)
    reference.zero_grad()
    reference(reference(torch.ones(2, 4))).sum().backward()

    torch.testing.assert_close(both, reference.bias.grad, rtol=2e-2, atol=2e-2)


def test_only_what_was_turned_on_is_on_in_a_forked_child():
    """A data loader's worker: the user's data set must not run in half there."""
    make("O1")
    loader = torch.utils.data.DataLoader(range(2), num_workers=1, collate_fn=types_of_a_product)

    assert list(loader) == [["torch.float32"], ["torch.float32"]]
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def types_of_a_product(samples):
    return [str((torch.ones(2, 2) @ torch.ones(2, 2)).dtype) for _ in samples]


class Strange(nn.Module):
    """Parameters of every layout: of odd size, in a larger storage, scalar, empty, channels last."""

    def __init__(self):
        super().__init__()
        storage = torch.linspace(-1, 1, 64)
        self.odd = nn.Parameter(storage[:7].clone())
        self.inside = nn.Parameter(storage[1:9])
        self.scalar = nn.Parameter(torch.tensor(0.3))
        self.empty = nn.Parameter(torch.empty(0))
        self.last = nn.Parameter(storage[:32].reshape(2, 4, 2, 2).clone().to(memory_format=torch.channels_last))
        self.strided = nn.Parameter(storage.view(8, 8).clone().t())

    def forward(self, x):
        return sum((param * x).square().sum() for param in self.parameters())


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["odd", "inside", "scalar", "last", "strided"])
def test_a_value_written_into_a_parameter_of_any_layout_reaches_its_master(name, half):
    model = Strange()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    amp.initialize(model, optimizer, opt_level="O2", cast_model_type=half, verbosity=0)
    kept = dict(zip(dict(model.named_parameters()), map(torch.clone, amp.master_params(optimizer)), strict=True))
    written = getattr(model, name)
    if name == "inside":  # where a script that flattens parameters has put it
        written.data = torch.cat([torch.zeros(1, dtype=half), written.data])[1:]
    written.data[(-1,) * written.dim()] = 5.0
    with amp.scale_loss(model(torch.ones(())), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    masters = dict(zip(dict(model.named_parameters()), amp.master_params(optimizer), strict=True))

    assert (masters[name] == 5.0).any()
    assert {n: (masters[n] != kept[n]).sum().item() for n in masters} == {n: int(n == name) for n in masters}
