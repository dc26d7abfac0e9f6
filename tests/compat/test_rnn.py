"""apex.RNN against torch's own recurrent layers, and plain loops, in float64."""

import copy
import io
import itertools

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from amp.programs import half_is, printed
from faces import apex
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

rnn = apex.RNN
KINDS = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "ReLU": lambda *sizes, **more: nn.RNN(*sizes, nonlinearity="relu", **more),
    "Tanh": nn.RNN,
}
EVERY = [*KINDS, "mLSTM"]
NAMES = {"w_ih": "weight_ih", "w_hh": "weight_hh", "b_ih": "bias_ih", "b_hh": "bias_hh", "w_ho": "weight_hr"}


def sequence(steps=5, batch=2, features=3):
    torch.manual_seed(1)
    return torch.randn(steps, batch, features, dtype=torch.float64)


def network(kind, *sizes, **options):
    torch.manual_seed(0)
    return getattr(rnn, kind)(*sizes, **options).double()


def torchs(kind, stack, *sizes, **options):
    """Torch's layer with the weights of a stack."""
    layer = KINDS[kind](*sizes, **options).double()
    with torch.no_grad():
        for number, cell in enumerate(stack.rnns):
            for name, param in cell.named_parameters():
                getattr(layer, f"{NAMES[name]}_l{number}").copy_(param)
    return layer


def grads_by_name(stack):
    return {
        f"{NAMES[name]}_l{number}": param.grad
        for number, cell in enumerate(stack.rnns)
        for name, param in cell.named_parameters()
    }


def gradient(outputs, x):
    """Of a sum in which every number counts differently."""
    loss = sum((out * torch.cos(torch.arange(out.numel()).double()).view_as(out)).sum() for out in outputs)
    return torch.autograd.grad(loss, x, retain_graph=True)[0], loss


sizes = st.integers(1, 4)


@settings(max_examples=15)
@given(st.sampled_from(list(KINDS)), sizes, sizes, sizes, sizes, st.integers(1, 3), st.booleans())
def test_outputs_hidden_states_and_gradients_are_torchs(kind, steps, batch, features, hidden, layers, bias):
    mine = network(kind, features, hidden, layers, bias=bias)
    theirs = torchs(kind, mine, features, hidden, layers, bias=bias)
    x = sequence(steps, batch, features).requires_grad_()
    y = x.detach().clone().requires_grad_()
    out, states = mine(x)
    expected, last = theirs(y)
    grad, loss = gradient([out, *states], x)
    expected_grad, expected_loss = gradient([expected, *(last if kind == "LSTM" else [last])], y)
    loss.backward()
    expected_loss.backward()

    assert out.shape == (steps, batch, hidden)
    assert [tuple(state.shape) for state in states] == [(layers, batch, hidden)] * (2 if kind == "LSTM" else 1)
    torch.testing.assert_close([out, *states, grad], [expected, *(last if kind == "LSTM" else [last]), expected_grad])
    torch.testing.assert_close(
        grads_by_name(mine), {name: param.grad for name, param in theirs.named_parameters()}, rtol=1e-9, atol=1e-12
    )


def test_a_smaller_output_is_projected_as_torch_does_it():
    mine = network("LSTM", 3, 6, 2, output_size=4)
    theirs = torchs("LSTM", mine, 3, 6, 2, proj_size=4)
    x = sequence().requires_grad_()
    out, (output, cell) = mine(x)
    expected, last = theirs(x)

    assert (output.shape, cell.shape) == ((2, 2, 4), (2, 2, 6))
    torch.testing.assert_close([out, output, cell], [expected, *last])
    torch.testing.assert_close(gradient([out], x)[0], gradient([expected], x)[0])


def test_units_that_mix_their_output_have_no_other_size():
    with pytest.raises(ValueError, match="GRU: output_size=4 must be hidden_size=6"):
        rnn.GRU(3, 6, 1, output_size=4)


def multiplicative(cell, x):
    """One layer by the formulas of the paper, step by step."""
    h = torch.zeros(x.shape[1], cell.output_size).double()
    c = torch.zeros(x.shape[1], cell.hidden_size).double()
    outputs = []
    for step in x:
        m = (step @ cell.w_mih.T) * (h @ cell.w_mhh.T)
        i, f, g, o = (step @ cell.w_ih.T + cell.b_ih + m @ cell.w_hh.T + cell.b_hh).split(cell.hidden_size, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        if cell.output_size != cell.hidden_size:
            h = h @ cell.w_ho.T
        outputs.append(h)
    return torch.stack(outputs), h, c


@pytest.mark.parametrize("output_size", [None, 2])
def test_the_multiplicative_one_is_its_formula(output_size):
    mine = network("mLSTM", 3, 4, 2, output_size=output_size)
    x = sequence().requires_grad_()
    out, (h, c) = mine(x)
    first, *states = multiplicative(mine.rnns[0], x)
    expected, *others = multiplicative(mine.rnns[1], first)

    torch.testing.assert_close(out, expected)
    torch.testing.assert_close([h, c], [torch.stack(pair) for pair in zip(states, others, strict=True)])
    weights = [x, *mine.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), weights, retain_graph=True),
        torch.autograd.grad(expected.square().sum(), weights),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_two_directions_are_two_stacks_that_meet_in_the_output(kind):
    mine = network(kind, 3, 4, 2, bidirectional=True)
    x = sequence()
    out, states = mine(x)
    forth, last = torchs(kind, mine.fwd, 3, 4, 2)(x)
    back, others = torchs(kind, mine.bckwrd, 3, 4, 2)(x.flip(0))
    last, others = ((s if kind == "LSTM" else [s]) for s in (last, others))

    torch.testing.assert_close(out, torch.cat([forth, back.flip(0)], -1))
    torch.testing.assert_close(list(states), [torch.cat(pair, -1) for pair in zip(last, others, strict=True)])


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", EVERY)
def test_collected_hidden_states_are_those_of_every_step(kind, bidirectional):
    mine = network(kind, 3, 4, 2, bidirectional=bidirectional)
    x = sequence(steps=4)
    out, collected = mine(x, collect_hidden=True)
    mine.reset_hidden(2)
    _, last = mine(x)

    assert [len(kind) for kind in collected] == [4] * len(last)
    torch.testing.assert_close(torch.stack([state[-1] for state in collected[0]]), out)
    # The last state of the way back is that of the first step.
    ends = [torch.cat([kind[-1][..., :4], kind[0][..., 4:]], -1) for kind in collected]
    torch.testing.assert_close(ends, list(last))


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", EVERY)
def test_the_hidden_state_stays_until_it_is_reset(kind, bidirectional):
    mine = network(kind, 3, 4, 2, bidirectional=bidirectional)
    x = sequence(steps=6)
    whole, _ = mine(x)
    mine.reset_hidden(2)
    first, _ = mine(x[:3])
    mine.detach_hidden()
    mine.init_hidden(2)  # leaves a state of this batch size alone
    second, _ = mine(x[3:])
    mine.reset_hidden(2)
    again, _ = mine(x)
    other, _ = mine(x[:, :1])  # another batch size begins with zeros
    mine.reset_hidden(1)

    assert torch.equal(whole, again)
    assert torch.equal(whole[..., :4], torch.cat([first, second])[..., :4])
    torch.testing.assert_close(other, whole[:, :1])
    torch.testing.assert_close(mine(x[:, :1])[0], whole[:, :1])


def test_gradients_go_through_calls_until_the_state_is_detached():
    mine = network("LSTM", 3, 4, 1)
    x = sequence().requires_grad_()
    mine(x)
    through = torch.autograd.grad(mine(sequence())[0].sum(), x)[0]
    mine.detach_hidden()
    out, _ = mine(sequence())

    assert through.abs().max() > 0
    assert torch.autograd.grad(out.sum(), x, allow_unused=True) == (None,)


def test_a_state_that_is_not_there_cannot_be_detached():
    with pytest.raises(RuntimeError, match="Must initialize hidden state before you can detach it"):
        rnn.LSTM(3, 4, 1).detach_hidden()


def test_dropout_is_between_layers_and_in_training_only():
    with pytest.warns(UserWarning, match="took dropout and batch_first and did nothing"):
        mine = network("Tanh", 3, 4, 2, dropout=1.0)
    plain = network("Tanh", 3, 4, 2)
    x = sequence()
    dropped, _ = mine(x)
    mine.eval()
    mine.reset_hidden(2)
    alone = apex.RNN.RNNBackend.stackedRNN([copy.deepcopy(plain.rnns[1])])

    torch.testing.assert_close(dropped, alone(torch.zeros(5, 2, 4).double())[0])
    assert torch.equal(mine(x)[0], plain(x)[0])


@pytest.mark.parametrize("bidirectional", [False, True])
def test_batch_first_changes_places_of_steps_and_batch(bidirectional):
    with pytest.warns(UserWarning, match="took dropout and batch_first and did nothing"):
        mine = network("GRU", 3, 4, 2, batch_first=True, bidirectional=bidirectional)
    plain = network("GRU", 3, 4, 2, bidirectional=bidirectional)
    x = sequence()
    out, states = mine(x.transpose(0, 1))
    expected, others = plain(x)

    assert torch.equal(out, expected.transpose(0, 1))
    assert torch.equal(states[0], others[0])


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_model_can_be_copied_in_the_middle_of_training(how):
    mine = network("LSTM", 3, 4, 2, bidirectional=True)
    x = sequence()
    mine(x)
    if how == "deepcopy":
        other = copy.deepcopy(mine)
    else:
        torch.save(mine, file := io.BytesIO())
        file.seek(0)
        other = torch.load(file, weights_only=False)

    assert torch.equal(mine(x)[0], other(x)[0])


def test_keys_are_apexs():
    one = [f"{part}.{layer}.{name}" for part in ["rnns"] for layer in range(2) for name in ("w_ih", "w_hh")]
    two = [
        f"{part}.rnns.0.{name}"
        for part, name in itertools.product(
            ("fwd", "bckwrd", "rnns.0", "rnns.1"), ("w_ih", "w_hh", "w_ho", "b_ih", "b_hh")
        )
    ]

    assert list(rnn.GRU(3, 4, 2, bias=False).state_dict()) == one
    assert list(rnn.LSTM(3, 4, 1, bidirectional=True, output_size=2).state_dict()) == two


class Tagger(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn, self.head = getattr(rnn, kind)(3, 8, 2), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("kind", EVERY)
def test_amp_trains_it_as_float64_does(kind, level, half):
    """Truncated backpropagation, with a state from before `initialize`."""

    def losses(model, x, backward, step):
        model.rnn.reset_hidden(2)
        model(x)
        found = []
        for _ in range(8):
            model.rnn.detach_hidden()
            loss = (F.logsigmoid(model(x)).float() + x[..., :2]).square().mean()
            backward(loss)
            step()
            found.append(loss.item())
        return found

    torch.manual_seed(0)
    model, x = Tagger(kind), sequence().float()
    reference = copy.deepcopy(model).double()
    plain = torch.optim.SGD(reference.parameters(), lr=0.3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def plainly(loss):
        plain.zero_grad()
        loss.backward()

    def scaled(loss):
        optimizer.zero_grad()
        with apex.amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()

    expected = losses(reference, x.double(), plainly, plain.step)
    with half_is(half), printed():
        model(x)
        apex.amp.initialize(model, optimizer, opt_level=level, loss_scale=128.0)
        got = losses(model, x, scaled, optimizer.step)

    assert got == pytest.approx(expected, rel=3e-2)
    assert got[-1] < 0.9 * got[0]
    assert all(state.dtype == torch.float32 or level == "O2" for state in model.rnn(x.to(model.head.weight))[1])
