"""Ways in which gradients come about, for one process over all shares of a batch and for one rank for each share.

A case builds its model from a seed, gives it to ``tool.wrap``, and returns what has to be the same: gradients, or
parameters after some steps. ``tool.loss(f)`` is the mean of ``f(share, x)`` over this process's shares.
"""

import warnings

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

ROWS, WIDTH = 3, 5
CASES = {}


def case(function):
    CASES[function.__name__] = function
    return function


def share(number, step=0):
    generator = torch.Generator("cpu").manual_seed(1000 * step + number)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator, device="cpu")
    return x.to(torch.get_default_device())


class Tool:
    """One process over all shares. The ranks' tools differ in these few methods."""

    def __init__(self, shares):
        self.shares = list(shares)

    def wrap(self, model):
        return model

    def inner(self, model):
        return model

    def no_sync(self, model):
        return torch.enable_grad()

    def sync(self, model):
        pass

    def loss(self, function, step=0):
        losses = [function(number, share(number, step)) for number in self.shares]
        losses = [loss for loss in losses if loss is not None]
        return sum(losses) / len(self.shares) if losses else None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.double()

    def forward(self, x, use="abc"):
        for name in use:
            x = torch.tanh(getattr(self, name)(x))
        return x

    def energy(self, x):
        return self.b(torch.tanh(self.a(x))).square().mean()


def grads(tool, model):
    return {
        name: None if p.grad is None else p.grad.detach().to_dense().clone()
        for name, p in tool.inner(model).named_parameters()
    }


def params(tool, model):
    return {name: p.detach().clone() for name, p in tool.inner(model).named_parameters()}


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


@case
def plain(tool):
    model = tool.wrap(Net())
    tool.loss(lambda _, x: model(x).square().mean()).backward()
    return grads(tool, model)


@case
def g05_unused_everywhere(tool):
    model = tool.wrap(Net())
    tool.loss(lambda _, x: model(x, "ac").square().mean()).backward()
    return grads(tool, model)


@case
def g05_unused_on_some_ranks(tool):
    model = tool.wrap(Net())
    tool.loss(lambda number, x: model(x, "abc" if number == 0 else "c").square().mean()).backward()
    return grads(tool, model)


@case
def g05_unused_changing_from_step_to_step(tool):
    model = tool.wrap(Net())
    optimizer = sgd(model)
    for step, uses in enumerate((("abc", "abc"), ("a", "b"), ("c", "c"), ("abc", "a"), ("b", "abc"))):
        optimizer.zero_grad()
        tool.loss(lambda number, x, uses=uses: model(x, uses[number % 2]).square().mean(), step).backward()
        optimizer.step()
    return params(tool, model)


@case
def g18_branch_by_rank(tool):
    model = tool.wrap(Net())
    tool.loss(lambda number, x: model(x, "a" if number % 2 == 0 else "b").square().mean()).backward()
    return grads(tool, model)


def checkpointed(tool, reentrant, uses, steps=3):
    model = tool.wrap(Net())
    optimizer = sgd(model)

    def loss(_, x):
        x = x.requires_grad_()
        for use in uses:
            x = checkpoint(model, x, use, use_reentrant=reentrant)
        return x.square().mean()

    for step in range(steps):
        optimizer.zero_grad()
        tool.loss(loss, step).backward()
        optimizer.step()
    return params(tool, model)


@case
def g07_reentrant_checkpoint(tool):
    return checkpointed(tool, True, ["abc"])


@case
def g07_reentrant_checkpoints_that_share_parameters(tool):
    return checkpointed(tool, True, ["ab", "bc", "a", "abc"])


@case
def g07_other_checkpoint(tool):
    return checkpointed(tool, False, ["ab", "bc", "a"])


@case
def g07_reentrant_checkpoints_that_differ_from_rank_to_rank(tool):
    model = tool.wrap(Net())
    optimizer = sgd(model)

    def loss(number, x):
        x = x.requires_grad_()
        for use in ("ab", "a", "abc")[: number + 1]:
            x = checkpoint(model, x, use, use_reentrant=True)
        return x.square().mean()

    for step in range(3):
        optimizer.zero_grad()
        tool.loss(loss, step).backward()
        optimizer.step()
    return params(tool, model)


@case
def parameter_used_twice(tool):
    model = tool.wrap(Net())
    tool.loss(lambda _, x: model(x, "abca").square().mean()).backward()
    return grads(tool, model)


@case
def two_forwards_one_backward(tool):
    model = tool.wrap(Net())
    tool.loss(lambda _, x: model(x).square().mean() + model(2 * x, "cab").square().mean()).backward()
    return grads(tool, model)


@case
def g14_two_forwards_one_backward_with_batch_norm_in_eval_mode(tool):
    model = Net()
    model.norm = nn.BatchNorm1d(WIDTH).double().eval()
    model.norm.train = lambda mode=True: model.norm
    model = tool.wrap(model)
    tool.loss(lambda _, x: (model(x, ["a", "norm", "c"]) * model(2 * x, ["norm", "b"])).mean()).backward()
    return grads(tool, model)


@case
def one_forward_two_backwards(tool):
    model = tool.wrap(Net())
    loss = tool.loss(lambda _, x: model(x).square().mean())
    loss.backward(retain_graph=True)
    loss.backward()
    return grads(tool, model)


@case
def g12_backward_through_a_method(tool):
    model = tool.wrap(Net())
    tool.loss(lambda _, x: tool.inner(model).energy(x)).backward()
    return grads(tool, model)


@case
def g12_backward_through_the_inner_module(tool):
    model = tool.wrap(Net())
    tool.loss(lambda _, x: tool.inner(model)(x).square().mean()).backward()
    return grads(tool, model)


@case
def g12_backward_through_a_submodule(tool):
    model = tool.wrap(Net())
    tool.loss(lambda _, x: tool.inner(model).b(x).square().mean()).backward()
    return grads(tool, model)


class Words(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        torch.manual_seed(4)
        self.one = nn.Embedding(11, WIDTH, sparse=True)
        self.two = nn.Embedding(7, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.double()
        if tied:
            self.head.weight = self.one.weight

    def forward(self, x, use):
        numbers = (x.abs() * 100).long()
        x = sum(getattr(self, name)(numbers % getattr(self, name).num_embeddings) for name in use)
        return self.head(x).square().mean()


@case
def g16_sparse_embeddings(tool):
    model = tool.wrap(Words())
    tool.loss(lambda _, x: model(x, ["one", "two"])).backward()
    return grads(tool, model)


@case
def g16_sparse_embedding_unused(tool):
    model = tool.wrap(Words())
    tool.loss(lambda _, x: model(x, ["one"])).backward()
    return grads(tool, model)


@case
def g16_sparse_embedding_unused_on_some_ranks(tool):
    model = tool.wrap(Words())
    tool.loss(lambda number, x: model(x, ["one", "two"] if number == 0 else ["one"])).backward()
    return grads(tool, model)


@case
def sparse_embedding_tied_to_a_dense_layer(tool):
    model = tool.wrap(Words(tied=True))
    for step in range(2):
        tool.loss(lambda number, x: model(x, ["one"] if number == 0 else ["two"]), step).backward()
    return grads(tool, model)


@case
def sparse_gradient_that_no_module_announces(tool):
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.arange(20, dtype=torch.float64).reshape(4, 5) / 7)

        def forward(self, x):
            return F.embedding((x.abs() * 100).long() % 4, self.table, sparse=True).square().mean()

    model = tool.wrap(Table())
    tool.loss(lambda _, x: model(x)).backward()
    return grads(tool, model)


@case
def g11_frozen_model(tool):
    model = tool.wrap(Net().requires_grad_(False))
    head = tool.wrap(nn.Linear(WIDTH, 1, dtype=torch.float64).requires_grad_(True))
    nn.init.ones_(tool.inner(head).weight)
    nn.init.ones_(tool.inner(head).bias)
    tool.loss(lambda _, x: head(model(x)).square().mean()).backward()
    return grads(tool, model) | grads(tool, head)


def changed_between_steps(tool, change, uses=("abc", "abc"), steps=4):
    model = tool.wrap(Net())
    inner = tool.inner(model)
    optimizer = sgd(model)
    for step in range(steps):
        if step == 2:
            change(inner)
            optimizer = sgd(model)
        optimizer.zero_grad()
        tool.loss(lambda number, x: model(x, uses[number % 2]).square().mean(), step).backward()
        optimizer.step()
    return params(tool, model)


@case
def frozen_later(tool):
    return changed_between_steps(tool, lambda net: net.b.requires_grad_(False))


@case
def g10_unfrozen_later(tool):
    model = Net()
    model.b.requires_grad_(False)
    model = tool.wrap(model)
    for step in range(3):
        tool.inner(model).b.requires_grad_(step > 0)
        optimizer = sgd(model)
        optimizer.zero_grad()
        tool.loss(lambda _, x: model(x).square().mean(), step).backward()
        optimizer.step()
    return params(tool, model)


@case
def frozen_for_one_step(tool):
    model = tool.wrap(Net())
    for step, trained in enumerate((True, False, True)):
        tool.inner(model).b.requires_grad_(trained)
        optimizer = sgd(model)
        optimizer.zero_grad()
        tool.loss(lambda _, x: model(x).square().mean(), step).backward()
        optimizer.step()
    return params(tool, model)


@case
def g10_all_unfrozen_later(tool):
    model = tool.wrap(Net().requires_grad_(False))
    tool.inner(model).requires_grad_(True)
    tool.loss(lambda _, x: model(x).square().mean()).backward()
    return grads(tool, model)


@case
def g10_unfrozen_later_and_used_by_one_rank(tool):
    model = Net()
    model.b.requires_grad_(False)
    model = tool.wrap(model)
    tool.loss(lambda _, x: model(x).square().mean()).backward()
    tool.inner(model).b.requires_grad_(True)
    tool.loss(lambda number, x: model(x, "ab" if number == 0 else "a").square().mean(), 1).backward()
    return grads(tool, model)


def new_weight():
    return nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64).reshape(WIDTH, WIDTH))


@case
def g09_parameter_replaced_later(tool):
    return changed_between_steps(tool, lambda net: setattr(net.b, "weight", new_weight()))


@case
def g09_module_replaced_later(tool):
    def change(net):
        layer = nn.Linear(WIDTH, WIDTH).double()
        layer.weight, layer.bias = new_weight(), nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        net.b = layer

    return changed_between_steps(tool, change, uses=("abc", "b"))


@case
def g09_parameter_added_later(tool):
    def change(net):
        net.d = nn.Linear(WIDTH, WIDTH, bias=False).double()
        net.d.weight = new_weight()
        net.forward = lambda x, use: net.d(Net.forward(net, x, use))

    return changed_between_steps(tool, change)


@case
def parameter_removed_later(tool):
    def change(net):
        del net.b

    return changed_between_steps(tool, change, uses=("ac", "ac"))


@case
def state_loaded_by_assignment(tool):
    return changed_between_steps(
        tool, lambda net: net.load_state_dict({k: v * 0.5 for k, v in net.state_dict().items()}, assign=True)
    )


def cast_later(tool, cast, zero=True):
    torch.manual_seed(0)
    model = tool.wrap(Net().float())
    tool.loss(lambda _, x: model(x.float()).square().mean()).backward()
    cast(tool.inner(model))
    if zero:
        model.zero_grad()
    for step in range(2):
        tool.loss(lambda _, x: model(x).square().mean(), step + 1).backward()
    return grads(tool, model)


@case
def g13_double_later(tool):
    return cast_later(tool, lambda net: net.double())


@case
def g13_part_cast_later_with_gradients(tool):
    model = tool.wrap(Net())
    tool.loss(lambda _, x: model(x).square().mean()).backward()
    tool.inner(model).b.float().double()
    tool.inner(model).to(memory_format=torch.channels_last)
    tool.loss(lambda _, x: model(x).square().mean(), 1).backward()
    return {name: grad.float() for name, grad in grads(tool, model).items()}


@case
def g13_half_later(tool):
    model = tool.wrap(Net().float())
    tool.loss(lambda _, x: model(x.float()).square().mean()).backward()
    model.zero_grad()
    tool.inner(model).bfloat16()
    tool.loss(lambda _, x: model((x > 0).bfloat16()).sum(), 1).backward()
    return grads(tool, model)


@case
def g15_penalty_on_input_gradients(tool):
    model = tool.wrap(Net())

    def loss(_, x):
        x = x.requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.square().mean() + slope.square().sum(1).mean()

    tool.loss(loss).backward()
    return grads(tool, model)


@case
def g15_penalty_on_parameter_gradients(tool):
    model = tool.wrap(Net())
    for step in range(2):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the reference cycle
            tool.loss(lambda _, x: model(x).square().mean(), step).backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in tool.inner(model).parameters())
        penalty.backward()
    return grads(tool, model)


@case
def complex_parameters(tool):
    class Waves(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.v = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))
            self.w = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex128))

        def forward(self, x):
            return ((x.to(torch.complex128) @ self.w).abs().square() * self.v).mean()

    model = tool.wrap(Waves())
    for step in range(2):
        tool.loss(lambda _, x: model(x), step).backward()
    return grads(tool, model)


@case
def several_dtypes(tool):
    model = Net()
    model.c.float()
    model = tool.wrap(model)
    tool.loss(lambda _, x: tool.inner(model).c(model(x, "ab").float()).double().square().mean()).backward()
    return {name: grad.float() for name, grad in grads(tool, model).items()}


@case
def convolution_in_channels_last(tool):
    torch.manual_seed(6)
    model = nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
    model = tool.wrap(model)
    image = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    tool.loss(lambda number, _: model(image * (number + 1)).square().mean()).backward()
    return grads(tool, model)


@case
def modules_without_parameters(tool):
    model = tool.wrap(nn.Sequential(nn.Tanh(), nn.Flatten()))
    head = tool.wrap(Net())
    tool.loss(lambda _, x: head(model(x)).square().mean()).backward()
    return grads(tool, head)


@case
def g03_no_sync_around_the_backward_alone(tool):
    model = tool.wrap(Net())
    loss = tool.loss(lambda _, x: model(x).square().mean())
    with tool.no_sync(model):
        loss.backward()
    tool.loss(lambda _, x: model(x).square().mean(), 1).backward()
    return grads(tool, model)


@case
def g04_gradients_sent_without_another_forward(tool):
    model = tool.wrap(Net())
    for step in range(3):
        with tool.no_sync(model):
            tool.loss(lambda _, x: model(x).square().mean(), step).backward()
    tool.sync(model)
    return grads(tool, model)


@case
def g04_an_optimizers_step_sends_what_is_unsent(tool):
    model = tool.wrap(Net())
    optimizer = sgd(model)
    for step in range(3):
        with tool.no_sync(model):
            tool.loss(lambda _, x: model(x).square().mean(), step).backward()
    optimizer.step()
    return params(tool, model)


@case
def g08_parameter_used_only_in_an_earlier_micro_batch(tool):
    model = tool.wrap(Net())
    with tool.no_sync(model):
        tool.loss(lambda _, x: model(x, "a").square().mean()).backward()
    tool.loss(lambda _, x: model(x, "b").square().mean(), 1).backward()
    return grads(tool, model)


@case
def accumulated_with_and_without_sending(tool):
    model = tool.wrap(Net())
    for step in range(5):
        loss = tool.loss(lambda _, x: model(x).square().mean(), step)
        if step in (1, 3):
            with tool.no_sync(model):
                loss.backward()
        else:
            loss.backward()
    return grads(tool, model)


def step_of_which_one_rank_has_a_backward(tool, model, optimizer, step):
    optimizer.zero_grad()
    loss = tool.loss(lambda number, x: model(x).square().mean() if number == 0 else None, step)
    if loss is not None:
        loss.backward()
    optimizer.step()


@case
def rank_without_a_backward_takes_part_in_the_step(tool):
    model = tool.wrap(Net())
    optimizer = sgd(model)
    for step in range(4):
        step_of_which_one_rank_has_a_backward(tool, model, optimizer, step)
    return params(tool, model)


@case
def rank_without_a_backward_takes_part_in_sync_gradients(tool):
    model = tool.wrap(Net())
    for step in range(3):
        model.zero_grad()
        loss = tool.loss(lambda number, x, step=step: model(x).square().mean() if number == step else None, step)
        if loss is not None:
            loss.backward()
        tool.sync(model)
    return grads(tool, model)


@case
def zeroed_in_place(tool):
    model = tool.wrap(Net())
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step == 2)
        tool.loss(lambda _, x: model(x).square().mean(), step).backward()
        optimizer.step()
    return params(tool, model)


@case
def two_models_in_one_backward(tool):
    one, two = tool.wrap(Net()), tool.wrap(Net())
    for step in range(2):
        tool.loss(lambda number, x: one(two(x, "ab" if number else "b"), "ab").square().mean(), step).backward()
    return {f"{i}.{k}": v for i, m in enumerate((one, two)) for k, v in grads(tool, m).items()}


@case
def old_gradients_that_the_script_kept(tool):
    model = tool.wrap(Net())
    kept = []
    for step in range(3):
        tool.loss(lambda _, x: model(x).square().mean(), step).backward()
        kept += [p.grad if step else p.grad.view(-1) for p in model.parameters()]
        model.zero_grad()
    return {str(i): grad.clone() for i, grad in enumerate(kept)}


@case
def lbfgs_with_a_closure(tool):
    model = tool.wrap(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = tool.loss(lambda _, x: model(x).square().mean())
        loss.backward()
        return loss

    optimizer.step(closure)
    return params(tool, model)


def newly_unfrozen(tool, sparse):
    """What is unfrozen, and has its gradient only under no_sync."""
    model = Words() if sparse else Net()
    part = model.two if sparse else model.b
    head = model.head if sparse else model.c
    model = tool.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(use):
        return lambda _, x: model(x, use) if sparse else model(x, use).square().mean()

    for step in range(4):
        part.requires_grad_(step in (0, 3))
        head.requires_grad_(step != 1)  # so that there is a layout without the part
        optimizer.zero_grad()
        with tool.no_sync(model):
            tool.loss(loss(("one", "two") if sparse else "abc"), step).backward()
        if step < 3:
            tool.loss(loss(("one",) if sparse else "ac"), step).backward()
        optimizer.step()
    return params(tool, model)


@case
def unfrozen_and_used_under_no_sync_alone(tool):
    return newly_unfrozen(tool, sparse=False)


@case
def sparse_embedding_frozen_and_unfrozen(tool):
    return newly_unfrozen(tool, sparse=True)


@case
def unfrozen_under_no_sync_and_frozen_before_the_step(tool):
    model = Net()
    model.b.requires_grad_(False)
    model = tool.wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        if step == 1:
            tool.inner(model).b.requires_grad_(True)
            with tool.no_sync(model):
                tool.loss(lambda _, x: model(x).square().mean(), step).backward()
            tool.inner(model).b.requires_grad_(False)
        tool.loss(lambda _, x: model(x).square().mean(), step).backward()
        optimizer.step()
    return params(tool, model)


@case
def rank_without_a_backward_takes_part_in_the_first_step_of_a_new_optimizer(tool):
    model = tool.wrap(Net())
    for step in range(4):
        optimizer = sgd(model)
        for _ in range(2):  # the second loss is not one to learn from, so there is no step
            optimizer.zero_grad()
            tool.loss(lambda _, x: model(x).square().mean(), step).backward()
        step_of_which_one_rank_has_a_backward(tool, model, optimizer, step)
    return params(tool, model)
