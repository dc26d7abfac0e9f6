"""The types that every function on apex's lists, and common ones on none, gets and gives at O1."""

import contextlib

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from amp.programs import half_is, load
from torch import nn

from lockstep import amp
from lockstep.amp import lists, policies

RECORD = load("o1-dtypes")["trace"]
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# Autocast runs these in float32 on a CPU, or has its own idea; apex left them alone or torch refused the mix.
ELSEWHERE = {
    "torch.einsum": "autocast casts it to half",
    "F.binary_cross_entropy": "runs in float32 where apex refused",
    "Tensor.__iadd__": "torch itself keeps the type of what it writes into",
    "Tensor.__isub__": "as __iadd__",
    "Tensor.__imul__": "as __iadd__",
    "Tensor.__idiv__": "as __iadd__",
    "Tensor.__itruediv__": "as __iadd__",
}


def t(*shape, low=0.25, high=0.75):
    return torch.linspace(low, high, max(1, torch.Size(shape).numel())).reshape(shape)


M = [lambda: t(3, 4), lambda: t(2, 4)]
PAIR = lambda: (t(2, 3), t(2, 3))  # noqa: E731
ONE = lambda: (t(2, 3),)  # noqa: E731
SQUARE = lambda n: lambda: tuple(t(3, 3) for _ in range(n))  # noqa: E731

CASES = {
    "F.conv1d": lambda: ((t(1, 2, 5), t(3, 2, 3), t(3)), {}),
    "F.conv2d": lambda: ((t(1, 2, 5, 5), t(3, 2, 3, 3), t(3)), {}),
    "F.conv3d": lambda: ((t(1, 2, 4, 4, 4), t(3, 2, 3, 3, 3), t(3)), {}),
    "F.conv_transpose1d": lambda: ((t(1, 2, 5), t(2, 3, 3), t(3)), {}),
    "F.conv_transpose2d": lambda: ((t(1, 2, 5, 5), t(2, 3, 3, 3), t(3)), {}),
    "F.conv_transpose3d": lambda: ((t(1, 2, 4, 4, 4), t(2, 3, 3, 3, 3), t(3)), {}),
    "F.conv_tbc": lambda: ((t(5, 1, 2), t(3, 2, 3), t(3)), {}),
    "F.linear": lambda: ((t(2, 3), t(4, 3), t(4)), {}),
    "addmm": lambda: ((t(2, 2), t(2, 3), t(3, 2)), {}),
    "addmv": lambda: ((t(2), t(2, 3), t(3)), {}),
    "addr": lambda: ((t(2, 3), t(2), t(3)), {}),
    "addbmm": lambda: ((t(2, 2), t(1, 2, 3), t(1, 3, 2)), {}),
    "baddbmm": lambda: ((t(1, 2, 2), t(1, 2, 3), t(1, 3, 2)), {}),
    "prelu": lambda: ((t(2, 3), t(1)), {}),
    "matmul": lambda: ((t(2, 3), t(3, 2)), {}),
    "__matmul__": lambda: ((t(2, 3), t(3, 2)), {}),
    "mm": lambda: ((t(2, 3), t(3, 2)), {}),
    "mv": lambda: ((t(2, 3), t(3)), {}),
    "bmm": lambda: ((t(1, 2, 3), t(1, 3, 2)), {}),
    "F.interpolate": lambda: ((t(1, 2, 3),), {"scale_factor": 2}),
    "F.softmin": lambda: (ONE(), {"dim": 1}),
    "F.log_softmax": lambda: (ONE(), {"dim": 1}),
    "F.softmax": lambda: (ONE(), {"dim": 1}),
    "F.local_response_norm": lambda: ((t(1, 2, 3),), {"size": 2}),
    "F.cross_entropy": lambda: ((t(2, 3), torch.tensor([0, 1])), {}),
    "F.multilabel_margin_loss": lambda: ((t(2, 3), torch.tensor([[0, -1, -1], [1, -1, -1]])), {}),
    "F.multi_margin_loss": lambda: ((t(2, 3), torch.tensor([0, 1])), {}),
    "F.nll_loss": lambda: ((t(2, 3), torch.tensor([0, 1])), {}),
    "F.ctc_loss": lambda: (
        (t(4, 1, 3).log(), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])),
        {},
    ),
    "cumprod": lambda: (ONE(), {"dim": 0}),
    "cumsum": lambda: (ONE(), {"dim": 0}),
    "pow": lambda: ((t(2, 3), 2), {}),
    "__pow__": lambda: ((t(2, 3), 2), {}),
    "__ipow__": lambda: ((t(2, 3), 2), {}),
    "__rpow__": lambda: ((t(2, 3), 2), {}),
    "renorm": lambda: ((t(2, 3), 2, 0, 1.0), {}),
    "F.grid_sample": lambda: ((t(1, 1, 3, 3), t(1, 2, 2, 2)), {"align_corners": False}),
    "F.cosine_embedding_loss": lambda: ((t(2, 3), t(2, 3), torch.tensor([1, -1])), {}),
    "F.hinge_embedding_loss": lambda: (PAIR(), {}),
    "F.kl_div": lambda: (PAIR(), {"reduction": "batchmean"}),
    "F.margin_ranking_loss": lambda: ((t(2), t(2), torch.tensor([1, -1])), {}),
    "F.soft_margin_loss": lambda: (PAIR(), {}),
    "F.layer_norm": lambda: ((t(2, 3), (3,), t(3), t(3)), {}),
    "F.group_norm": lambda: ((t(2, 4), 2, t(4), t(4)), {}),
    "F.triplet_margin_loss": lambda: ((t(2, 3), t(2, 3), t(2, 3, high=0.9)), {}),
    "cross": lambda: (PAIR(), {"dim": 1}),
    "dot": lambda: ((t(3), t(3)), {}),
    "torch.bilinear": lambda: ((t(2, 3), t(2, 4), t(5, 3, 4), t(5)), {}),
    "torch.cat": lambda: (([t(2, 3), t(2, 3)],), {}),
    "torch.stack": lambda: (([t(2, 3), t(2, 3)],), {}),
    "torch.logsumexp": lambda: (ONE(), {"dim": 1}),
    "torch.clamp": lambda: (ONE(), {"min": 0.3}),
    "F.max_pool2d": lambda: ((t(1, 1, 4, 4), 2), {}),
    "F.avg_pool2d": lambda: ((t(1, 1, 4, 4), 2), {}),
    "F.adaptive_avg_pool2d": lambda: ((t(1, 1, 4, 4), 2), {}),
    "F.embedding": lambda: ((torch.tensor([0, 1]), t(3, 2)), {}),
    "F.instance_norm": lambda: ((t(1, 2, 4),), {}),
    "F.batch_norm": lambda: ((t(4, 3), t(3), t(3)), {"training": True}),
    "torch.einsum": lambda: (("ij,jk->ik", t(2, 3), t(3, 2)), {}),
}


def case(op, tensors):
    build = CASES.get(op) or CASES.get("F." + op.split(".")[1]) or CASES.get(op.split(".")[1])
    if build:
        return build()
    return tuple(t(2, 3) for _ in range(tensors)), {}


def resolve(op):
    where, name = op.split(".")
    return getattr({"F": F, "torch": torch, "Tensor": torch.Tensor}[where], name)


def give(args, first, others):
    """Floating tensors in these types, the first one and the rest."""
    seen = 0

    def cast(value):
        nonlocal seen
        if isinstance(value, list):
            return [cast(v) for v in value]
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        seen += 1
        return value.to(first if seen == 1 else others)

    return tuple(cast(arg) for arg in args)


def word(value):
    """How the record calls a type."""
    if isinstance(value, torch.Tensor):
        value = value.dtype
    return {torch.float16: "half", torch.bfloat16: "half", torch.float32: "float", torch.bool: "bool", bool: "bool"}[
        value if isinstance(value, torch.dtype) else type(value)
    ]


GROUPS = [
    pytest.param(group, id=f"{i}-{group['list'].replace(' ', '-')}-list-of-{group['floating_tensors']}")
    for i, group in enumerate(RECORD["table"])
]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("group", GROUPS)
def test_o1_gives_the_types_that_apex_gave(group, half):
    types = {"half": HALVES[half], "float": torch.float32}
    ops = [op for op in group["ops"] if op not in ELSEWHERE]
    got = {op: {} for op in ops}
    with half_is(half):
        amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
        for op in ops:
            for inputs in group["cases"]:
                first, others = (types[name] for name in (inputs.split(",") * 2)[:2])
                args, kwargs = case(op, group["floating_tensors"])
                got[op][inputs] = word(resolve(op)(*give(args, first, others), **kwargs))

    assert {op: {key: out_of(value) for key, value in group["cases"].items()} for op in ops} == got


def out_of(recorded):
    return recorded if isinstance(recorded, str) else recorded["out"]


@pytest.fixture(params=HALVES)
def o1(request):
    """O1 is on; gives a half and a float tensor of shape 2x3."""
    with half_is(request.param):
        amp.initialize(nn.Linear(2, 2), opt_level="O1", verbosity=0)
        yield t(2, 3).to(HALVES[request.param]), t(2, 3)


METHODS = [
    pytest.param(name, inputs, expected, id=f"{name}-{inputs}")
    for group in RECORD["in_place_methods"]["groups"]
    for name in group["methods"]
    for inputs, expected in group["cases"].items()
]


def in_place_arguments(name, tensors):
    args, kwargs = case(name.rstrip("_"), tensors)
    if name in ("Tensor.addcdiv_", "Tensor.addcmul_"):
        args = tuple(t(2, 3) for _ in range(3))
    return args, kwargs


@pytest.mark.parametrize(("name", "inputs", "expected"), METHODS)
def test_methods_that_write_in_place_keep_the_type_of_what_they_write_into(o1, name, inputs, expected):
    """Where apex raised, for the float list on a half tensor, torch computes in fp32 and writes half."""
    types = {"half": o1[0].dtype, "float": torch.float32}
    first, others = (types[part] for part in (inputs.split(",") * 2)[:2])
    args, kwargs = in_place_arguments(name, len(inputs.split(",")))
    args = give(args, first, others)
    resolve(name)(*args, **kwargs)

    assert word(args[0]) == ("half" if expected == "NotImplementedError" else expected)


MODULES = {
    "Linear": lambda: (nn.Linear(3, 4), t(2, 3)),
    "Conv2d": lambda: (nn.Conv2d(2, 3, 3), t(1, 2, 5, 5)),
    "ConvTranspose2d": lambda: (nn.ConvTranspose2d(2, 3, 3), t(1, 2, 5, 5)),
    "BatchNorm1d": lambda: (nn.BatchNorm1d(3), t(4, 3)),
    "BatchNorm2d": lambda: (nn.BatchNorm2d(2), t(2, 2, 3, 3)),
    "LayerNorm": lambda: (nn.LayerNorm(3), t(2, 3)),
    "GroupNorm": lambda: (nn.GroupNorm(2, 4), t(2, 4)),
    "GELU": lambda: (nn.GELU(), t(2, 3)),
    "Softmax": lambda: (nn.Softmax(1), t(2, 3)),
    "Softplus": lambda: (nn.Softplus(), t(2, 3)),
    "RNNCell tanh": lambda: (nn.RNNCell(3, 4), t(2, 3)),
    "RNNCell relu": lambda: (nn.RNNCell(3, 4, nonlinearity="relu"), t(2, 3)),
    "GRUCell": lambda: (nn.GRUCell(3, 4), t(2, 3)),
    "LSTMCell": lambda: (nn.LSTMCell(3, 4), t(2, 3)),
}


@pytest.mark.parametrize("row", RECORD["modules"], ids=lambda row: row["module"])
def test_modules_give_the_types_that_apex_gave(o1, row):
    name, _, given = row["module"].split(", ")
    module, x = MODULES[name]()
    out = module(x.to(o1[0].dtype) if given == "input half" else x)

    assert word(out[0] if isinstance(out, tuple) else out) == row["out"]


RULES = {
    "half + 1.0 (python number)": lambda h, f: h + 1.0,
    "float + 1.0 (python number)": lambda h, f: f + 1.0,
    "int64 tensor + half": lambda h, f: torch.ones(2, 3, dtype=torch.int64) + h,
    "half @ float": lambda h, f: h @ f.t(),
    "torch.cat of [half, half]": lambda h, f: torch.cat([h, h]),
    "torch.cat of [half, float]": lambda h, f: torch.cat([h, f]),
    "torch.cat of (half, float, half), a tuple": lambda h, f: torch.cat((h, f, h)),
    "torch.cat of [half, int64]": lambda h, f: torch.cat([h, torch.ones(2, 3, dtype=torch.int64)]),
    "half.cpu()": lambda h, f: h.cpu(),
    "float.cpu()": lambda h, f: f.cpu(),
    "half.sum()": lambda h, f: h.sum(),
    "half.mean()": lambda h, f: h.mean(),
    "half.float()": lambda h, f: h.float(),
    "torch.sum(half, dim=0)": lambda h, f: torch.sum(h, dim=0),
    "half ** 2": lambda h, f: h**2,
    "2 ** half": lambda h, f: 2**h,
    "half / half": lambda h, f: h / h,
    "half / float": lambda h, f: h / f,
    "keyword tensors: F.linear(input=float, weight=float)": lambda h, f: F.linear(input=f, weight=f),
    "F.binary_cross_entropy(float, float)": lambda h, f: F.binary_cross_entropy(f, f),
    "nn.CrossEntropyLoss()(half logits, int64)": lambda h, f: nn.CrossEntropyLoss()(h, torch.tensor([0, 1])),
}


@pytest.mark.parametrize("rule", RULES)
def test_special_rules_are_those_of_apex(o1, rule):
    (recorded,) = [row["result"] for row in RECORD["rules"] if row["case"] == rule]

    assert word(RULES[rule](*o1)) == recorded


@pytest.mark.parametrize("mixture", ["half half", "half float", "float half"])
def test_pain12_binary_cross_entropy_runs_in_fp32_where_apex_refused(o1, mixture):
    given = [{"half": o1[0], "float": o1[1]}[name] for name in mixture.split()]
    loss = F.binary_cross_entropy(*given)

    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.binary_cross_entropy(*[x.float() for x in given]))


def test_bce_loss_of_a_sigmoid_of_half_runs_in_fp32(o1):
    assert nn.BCELoss()(torch.sigmoid(o1[0]), o1[0]).dtype == torch.float32


def test_float64_is_left_alone(o1):
    x = t(2, 3).double()

    results = {"exp": x.exp(), "softmax": F.softmax(x, 1), "matmul": x @ x.t(), "mv": x.mv(x[0]), "dot": x[0].dot(x[1])}

    assert {name: result.dtype for name, result in results.items()} == dict.fromkeys(results, torch.float64)


def test_float64_is_left_alone_in_a_users_backward(o1):
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x @ x.t()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return (grad + grad.t()) @ x

    assert torch.autograd.gradcheck(Product.apply, t(2, 3).double().requires_grad_())


def test_casts_hold_under_no_grad(o1):
    with torch.no_grad():
        assert word(F.linear(o1[1], o1[1])) == "half"


def test_gradients_of_cast_weights_and_inputs_are_float(o1):
    weight, x = nn.Parameter(t(4, 3)), t(2, 3).requires_grad_()
    F.linear(x, weight).sum().backward()

    assert (weight.grad.dtype, x.grad.dtype) == (torch.float32, torch.float32)


def test_numpy_of_what_went_through_cpu_is_float32(o1):
    assert str(nn.Linear(3, 2)(o1[1]).detach().cpu().numpy().dtype) == "float32"


def test_disable_casts_nests_and_survives_exceptions(o1):
    x, seen = o1[1], []
    with contextlib.suppress(ZeroDivisionError), amp.disable_casts():
        with amp.disable_casts():
            seen.append(word(x @ x.t()))
        seen.append(word(x @ x.t()))
        seen.append(word(o1[0].exp()))
        _ = 1 / 0
    seen.append(word(x @ x.t()))

    assert seen == ["float", "float", "half", "half"]


def test_disable_casts_is_a_decorator_too(o1):
    @amp.disable_casts()
    def product(x):
        return x @ x.t()

    assert [word(product(o1[1])), word(product(o1[1])), word(o1[1] @ o1[1].t())] == ["float", "float", "half"]


def test_everything_is_put_back_when_amp_is_turned_off(o1):
    assert "exp" in vars(torch.Tensor)
    amp.initialize(nn.Identity(), enabled=False)

    assert (word(F.linear(o1[1], o1[1])), word(F.softmax(o1[0], 1))) == ("float", "half")
    assert "exp" not in vars(torch.Tensor)
    assert F.softmax.__module__ == "torch.nn.functional"
    assert not hasattr(F.softmax, "__wrapped__")


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_recurrent_layers_run_in_half_from_float_inputs(o1, kind, packed):
    layer, x = kind(3, 4), t(5, 2, 3)
    if packed:
        x = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
    out, hidden = layer(x)
    out = out.data if packed else out
    out.sum().backward()

    assert word(out) == "half"
    assert word(hidden[0] if kind is nn.LSTM else hidden) == "half"
    assert {name: word(p.grad) for name, p in layer.named_parameters()} == {
        name: "float" for name, _ in layer.named_parameters()
    }


OUT = {
    "exp": torch.exp,
    "sum": lambda x, **more: torch.sum(x, 1, **more),
    "cumsum": lambda x, **more: torch.cumsum(x, 1, **more),
    "norm": lambda x, **more: torch.norm(x, 2, 1, **more),
    "mv": lambda x, **more: torch.mv(x, x[0], **more),
    "dot": lambda x, **more: torch.dot(x[0], x[1], **more),
}


@pytest.mark.parametrize("name", OUT)
@pytest.mark.parametrize("given", ["half", "float"])
@pytest.mark.parametrize("written", ["half", "float"])
@pytest.mark.parametrize("size", ["full", "empty"])
def test_what_is_given_as_out_is_filled_and_keeps_its_type(o1, name, given, written, size):
    half, single = o1
    types = {"half": half.dtype, "float": torch.float32}
    expected = OUT[name](single.double())
    out = torch.full_like(expected if size == "full" else expected.new_empty(0), -7, dtype=types[written])
    if name == "dot" and given != written:
        pytest.skip("torch itself refuses an out of another type")
    result = OUT[name](single.to(types[given]), out=out)

    assert result is out
    assert out.dtype == types[written]
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=0)


MIXED = {
    "torch.vdot": lambda h, f: torch.vdot(f[0], h[0]),
    "Tensor.vdot": lambda h, f: f[0].vdot(h[0]),
    "torch.tensordot": lambda h, f: torch.tensordot(f, h, ([1], [1])),
    "torch.scatter_add": lambda h, f: torch.scatter_add(f, 1, torch.zeros(2, 3, dtype=torch.long), h),
    "Tensor.scatter_add": lambda h, f: f.scatter_add(1, torch.zeros(2, 3, dtype=torch.long), h),
    "torch.index_put": lambda h, f: torch.index_put(f, (torch.tensor([0, 1]),), h),
    "Tensor.index_put": lambda h, f: f.index_put((torch.tensor([0, 1]),), h),
}


@pytest.mark.parametrize("name", MIXED)
def test_what_promotes_on_a_cuda_device_does_so_on_a_cpu(o1, name):
    assert word(MIXED[name](*o1)) == "float"


def test_spectral_norm_can_be_made_and_used(o1):
    for normed in (nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm):
        assert word(normed(nn.Linear(3, 3))(o1[1])) == "half"


def names_under(key):
    names = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}
    return {name for name in names if not name.startswith(("_", "cudnn_", "upsample_"))}


def test_autocast_knows_every_function_of_the_half_list():
    """Where it does not, on a CPU, `policies` casts by itself."""
    half = {*lists.functional_overrides.FP16_FUNCS, *lists.torch_overrides.FP16_FUNCS}

    assert half - names_under("AutocastCUDA") == set()
    assert half - names_under("AutocastCPU") == policies._NOT_ON_CPU


def test_what_autocast_casts_on_cuda_and_apex_did_not_is_what_it_was_when_the_lists_were_compared():
    """A torch whose autocast casts more, or less, fails here by name: decide what O1 does then."""
    apexs = {
        name
        for table in lists.ALL
        for name in (*table.FP16_FUNCS, *table.FP32_FUNCS, *table.CASTS, *[name for name, _ in table.BANNED_FUNCS])
    }

    later = {"rms_norm", "linalg_matrix_sqrth"}  # not in torch 2.9; since 2.14, on CPUs too: float32, and so it stays
    assert " ".join(sorted(names_under("AutocastCUDA") - apexs - later)) == (
        "cdist chain_matmul convolution einsum frobenius_norm grid_sampler gru_cell huber_loss index_put "
        "linalg_matrix_norm linalg_multi_dot linalg_vecdot linalg_vector_norm log1p logsumexp lstm_cell "
        "native_layer_norm nll_loss2d nuclear_norm pdist rnn_relu_cell rnn_tanh_cell "
        "scaled_dot_product_attention scatter_add tensordot vdot"
    )
