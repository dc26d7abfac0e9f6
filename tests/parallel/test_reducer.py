"""The reducer beyond the numbers: what it attaches to, what it refuses, what it sends and when."""

import copy
import io
import pickle
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from parallel.cases import Net, Tool, share
from ranks import run_ranks
from torch import nn

import lockstep
from lockstep import LostRankError, MismatchError, UsageError
from lockstep.parallel.attach import reducer_of


def raised(function):
    """The type and the message of what a call raises, to travel home; None if it does not."""
    try:
        function()
    except Exception as error:
        return type(error), str(error)
    return None


def mean(x):
    return x.square().mean()


def what_a_replicated_model_is(rank):
    model = Net()
    names, before = list(model.state_dict()), set(vars(model))
    same = lockstep.replicate(model)
    mean(model(share(rank))).backward()
    twin, thawed = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with io.BytesIO() as file:
        torch.save(model, file)
    hooks = [list(p._post_accumulate_grad_hooks or ()) for m in (twin, thawed) for p in m.parameters()]
    return same is model, type(model) is Net, list(model.state_dict()) == names, set(vars(model)) == before, hooks


def test_a_replicated_model_stays_what_it_was_and_copies_of_it_are_plain():
    for *same, hooks in run_ranks(what_a_replicated_model_is, 2):
        assert same == [True, True, True, True]
        assert hooks == [[]] * 12


FRESH = """
import sys, torch, lockstep, torch.distributed as dist
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
for attach in (lockstep.replicate, lockstep.DistributedDataParallel):
    model = attach(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    lockstep.sync_gradients(model)
print(sorted(name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))))
dist.destroy_process_group()
"""


def test_p02_no_compiler_is_imported(tmp_path):
    commands = [[sys.executable, "-c", FRESH, str(tmp_path / "store"), str(rank)] for rank in range(2)]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]

    # The last line: torch 2.9's gloo says on stdout that it has connected.
    assert [rank.communicate(timeout=60)[0].splitlines()[-1] for rank in ranks] == ["[]", "[]"]


def alone(rank):
    model = lockstep.replicate(Net())
    with lockstep.no_sync(model):
        mean(model(share(rank))).backward()
    lockstep.sync_gradients(model)
    lockstep.sync_buffers(model)
    return dist.is_initialized(), reducer_of(model), [p._post_accumulate_grad_hooks for p in model.parameters()]


def test_a_world_of_one_has_no_process_group_and_nothing_attached():
    assert run_ranks(alone, 1, backend=None) == [(False, None, [None] * 6)]


def different_values(rank):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model[1].running_mean.fill_(rank)
    if rank == 1:
        model[0].weight.data[0] = model[0].weight.data[0].flip(0)
    lockstep.replicate(model, sync_batchnorm=False)
    return list(model.state_dict().values())


def test_rank_0s_values_win():
    first, *others = run_ranks(different_values, 3)

    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def permuted_values(rank):
    model = nn.Linear(4, 1, bias=False)
    model.weight.data = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    if rank == 1:
        model.weight.data = model.weight.data.flip(1)
    return lockstep.replicate(model).weight.data


def test_values_in_another_order_are_not_taken_for_equal():
    assert torch.equal(*run_ranks(permuted_values, 2))


def build_shape(rank):
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4 if rank == 2 else 5))


def build_order(rank):
    names = ["a", "b"] if rank == 0 else ["b", "a"]
    return nn.ModuleDict({name: nn.Linear(2, 2) for name in names})


def build_number(rank):
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(1 + (rank == 1))))


def build_dtype(rank):
    return nn.Linear(2, 2).to(torch.float64 if rank == 1 else torch.float32)


def build_frozen(rank):
    return nn.Linear(2, 2).requires_grad_(rank != 1)


def build_strides(rank):
    return nn.Conv2d(2, 2, 3).to(memory_format=torch.channels_last if rank == 1 else torch.contiguous_format)


def attach_different(rank, build, wrapped):
    return raised(lambda: (lockstep.DistributedDataParallel if wrapped else lockstep.replicate)(build(rank)))


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("build", "words"),
    [
        (build_shape, ["1.weight (5, 3)", "1.weight (4, 3)", "rank(s) 2"]),
        (build_order, ["'a.weight", "'b.weight", "rank(s) 1, 2"]),
        (build_number, ["'nothing'", "'1.weight", "rank(s) 1"]),
        (build_dtype, ["float32", "float64", "rank(s) 1"]),
        (build_frozen, ["frozen", "rank(s) 1"]),
        (build_strides, ["strides", "rank(s) 1"]),
    ],
)
def test_h10_different_models_raise_on_every_rank(build, words, wrapped):
    for kind, message in run_ranks(attach_different, 3, build, wrapped):
        assert kind is MismatchError
        assert [word for word in words if word not in message] == []


def misuse(rank):
    model = lockstep.replicate(Net())
    return [
        raised(lambda: lockstep.replicate(nn.Sequential(model))),
        raised(lambda: lockstep.replicate(nn.LazyLinear(3))),
        raised(lambda: lockstep.replicate(nn.Linear(2, 2, device="meta"))),
        raised(lambda: lockstep.sync_gradients(nn.Linear(2, 2))),
        raised(lambda: lockstep.no_sync(nn.Linear(2, 2)).__enter__()),
        raised(lambda: lockstep.replicate(nn.Linear(2, 2), communicate="int8")),
        raised(lambda: lockstep.sync_buffers(model, how="median")),
        raised(lambda: lockstep.DistributedDataParallel(nn.Linear(2, 2), mixed_precision=object())),
        raised(lambda: lockstep.DistributedDataParallel(nn.Linear(2, 2), device_ids=[0, 1])),
        raised(lambda: lockstep.replicate(nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)))),
    ]


def test_misuse_says_what_to_write_instead():
    words = [
        "once",
        "forward",
        "to_empty",
        "lockstep.replicate",
        "lockstep.replicate",
        "'bf16'",
        "'mean'",
        "autocast",
        "one",
        "torch.renorm",
    ]
    for errors in run_ranks(misuse, 2):
        assert [kind for kind, _ in errors] == [UsageError] * len(words)
        assert [word for word, (_, message) in zip(words, errors, strict=True) if word not in message] == []


def test_an_unknown_communicate_raises_in_a_world_of_one_too():
    """So that a script that is tried alone first does not stop on many ranks."""
    with pytest.raises(UsageError, match="'int8'; write 'bf16', 'fp16' or None"):
        lockstep.replicate(nn.Linear(2, 2), communicate="int8")


def unwrapped(rank):
    plain = Net()
    lockstep.replicate(plain)
    tries = [
        plain,
        torch.nn.DataParallel(plain),
        nn.parallel.DistributedDataParallel(Net()),
        torch.compile(plain, backend="eager"),
    ]
    tries += [lockstep.DistributedDataParallel(Net()), torch.compile(torch.nn.DataParallel(plain), backend="eager")]
    return [type(lockstep.unwrap(model)) for model in tries]


def test_unwrap_gives_the_plain_module():
    assert run_ranks(unwrapped, 2) == [[Net] * 6] * 2


def local_until_sent(rank):
    model = lockstep.replicate(Net())
    loss = mean(model(share(rank)))
    with lockstep.no_sync(model):
        loss.backward()
    before = model.a.weight.grad.clone()
    lockstep.sync_gradients(model)
    after = model.a.weight.grad.clone()
    lockstep.sync_gradients(model)
    return before, after, torch.equal(after, model.a.weight.grad)


def test_g03_gradients_under_no_sync_stay_local_until_they_are_sent_once():
    (one, mixed, same), (other, also, _) = run_ranks(local_until_sent, 2)

    assert not torch.equal(one, other)
    torch.testing.assert_close(mixed, (one + other) / 2)
    assert torch.equal(mixed, also)
    assert same


def rank_0_evaluates(rank, wrapped):
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5)).double()
    model = lockstep.DistributedDataParallel(model) if wrapped else lockstep.replicate(model, sync_batchnorm=False)
    for step in range(2):
        mean(model(share(rank, step))).backward()
        if rank == 0:
            model.eval()
            model(share(0))
            model.train()
            with torch.no_grad():
                model(share(0))
    return next(model.parameters()).grad


@pytest.mark.parametrize("wrapped", [False, True])
def test_h01_rank_0_may_evaluate_alone(wrapped):
    assert torch.equal(*run_ranks(rank_0_evaluates, 2, wrapped))


def views(rank):
    model = lockstep.replicate(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places = []
    for step, to_none in enumerate((True, True, False, False, True)):
        optimizer.zero_grad(set_to_none=to_none)
        with lockstep.no_sync(model):
            mean(model(share(rank, step))).backward()
        places.append([p.grad.data_ptr() for p in model.parameters()])
        mean(model(share(rank, step))).backward()
        places.append([p.grad.data_ptr() for p in model.parameters()])
    storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
    return places, len(storages)


def test_gradients_lie_in_the_bucket_all_the_time_and_nowhere_else():
    for places, storages in run_ranks(views, 2):
        assert all(place == places[-1] for place in places[2:])
        assert storages == 1


def unequal_change(rank):
    model = lockstep.replicate(Net())
    mean(model(share(rank))).backward()
    model.zero_grad()
    if rank == 1:
        model.b.weight = nn.Parameter(torch.ones(7, 5, dtype=torch.float64))
        model.b.bias = nn.Parameter(torch.ones(7, dtype=torch.float64))
    return raised(lambda: mean(model(share(rank), "a")).backward())


def test_a_model_that_changed_on_one_rank_only_raises_on_all():
    for kind, message in run_ranks(unequal_change, 3):
        assert kind is MismatchError
        assert "b.weight (5, 5)" in message
        assert "b.weight (7, 5)" in message
        assert "rank(s) 1" in message


def values_that_part(rank, how):
    model = lockstep.replicate(Net())
    if how == "loaded":
        if rank == 1:
            model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    else:
        mean(model(share(rank))).backward()
        model.zero_grad()
        torch.manual_seed(rank if how == "added" else 0)
        model.c = nn.Linear(5, 5).double()
    return raised(lambda: mean(model(share(rank), "abc")).backward())


@pytest.mark.parametrize(("how", "name"), [("loaded", "'a.weight'"), ("added", "'c.weight'"), ("alike", None)])
def test_values_that_ranks_have_not_got_in_common_raise_on_all(how, name):
    for error in run_ranks(values_that_part, 3, how):
        if name is None:
            assert error is None
            continue
        kind, message = error
        assert kind is MismatchError
        assert name in message
        assert f"rank(s) {'1' if how == 'loaded' else '1, 2'} than on rank 0" in message


def out_of_step(rank):
    model = lockstep.replicate(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        for step in range(4):
            optimizer.zero_grad()
            mean(model(share(rank, step))).backward()
            if rank == 1 and step == 2:
                mean(model(share(rank, step))).backward()
            optimizer.step()

    return raised(train)


def test_h09_a_backward_that_only_one_rank_makes_raises_on_all():
    for kind, message in run_ranks(out_of_step, 3):
        assert kind is MismatchError
        assert "rank 0: 3, rank 1: 2, rank 2: 3" in message


def leaving(rank):
    model = lockstep.replicate(Net())
    mean(model(share(rank))).backward()
    if rank == 1:
        return None
    return raised(lambda: [mean(model(share(rank))).backward() for _ in range(2)])


def test_a_rank_that_left_is_named_on_the_others():
    _, *others = sorted(run_ranks(leaving, 3), key=lambda found: found is not None)

    for kind, message in others:
        assert kind is LostRankError
        assert "rank(s) 1 left" in message


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("on purpose")


def broken_backward(rank, everywhere):
    model = lockstep.replicate(Net(), first_bucket_mb=1e-6, bucket_mb=1e-6)
    mean(model(share(rank))).backward()
    model.zero_grad()
    x = torch.tanh(model.a(share(rank)))
    if everywhere or rank == 1:
        x = Breaks.apply(x)
    first = raised(lambda: mean(model.c(model.b(x))).backward())
    model.zero_grad()
    second = raised(lambda: mean(model(share(rank))).backward())
    return first, second, None if model.a.weight.grad is None else model.a.weight.grad.clone()


def test_a_backward_that_raised_on_one_rank_raises_on_the_others():
    (first, *_), (own, then, _), (last, *_) = run_ranks(broken_backward, 3, False)

    assert own == (ValueError, "on purpose")
    assert {first[0], last[0], then[0]} == {LostRankError}
    assert "a backward raised on 1 of ranks" in first[1]


def test_a_backward_that_raised_everywhere_leaves_nothing_behind():
    expected = Net()
    Tool(range(2)).loss(lambda _, x: mean(expected(x))).backward()

    for first, second, grad in run_ranks(broken_backward, 2, True):
        assert first == (ValueError, "on purpose")
        assert second is None
        torch.testing.assert_close(grad, expected.a.weight.grad)


def overwritten(rank):
    model = lockstep.replicate(Net().float())
    mean(model(share(rank).float())).backward()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        mean(model(share(rank, step))).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_g13_parameters_that_a_cast_replaced_unnoticed_are_found_at_the_optimizers_step():
    exact = Net().float().double()
    optimizer = torch.optim.SGD(exact.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        Tool(range(2)).loss(lambda _, x: mean(exact(x)), step).backward()
        optimizer.step()

    for found in run_ranks(overwritten, 2):
        for param, p in zip(found, exact.parameters(), strict=True):
            torch.testing.assert_close(param, p.detach(), rtol=1e-12, atol=1e-12)


def step_in_backward(rank):
    model = lockstep.replicate(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean(model(share(rank))).backward()
    optimizer.step()
    model.a.weight.register_hook(lambda grad: optimizer.step())
    return raised(lambda: mean(model(share(rank))).backward())


def test_an_optimizers_step_within_backward_raises():
    for kind, message in run_ranks(step_in_backward, 2):
        assert kind is UsageError
        assert "after it" in message


class Gate(torch.autograd.Function):
    """A place in backward that waits until something else has happened."""

    @staticmethod
    def forward(ctx, x, event):
        ctx.event = event
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if not ctx.event.wait(20):
            raise TimeoutError("nothing travelled while backward went on")
        return grad, None


def overlap(rank):
    torch.manual_seed(0)
    model = lockstep.DistributedDataParallel(
        nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), bucket_cap_mb_list=[1e-6]
    )
    arrived = threading.Event()

    def slowly(group, bucket):
        future = torch.futures.Future()

        def travel():
            time.sleep(0.05)
            tensor = bucket.buffer().div_(2)
            dist.all_reduce(tensor)
            future.set_result(tensor)
            if bucket.index() == 0:
                arrived.set()

        # One thread at a time, in the order of the buckets: the order of collectives is the same on all ranks.
        previous = slowly.last
        slowly.last = threading.Thread(target=lambda: (previous and previous.join(), travel()))
        slowly.last.start()
        return future

    slowly.last = None
    mean(model(torch.full((2, 64), float(rank)))).backward()
    model.register_comm_hook(None, slowly)
    model.zero_grad()
    x = torch.full((2, 64), float(rank))
    middle = model.module[1](model.module[0](x))
    mean(model.module[3](model.module[2](Gate.apply(middle, arrived)))).backward()
    slowly.last.join()
    return [p.grad for p in model.parameters()]


def test_buckets_travel_while_backward_goes_on():
    first, second = run_ranks(overlap, 2)

    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def random_steps(rank, steps, seed):
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(6, 6) for _ in range(12))
    lockstep.replicate(model, first_bucket_mb=1e-4, bucket_mb=2e-4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mine = torch.Generator().manual_seed(seed + rank)
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=bool(torch.randint(2, (), generator=mine)))
        used = torch.randperm(12, generator=mine)[: int(torch.randint(13, (), generator=mine))]
        x = torch.randn(3, 6, generator=mine)
        for number in used.tolist():
            x = torch.tanh(model[number](x))
            if torch.rand((), generator=mine) < 0.02:
                time.sleep(0.002)
        if len(used):
            mean(x).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def one_rank_skips_a_batch(rank, with_update, skips, which=1):
    torch.manual_seed(0)
    model = lockstep.replicate(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = lockstep.Update(model, optimizer) if with_update else None
    val, train = (lockstep.DataLoader(torch.randn(12, 2), batch_size=4) for _ in range(2))

    def epoch():
        with torch.no_grad():
            for _ in val:
                if rank:
                    break  # where nobody learns, it may
        for number, x in enumerate(train):
            if number == which and rank in skips:
                continue
            if update is None:
                optimizer.zero_grad()
                mean(model(x)).backward()
                optimizer.step()
            else:
                with update:
                    update.backward(model(x).square())

    return raised(epoch)


@pytest.mark.parametrize("with_update", [False, True])
def test_a_batch_that_one_rank_skips_raises_at_the_next_backward_of_every_rank(with_update):
    for kind, said in run_ranks(one_rank_skips_a_batch, 2, with_update, [1]):
        assert kind is MismatchError
        assert (
            "optimizer steps taken, or left by an error, so far: rank 0: 1, rank 1: 1; batches: rank 0: 2, rank 1: 3"
            in said
        )


def test_the_last_batch_of_an_epoch_that_one_rank_skips_raises_where_an_update_would_have_had_it():
    for kind, said in run_ranks(one_rank_skips_a_batch, 2, True, [1], 2):
        assert kind is MismatchError
        assert "so far: rank 0: 2, rank 1: 2; batches: rank 0: 3, rank 1: 4" in said


@pytest.mark.parametrize(("with_update", "which"), [(False, 1), (True, 1), (True, 2)])
def test_a_batch_that_all_ranks_skip_is_none_of_the_reducers_business(with_update, which):
    assert run_ranks(one_rank_skips_a_batch, 2, with_update, [0, 1], which) == [None, None]


@pytest.mark.parametrize(("size", "steps"), [(2, 200), (3, 40)])
def test_ranks_agree_to_the_bit_after_random_steps_with_random_unused_sets_and_delays(size, steps):
    first, *others = run_ranks(random_steps, size, steps, 11)

    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def orders(rank):
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))  # used in the order 3, 0, 2, 1
    lockstep.replicate(model, first_bucket_mb=1e-6, bucket_mb=1e-6)
    reducer, seen = reducer_of(model), []
    for _ in range(2):
        seen.append(
            [slot.name for bucket in reducer._layout.buckets for slot in bucket.slots if slot.name.endswith("weight")]
        )
        x = torch.ones(1, 8)
        for number in (3, 0, 2, 1) if rank == 0 else (1, 2, 0, 3):
            x = model[number](x)
        mean(x).backward()
    return seen


def test_buckets_follow_the_order_in_which_gradients_came_on_rank_0():
    for first, second in run_ranks(orders, 2):
        assert first == ["3.weight", "2.weight", "1.weight", "0.weight"]
        assert second == ["1.weight", "2.weight", "0.weight", "3.weight"]


def half_parameters(rank):
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    lockstep.replicate(model)
    grad = 1.0 if rank == 0 else 2.0**-9  # each of the small ones vanishes beside 1 in bfloat16, all three do not
    (model.weight * 4 * grad).sum().backward()
    return model.weight.grad.item()


def test_halves_are_summed_in_float32():
    assert run_ranks(half_parameters, 4) == [1.0078125] * 4


def compressed(rank, communicate):
    model = lockstep.replicate(Net(), communicate=communicate)
    for step in range(2):
        mean(model(share(rank, step))).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("communicate", ["bf16", "fp16"])
def test_gradients_may_travel_in_halves(communicate):
    first, second = run_ranks(compressed, 2, communicate)
    exact = Net()
    for step in range(2):
        Tool(range(2)).loss(lambda _, x: mean(exact(x)), step).backward()

    for a, b, p in zip(first, second, exact.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, p.grad)
        torch.testing.assert_close(a, p.grad, rtol=3e-2, atol=1e-3)


def compiled(rank):
    found = []
    for how in ("whole", "in place", "by block"):
        model = lockstep.replicate(Net())
        run = torch.compile(model, backend="aot_eager") if how == "whole" else model
        for block in {"whole": [], "in place": [model], "by block": [model.a, model.b, model.c]}[how]:
            block.compile(backend="aot_eager")
        for step in range(3):
            model.zero_grad()
            mean(run(share(rank, step))).backward()
        found.append([p.grad for p in model.parameters()])
    return found


def test_compiled_models_are_right():
    exact = Net()
    Tool(range(2)).loss(lambda _, x: mean(exact(x)), 2).backward()

    for found in run_ranks(compiled, 2):
        for grads in found:
            for grad, p in zip(grads, exact.parameters(), strict=True):
                torch.testing.assert_close(grad, p.grad)


def random_numbers(rank):
    lockstep.init(seed=0, device="cpu")
    model = lockstep.replicate(nn.Sequential(nn.Linear(2, 2), nn.Dropout()))
    before = torch.rand(())
    model.eval()(torch.ones(1, 2))
    still = torch.rand(())
    model.train()(torch.ones(1, 2))
    return before, still, torch.rand(()), len(model._forward_pre_hooks)


def test_ranks_draw_their_own_numbers_from_the_first_training_forward_on():
    one, other = run_ranks(random_numbers, 2)

    assert one[:2] == other[:2]
    assert one[2] != other[2]
    assert one[3] == other[3] == 0
