"""send and recv."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

import lockstep


def cross(rank, count):
    """Both send first: nobody may wait for the other to receive."""
    out, back = torch.full((count,), float(rank)), torch.empty(count)
    sending = dist.isend(out, 1 - rank)
    dist.recv(back, 1 - rank)
    sending.wait()
    return back.unique().tolist()


def test_both_may_send_first():
    for count in (1, 5_000_000):
        assert run_ranks(cross, 2, count, backend="shm") == [[1.0], [0.0]]


def by_tag(rank, sent, taken):
    if rank == 0:
        for tag in sent:
            dist.send(torch.full((50_000 * tag + 1,), tag), 1, tag=tag)
        return None
    got = []
    for tag in taken:
        x = torch.zeros(50_000 * tag + 1, dtype=torch.int64)
        dist.recv(x, 0, tag=tag)
        got.append(x.unique().tolist())
    return got


@settings(max_examples=4, deadline=None)
@given(sent=st.permutations(range(4)), taken=st.permutations(range(4)))
def test_messages_are_taken_by_their_tags(sent, taken):
    assert [None, [[tag] for tag in taken]] == run_ranks(by_tag, 2, sent, taken, backend="shm")


def from_anyone(rank):
    if rank:
        dist.send(torch.full((3,), float(rank)), 0)
        return None
    found = {}
    for _ in range(dist.get_world_size() - 1):
        x = torch.zeros(3)
        sender = dist.recv(x)
        found[sender] = x.tolist()
    return found


def test_a_message_from_anyone_says_whose_it_is():
    assert run_ranks(from_anyone, 4, backend="shm")[0] == {1: [1.0] * 3, 2: [2.0] * 3, 3: [3.0] * 3}


def beside_collectives(rank):
    big, x = torch.zeros(1_000_000), torch.ones(2)
    receiving = dist.irecv(big, 1) if rank == 0 else None
    dist.all_reduce(x)
    if rank == 1:
        dist.send(torch.ones(1_000_000), 0)
    else:
        receiving.wait()
    return x.tolist(), big.sum().item()


def test_messages_and_collectives_do_not_wait_for_each_other():
    assert run_ranks(beside_collectives, 2, backend="shm") == [([2.0, 2.0], 1e6), ([2.0, 2.0], 0.0)]


def empty_and_strided(rank):
    x = torch.arange(12.0).reshape(3, 4).t() if rank == 0 else torch.zeros(3, 4).t()
    nothing = torch.empty(0)
    (dist.send if rank == 0 else dist.recv)(nothing, 1 - rank)
    (dist.send if rank == 0 else dist.recv)(x, 1 - rank)
    return x.tolist()


def test_empty_and_strided_messages():
    assert [torch.arange(12.0).reshape(3, 4).t().tolist()] * 2 == run_ranks(empty_and_strided, 2, backend="shm")


def receive_early(rank):
    x, y, word = torch.zeros(4), torch.zeros(4), torch.zeros(1)
    if rank == 1:
        dist.send(torch.full((4,), 2.0), 0, tag=2)
        dist.barrier()
        dist.recv(word, 0)
        dist.send(torch.full((4,), 1.0), 0, tag=1)
        return None
    dist.barrier()
    receiving = dist.irecv(x, 1, tag=1)  # what is here has another tag, and rank 1 goes on only after the next line
    dist.send(word, 1)
    receiving.wait()
    dist.recv(y, 1, tag=2)
    return x.tolist(), y.tolist()


def test_a_message_with_another_tag_does_not_make_irecv_wait():
    assert run_ranks(receive_early, 2, backend="shm") == [([1.0] * 4, [2.0] * 4), None]


def negated(rank):
    part = torch.tensor([1 + 2j]).conj().imag  # lies in memory as [2], and counts as contiguous
    if rank == 0:
        dist.send(part, 1)
        dist.send(torch.tensor([5.0]), 1)
        return None
    plain = torch.zeros(1)
    dist.recv(plain, 0)
    dist.recv(part, 0)
    return plain.item(), part.item()


def test_lazily_negated_tensors_are_sent_and_received_by_value():
    assert run_ranks(negated, 2, backend="shm")[1] == (-2.0, 5.0)


def one_after_another(rank, asked, sent, anyone):
    """Each message goes out once the one before has arrived: no request may wait for another one's."""
    if rank == 1:
        for tag in sent:
            dist.send(torch.full((30_000 * tag + 1,), tag), 0, tag=tag)
            dist.recv(torch.zeros(1), 0, tag=99)
        return None
    boxes = {tag: torch.zeros(30_000 * tag + 1, dtype=torch.int64) for tag in asked}
    works = {tag: dist.irecv(boxes[tag], None if tag in anyone else 1, tag=tag) for tag in asked}
    for tag in sent:
        works[tag].wait()
        dist.send(torch.zeros(1), 1, tag=99)
    return [boxes[tag].unique().tolist() for tag in range(4)]


@settings(max_examples=8, deadline=None)
@given(asked=st.permutations(range(4)), sent=st.permutations(range(4)), anyone=st.sets(st.integers(0, 3), max_size=4))
def test_requests_are_met_in_whatever_order_their_messages_come(asked, sent, anyone):
    found = run_ranks(one_after_another, 2, asked, sent, anyone, backend="shm")
    assert found == [[[tag] for tag in range(4)], None]


def no_address(rank):
    said = []
    for call in (dist.send, dist.recv):
        for peer, tag in ((1 - rank, -1), (1 - rank, 2**31), (7, 0)):
            with pytest.raises(lockstep.UsageError) as caught:
                call(
                    torch.ones(1),
                    group=dist.group.WORLD,
                    tag=tag,
                    **{f"group_{'dst' if call is dist.send else 'src'}": peer},
                )
            said.append(str(caught.value))
    return said


def test_tags_and_ranks_that_cannot_be_are_refused():
    for said in run_ranks(no_address, 2, backend="shm"):
        assert [("tag -1" in a, "tag 2147483648" in b, "no rank 7" in c) for a, b, c in (said[:3], said[3:])] == [
            (True, True, True)
        ] * 2


def not_after_a_failure(rank):
    if rank == 1:
        dist.recv(torch.ones(1), 0)  # rank 0 has given up
        return None
    dist.group.WORLD.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(lockstep.LateRankError):
        dist.recv(torch.ones(1), 1)
    with pytest.raises(lockstep.LateRankError, match="ended earlier"):
        dist.send(torch.ones(1), 1)
    return "refused"


def nobody_else(rank):
    alone = [dist.new_group([each]) for each in range(2)][rank]
    with pytest.raises(lockstep.LostRankError) as caught:
        dist.recv(torch.ones(1), group=alone)
    return str(caught.value)


def test_who_has_nobody_to_receive_from_hears_of_it():
    for said in run_ranks(nobody_else, 2, backend="shm"):
        assert "no other rank is there any more that could send anything" in said


def test_a_group_that_gave_up_on_a_message_takes_no_other():
    with pytest.raises(AssertionError, match=r"rank 0 .* gave up after an error of its own"):
        run_ranks(not_after_a_failure, 2, backend="shm")
