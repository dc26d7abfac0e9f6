import random

import numpy as np
import torch

from lockstep.data.randomness import Borrowed, plant


def draw():
    return random.random(), np.random.rand(), torch.rand(()).item()


def test_the_callers_random_numbers_stay_as_they_are():
    plant(1)
    expected = draw()
    plant(1)
    with Borrowed((2,)):
        draw()

    assert expected == draw()


def test_blocks_in_pieces_draw_what_one_block_draws():
    whole, pieces = Borrowed((2, 3)), Borrowed((2, 3))
    with whole:
        expected = [draw(), draw()]
    with pieces:
        found = [draw()]
    draw()
    with pieces:
        found.append(draw())

    assert expected == found


def test_a_generator_of_ones_own_is_lent_too():
    generator = torch.Generator().manual_seed(5)
    before = generator.get_state()
    draws = []
    for _ in range(2):
        with Borrowed((1,), [generator]):
            draws.append(torch.rand(3, generator=generator))

    assert torch.equal(draws[0], draws[1])
    assert torch.equal(before, generator.get_state())


def test_generators_seeded_differently_stay_different():
    a, b = torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)
    with Borrowed((1,), [a]):
        first = torch.rand(3, generator=a)
    with Borrowed((1,), [b]):
        second = torch.rand(3, generator=b)

    assert not torch.equal(first, second)
