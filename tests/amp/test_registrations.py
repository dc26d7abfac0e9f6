"""Functions that the user moves to another list, and decorators."""

import contextlib

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from amp.programs import half_is, load
from torch import nn

from lockstep import amp

SCENARIOS = {s["scenario"]: s for s in load("o1-registrations")["trace"]["scenarios"]}
TYPES = {torch.float16: "half", torch.bfloat16: "half", torch.float32: "float", torch.float64: "float64"}


def seen(value):
    """How the record writes what a function receives."""
    if isinstance(value, torch.Tensor):
        return TYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
    if isinstance(value, list | tuple):
        return [seen(v) for v in value]
    if isinstance(value, dict):
        return {k: seen(v) for k, v in value.items()}
    return f"python {type(value).__name__}"


def report(*args, **kwargs):
    return {"args": [seen(a) for a in args], "kwargs": {k: seen(v) for k, v in kwargs.items()}}


class Module(nn.Module):
    def forward(self, x):
        return x


def library():
    class Lib:
        spy = staticmethod(report)

    return Lib


@pytest.fixture(params=["float16", "bfloat16"])
def given(request):
    """The tensors that the calls of a scenario name."""
    half = getattr(torch, request.param)
    with half_is(request.param):
        yield {
            "half": torch.full((2, 3), 0.5, dtype=half),
            "float": torch.full((2, 3), 0.5),
            "float64": torch.full((2, 3), 0.5, dtype=torch.float64),
            "int64": torch.ones(2, 3, dtype=torch.int64),
        }


def start(level="O1"):
    amp.initialize(nn.Linear(2, 2), opt_level=level, verbosity=0)


def outcome(call, **names):
    """Run one call as it is written in the record."""
    expression = call.split(" (")[0].split(" : ")[0].replace("half.", "half_.").replace("float.", "float_.")
    scope = {"torch": torch, "F": F, **names, "half_": names.get("half"), "float_": names.get("float")}
    expression = expression.replace("float Parameter", "parameter")
    value = eval(expression, scope)
    return seen(value) if isinstance(value, torch.Tensor) else value


def outcomes(scenario, **names):
    return {c["call"]: outcome(c["call"], **names) for c in SCENARIOS[scenario]["calls"]}


def recorded(scenario):
    return {c["call"]: c["result"] for c in SCENARIOS[scenario]["calls"]}


def test_without_registrations_the_lists_decide(given):
    start()

    assert recorded("no registration") == outcomes("no registration", **given, spy=report)


@pytest.mark.parametrize("policy", ["half", "float", "promote"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_registered_function_of_the_user_receives_what_apex_gave_it(given, policy, order):
    lib = library()
    if order == "after":
        start()
    getattr(amp, f"register_{policy}_function")(lib, "spy")
    if order == "before":
        start()
    scenario = f"register_{policy}_function on a user's function"
    calls = {
        c["call"]: outcome(c["call"], **given, parameter=nn.Parameter(given["float"]), spy=lib.spy)
        for c in SCENARIOS[scenario]["calls"]
    }

    assert recorded(scenario) == calls


UNLISTED = [
    ("half", "register_half_function on an unlisted torch function"),
    ("float", "register_float_function on an unlisted torch function"),
]


@pytest.mark.parametrize(("policy", "scenario"), UNLISTED)
def test_registering_sigmoid_changes_the_type_it_gives(given, policy, scenario):
    getattr(amp, f"register_{policy}_function")(torch, "sigmoid")
    start()

    assert recorded(scenario) == outcomes(scenario, **given)


class Gate(nn.Module):
    """A model whose forward uses a function that is on no list."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, other):
        return torch.sigmoid(self.linear(x)), torch.hypot(self.linear(x), other)


RESULTS = {None: ("half", "float"), "half": ("half", "half"), "float": ("float", "float"), "promote": ("half", "float")}


@pytest.mark.parametrize("policy", RESULTS)
def test_a_registration_changes_the_types_in_a_models_forward(given, policy):
    if policy:
        getattr(amp, f"register_{policy}_function")(torch, "sigmoid")
        getattr(amp, f"register_{policy}_function")(torch, "hypot")
    model = amp.initialize(Gate(), opt_level="O1", verbosity=0)
    gate, distance = model(given["float"], given["float"])

    assert RESULTS[policy] == (seen(gate), seen(distance))


@pytest.mark.parametrize("name", ["matmul", "exp", "einsum"])
def test_a_registered_name_of_a_list_is_cast_by_both(given, name):
    policy = "float" if name == "matmul" else "half"
    scenario = {
        "matmul": "register_float_function on a function of the half list",
        "exp": "register_half_function on a function of the float list",
        "einsum": "register_half_function on einsum",
    }[name]
    getattr(amp, f"register_{policy}_function")(torch, name)
    start()
    square = {key: tensor[:, :2] for key, tensor in given.items()}
    calls = [c for c in SCENARIOS[scenario]["calls"] if "a, a" not in c["call"]]

    assert {c["call"]: c["result"] for c in calls} == {c["call"]: outcome(c["call"], **square) for c in calls}


def test_a_float_registration_of_matmul_computes_in_float_from_rounded_arguments():
    (value,) = [
        c["result"]
        for c in SCENARIOS["register_float_function on a function of the half list"]["calls"]
        if isinstance(c["result"], float)
    ]
    amp.register_float_function(torch, "matmul")
    with half_is("float16"):
        start()
        a = torch.full((2, 2), 1 / 3)

        assert torch.matmul(a, a)[0, 0].item() == pytest.approx(value, rel=1e-6)


def test_the_forward_of_a_module_class_can_be_registered(given):
    class Echo(Module):
        pass

    amp.register_float_function(Echo, "forward")
    start()

    assert [seen(Echo()(given["half"])), seen(Echo()(given["float"]))] == ["float", "float"]


@pytest.mark.parametrize("policy", ["half", "float", "promote"])
def test_an_unknown_name_is_refused(policy):
    with pytest.raises(ValueError, match="No function named no_such_function in module"):
        getattr(amp, f"register_{policy}_function")(torch, "no_such_function")


def test_the_last_registration_of_a_name_wins(given):
    amp.register_half_function(torch, "sigmoid")
    start()
    amp.register_float_function(torch, "sigmoid")

    assert seen(torch.sigmoid(given["float"])) == "float"


def test_decorated_functions_cast_only_while_o1_does(given):
    half_fn, float_fn = amp.half_function(report), amp.float_function(report)
    names = {**given, "half_fn": half_fn, "float_fn": float_fn, "promote_fn": amp.promote_function(report)}
    got = {}
    for c in SCENARIOS["decorators"]["calls"]:
        when, call = c["call"].split(": ")
        if when == "at O1" and not amp._amp_state.__dict__.get("handle"):
            start()
        with amp.disable_casts() if when.startswith("inside") else contextlib.nullcontext():
            got[c["call"]] = outcome(call, **names)

    assert recorded("decorators") == got


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
def test_registrations_do_nothing_at_other_levels(given, level):
    lib = library()
    amp.register_half_function(lib, "spy")
    amp.register_float_function(torch, "sigmoid")
    start(level)

    assert recorded(f"registrations at {level}") == outcomes(f"registrations at {level}", **given, spy=lib.spy)


def test_names_are_kept():
    amp.register_half_function(torch, "sigmoid")
    start()

    assert (torch.sigmoid.__name__, F.linear.__name__) == ("sigmoid", "linear")
