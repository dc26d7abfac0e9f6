"""Calls that are over later: in order, whoever finishes them, and their caller goes on meanwhile."""

import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from ranks import run_ranks

import lockstep

few = settings(max_examples=3, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
SIZES = (0, 1, 1000, 65_536, 65_537, 300_000)  # up to 65,536 float32 are a single message between two ranks
ENDS = ("wait", "future", "poll", "exception", "dropped", "at the end")


def finish(work, end):
    if end == "wait":
        work.wait()
    elif end == "future":
        work.get_future().then(lambda done: done.value()[0]).wait()
    elif end == "poll":
        while not work.is_completed():
            pass
        assert work.is_success()
    elif end == "exception":
        while not work.is_completed():
            assert work.exception() is None


def wrong_results(rank, cases):
    """All-reduces of which some are begun, some done in a thread and some at once; the results that are not right."""
    size, open_, found = dist.get_world_size(), [], []
    for number, (count, later, end) in enumerate(cases):
        x = torch.full((count,), float(number + rank))
        if later:
            work = dist.all_reduce(x, async_op=True)
            finish(work, end)
            open_.append((number, x, None if end == "dropped" else work))
        else:
            dist.all_reduce(x)
            open_.append((number, x, None))
    dist.barrier()  # what was dropped is over when a later call is
    for number, x, work in reversed(open_):
        if work is not None:
            work.wait()
        if not torch.equal(x, torch.full_like(x, size * number + size * (size - 1) / 2)):
            found.append(number)
    return found


@pytest.mark.parametrize("size", [2, 3])
@few
@given(
    cases=st.lists(st.tuples(st.sampled_from(SIZES), st.booleans(), st.sampled_from(ENDS)), min_size=60, max_size=90)
)
def test_results_do_not_depend_on_who_finishes_a_call(size, cases):
    assert run_ranks(wrong_results, size, cases, backend="shm") == [[]] * size


def go_on_meanwhile(rank, count):
    """Rank 1 joins in only after it has heard from rank 0, which must not be held up by its own call."""
    x, word, heard = torch.ones(count), torch.zeros(1), threading.Event()
    if rank == 1:
        dist.recv(word, 0)
        dist.all_reduce(x)
        return x.unique().tolist()
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future().then(lambda _: heard.set())  # nobody waits for the work itself
    assert not work.is_completed()
    dist.send(word, 1)
    assert heard.wait(30)
    future.wait()
    return x.unique().tolist()


@pytest.mark.parametrize("count", [1, 1_000_000])
def test_the_caller_goes_on_and_its_callbacks_are_called(count):
    assert run_ranks(go_on_meanwhile, 2, count, backend="shm") == [[2.0], [2.0]]


def disagree(rank):
    x = torch.ones(3 + rank)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(torch.ones(2), async_op=True)]
    with pytest.raises(lockstep.MismatchError, match="3 float32"):
        works[0].wait()
    works[1].wait()
    work = dist.all_reduce(x, async_op=True)
    y = torch.ones(2)
    dist.all_reduce(y)
    return isinstance(work.exception(), lockstep.MismatchError), y.tolist()


def test_a_mismatch_belongs_to_the_call_that_met_it():
    assert run_ranks(disagree, 2, backend="shm") == [(True, [2.0, 2.0])] * 2


def call_from_a_callback(rank):
    x, y = torch.ones(2), torch.ones(2)
    dist.all_reduce(x, async_op=True).get_future().then(lambda _: dist.all_reduce(y)).wait()
    return x.tolist(), y.tolist()


def test_a_callback_may_call():
    assert run_ranks(call_from_a_callback, 2, backend="shm") == [([2.0, 2.0], [2.0, 2.0])] * 2


REACTIONS = {
    "calls": lambda _, x: dist.all_reduce(x),
    "waits for its call": lambda _, x: dist.all_reduce(x, async_op=True).wait(),
    "waits for its call's future": lambda _, x: dist.all_reduce(x, async_op=True).get_future().wait(),
    "waits for what was ahead": lambda ahead, x: (ahead[0].wait(), dist.all_reduce(x)),
    "waits for the future of what was ahead": lambda ahead, x: (ahead[1].wait(), dist.all_reduce(x)),
}


def call_behind(rank, name):
    """On rank 0 the first call is over only once the second is ahead of what its callback does."""
    first, second, third = (torch.ones(300_000) for _ in range(3))
    word = torch.zeros(1)
    if rank == 1:
        dist.recv(word, 0)
    future = dist.all_reduce(first, async_op=True).get_future()
    ahead = dist.all_reduce(second, async_op=True)
    both = ahead, ahead.get_future()
    answered = future.then(lambda _: REACTIONS[name](both, third))
    if rank == 0:
        dist.send(word, 1)
    answered.wait()
    ahead.wait()
    return [x.unique().tolist() for x in (first, second, third)]


@pytest.mark.parametrize("name", REACTIONS)
def test_a_callback_may_wait_for_what_is_done_in_its_own_thread(name):
    """As torch's PowerSGD does."""
    assert run_ranks(call_behind, 2, name, backend="shm") == [[[2.0]] * 3] * 2


def receive_behind(rank):
    first, second = torch.zeros(300_000), torch.zeros(3)
    future = dist.irecv(first, 1 - rank).get_future().then(lambda _: dist.recv(second, 1 - rank))
    sent = [dist.isend(torch.full((count,), float(rank)), 1 - rank) for count in (300_000, 3)]
    future.wait()
    for work in sent:
        work.wait()
    return first.unique().tolist(), second.tolist()


def test_a_callback_may_receive_the_next_message():
    assert run_ranks(receive_behind, 2, backend="shm") == [([1.0], [1.0] * 3), ([0.0], [0.0] * 3)]


def destroy_from_a_callback(rank):
    group, x = dist.new_group(), torch.ones(300_000)
    future = dist.all_reduce(x, group=group, async_op=True).get_future()
    future.then(lambda _: dist.destroy_process_group(group)).wait()
    dist.barrier()
    return x.unique().tolist()


def test_a_callback_may_destroy_its_group():
    assert run_ranks(destroy_from_a_callback, 2, backend="shm") == [[2.0]] * 2
