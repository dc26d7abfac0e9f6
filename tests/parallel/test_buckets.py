"""Which gradient lies in which bucket, and what a bucket does with them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lockstep.parallel.buckets import Piece, complete_order, fill_buckets, small_first
from lockstep.parallel.control import in_step, say, understand
from lockstep.parallel.flat import Bucket
from lockstep.parallel.same_model import fingerprint, first_difference
from lockstep.parallel.slots import Slot

pieces = st.lists(st.builds(Piece, st.integers(0, 40), st.sampled_from(["fp32", "bf16"])), max_size=30)
caps = st.lists(st.integers(1, 60), min_size=1, max_size=3)


@given(pieces=pieces, caps=caps, data=st.data())
def test_every_gradient_lies_in_one_bucket_of_its_kind(pieces, caps, data):
    order = data.draw(st.permutations(range(len(pieces))))
    buckets = fill_buckets(pieces, order, caps)

    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(pieces)))
    assert all(len({pieces[index].kind for index in bucket}) == 1 for bucket in buckets)


@given(sizes=st.lists(st.integers(0, 40), max_size=30), caps=caps, data=st.data())
def test_buckets_keep_the_order_and_close_at_their_cap(sizes, caps, data):
    order = data.draw(st.permutations(range(len(sizes))))
    buckets = fill_buckets([Piece(size, "fp32") for size in sizes], order, caps)

    assert [index for bucket in buckets for index in bucket] == order
    for number, bucket in enumerate(buckets):
        cap = caps[min(number, len(caps) - 1)]
        assert sum(sizes[index] for index in bucket[:-1]) < cap
        assert number == len(buckets) - 1 or sum(sizes[index] for index in bucket) >= cap


@given(sizes=st.lists(st.integers(0, 9)), limit=st.integers(0, 9))
def test_small_gradients_come_first_and_none_is_lost(sizes, limit):
    order, count = small_first(sizes, limit)

    assert sorted(order) == list(range(len(sizes)))
    assert [sizes[i] < limit for i in order] == [True] * count + [False] * (len(sizes) - count)


@given(planned=st.permutations(range(8)), seen=st.lists(st.integers(0, 7), unique=True))
def test_an_order_seen_in_part_is_completed(planned, seen):
    order = complete_order(seen, planned)

    assert order[: len(seen)] == seen
    assert sorted(order) == list(range(8))


@given(steps=st.lists(st.integers(0, 20), min_size=1, max_size=5))
def test_ranks_are_in_step_if_their_counts_agree_modulo_four(steps):
    rows = [say(changed=False, late=False, failed=False, inactive=False, steps=step) for step in steps]
    heard = understand([sum(column) for column in zip(*rows, strict=True)])

    assert in_step(heard) == (len({step % 4 for step in steps}) == 1)


@given(lines=st.lists(st.lists(st.sampled_from("ab"), max_size=3), min_size=1, max_size=4))
def test_the_first_difference_is_found_wherever_it_is(lines):
    found = first_difference(lines)

    assert (found is None) == all(line == lines[0] for line in lines)
    if found is not None:
        number, ranks = found
        assert all(line[:number] == lines[0][:number] for line in lines)
        assert ranks == [
            r for r, line in enumerate(lines) if line[number : number + 1] != lines[0][number : number + 1]
        ]


def test_fingerprints_of_values_that_change_places_with_their_neighbours_differ():
    assert fingerprint(torch.tensor([1.0, 0.0, 0.0, 1.0])) != fingerprint(torch.tensor([0.0, 1.0, 1.0, 0.0]))


@given(
    values=st.lists(st.sampled_from([0.0, -0.0, 1.0]) | st.floats(-9, 9, width=32), min_size=1, max_size=9),
    data=st.data(),
)
def test_fingerprints_differ_if_any_bit_or_the_order_does(values, data):
    other = data.draw(st.permutations(values))
    one, two = torch.tensor(values), torch.tensor(other)

    assert (fingerprint(one) == fingerprint(two)).item() == torch.equal(one.view(torch.int32), two.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_every_dtype_has_a_fingerprint(dtype):
    one = torch.ones(3, 2).to(dtype)
    other = one.clone()
    other[2, 1] = 0

    assert fingerprint(one) != fingerprint(other)
    assert fingerprint(one.t().contiguous().t()) == fingerprint(one)


shapes = st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=6)


@given(shapes=shapes, present=st.lists(st.booleans(), min_size=6, max_size=6), at=st.integers(0, 6))
def test_a_bucket_gives_back_what_was_put_in_scaled_and_none_for_the_rest(shapes, present, at):
    shapes.insert(at, [130, 130])  # large enough to be copied by itself
    kinds = [torch.float32, torch.float32, torch.complex64] * 3
    params = [nn.Parameter(torch.zeros(shape, dtype=kind)) for shape, kind in zip(shapes, kinds, strict=False)]
    slots = [Slot(str(i), param) for i, param in enumerate(params)]
    bucket = Bucket(0, slots, (torch.float32, torch.device("cpu")), 0.5, 2, apart=False)
    grads = [torch.randn_like(param) if there else None for param, there in zip(params, [*present, True], strict=False)]
    for slot, param, grad in zip(slots, params, grads, strict=False):
        param.grad = None if grad is None else grad.clone()
        if slot.large and grad is not None:
            bucket.take(slot)
    bucket.fill()

    assert all(param.grad is None for param in params)
    bucket.hand_back()
    for param, grad in zip(params, grads, strict=False):
        assert (param.grad is None) == (grad is None)
        if grad is not None:
            assert torch.equal(param.grad, grad * 0.5)
            assert param.grad.untyped_storage().data_ptr() == bucket.flat.untyped_storage().data_ptr()
