"""O1's half copies of weights: kept while they are true, never used when they are not."""

import copy
import io

import pytest
import torch
from torch import nn

from lockstep import amp

X = torch.linspace(-1, 1, 12).reshape(3, 4)


def started():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    return amp.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level="O1", verbosity=0)


def by_copy(model, values):
    for param, value in zip(model.parameters(), values, strict=True):
        param.data.copy_(value)


def by_storage(model, values):
    for param, value in zip(model.parameters(), values, strict=True):
        param.data = value.clone()


def no_grad(model):
    with torch.no_grad():
        return model(X)


def inference(model):
    with torch.inference_mode():
        return model(X)


def eval_mode(model):
    """As scripts do that have forgotten about gradients."""
    model.eval()
    out = model(X)
    model.train()
    return out


@pytest.mark.parametrize("write", [by_copy, by_storage])
@pytest.mark.parametrize("evaluate", [no_grad, inference, eval_mode])
def test_weights_swapped_for_an_evaluation_and_back_are_seen_each_time(write, evaluate):
    """Averages of weights, put in place before an evaluation; `p.data` tells nobody."""
    model, optimizer = started()
    own = [p.detach().clone() for p in model.parameters()]
    before, trained = evaluate(model), model(X).detach()
    write(model, [torch.zeros_like(value) for value in own])
    swapped = evaluate(model)
    write(model, own)
    loss = model(X)
    with amp.scale_loss(loss.float().sum(), optimizer) as scaled:
        scaled.backward()

    assert swapped.abs().max() == 0
    assert torch.equal(before, trained)
    assert torch.equal(loss.detach(), trained)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def test_weights_written_after_any_backward_are_seen():
    """Finite differences: a gradient by hand, a step along it, another forward, no `scale_loss` anywhere."""
    model, _ = started()
    torch.autograd.grad(model(X).float().sum(), list(model.parameters()))
    by_copy(model, [torch.zeros_like(p) for p in model.parameters()])

    assert model(X).abs().max() == 0


@pytest.mark.skipif(torch.__version__ < "2.11", reason="no half copies are kept there (amp.casting.KEEP_COPIES)")
def test_forwards_of_one_loss_share_their_copies():
    """A model that is called at every time step must not keep a copy of its weights for each."""
    model, _ = started()
    saved = set()

    def remember(tensor):
        if tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in ((4, 4), (4, 2)):
            saved.add(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        outputs = [model(X.clone().requires_grad_()) for _ in range(5)]

    assert len(outputs) == 5
    assert len(saved) == 2


def test_a_copy_of_the_model_sees_its_own_new_weights():
    model, _ = started()
    average = copy.deepcopy(model).eval()
    no_grad(average)
    by_copy(average, [torch.zeros_like(p) for p in model.parameters()])

    assert no_grad(average).abs().max() == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit")  # nothing in 2.9, DeprecationWarning in 2.13, FutureWarning in 2.14
def test_a_model_can_be_traced():
    """As tensorboard's `add_graph` does; the trace runs the model twice."""
    model, _ = started()
    traced = torch.jit.trace(model, X)

    assert torch.equal(traced(X), model(X))


def test_a_layer_made_while_casts_are_on_can_be_pickled_whole():
    """It holds the wrapped function, under the name where pickle finds it."""
    started()
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", dropout=0.0).eval()
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    x = torch.linspace(-1, 1, 16).reshape(2, 1, 8)

    assert torch.equal(layer(x), loaded(x))
