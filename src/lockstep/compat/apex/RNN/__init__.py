"""``apex.RNN``: recurrent networks that keep their hidden state from one call to the next."""

from .models import GRU, LSTM, ReLU, Tanh, mLSTM

__all__ = ["GRU", "LSTM", "ReLU", "Tanh", "mLSTM"]
