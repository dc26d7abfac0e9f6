"""What tensors say of where they are, and what is noted where they should not meet."""

import copy
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from lockstep.compat.rehearsal.moving import read_to
from lockstep.errors import UsageError
from tests.compat.rehearsal.rehearsing import rehearsing


def devices_of(*tensors):
    return [str(x.device) for x in tensors]


def test_results_are_where_their_arguments_are():
    with rehearsing() as noted:
        x = torch.randn(4, 3, device="cuda:1", requires_grad=True)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout()).to("cuda:1")
        y = model(x)
        values, indices = y.max(1)
        parts = torch.cat([y, y]).chunk(2)
        y.sum().backward()
        found = devices_of(
            y, values, indices, *parts, y[0], y.T, y > 0, x.grad, model[0].weight.grad, x.data, y.detach()
        )

    assert set(found) == {"cuda:1"}
    assert not noted


def test_a_move_is_a_copy_and_staying_is_none():
    with rehearsing():
        x = torch.ones(3)
        y = x.cuda()
        y.add_(1)

        assert x.tolist() == [1, 1, 1]
        assert y.cuda() is y
        assert y.to("cuda:0", torch.float32) is y
        assert y.to("cuda:1") is not y
        assert y.cpu() is not y
        assert x.cpu() is x


def test_gradients_pass_through_a_move():
    with rehearsing():
        x = torch.ones(3, requires_grad=True)
        (x.cuda() * 2).sum().backward()

        assert x.grad.tolist() == [2, 2, 2]


def test_a_module_that_moves_keeps_its_parameters():
    """An optimizer may have been made before."""
    with rehearsing():
        model = torch.nn.Linear(2, 2)
        weight = model.weight
        model.cuda()

        assert model.weight is weight
        assert weight.is_cuda
        assert str(copy.deepcopy(model).weight.device) == "cuda:0"
        assert not model.cpu().weight.is_cuda


@pytest.mark.parametrize(
    ("piece", "what"),
    [
        ("torch.nn.Linear(2, 2)(x)", "linear of tensors on cuda:0 and cpu"),
        ("x + torch.ones(2, 2)", "__add__ of tensors on cuda:0 and cpu"),
        ("torch.cat([x, torch.ones(2, 2)])", "cat of tensors on cuda:0 and cpu"),
        ("x + x.to('cuda:1')", "__add__ of tensors on cuda:1 and cuda:0"),
        ("torch.nn.functional.cross_entropy(x, torch.tensor([0, 1]))", "cross_entropy of tensors on cuda:0 and cpu"),
        ("x.numpy()", "numpy() of a tensor on cuda:0"),
    ],
)
def test_what_a_gpu_would_refuse_is_noted(piece, what):
    with rehearsing() as noted:
        exec(piece, {"torch": torch, "x": torch.ones(2, 2).cuda()})

    ((note, count),) = noted.items()
    assert (note.what.replace("add of", "__add__ of"), count) == (what, 1)


@pytest.mark.parametrize(
    "piece",
    [
        "x * torch.tensor(2.0)",
        "x[torch.tensor([1])]",
        "x[torch.tensor([1])] = 0.0",
        "x.copy_(torch.zeros(2, 2))",
        "torch.zeros(2, 2).copy_(x)",
        "x.cpu() + torch.ones(2, 2)",
        "torch.where(x > 0, x, torch.tensor(0.0))",
        "torch.nn.Linear(2, 2).load_state_dict(torch.nn.Linear(2, 2).cuda().state_dict())",
        "x.cpu().numpy()",
        "x.tolist(), x.sum().item()",
        "torch.nn.utils.clip_grad_norm_([torch.nn.Parameter(x)], 1.0)",
        "rnn.pad_packed_sequence(torch.nn.GRU(1, 1).cuda()(rnn.pack_sequence([x[0, :, None], x[1, :1, None]]))[0])",
        "torch.nn.CTCLoss()(x[:, None], torch.ones(1, 1).long().cuda(), torch.tensor([2]), torch.tensor([1]))",
    ],
)
def test_what_a_gpu_takes_is_not_noted(piece):
    with rehearsing() as noted:
        exec(piece, {"torch": torch, "rnn": torch.nn.utils.rnn, "x": torch.ones(2, 2).cuda()})

    assert not noted


def test_the_place_is_the_scripts_own_line():
    with rehearsing() as noted:
        torch.nn.Sequential(torch.nn.Linear(2, 2)).cuda()(torch.ones(1, 2))

    ((note, _),) = noted.items()
    assert note.place.startswith("test_follow.py:")


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop])
@pytest.mark.parametrize("options", [{}, {"foreach": True}])
def test_optimizers_and_their_states_stay_together(optimizer, options):
    with rehearsing() as noted:
        model = torch.nn.Linear(2, 2).cuda()
        made = optimizer(model.parameters(), lr=0.1, **options)
        for _ in range(2):
            model(torch.ones(1, 2).cuda()).sum().backward()
            made.step()
        made.load_state_dict(made.state_dict())
        made.step()

    assert not noted


def test_recomputed_activations_and_hooks_work():
    with rehearsing() as noted:
        layer = torch.nn.Linear(2, 2).cuda()
        x = torch.ones(1, 2, device="cuda", requires_grad=True)
        x.register_hook(lambda grad: grad.cuda() * 2)
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        checkpoint(layer, x, use_reentrant=True).sum().backward()

        torch.testing.assert_close(x.grad.cpu(), (4 * layer.weight.sum(0)).detach().cpu()[None])
    assert not noted


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # nothing in 2.9, DeprecationWarning in 2.13, FutureWarning in 2.14
def test_a_function_of_the_scripts_own_and_jit_work():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.full((), 2.0, device="cuda")

    with rehearsing():
        x = torch.ones(2, device="cuda", requires_grad=True)
        Double.apply(x).sum().backward()

        assert x.grad.tolist() == [2, 2]
        assert torch.jit.script(add_zeros)(torch.ones(2)).tolist() == [1, 1]


def add_zeros(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros(2)


def test_threads_have_devices_of_their_own():
    found = []

    def work():
        found.append(torch.cuda.current_device())
        torch.cuda.set_device(1)
        found.append(str((torch.ones(1).cuda() + 1).device))

    with rehearsing():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        found.append(torch.cuda.current_device())

    assert found == [0, "cuda:1", 0]


@pytest.mark.parametrize("ask", ["cuda:2", 2, torch.device("cuda", 7)])
def test_a_device_that_is_not_there_is_refused(ask):
    with rehearsing(), pytest.raises(UsageError, match="invalid device ordinal"):
        torch.ones(1).to(ask)


def test_hidden_devices_still_work():
    with rehearsing(hide_cuda=True):
        assert not torch.cuda.is_available()
        assert torch.cuda.device_count() == 0
        assert torch.ones(1).cuda().is_cuda


WORDS = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([torch.float64, torch.int32]),
        "copy": st.booleans(),
        "non_blocking": st.booleans(),
        "memory_format": st.just(torch.preserve_format),
    },
)


@given(
    first=st.sampled_from([(), ("cpu",), (torch.device("cpu"),), (None,), (torch.ones(1, dtype=torch.int16),)]),
    dtype=st.sampled_from([(), (torch.float64,), (torch.int32,)]),
    flags=st.sampled_from([(), (False,), (True,), (False, True), (True, False)]),
    words=WORDS,
)
def test_to_reads_its_arguments_as_torch_does(first, dtype, flags, words):
    args = (*first, *dtype, *(flags if first or dtype else ()))
    x = torch.ones(2)
    try:
        expected = x.to(*args, **words)
    except (TypeError, RuntimeError):
        return  # torch's own refusal
    wanted = read_to(args, words)
    assert expected.dtype == (wanted.dtype or x.dtype)
    assert (expected is not x) == (wanted.copy or expected.dtype != x.dtype)

    with rehearsing():
        moved = x.to(*args, **words)
        assert (moved.dtype, moved is x) == (expected.dtype, expected is x)
