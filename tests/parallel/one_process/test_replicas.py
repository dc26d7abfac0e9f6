"""What replicas are, and what of the caller's state they see."""

import contextvars
import copy
import gc
import io
import pickle
import traceback
import weakref

import pytest
import torch
from ranks import run_ranks
from torch import nn

import lockstep
from lockstep.parallel.one_process.hints import say_once


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def two(module, **options):
    return lockstep.DataParallel(module, ["cpu", "cpu"], **options)


def data(samples=6):
    return torch.randn(samples, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Sees(nn.Module):
    """Keeps what a function sees in each replica."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.function, self.seen = function, []

    def forward(self, x):
        self.seen.append(self.function(self))
        return self.layer(x)


variable = contextvars.ContextVar("variable", default="outside")


@pytest.mark.parametrize(
    ("mode", "look", "expected"),
    [
        (torch.inference_mode, lambda model: torch.is_inference_mode_enabled(), True),
        (torch.no_grad, lambda model: torch.is_grad_enabled(), False),
        (
            lambda: torch.autocast("cpu", dtype=torch.float16),
            lambda model: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
            (True, torch.float16),
        ),
        (
            lambda: torch.autocast("cpu", enabled=False),
            lambda model: torch.is_autocast_enabled("cpu"),
            False,
        ),
        (lambda: torch.device("meta"), lambda model: torch.empty(1).device.type, "meta"),
    ],
    ids=["inference", "no_grad", "autocast", "no autocast", "default device"],
)
def test_modes_of_the_caller_reach_the_replicas(mode, look, expected):
    module, x = Sees(look), data()
    model = two(module)
    with mode():
        model.parallel_apply([module, module], [x, x], [{}, {}])

    assert module.seen == [expected, expected]


def test_context_variables_reach_the_replicas():
    module, token = Sees(lambda model: variable.get()), variable.set("inside")
    two(module)(data())
    variable.reset(token)

    assert module.seen == ["inside", "inside"]


def test_replicas_have_parameters_to_ask():
    module = Sees(lambda model: ([*dict(model.named_parameters())], next(model.parameters()).dtype))
    two(module)(data())

    assert module.seen == [(["layer.weight", "layer.bias"], torch.float64)] * 2


def test_what_was_set_and_hooked_since_the_last_forward_counts():
    module, calls = Sees(lambda model: model.training), []
    model = two(module)
    model(data())
    model.eval()
    module.layer.register_forward_hook(lambda *_: calls.append(1))
    model(data())

    assert (module.seen, calls) == ([True, True, False, False], [1, 1])


def test_a_forward_that_is_a_bound_method_runs_in_the_replica():
    class Switches(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.forward = self.forward_quickly

        def forward_quickly(self, x):
            self.calls += 1
            return x

    module = Switches()
    two(module)(data())

    assert module.calls == 1  # replica 1 counted on its own copy


def test_a_compiled_module_runs_uncompiled_in_replicas():
    module = net()
    expected = module(data())
    model = two(torch.compile(module, backend="eager"))
    y = model(data())
    y.sum().backward()

    torch.testing.assert_close(y, expected)
    assert module[0].weight.grad is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # nothing in 2.9, DeprecationWarning in 2.13, FutureWarning in 2.14
def test_torchscript_is_refused():
    module = torch.jit.trace(net(), data())

    with pytest.raises(lockstep.UsageError, match="which is TorchScript"):
        two(module)(data())


def test_hooks_on_a_parameter_fire_once_with_the_whole_gradient():
    module, seen = net(), []
    module[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    two(module)(data()).sum().backward()

    assert len(seen) == 1
    torch.testing.assert_close(seen[0], module[0].weight.grad)


def test_a_shared_parameter_and_many_replicas_repeat_to_the_bit():
    class Recurs(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            for _ in range(5):
                x = torch.tanh(self.layer(x))
            return x

    found = []
    for _ in range(8):
        module = Recurs()
        lockstep.DataParallel(module, ["cpu"] * 5)(data(64).float()).sum().backward()
        found.append(module.layer.weight.grad)

    assert all(torch.equal(found[0], other) for other in found)


class Fails(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.deeper(x)

    def deeper(self, x):
        raise self.make(float(x[0, 0]))


class OwnError(Exception):
    def __init__(self, code, text):
        super().__init__(code, text)
        self.code = code


@pytest.mark.parametrize(
    "make", [lambda x: ValueError(f"sample {x}"), lambda x: OwnError(x, "sample")], ids=["ours", "theirs"]
)
def test_an_exception_is_the_replicas_own_with_its_device(make):
    x = torch.tensor([[5.0], [6.0]])
    with pytest.raises((ValueError, OwnError)) as caught:
        two(Fails(make))(x)

    shown = "".join(traceback.format_exception(caught.value))
    assert "in deeper" in shown
    assert "5.0" in shown
    if isinstance(caught.value, OwnError):
        assert caught.value.code == 5.0
    else:
        assert str(caught.value) == "sample 5.0\n(in replica 0 of 2, on device cpu)"


def test_a_failed_forward_leaves_the_model_usable():
    class Once(nn.Module):
        def forward(self, x):
            if x[0, 0] < 0:
                raise ValueError("negative")
            return x

    model = two(Once())
    with pytest.raises(ValueError, match="negative"):
        model(-torch.ones(4, 2))

    assert model(torch.ones(4, 2)).shape == (4, 2)


def test_the_wrapper_is_copied_and_pickled_without_its_copies():
    model = two(net())
    y = model(data())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        torch.testing.assert_close(again(data()), y)


def test_double_wrapping_is_the_module():
    plain = net()
    module = copy.deepcopy(plain)
    model = two(two(module))
    for run in (plain, model):
        run(data()).square().sum().backward()

    torch.testing.assert_close(module[0].weight.grad, plain[0].weight.grad)
    assert next(iter(model.state_dict())) == "module.module.0.weight"
    assert lockstep.unwrap(model) is module


def test_a_subclass_may_change_a_step():
    class Lonely(lockstep.DataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            return super().scatter(inputs, kwargs, device_ids[:1])

        def gather(self, outputs, output_device):
            return outputs

    assert [len(y) for y in Lonely(net(), ["cpu", "cpu"])(data())] == [6]


def test_without_cuda_the_module_simply_runs(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    say_once.cache_clear()
    module, calls = net(), []
    module.register_forward_hook(lambda *_: calls.append(1))
    for device_ids in (None, [0, 1], ["cuda:0", "cuda:1"]):
        model = lockstep.DataParallel(module, device_ids)
        model(data())

        assert model.device_ids == []
    assert (len(calls), capsys.readouterr().err) == (3, "")


def test_the_pointer_to_lockstep_run_is_one_line_once(capsys):
    say_once.cache_clear()
    two(net())
    two(net())

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "`lockstep run script.py` gives each device a process of its own" in lines[0]


@pytest.mark.parametrize(
    ("device_ids", "message"),
    [
        (["gpu"], "'gpu' is no device"),
        ([True], "True is no device"),
        ([None], "None is no device"),
    ],
)
def test_a_device_that_is_none_is_said(device_ids, message):
    with pytest.raises(lockstep.UsageError, match=message):
        lockstep.DataParallel(net(), device_ids)


def test_a_module_elsewhere_is_named_with_the_line_that_mends_it():
    module = net()
    module[2].to("meta")

    with pytest.raises(
        lockstep.UsageError, match=r"(?s)parameter '2.weight' is on meta, and 1 more of 4 .*model.to\('cpu'\)"
    ):
        two(module)(data())


def test_a_lazy_module_says_to_run_it_first():
    with pytest.raises((ValueError, RuntimeError), match="uninitialized"):
        two(nn.LazyLinear(3))(data())


class Probe(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probes):
        ctx.probe = Fails(None)  # any object that can be watched
        probes.append(weakref.ref(ctx.probe))
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


@pytest.mark.parametrize("part", [nn.Identity, lambda: lockstep.SyncBatchNorm(4).double()], ids=["plain", "synced"])
def test_a_graph_goes_with_its_outputs_and_waits_for_no_garbage_collection(part):
    class Probed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers, self.probes = nn.Sequential(nn.Linear(4, 4).double(), part()), []

        def forward(self, x):
            return Probe.apply(self.layers(x), self.probes)

    module = Probed()
    model = two(module)
    gc.collect()
    gc.disable()
    try:
        y = model(data())
        there = [probe() is not None for probe in module.probes]
        del y
        left = [probe() is not None for probe in module.probes]
    finally:
        gc.enable()

    assert (there, left) == ([True, True], [False, False])


def ddp_step(rank, size):
    module = net()
    model = lockstep.DistributedDataParallel(two(module))
    x = data(8)[rank * 8 // size : (rank + 1) * 8 // size]
    for _ in range(2):
        model(x).square().mean().backward()
    return [parameter.grad for parameter in module.parameters()], list(model.state_dict())


def test_inside_ddp_ranks_times_replicas_are_one_process():
    plain = net()
    for _ in range(2):
        plain(data(8)).square().mean().backward()

    for found, keys in run_ranks(ddp_step, 2, 2):
        torch.testing.assert_close(found, [parameter.grad for parameter in plain.parameters()])
        assert keys[0] == "module.module.0.weight"
