"""What a state may hold, and that it comes back as it was."""

import math
from collections import Counter, OrderedDict, deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import lockstep
from lockstep.train.checkpoint import trees

# torch warns of what is new, or on its way out.
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]
OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and name != "Optimizer" and name[0].isupper()
)


def same(a, b):  # noqa: PLR0911
    """Equal in type, value and bits, and in how tensors lie in memory."""
    if isinstance(a, torch.Tensor):
        if a.is_quantized or a.layout != torch.strided:
            return type(a) is type(b) and str(a) == str(b) and a.layout == b.layout and a.dtype == b.dtype
        facts = (a.dtype, a.shape, a.stride(), a.device)
        if facts != (b.dtype, b.shape, b.stride(), b.device):
            return False
        return torch.equal(*(x.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return a == b if isinstance(a, set) else str(a) == str(b)


def there_and_back(directory, state):
    lockstep.Checkpoint(directory, values=state).save(wait=True)
    found = {}
    assert lockstep.Checkpoint(directory, values=found).restore()
    return found


def made(name):
    embedding = name == "SparseAdam"
    model = nn.Embedding(5, 3, sparse=True) if embedding else nn.Linear(4, 3, bias=name != "Muon")
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    return model, optimizer, torch.tensor([1, 4]) if embedding else torch.ones(2, 4)


def train(model, optimizer, x, steps):
    for _ in range(steps):

        def closure():
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_to_the_bit(tmp_path, name):
    model, optimizer, x = made(name)
    train(model, optimizer, x, 3)
    lockstep.Checkpoint(tmp_path, model=model, optimizer=optimizer).save(wait=True)
    again, other, _ = made(name)
    lockstep.Checkpoint(tmp_path, model=again, optimizer=other).restore()
    assert same(optimizer.state_dict(), other.state_dict())
    train(model, optimizer, x, 2)
    train(again, other, x, 2)

    assert same([*model.parameters()], [*again.parameters()])


def schedulers():
    from torch.optim import lr_scheduler as s

    return {
        "MultiStepLR": lambda o: s.MultiStepLR(o, [2, 2, 4]),
        "OneCycleLR": lambda o: s.OneCycleLR(o, 0.5, total_steps=20),
        "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, patience=1),
        "CyclicLR": lambda o: s.CyclicLR(o, 0.01, 0.1, step_size_up=3),
        "SequentialLR": lambda o: s.SequentialLR(o, [s.ConstantLR(o, 0.1, 2), s.ExponentialLR(o, 0.9)], [2]),
        "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 3),
    }


@pytest.mark.parametrize("name", schedulers())
def test_schedulers_go_on(tmp_path, name):
    def build():
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
        return optimizer, schedulers()[name](optimizer)

    def rates(optimizer, scheduler, count):
        found = []
        for number in range(count):
            optimizer.step()
            scheduler.step(*([1.0 + number] if name == "ReduceLROnPlateau" else []))
            found.append(optimizer.param_groups[0]["lr"])
        return found

    optimizer, scheduler = build()
    rates(optimizer, scheduler, 3)
    lockstep.Checkpoint(tmp_path, optimizer=optimizer, scheduler=scheduler).save(wait=True)
    other, again = build()
    lockstep.Checkpoint(tmp_path, optimizer=other, scheduler=again).restore()

    assert rates(optimizer, scheduler, 5) == rates(other, again, 5)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(lambda items: deque(items, maxlen=len(items) + 1))
        | st.dictionaries(st.integers() | st.text() | st.just("!") | st.booleans(), inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
        | st.sets(st.integers())
    ),
    max_leaves=10,
)


@given(value=plain)
def test_plain_values_come_back_as_they_were(value):
    import json

    tree = json.loads(json.dumps(trees.encode(value, "x", None)))

    assert same(value, trees.decode(tree, None))


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    torch.complex32,
]


def test_every_dtype_comes_back(tmp_path):
    bits = torch.arange(7 * 16, dtype=torch.uint8)
    state = {str(dtype): bits[: 7 * dtype.itemsize].clone().view(dtype) for dtype in DTYPES if dtype != torch.bool}
    state["bool"] = torch.tensor([True, False])

    assert same(state, there_and_back(tmp_path, state))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4),
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.tensor(3.5),
        torch.empty(0),
        torch.empty(3, 0, 2),
        torch.randn(3, dtype=torch.complex64).conj(),
    ],
    ids=["plain", "permuted", "channels last", "scalar", "empty", "empty 3d", "conjugated"],
)
def test_dense_tensors_come_back_with_their_memory_order(tmp_path, tensor):
    assert same({"x": tensor}, there_and_back(tmp_path, {"x": tensor}))


@pytest.mark.parametrize("tensor", [torch.arange(20.0)[::3], torch.ones(3, 1).expand(3, 4)], ids=["holes", "expanded"])
def test_tensors_with_holes_come_back_without(tmp_path, tensor):
    assert same({"x": tensor.contiguous()}, there_and_back(tmp_path, {"x": tensor}))


def special():
    dense = torch.tensor([[0.0, 2.0, 0.0, 1.0], [3.0, 0.0, 0.0, 4.0]])
    return {
        "coo": dense.to_sparse(),
        "coo not coalesced": torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2)),
        "hybrid": dense.to_sparse(1),
        "csr": dense.to_sparse_csr(),
        "csc": dense.to_sparse_csc(),
        "bsr": dense.to_sparse_bsr((1, 2)),
        "bsc": dense.to_sparse_bsc((1, 2)),
        "per tensor": torch.quantize_per_tensor(dense, 0.1, 3, torch.quint8),
        "int32": torch.quantize_per_tensor(dense, 0.1, 0, torch.qint32),
        "per channel": torch.quantize_per_channel(
            dense, torch.tensor([0.1, 0.2]), torch.tensor([0, 3]), 0, torch.qint8
        ),
    }


def test_sparse_and_quantised_tensors_come_back(tmp_path):
    state = special()

    assert same(state, there_and_back(tmp_path, state))


def test_arrays_scalars_and_torchs_own_values_come_back(tmp_path):
    state = {
        "array": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(0.1),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:3"),
        "counter": Counter({3: 2}),
        "number": 10**40,
        "zero": -0.0,
    }

    assert same(state, there_and_back(tmp_path, state))


def test_tied_tensors_are_written_once_and_stay_tied(tmp_path):
    weight = torch.randn(100, 100)
    found = there_and_back(tmp_path, {"a": weight, "b": [weight]})
    size = sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors"))

    assert found["a"] is found["b"][0]
    assert size < 60_000  # once 40,000, and the random number generators


class Point(tuple):
    pass


@pytest.mark.parametrize(
    "value", [Point(), object(), test_schedulers_go_on, np.array(["text"])], ids=lambda v: type(v).__name__
)
def test_what_would_need_pickle_is_refused_by_name(tmp_path, value):
    with pytest.raises(lockstep.UsageError, match=r"values/deep/0 is a .* cannot hold without pickle"):
        lockstep.Checkpoint(tmp_path, values={"deep": [value]}).save()
    assert list(tmp_path.iterdir()) == []


def test_safetensors_itself_reads_the_files(tmp_path):
    from safetensors.torch import load_file

    model = nn.Linear(4, 3)
    checkpoint = lockstep.Checkpoint(tmp_path, model=model)
    checkpoint.save(wait=True)
    (path,) = checkpoint.latest().glob("*.safetensors")

    assert same(model.weight.detach(), load_file(path)["model/weight"])


class Graph(nn.Module):
    def __init__(self, edge):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.register_buffer("edges", torch.sparse_coo_tensor([[0], [1]], [edge], (2, 2)))


def test_a_model_with_a_sparse_buffer_comes_back(tmp_path):
    lockstep.Checkpoint(tmp_path, model=Graph(3.0)).save(wait=True)
    again = Graph(0.0)

    assert lockstep.Checkpoint(tmp_path, model=again).restore()
    assert again.edges.to_dense().tolist() == [[0.0, 3.0], [0.0, 0.0]]
