"""A shuffle that is computed where it is asked for, so that no list of the whole data set ever exists.

Long orders: a Feistel network over the bits of the position (Luby and Rackoff, "How to construct pseudorandom
permutations from pseudorandom functions", 1988), with cycle walking where the length is no power of two (Black and
Rogaway, "Ciphers with arbitrary finite domains", 2002). Short ones: a table, since a network over a handful of bits
does not reach every permutation.
"""

import numpy as np
from numpy.typing import NDArray

from lockstep.data.shares import Indices

_Words = NDArray[np.uint64]

BLOCK = 8192
"""Positions that are best looked up at a time: half a millisecond, and 64 kB."""

_TABLE = 1 << 14  # positions; sorting that many takes about a millisecond
_ROUNDS = 8
# The multipliers of SplitMix64 (Steele, Lea and Flood, 2014): odd, with well-spread bits.
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Permutation:
    """A shuffle of ``range(n)``, fixed by a key.

    Args:
        n: How many positions there are.
        key: Whole numbers that fix the shuffle, such as a seed and an epoch. Taken modulo 2**64.

    Example:
        >>> shuffle = Permutation(5, key=(0, 1))
        >>> sorted(shuffle(np.arange(5)).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(self, n: int, key: tuple[int, ...]) -> None:
        self.n = n
        words = np.random.SeedSequence([number % 2**64 for number in key]).generate_state(_ROUNDS, np.uint64)
        self._keys = words
        self._table = _sorted_table(n, words[0]) if n <= _TABLE else None
        bits = max(2, (n - 1).bit_length())
        self._low_bits, self._high_bits = bits // 2, bits - bits // 2

    def __call__(self, positions: Indices) -> Indices:
        """Give what stands at ``positions`` (each in ``range(n)``), same shape."""
        if self._table is not None:
            found: Indices = self._table[positions]
            return found
        walked = self._network(positions.astype(np.uint64).reshape(-1))
        # Cycle walking: what fell outside goes through again until it lands inside; fewer than half do each time.
        outside = np.flatnonzero(walked >= self.n)
        while outside.size:
            walked[outside] = self._network(walked[outside])
            outside = outside[walked[outside] >= self.n]
        return walked.astype(np.int64).reshape(positions.shape)

    def _network(self, x: _Words) -> _Words:
        """Change one part by a function of the other, in turn; each round can be undone, so this is a bijection."""
        low_bits = np.uint64(self._low_bits)
        high, low = x >> low_bits, x & np.uint64((1 << self._low_bits) - 1)
        for number, key in enumerate(self._keys):
            if number % 2:
                low ^= _top_bits(high, key, self._low_bits)
            else:
                high ^= _top_bits(low, key, self._high_bits)
        high <<= low_bits
        mixed: _Words = high | low
        return mixed


def _top_bits(x: _Words, key: np.uint64, bits: int) -> _Words:
    """Hash to ``bits`` bits; the top ones, which a product mixes best."""
    y = x + key
    y *= _MIX_1
    y ^= y >> np.uint64(32)
    y *= _MIX_2
    y >>= np.uint64(64 - bits)
    return y


def _sorted_table(n: int, key: np.uint64) -> Indices:
    """Sort positions by 64-bit hashes: every order equally likely; integers only, so the same with every numpy."""
    x = (np.arange(n, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + key
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        x ^= x >> np.uint64(shift)
        x *= factor
    x ^= x >> np.uint64(31)
    return np.argsort(x, kind="stable").astype(np.int64)
