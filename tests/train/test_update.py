"""Steps of several ranks and micro-batches, compared with one process that sees every global batch whole."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from torch import nn

import lockstep


def backend_for(size):
    return "gloo" if size > 1 else None


def share(n, rank, size):
    return slice(rank * n // size, (rank + 1) * n // size)


def network(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def samples(n, dtype=torch.float64):
    """Inputs, labels, weights of which some are 0, for n samples."""
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(n, 4, dtype=dtype, generator=generator)
    return x, torch.randint(3, (n,), generator=generator), torch.randint(3, (n,), generator=generator).to(dtype)


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
}


def train_by_hand(sizes, kind, clip_norm=None, weigh=False, dtype=torch.float64):
    """The reference: for each step one whole batch, one backward."""
    model = network(dtype=dtype)
    optimizer = OPTIMIZERS[kind](model.parameters())
    for n in sizes:
        x, y, w = samples(n, dtype)
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        optimizer.zero_grad()
        ((losses * w).sum() / w.sum() if weigh else losses.mean()).backward()
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train_on_ranks(rank, size, sizes, kind, micro_batches=1, clip_norm=None, weigh=False, dtype=torch.float64):
    """The same steps, each cut into micro-batches, each of them into the ranks' shares."""
    model = lockstep.replicate(network(seed=rank, dtype=dtype))  # rank 0's values win
    optimizer = OPTIMIZERS[kind](model.parameters())
    update = lockstep.Update(model, optimizer, accumulate=micro_batches, clip_norm=clip_norm)
    for n in sizes:
        for number in range(micro_batches):
            micro_batch = [part[share(n, number, micro_batches)] for part in samples(n, dtype)]
            x, y, w = (part[share(len(part), rank, size)] for part in micro_batch)
            with update:
                losses = nn.functional.cross_entropy(model(x), y, reduction="none")
                update.backward(losses, w if weigh else None)
    assert update.step_count == len(sizes)
    return [p.detach() for p in model.parameters()]


def largest_difference(some, others):
    return max((a.detach() - b.detach()).abs().max().item() for a, b in zip(some, others, strict=True))


@settings(max_examples=12)
@given(st.data())
def test_any_division_of_the_samples_gives_one_process_parameters(data):
    size = data.draw(st.integers(1, 4), "ranks")
    sizes = data.draw(st.lists(st.integers(3, 17), min_size=1, max_size=5), "batches")
    kind, clip = data.draw(st.sampled_from(["sgd", "adamw"])), data.draw(st.sampled_from([None, 0.1]))
    micro_batches, weigh = data.draw(st.integers(1, 3), "micro-batches"), data.draw(st.booleans(), "weigh")

    results = run_ranks(train_on_ranks, size, size, sizes, kind, micro_batches, clip, weigh, backend=backend_for(size))

    expected = train_by_hand(sizes, kind, clip, weigh)
    assert max(largest_difference(result, expected) for result in results) < 1e-9
    assert [largest_difference(result, results[0]) for result in results] == [0.0] * size


@pytest.mark.parametrize("size", [2, 3, 4])
def test_g01_uneven_local_batches_give_the_gradient_of_the_whole_batch(size):
    """13 samples over 3 ranks are 4, 4 and 5: a mean of means weighs them differently. In float32, 20 steps."""
    sizes = [12, 13] * 10

    results = run_ranks(train_on_ranks, size, size, sizes, "sgd", 1, None, False, torch.float32)

    expected = train_by_hand(sizes, "sgd", dtype=torch.float32)
    assert max(largest_difference(result, expected) for result in results) < 1e-5


def masked_tokens(rank, size, counts):
    """Micro-batches of sequences of 8 tokens of which some count: (rank, micro-batch) -> how many."""
    model = lockstep.replicate(network())
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.5), accumulate=2)
    x, y, _ = samples(8 * 4)
    for number in range(2):
        sequences = [s for s in range(4) if s % 2 == number and (size == 1 or s // 2 == rank)]
        tokens = torch.cat([torch.arange(s * 8, s * 8 + 8) for s in sequences])
        mask = torch.cat([torch.arange(8) < counts[s] for s in sequences])
        with update:
            losses = nn.functional.cross_entropy(model(x[tokens]), y[tokens], reduction="none")
            update.backward(losses.view(-1, 8), mask.view(-1, 8))
    return [p.detach() for p in model.parameters()], update.loss


def test_g02_token_counts_that_differ_between_ranks_and_micro_batches_weigh_as_they_should():
    """2 ranks and 2 micro-batches with 7, 1, 3 and 5 tokens, against one pass over the 16."""
    counts = [7, 1, 3, 5]
    model = network()
    x, y, _ = samples(8 * 4)
    counted = torch.cat([torch.arange(8) < count for count in counts])
    loss = nn.functional.cross_entropy(model(x[counted]), y[counted])
    loss.backward()
    expected = [p.detach() - 0.5 * p.grad for p in model.parameters()]

    results = run_ranks(masked_tokens, 2, 2, counts)

    assert max(largest_difference(parameters, expected) for parameters, _ in results) < 1e-12
    assert [value for _, value in results] == pytest.approx([loss.item()] * 2)


def run_out_early(rank):
    """Rank 0 has samples for two steps, rank 1 for one; every sample's gradient is 2."""
    model = lockstep.replicate(nn.Linear(1, 1, bias=False).double())
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.0))
    seen = []
    for number in range(2):
        x = torch.full((1 if number == 0 or rank == 0 else 0, 1), 2.0, dtype=torch.float64)
        with update:
            update.backward(model(x))
        seen.append(float(model.weight.grad))
    return seen


def test_g17_a_rank_without_samples_does_not_shrink_the_gradient():
    """Under torch's join() the remaining rank's gradients are divided by all ranks: 2 and then 1."""
    assert run_ranks(run_out_early, 2) == [[2.0, 2.0]] * 2


def tail_of_an_epoch(rank, size):
    """The loader's own division: 29 samples in batches of 8, in groups of 2: the last group is one batch of 5."""
    lockstep.init(device="cpu")
    model = lockstep.replicate(network())
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.5), accumulate=2)
    x, y, _ = samples(29)
    train = lockstep.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    other = lockstep.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=29)
    steps = []
    for _ in range(2):
        for inputs, labels in train:
            with update:
                update.backward(nn.functional.cross_entropy(model(inputs), labels, reduction="none"))
            steps.append(update.step_count)
            list(other)  # the end of another loader's epoch is not the end of ours
    return steps, update.step_count, [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("size", [1, 3])
def test_a_shorter_group_at_the_end_of_the_loaders_epoch_makes_a_step(size):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y, _ = samples(29)
    for part in [slice(0, 16), slice(16, 29)] * 2:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[part]), y[part]).backward()
        optimizer.step()

    for steps, count, parameters in run_ranks(tail_of_an_epoch, size, size, backend=backend_for(size)):
        assert steps == [0, 1, 1, 2, 2, 3, 3, 4]
        assert count == 4
        assert largest_difference(parameters, list(model.parameters())) < 1e-12


def odd_tail(rank):
    """Three batches in groups of two with a plain iterable: the last is flushed by hand."""
    model = lockstep.replicate(network())
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.5), accumulate=2)
    for n in (4, 6, 2):
        x, y, _ = (part[rank::2] for part in samples(n))
        with update:
            update.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
    before = (update.stepped, update.step_count)
    update.flush()
    after = (update.stepped, update.step_count)
    update.flush()
    return before, after, (update.stepped, update.step_count)


def test_flush_steps_with_what_there_is_and_not_twice():
    assert run_ranks(odd_tail, 2) == [((False, 1), (True, 2), (False, 2))] * 2


def collectives_of_a_step(rank, micro_batches):
    model = lockstep.replicate(network())
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.5), accumulate=micro_batches)
    x, y, _ = samples(4)

    def step():
        for _ in range(micro_batches):
            with update:
                update.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))

    step()  # the first one has to find the order of the gradients
    with torch.autograd.profiler.profile() as seen:
        step()
    return [event.name for event in seen.function_events if event.name.startswith("c10d::")]


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_step_is_one_collective_however_many_micro_batches_it_has(micro_batches):
    assert run_ranks(collectives_of_a_step, 2, micro_batches) == [["c10d::allreduce_"]] * 2


def many_halves(rank, counts):
    model = lockstep.replicate(nn.Linear(1, 1, bias=False).to(torch.bfloat16))
    nn.init.zeros_(model.weight)
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.0))
    with update:
        update.backward(model(torch.ones(counts[rank], 1, dtype=torch.bfloat16)) + float(rank))
    return update.loss


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_a_model_in_halves_counts_its_samples_in_float32(backend):
    counts = [300, 301]

    assert run_ranks(many_halves, 2, counts, backend=backend) == [pytest.approx(301 / 601, rel=1e-6)] * 2


def scalar_means(rank, size, counted):
    model = lockstep.replicate(network())
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.5))
    x, y, _ = (part[share(13, rank, size)] for part in samples(13))
    with update:
        update.backward(nn.functional.cross_entropy(model(x), y), count=len(x) if counted else None)
    return [p.detach() for p in model.parameters()]


def test_a_scalar_loss_is_a_mean_of_so_many():
    model = network()
    x, y, _ = samples(13)
    nn.functional.cross_entropy(model(x), y).backward()
    expected = [p.detach() - 0.5 * p.grad for p in model.parameters()]

    assert largest_difference(run_ranks(scalar_means, 3, 3, True)[0], expected) < 1e-12
    assert largest_difference(run_ranks(scalar_means, 3, 3, False)[0], expected) > 1e-4


def step_without_weight(rank):
    model = lockstep.replicate(network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    update = lockstep.Update(model, optimizer, scheduler=scheduler)
    before = [p.detach().clone() for p in model.parameters()]
    x, y, _ = samples(4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with update:
            update.backward(nn.functional.cross_entropy(model(x), y, reduction="none"), torch.zeros(4))
    moved = largest_difference(before, list(model.parameters()))
    skipped = (update.stepped, update.step_count, scheduler.last_epoch, moved)
    with update:
        update.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
    return [str(w.message) for w in caught], skipped, update.step_count


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_weighs_nothing_in_the_world_is_skipped_with_a_warning(size):
    for messages, skipped, after in run_ranks(step_without_weight, size, backend=backend_for(size)):
        assert [message for message in messages if "weigh nothing on any rank" in message] == messages != []
        assert skipped == (False, 0, 0, 0.0)
        assert after == 1


def warnings_of_first_steps(rank, batches):
    """Of a few steps on what ``batches`` gives each rank."""
    model = lockstep.replicate(network())
    nn.init.zeros_(model[2].weight)  # its first losses are log(3), whatever the samples
    nn.init.zeros_(model[2].bias)
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.5))
    x, y, _ = samples(8)
    data = torch.utils.data.TensorDataset(x, y)
    loader = {
        "torch's": lambda: torch.utils.data.DataLoader(data, 2),
        "divided": lambda: torch.utils.data.DataLoader(data, 1, sampler=lockstep.DistributedSampler(data)),
        "lockstep's": lambda: lockstep.DataLoader(
            torch.utils.data.TensorDataset(x[:1].repeat(8, 1), y[:1].repeat(8)), 2
        ),
    }[batches]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for x, y in loader:
            with update:
                update.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
    assert update.step_count == 4
    return [str(w.message) for w in caught if "same samples" in str(w.message)]


def test_ranks_that_all_train_on_the_same_samples_are_told():
    (said,), *others = run_ranks(warnings_of_first_steps, 2, "torch's")

    assert said.startswith("rank 0 of 2, step 2: all ranks had the same losses in each of the first 3 steps")
    assert others == [[]]


@pytest.mark.parametrize("batches", ["divided", "lockstep's"])
def test_samples_that_are_divided_or_that_are_alike_are_no_reason_to_warn(batches):
    assert run_ranks(warnings_of_first_steps, 2, batches) == [[], []]


def nan_on_one_rank(rank):
    model = lockstep.replicate(network())
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.5))
    before = [p.detach().clone() for p in model.parameters()]
    x, y, _ = samples(4)
    for number in range(3):
        try:
            with update:
                losses = nn.functional.cross_entropy(model(x), y, reduction="none")
                update.backward(losses * (float("nan") if rank == 2 and number == 1 else 1.0))
        except lockstep.NotFiniteError as error:
            return str(error), [bool(p.isfinite().all()) for p in model.parameters()], number
        assert largest_difference(before, list(model.parameters())) > 0
    return None


def test_nan_losses_of_one_rank_raise_on_all_and_name_rank_and_step():
    for rank, (message, finite, number) in enumerate(run_ranks(nan_on_one_rank, 3)):
        assert f"rank {rank} of 3, step 1: the losses of rank(s) 2 are NaN" in message
        assert (finite, number) == ([True] * 4, 1)


def learning_rates(rank):
    model = lockstep.replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1.0, end_factor=0.0, total_iters=4)
    update = lockstep.Update(model, optimizer, scheduler=scheduler, accumulate=2)
    x, y, _ = samples(4)
    rates = []
    for _ in range(8):
        with update:
            update.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_r03_the_schedule_moves_once_a_step_whatever_the_number_of_ranks():
    """Accelerate steps it once for each process: the rate is 0 after 2 of 4 steps."""
    assert run_ranks(learning_rates, 2)[1] == [1.0, 0.75, 0.75, 0.5, 0.5, 0.25, 0.25, 0.0]


class Two:
    def __init__(self):
        self.generator, self.judge = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()


def adversaries(rank, size, by_hand):
    torch.manual_seed(0)
    two = Two()
    models = [two.generator, two.judge]
    if not by_hand:
        models = [lockstep.replicate(model) for model in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    noise = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))[share(5, rank, size)]
    real = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(2))[share(5, rank, size)]
    generator, judge = models
    if by_hand:
        for _ in range(4):
            optimizers[1].zero_grad()
            (judge(generator(noise).detach()).square() + (1 - judge(real)).square()).mean().backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            (1 - judge(generator(noise))).square().mean().backward()
            optimizers[0].step()
    else:
        updates = [lockstep.Update(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
        for _ in range(4):
            with updates[1] as update:
                update.backward(judge(generator(noise).detach()).square() + (1 - judge(real)).square())
            with updates[0] as update:
                update.backward((1 - judge(generator(noise))).square())
    return [p.detach() for model in models for p in model.parameters()]


def test_two_models_with_an_update_each_train_as_in_one_process():
    """A GAN: the generator's backward leaves gradients in the judge, which its next step must not see."""
    expected = adversaries(0, 1, by_hand=True)

    for result in run_ranks(adversaries, 2, 2, False):
        assert largest_difference(result, expected) < 1e-12


def misuse(rank, how):
    model = lockstep.replicate(network()) if how != "plain model" else network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if how == "stranger":
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(7))]})
    x, y, _ = samples(4)
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    in_block = {
        "no backward": lambda update: None,
        "frozen": lambda update: update.backward(losses.detach()),
        "twice": lambda update: (update.backward(losses), update.backward(losses)),
        "inside": lambda update: update.flush(),
        "shape": lambda update: update.backward(losses, torch.ones(3)),
        "count": lambda update: update.backward(losses, count=4),
        "weights": lambda update: update.backward(losses.mean(), torch.ones(4)),
    }
    try:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer) if how == "plateau" else None
        update = lockstep.Update(model, optimizer, accumulate=0 if how == "accumulate" else 1, scheduler=scheduler)
        if how == "outside":
            update.backward(losses)
        with update:
            in_block[how](update)
    except lockstep.UsageError as error:
        return str(error)


MISUSES = {
    "outside": "outside `with update:`",
    "no backward": "ended without update.backward(losses)",
    "frozen": "don't depend on any parameter that requires grad",
    "twice": "a second update.backward()",
    "inside": "inside `with update`",
    "accumulate": "accumulate=0",
    "shape": "weights of shape (3,) do not fit losses of shape (4,)",
    "count": "count= goes with a scalar loss",
    "weights": "reduction='none'",
    "plateau": "call scheduler.step(lockstep.mean(total, count)) after each validation",
}


@pytest.mark.parametrize("how", MISUSES)
def test_misuse_raises_and_says_what_to_write(how):
    assert MISUSES[how] in run_ranks(misuse, 1, how, backend=None)[0]


@pytest.mark.parametrize(
    ("how", "words"),
    [("plain model", "lockstep.replicate(model)"), ("stranger", "1 parameter(s) that the model has not")],
)
def test_what_would_train_apart_on_each_rank_raises(how, words):
    assert [words in message for message in run_ranks(misuse, 2, how)] == [True, True]


def group_added_later(rank):
    model = lockstep.replicate(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = lockstep.Update(model, optimizer)
    model.append(nn.Linear(3, 3, dtype=torch.float64))
    optimizer.add_param_group({"params": list(model[-1].parameters())})
    x, y, _ = samples(4)
    errors = []
    for strangers in (False, True):
        if strangers:
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(7))]})
        try:
            with update:
                update.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
        except lockstep.UsageError as error:
            errors.append(str(error))
    return update.step_count, errors


def test_a_group_that_is_added_later_must_be_of_the_model_too():
    torch.manual_seed(0)
    for steps, errors in run_ranks(group_added_later, 2):
        assert steps == 1
        assert len(errors) == 1
        assert "1 parameter(s) that the model has not" in errors[0]


def made_differently(rank, how):
    model = lockstep.replicate(network())
    here = how if rank == 1 else "as rank 0"
    make = torch.optim.Adam if here == "optimizer" else torch.optim.SGD
    optimizer = make(model.parameters(), lr=0.2 if here == "lr" else 0.1)
    update = lockstep.Update(
        model, optimizer, accumulate=2 if here == "accumulate" else 1, clip_norm=1.0 if here == "clip_norm" else None
    )
    x, y, _ = samples(4)
    try:
        with update:
            update.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
    except lockstep.MismatchError as error:
        return str(error)


@pytest.mark.parametrize("how", ["optimizer", "lr", "accumulate", "clip_norm"])
def test_an_update_that_differs_between_ranks_raises_on_all(how):
    for message in run_ranks(made_differently, 3, how):
        assert "another one on rank(s) 1 than on rank 0" in message


def left_by_an_error(rank, which, accumulate):
    model = lockstep.replicate(network())
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=accumulate)
    x, y, _ = samples(4)
    for micro_batch in range(8):
        try:
            with update:
                losses = nn.functional.cross_entropy(model(x), y, reduction="none")
                if micro_batch == 3 and rank in which:
                    raise ZeroDivisionError
                update.backward(losses)
        except ZeroDivisionError:
            pass
        except lockstep.MismatchError as error:
            return str(error)
    return update.step_count


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_one_rank_leaves_by_an_error_is_not_taken_with_its_next_one(accumulate):
    for message in run_ranks(left_by_an_error, 2, [1], accumulate):
        assert "left by an error, so far: rank 0: " in message


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 7), (2, 3)])
def test_a_step_that_all_ranks_leave_by_an_error_is_dropped(accumulate, steps):
    assert run_ranks(left_by_an_error, 2, [0, 1], accumulate) == [steps, steps]


def go_on(rank, precision, saved):
    model = network(dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    update = lockstep.Update(model, optimizer, precision=precision, scheduler=scheduler)
    if saved is not None:
        model.load_state_dict(saved["model"])
        update.load_state_dict(saved["update"])
    x, y, _ = samples(8, torch.float32)
    for _ in range(3):
        with update:
            update.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
    return {"model": model.state_dict(), "update": update.state_dict(), "scale": update.scale}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_saved_update_goes_on_where_it_was(precision):
    first = run_ranks(go_on, 1, precision, None, backend=None)[0]
    second = run_ranks(go_on, 1, precision, first, backend=None)[0]

    assert (first["update"]["step_count"], second["update"]["step_count"]) == (3, 6)
    assert second["update"]["optimizer"]["state"][0]["step"] == 6
    assert second["update"]["scheduler"]["last_epoch"] == 6
    assert second["scale"] == (65536.0 if precision == "fp16" else 1.0)


def test_a_saved_update_of_another_precision_is_refused():
    saved = run_ranks(go_on, 1, "fp16", None, backend=None)[0]["update"]
    model = network()
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.1))

    with pytest.raises(lockstep.UsageError, match="the saved update has a scaler, this one has no scaler"):
        update.load_state_dict(saved)


class Telling(torch.optim.SGD):
    """An optimizer with a zero_grad of its own, as those with master weights have."""

    told = 0

    def zero_grad(self, set_to_none=True):
        self.told += 1
        super().zero_grad(set_to_none)


def test_an_optimizers_own_zero_grad_is_called():
    model = network()
    optimizer = Telling(model.parameters(), lr=0.5)
    update = lockstep.Update(model, optimizer, accumulate=2)
    for _ in range(4):
        with update:
            update.backward(model(samples(4)[0]).sum(1))

    assert optimizer.told == 2
