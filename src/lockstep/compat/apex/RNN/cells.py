"""One step of each kind of network: input ``x`` ``(batch, features)``, old hidden state, weights; new hidden state.

Written with linear layers and torch's own functions, so that amp casts them like any other model.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .RNNBackend import RNNCell

Bias = Tensor | None


def _gates(x: Tensor, hidden: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Bias = None, b_hh: Bias = None) -> Tensor:
    return F.linear(x, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh)


def lstm_cell(
    x: Tensor,
    hidden: list[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Bias = None,
    b_hh: Bias = None,
) -> tuple[Tensor, Tensor]:
    """Long short-term memory; gates in torch's order: input, forget, cell, output."""
    output, cell = hidden
    gates = _gates(x, output, w_ih, w_hh, b_ih, b_hh)
    enter, keep, new, leave = gates.chunk(4, 1)
    cell = torch.sigmoid(keep) * cell + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(leave) * torch.tanh(cell), cell


def gru_cell(
    x: Tensor,
    hidden: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Bias = None,
    b_hh: Bias = None,
) -> Tensor:
    """Gated recurrent units; gates in torch's order: reset, update, new."""
    of_input, of_hidden = F.linear(x, w_ih, b_ih).chunk(3, 1), F.linear(hidden, w_hh, b_hh).chunk(3, 1)
    reset, update = (torch.sigmoid(of_input[gate] + of_hidden[gate]) for gate in (0, 1))
    new = torch.tanh(of_input[2] + reset * of_hidden[2])
    return new + update * (hidden - new)


def relu_cell(*state: Any, **biases: Any) -> Tensor:
    """Elman's, with a rectifier."""
    return torch.relu(_gates(*state, **biases))


def tanh_cell(*state: Any, **biases: Any) -> Tensor:
    """Elman's, with a hyperbolic tangent."""
    return torch.tanh(_gates(*state, **biases))


def mLSTMCell(
    x: Tensor, hidden: list[Tensor], w_ih: Tensor, w_hh: Tensor, w_mih: Tensor, w_mhh: Tensor,
    b_ih: Bias = None, b_hh: Bias = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """An LSTM whose old output is first multiplied, element by element, with a projection of the input."""
    mixed = F.linear(x, w_mih) * F.linear(hidden[0], w_mhh)
    return lstm_cell(x, [mixed, hidden[1]], w_ih, w_hh, b_ih, b_hh)


class mLSTMRNNCell(RNNCell):
    """A layer of multiplicative LSTM: ``w_mih`` and ``w_mhh`` beside an LSTM's weights."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool = False, output_size: int | None = None) -> None:
        super().__init__(4, input_size, hidden_size, mLSTMCell, 2, bias, output_size)
        self.w_mih = nn.Parameter(torch.empty(self.output_size, self.input_size))
        self.w_mhh = nn.Parameter(torch.empty(self.output_size, self.output_size))
        self.reset_parameters()

    def weights(self) -> tuple[Tensor, ...]:
        """What the cell's function takes before the biases."""
        return self.w_ih, self.w_hh, self.w_mih, self.w_mhh

    def new_like(self, new_input_size: int | None = None) -> "mLSTMRNNCell":
        """Another layer of these sizes, with weights of its own."""
        return type(self)(new_input_size or self.input_size, self.hidden_size, self.bias, self.output_size)
