"""Layers that keep their hidden state, stacked and in both directions.

The state stays in the modules: a call begins where the last one of this batch size ended. `reset_hidden` begins with
zeros, `detach_hidden` keeps the values and forgets how they came about, as truncated backpropagation needs it.
"""

from collections.abc import Callable
from math import sqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RNNCell(nn.Module):
    """One layer: weights, a function of one step, and the hidden state.

    Args:
        gate_multiplier: Gates, as multiples of the hidden size.
        input_size: Features of the input.
        hidden_size: Features inside.
        cell: ``cell(input, hidden, w_ih, w_hh, b_ih=, b_hh=)``, which gives the new hidden state; see ``cells``.
        n_hidden_states: How many tensors that is. One goes in and comes out as such, several as a list.
        bias: Whether there are biases.
        output_size: What comes out, if it is not the hidden size: the first hidden state is projected by ``w_ho``.
    """

    b_ih: Tensor | None
    b_hh: Tensor | None

    def __init__(
        self, gate_multiplier: int, input_size: int, hidden_size: int, cell: Callable[..., Any],
        n_hidden_states: int = 2, bias: bool = False, output_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gate_multiplier, self.cell, self.n_hidden_states, self.bias = gate_multiplier, cell, n_hidden_states, bias
        self.input_size, self.hidden_size, self.output_size = input_size, hidden_size, output_size or hidden_size
        self.gate_size = gate_multiplier * hidden_size
        self.w_ih = nn.Parameter(torch.empty(self.gate_size, self.input_size))
        self.w_hh = nn.Parameter(torch.empty(self.gate_size, self.output_size))
        if self.output_size != self.hidden_size:
            self.w_ho = nn.Parameter(torch.empty(self.output_size, self.hidden_size))
        for name in ("b_ih", "b_hh"):
            self.register_parameter(name, nn.Parameter(torch.empty(self.gate_size)) if bias else None)
        self.hidden: list[Tensor | None] = [None] * n_hidden_states
        self.reset_parameters()

    def new_like(self, new_input_size: int | None = None) -> "RNNCell":
        """Another layer of these sizes, with weights of its own."""
        return type(self)(
            self.gate_multiplier, new_input_size or self.input_size, self.hidden_size, self.cell,
            self.n_hidden_states, self.bias, self.output_size,
        )  # fmt: skip

    def weights(self) -> tuple[Tensor, ...]:
        """What the cell's function takes before the biases."""
        return self.w_ih, self.w_hh

    def reset_parameters(self, gain: float = 1) -> None:
        """Uniform values up to 1 / sqrt(hidden size)."""
        bound = 1.0 / sqrt(self.hidden_size)
        for param in self.parameters():
            nn.init.uniform_(param, -bound, bound)

    def init_hidden(self, bsz: int) -> None:
        """Zeros where there is no state, or one of another batch size."""
        for number, state in enumerate(self.hidden):
            if state is None or state.shape[0] != bsz:
                size = self.hidden_size if number else self.output_size
                self.hidden[number] = self.w_ih.new_zeros(bsz, size)

    def reset_hidden(self, bsz: int) -> None:
        """Zeros."""
        self.hidden = [None] * self.n_hidden_states
        self.init_hidden(bsz)

    def detach_hidden(self) -> None:
        """Keep the state's values, without their graph.

        Raises:
            RuntimeError: There is no state yet.
        """
        if any(state is None for state in self.hidden):
            raise RuntimeError("Must initialize hidden state before you can detach it")
        self.hidden = [state.detach() for state in self.hidden if state is not None]

    def forward(self, input: Tensor) -> tuple[Tensor, ...]:  # noqa: A002
        """``(batch, input_size)`` to the new hidden states, the output first."""
        self.init_hidden(input.shape[0])
        # A model that was moved, or cast by amp, after its last call takes its state along.
        before = [state.to(self.w_hh) for state in self.hidden if state is not None]
        after = self.cell(
            input, before[0] if self.n_hidden_states == 1 else before, *self.weights(), b_ih=self.b_ih, b_hh=self.b_hh
        )
        states = [after] if self.n_hidden_states == 1 else list(after)
        if self.output_size != self.hidden_size:
            states[0] = F.linear(states[0], self.w_ho)
        self.hidden = list(states)
        return tuple(states)

    def __getstate__(self) -> dict[str, Any]:
        """Everything, the state without its graph: so a model can be copied and saved in the middle of training."""
        return self.__dict__ | {"hidden": [None if state is None else state.detach() for state in self.hidden]}


class _Layers(nn.Module):
    """What a stack and a pair of stacks have in common: they pass on what concerns the hidden state."""

    rnns: Any

    def __init__(self, dropout: float, batch_first: bool) -> None:
        super().__init__()
        self.dropout, self.batch_first = dropout, batch_first

    def reset_parameters(self) -> None:
        """New weights in every layer."""
        for rnn in self.rnns:
            rnn.reset_parameters()

    def init_hidden(self, bsz: int) -> None:
        """Zeros where there is no state, or one of another batch size."""
        for rnn in self.rnns:
            rnn.init_hidden(bsz)

    def detach_hidden(self) -> None:
        """Keep the state's values, without their graph."""
        for rnn in self.rnns:
            rnn.detach_hidden()

    def reset_hidden(self, bsz: int) -> None:
        """Zeros in every layer."""
        for rnn in self.rnns:
            rnn.reset_hidden(bsz)


class stackedRNN(_Layers):
    """Layers on top of each other.

    Args:
        inputRNN: The first layer, after which the others are made; or all of them, in a list.
        num_layers: How many there are.
        dropout: Probability of dropping what goes from one layer to the next, in training.
        batch_first: Whether input and output are ``(batch, steps, features)``.
    """

    def __init__(
        self, inputRNN: RNNCell | list[RNNCell], num_layers: int = 1, dropout: float = 0, batch_first: bool = False
    ) -> None:
        super().__init__(dropout, batch_first)
        layers = inputRNN if isinstance(inputRNN, list) else [inputRNN]
        if not isinstance(inputRNN, list):
            layers += [inputRNN.new_like(inputRNN.output_size) for _ in range(num_layers - 1)]
        assert len(layers) == num_layers, "RNN list length must be equal to num_layers"
        self.nLayers = num_layers
        self.rnns = nn.ModuleList(layers)

    def forward(
        self,
        input: Tensor,  # noqa: A002
        collect_hidden: bool = False,
        reverse: bool = False,
    ) -> tuple[Tensor, list[Any]]:
        """Run over all steps.

        Args:
            input: ``(steps, batch, features)``; with ``batch_first`` the first two the other way round.
            collect_hidden: Whether to give the hidden states of every step.
            reverse: Begin with the last step.

        Returns:
            The last layer's output ``(steps, batch, output_size)``, and for each kind of hidden state the layers' last
            ones, ``(layers, batch, size)``; with ``collect_hidden`` a list of these by step, in the input's order.
        """
        steps = list((input.transpose(0, 1) if self.batch_first else input).unbind(0))
        outputs: list[Tensor] = []
        collected: list[list[Tensor]] = []
        states: list[tuple[Tensor, ...]] = []
        for step in reversed(steps) if reverse else steps:
            states = self._step(step)
            outputs.append(states[-1][0])
            if collect_hidden:
                collected.append(_by_kind(states))
        if reverse:
            outputs.reverse()
            collected.reverse()
        output = torch.stack(outputs, 1 if self.batch_first else 0)
        return output, list(map(list, zip(*collected, strict=True))) if collect_hidden else _by_kind(states)

    def _step(self, out: Tensor) -> list[tuple[Tensor, ...]]:
        states: list[tuple[Tensor, ...]] = []
        for layer, rnn in enumerate(self.rnns):
            if layer and self.dropout:
                out = F.dropout(out, self.dropout, self.training)
            states.append(rnn(out))
            out = states[-1][0]
        return states


def _by_kind(states: list[tuple[Tensor, ...]]) -> list[Tensor]:
    """Each layer's hidden states, to each hidden state ``(layers, batch, size)``."""
    return [torch.stack(kind) for kind in zip(*states, strict=True)]


class bidirectionalRNN(_Layers):
    """Two stacks side by side, one for each direction; they meet in the output only.

    Args:
        inputRNN: The first layer of the one; the other's is like it.
        num_layers: Layers of each.
        dropout: See `stackedRNN`.
        batch_first: See `stackedRNN`.
    """

    def __init__(self, inputRNN: RNNCell, num_layers: int = 1, dropout: float = 0, batch_first: bool = False) -> None:
        super().__init__(dropout, batch_first)
        self.fwd = stackedRNN(inputRNN, num_layers, dropout, batch_first)
        self.bckwrd = stackedRNN(inputRNN.new_like(), num_layers, dropout, batch_first)
        self.rnns = nn.ModuleList([self.fwd, self.bckwrd])

    def forward(self, input: Tensor, collect_hidden: bool = False) -> tuple[Tensor, tuple[Any, ...]]:  # noqa: A002
        """As `stackedRNN`'s; features of both directions beside each other, in the output and in the hidden states."""
        forth, states = self.fwd(input, collect_hidden)
        back, others = self.bckwrd(input, collect_hidden, reverse=True)
        hidden = (_side_by_side(mine, theirs) for mine, theirs in zip(states, others, strict=True))
        return torch.cat([forth, back], -1), tuple(hidden)


def _side_by_side(mine: Any, theirs: Any) -> Any:
    if isinstance(mine, list):
        return [torch.cat(pair, -1) for pair in zip(mine, theirs, strict=True)]
    return torch.cat([mine, theirs], -1)
