"""The five kinds of network, made from their sizes.

Of all of them: ``num_layers`` layers of ``hidden_size``; ``output_size`` (by default the hidden size) is what a layer
gives, to the next layer and to itself at the next step. ``dropout`` is that between layers.
"""

import warnings

from .cells import gru_cell, lstm_cell, mLSTMRNNCell, relu_cell, tanh_cell
from .RNNBackend import RNNCell, bidirectionalRNN, stackedRNN

Network = stackedRNN | bidirectionalRNN


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


def LSTM(
    input_size: int, hidden_size: int, num_layers: int, bias: bool = True, batch_first: bool = False,
    dropout: float = 0, bidirectional: bool = False, output_size: int | None = None,
) -> Network:  # fmt: skip
    """Long short-term memory; its hidden states are output and cell."""
    cell = RNNCell(4, input_size, hidden_size, lstm_cell, 2, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def GRU(
    input_size: int, hidden_size: int, num_layers: int, bias: bool = True, batch_first: bool = False,
    dropout: float = 0, bidirectional: bool = False, output_size: int | None = None,
) -> Network:  # fmt: skip
    """Gated recurrent units. ``output_size`` must be the hidden size: the old output is mixed with the new one."""
    if output_size not in (None, hidden_size):
        raise ValueError(f"GRU: output_size={output_size} must be hidden_size={hidden_size}, or left out.")
    cell = RNNCell(3, input_size, hidden_size, gru_cell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def ReLU(
    input_size: int, hidden_size: int, num_layers: int, bias: bool = True, batch_first: bool = False,
    dropout: float = 0, bidirectional: bool = False, output_size: int | None = None,
) -> Network:  # fmt: skip
    """Elman's network with a rectifier."""
    cell = RNNCell(1, input_size, hidden_size, relu_cell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def Tanh(
    input_size: int, hidden_size: int, num_layers: int, bias: bool = True, batch_first: bool = False,
    dropout: float = 0, bidirectional: bool = False, output_size: int | None = None,
) -> Network:  # fmt: skip
    """Elman's network with a hyperbolic tangent."""
    cell = RNNCell(1, input_size, hidden_size, tanh_cell, 1, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)


def mLSTM(
    input_size: int, hidden_size: int, num_layers: int, bias: bool = True, batch_first: bool = False,
    dropout: float = 0, bidirectional: bool = False, output_size: int | None = None,
) -> Network:  # fmt: skip
    """Multiplicative LSTM (Krause, Lu, Murray, Renals, 2016)."""
    cell = mLSTMRNNCell(input_size, hidden_size, bias, output_size)
    return toRNNBackend(cell, num_layers, bidirectional, dropout, batch_first)
