"""The five kinds of network, made from their sizes.

Of all of them: ``num_layers`` layers of ``hidden_size``; ``output_size`` (by default the hidden size) is what a layer
gives, to the next layer and to itself at the next step. ``dropout`` is that between layers.
"""

import warnings
from collections.abc import Callable
from typing import Any

from .cells import gru_cell, lstm_cell, mLSTMRNNCell, relu_cell, tanh_cell
from .RNNBackend import RNNCell, bidirectionalRNN, stackedRNN

Network = stackedRNN | bidirectionalRNN
MakeCell = Callable[[int, int, bool, int | None], RNNCell]
"""Of input size, hidden size, bias and output size."""


def toRNNBackend(
    inputRNN: RNNCell, num_layers: int, bidirectional: bool = False, dropout: float = 0, batch_first: bool = False
) -> Network:
    """A network of layers like ``inputRNN``, which is its first."""
    if dropout or batch_first:
        warnings.warn(
            "apex.RNN of NVIDIA's took dropout and batch_first and did nothing with them. Here dropout is that between "
            "layers, and batch_first means input and output of shape (batch, steps, features). Leave them out to have "
            "what you had.",
            stacklevel=3,
        )
    kind = bidirectionalRNN if bidirectional else stackedRNN
    return kind(inputRNN, num_layers, dropout=dropout, batch_first=batch_first)


def _network(name: str, what: str, make_cell: MakeCell) -> Callable[..., Network]:
    """One kind of network: all have the same signature, and differ in the cell of their layers."""

    def make(
        input_size: int, hidden_size: int, num_layers: int, bias: bool = True, batch_first: bool = False,
        dropout: float = 0, bidirectional: bool = False, output_size: int | None = None,
    ) -> Network:  # fmt: skip
        cell = make_cell(input_size, hidden_size, bias, output_size)
        return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)

    make.__name__ = make.__qualname__ = name
    make.__doc__ = what
    return make


def _plain(gates: int, function: Callable[..., Any], states: int) -> MakeCell:
    return lambda input_size, hidden_size, bias, output_size: RNNCell(
        gates, input_size, hidden_size, function, states, bias, output_size
    )


def _gru(input_size: int, hidden_size: int, bias: bool, output_size: int | None) -> RNNCell:
    if output_size not in (None, hidden_size):
        raise ValueError(f"GRU: output_size={output_size} must be hidden_size={hidden_size}, or left out.")
    return RNNCell(3, input_size, hidden_size, gru_cell, 1, bias, output_size)


LSTM = _network("LSTM", "Long short-term memory; its hidden states are output and cell.", _plain(4, lstm_cell, 2))
GRU = _network(
    "GRU",
    "Gated recurrent units. ``output_size`` must be the hidden size: the old output is mixed with the new one.",
    _gru,
)
ReLU = _network("ReLU", "Elman's network with a rectifier.", _plain(1, relu_cell, 1))
Tanh = _network("Tanh", "Elman's network with a hyperbolic tangent.", _plain(1, tanh_cell, 1))
mLSTM = _network("mLSTM", "Multiplicative LSTM (Krause, Lu, Murray, Renals, 2016).", mLSTMRNNCell)
