"""What torch's DataParallel does on GPUs, lockstep's does on any devices: one list, run against both."""

import copy
import warnings
from collections import namedtuple

import pytest
import torch
from torch import nn

import lockstep

Pair = namedtuple("Pair", ["first", "second"])


class Tool:
    """One of the two, on two devices."""

    def __init__(self, kind, device_ids):
        self.kind, self.device_ids = kind, device_ids
        self.home = device_ids[0]

    def wrap(self, module, **options):
        return self.kind(module.to(self.home), device_ids=self.device_ids, **options)

    def tensor(self, *shape, seed=0):
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(self.home)


def tools():
    yield pytest.param(Tool(lockstep.DataParallel, ["cpu", "cpu"]), id="lockstep, cpu")
    there, count = torch.cuda.is_available(), torch.cuda.device_count()
    gpus = [0, 1 % max(count, 1)]
    for name, kind in (("torch, cuda", nn.DataParallel), ("lockstep, cuda", lockstep.DataParallel)):
        yield pytest.param(Tool(kind, gpus), id=name, marks=pytest.mark.skipif(not there, reason="needs a GPU"))


@pytest.fixture(params=tools())
def tool(request):
    return request.param


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def gradients(module):
    return [parameter.grad.clone() for parameter in module.parameters()]


class Tell(nn.Module):
    """Tells what each replica got."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.got = []

    def forward(self, x, *more, **options):
        self.got.append((x.shape, more, options))
        return x * self.scale


def test_a_batch_of_30_is_15_and_15(tool):
    module = Tell()
    tool.wrap(module)(tool.tensor(30, 2))

    assert sorted(shape[0] for shape, _, _ in module.got) == [15, 15]


@pytest.mark.parametrize(("samples", "expected"), [(5, [2, 3]), (2, [1, 1]), (1, [1])])
def test_a_batch_is_split_as_chunk_does_and_a_small_one_over_fewer_devices(tool, samples, expected):
    module = Tell()
    y = tool.wrap(module)(tool.tensor(samples, 2))

    assert (sorted(shape[0] for shape, _, _ in module.got), len(y)) == (expected, samples)


def test_along_another_dimension(tool):
    module, x = Tell(), tool.tensor(3, 8)
    y = tool.wrap(module, dim=1)(x)

    assert {tuple(shape) for shape, _, _ in module.got} == {(3, 4)}
    torch.testing.assert_close(y, x)


def test_keywords_and_nestings_are_split_and_the_rest_is_passed_on(tool):
    module, x = Tell(), tool.tensor(6, 2)
    something = object()
    tool.wrap(module)(x, [x, (x, "word")], Pair(x, 3), key={"x": x, "other": something})

    for shape, (listed, pair), options in module.got:
        assert listed[0].shape == listed[1][0].shape == pair.first.shape == options["key"]["x"].shape == shape
        assert (listed[1][1], pair.second, options["key"]["other"]) == ("word", 3, something)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = net()

    def forward(self, x):
        y = self.layer(x)
        return {"y": y, "both": [y + 1, Pair(y * 2, (y.sum(1), None))]}


def test_outputs_of_any_nesting_are_gathered(tool):
    module, x = Nested(), tool.tensor(5, 4)
    found = tool.wrap(module)(x)
    expected = module(x)

    torch.testing.assert_close(found["y"], expected["y"])
    torch.testing.assert_close(found["both"][0], expected["both"][0])
    torch.testing.assert_close(found["both"][1].first, expected["both"][1].first)
    torch.testing.assert_close(found["both"][1].second[0], expected["both"][1].second[0])
    assert isinstance(found["both"][1], Pair)
    assert found["both"][1].second[1] is None


def test_scalars_become_a_vector(tool):
    class Mean(nn.Module):
        def forward(self, x):
            return x.mean()

    module, x = Mean(), tool.tensor(6, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's hint
        y = tool.wrap(module)(x)

    torch.testing.assert_close(y, torch.stack([x[:3].mean(), x[3:].mean()]))


@pytest.mark.parametrize("output_device", [-1, "cpu", torch.device("cpu")])
def test_outputs_are_gathered_where_output_device_says(tool, output_device):
    y = tool.wrap(net(), output_device=output_device)(tool.tensor(4, 4))

    assert y.device == torch.device("cpu")


def test_gradients_of_parameters_and_inputs_are_those_of_the_module(tool):
    plain, x = net().to(tool.home), tool.tensor(7, 4)
    module = copy.deepcopy(plain)
    model = tool.wrap(module)
    for run, leaf in ((plain, x.clone().requires_grad_()), (model, x.clone().requires_grad_())):
        for _ in range(2):  # gradients accumulate
            run(leaf).square().sum().backward()
        run.kept = leaf.grad

    torch.testing.assert_close(gradients(module), gradients(plain), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(model.kept, plain.kept, rtol=1e-10, atol=1e-10)


def test_second_derivatives(tool):
    plain, x = net().to(tool.home), tool.tensor(7, 4)
    found = []
    for run in (plain, tool.wrap(copy.deepcopy(plain))):
        leaf = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(run(leaf).square().sum(), leaf, create_graph=True)
        slopes = torch.autograd.grad(run(leaf).pow(3).sum(), list(run.parameters()), create_graph=True)
        (slope.square().sum() + sum(x.square().sum() for x in slopes)).backward()
        found.append([leaf.grad, *gradients(run)])

    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


def test_a_frozen_parameter_gets_no_gradient(tool):
    module = net()
    module[0].weight.requires_grad_(False)
    tool.wrap(module)(tool.tensor(4, 4)).sum().backward()

    assert [parameter.grad is None for parameter in module.parameters()] == [True, False, False, False]


def test_what_replica_0_writes_to_buffers_stays_and_the_rest_is_lost(tool):
    x = tool.tensor(6, 4)
    module, expected = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double().to(tool.home)
    model = tool.wrap(module)
    for _ in range(3):
        model(x)
        expected(x[:3])

    torch.testing.assert_close(module.running_mean, expected.running_mean)
    assert int(module.num_batches_tracked) == 3


def test_attributes_set_in_forward_are_lost(tool):
    class Counts(nn.Module):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x

    module = Counts()
    model = tool.wrap(module)
    model(tool.tensor(4, 2))
    model(tool.tensor(4, 2))

    assert module.calls == 0


def test_hooks_run_in_every_replica(tool):
    module, seen = net(), []
    module[0].register_forward_hook(lambda layer, inputs, output: seen.append(len(output)))
    module[2].register_forward_pre_hook(lambda layer, inputs: (inputs[0] * 2,))
    module.register_full_backward_hook(lambda layer, of_inputs, of_outputs: seen.append(-len(of_outputs[0])))
    x = tool.tensor(6, 4).requires_grad_()
    y = tool.wrap(module)(x)
    y.sum().backward()

    assert sorted(seen) == [-3, -3, 3, 3]
    torch.testing.assert_close(y, module(x))


class Oddities(nn.Module):
    """Lists, norms of old and new, shared modules, what others have tripped over."""

    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([torch.randn(4, 4, dtype=torch.float64) for _ in range(3)])
        self.dict = nn.ParameterDict({"a": torch.randn(4, dtype=torch.float64)})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the old weight norm is deprecated, and in every old script
            self.old = nn.utils.weight_norm(nn.Linear(4, 4).double())
        self.new = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4).double())
        self.again = self.new
        self.tied = nn.Linear(4, 4).double()
        self.tied.weight = self.old.weight_v
        self.recurrent = nn.GRU(4, 4, batch_first=True).double()

    def forward(self, x):
        for weight in self.list:
            x = torch.tanh(x @ weight + self.dict["a"])
        x = self.again(self.new(self.old(x))) + self.tied(x)
        return self.recurrent(x[:, None])[0][:, 0]


def test_parameter_lists_weight_norms_and_shared_parts(tool):
    torch.manual_seed(0)
    plain, x = Oddities().to(tool.home), tool.tensor(5, 4)
    module = Oddities()
    module.load_state_dict(plain.state_dict())
    model = tool.wrap(module)
    for run in (plain, model):
        run(x).square().sum().backward()

    torch.testing.assert_close(model(x), plain(x))
    torch.testing.assert_close(gradients(module), gradients(plain))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_inside_replicas(tool, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([net(), nn.Linear(3, 3).double()])

        def forward(self, x):
            for part in self.parts:
                x = torch.utils.checkpoint.checkpoint(part, x, use_reentrant=reentrant)
            return x

    plain, x = Checkpointed().to(tool.home), tool.tensor(6, 4)
    module = copy.deepcopy(plain)
    model = tool.wrap(module)
    for run in (plain, model):
        y = run(x.clone().requires_grad_())
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # re-entrant checkpoints say that there is nothing to do
            run(x.clone().requires_grad_())  # another forward before the backward
        y.square().sum().backward()

    torch.testing.assert_close(gradients(module), gradients(plain))


def test_state_dict_has_the_prefix_and_the_module_its_own(tool):
    model = tool.wrap(net())

    assert list(model.state_dict()) == [f"module.{key}" for key in model.module.state_dict()]


def test_modes_are_carried_into_replicas(tool):
    seen = []

    class Modes(nn.Module):
        def forward(self, x):
            seen.append((torch.is_grad_enabled(), (x @ x.T).dtype))
            return x

    model = tool.wrap(Modes())
    kind = torch.device(tool.home).type
    with torch.no_grad(), torch.autocast(kind, dtype=torch.bfloat16) if kind == "cpu" else torch.autocast(kind):
        model(tool.tensor(4, 2).float())

    assert seen == [(False, torch.bfloat16 if kind == "cpu" else torch.float16)] * 2


def test_a_replicas_exception_is_raised_with_its_traceback_and_device(tool):
    class Fails(nn.Module):
        def forward(self, x):
            return self.deeper(x)

        def deeper(self, x):
            raise ValueError("this is wrong")

    with pytest.raises(ValueError, match=r"(?s)this is wrong.*device|device.*this is wrong") as caught:
        tool.wrap(Fails())(tool.tensor(4, 2))

    assert "replica" in str(caught.value)
    shown = str(caught.value) + "".join(entry.name for entry in caught.traceback)
    assert "deeper" in shown


def test_a_module_elsewhere_is_an_error(tool):
    model = tool.wrap(net())
    model.module[2].to("meta")

    with pytest.raises((RuntimeError, ValueError), match="meta"):
        model(tool.tensor(4, 4))


def test_an_optimizer_made_before_or_after_trains_the_module(tool):
    plain, x = net().to(tool.home), tool.tensor(6, 4)
    module = copy.deepcopy(plain)
    runs = [(plain, torch.optim.Adam(plain.parameters())), (tool.wrap(module), torch.optim.Adam(module.parameters()))]
    for run, optimizer in runs:
        for _ in range(5):
            optimizer.zero_grad()
            run(x).square().mean().backward()
            optimizer.step()

    torch.testing.assert_close(list(module.parameters()), list(plain.parameters()), rtol=1e-9, atol=1e-9)


def test_gradients_repeat_to_the_bit(tool):
    x, found = tool.tensor(64, 4).float(), []
    for _ in range(5):
        module = net().float()
        tool.wrap(module)(x).square().sum().backward()
        found.append(torch.cat([gradient.flatten() for gradient in gradients(module)]))

    assert all(torch.equal(found[0], other) for other in found)


def test_no_argument_at_all_runs_once(tool):
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self):
            return self.weight * 2

    assert tool.wrap(Constant())().tolist() == [2.0, 2.0, 2.0]
