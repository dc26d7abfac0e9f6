import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lockstep.data.permutation import Permutation

TABLE = 1 << 14


@settings(deadline=None)
@given(n=st.one_of(st.integers(1, 300), st.integers(TABLE - 2, 3 * TABLE)), seed=st.integers(-(2**63), 2**63 - 1))
def test_every_position_comes_once(n, seed):
    assert np.array_equal(np.sort(Permutation(n, (seed, 0))(np.arange(n))), np.arange(n))


@given(n=st.integers(1, 3 * TABLE), where=st.lists(st.integers(0, 10**6), max_size=20))
@settings(deadline=None)
def test_a_block_is_the_same_as_its_part_of_the_whole(n, where):
    positions = np.array([each % n for each in where], dtype=np.int64)
    shuffle = Permutation(n, (3, 1))

    assert np.array_equal(shuffle(np.arange(n))[positions], shuffle(positions))


def test_seeds_and_epochs_give_unrelated_orders():
    n = 40_000
    orders = [Permutation(n, key)(np.arange(n)) for key in ((0, 0), (0, 1), (1, 0), (-1, 0))]
    same = [int((a == b).sum()) for a, b in itertools.combinations(orders, 2)]

    assert max(same) < 10  # two unrelated orders agree in one place on average


def test_the_order_is_frozen():
    # A change here gives every user another order: a resumed run would repeat and miss samples.
    assert [0, 2, 1, 5, 9, 4, 7, 6, 3, 8] == Permutation(10, (0, 0))(np.arange(10)).tolist()
    assert [6893417, 63125178, 29443220, 37426262] == Permutation(10**8, (0, 0))(np.arange(4)).tolist()


def test_d05_all_orders_of_four_are_equally_likely():
    """D05: a shuffle that is visibly not uniform; the smallest sizes are where a bad one shows."""
    counts = Counter(tuple(Permutation(4, (seed, 0))(np.arange(4)).tolist()) for seed in range(2400))

    assert len(counts) == 24
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


@pytest.mark.parametrize("n", [TABLE - 1, TABLE + 1, 40_000, 10_000_000])
def test_d05_blocks_of_positions_spread_evenly_over_the_data_set(n):
    """D05: chi-square of where eight blocks of a thousand neighbours land."""
    heads = np.linspace(0, n - 1024, 8).astype(np.int64)
    landed = Permutation(n, (7, 3))(heads[:, None] + np.arange(1024))
    edges = np.linspace(0, n, 17).astype(np.int64)
    counts = np.stack([np.histogram(row, edges)[0] for row in landed])
    expected = np.broadcast_to(1024 * np.diff(edges) / n, counts.shape)

    assert stats.chisquare(counts.ravel(), expected.ravel(), ddof=7).pvalue > 1e-4


def test_d05_neighbours_do_not_stay_neighbours():
    """D05: the distance between where neighbours land is spread as for two random places."""
    n = 1 << 20
    landed = Permutation(n, (5, 0))(np.arange(200_000))
    gaps = np.diff(landed) % n

    assert stats.kstest(gaps / n, "uniform").pvalue > 1e-4


def test_d05_one_position_lands_everywhere_over_the_seeds():
    """D05: the same position under 4000 seeds."""
    n = 20_000
    landed = [int(Permutation(n, (seed, 0))(np.array([1]))[0]) for seed in range(4000)]

    assert stats.chisquare(np.histogram(landed, 20, (0, n))[0]).pvalue > 1e-4
