"""Do some steps on several ranks leave what they leave in one process?"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.collectives.nested import map_leaves
from lockstep.errors import UsageError
from lockstep.launcher.function import launch
from lockstep.testing.causes import Trace, first_difference, likely_cause


def assert_same_step(
    make_model: Callable[[], nn.Module],
    make_loss: Callable[[nn.Module, Any], Any],
    batch: Any,
    ranks: Sequence[int] = (1, 2, 3, 4),
    *,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    steps: int = 1,
    sync_batchnorm: bool = True,
    atol: float = 1e-5,
    rtol: float = 1e-4,
    seed: int = 0,
) -> None:
    """Run steps of your model on each number of ranks, on the CPU, and compare what they leave with one process.

    Compared are gradients, parameters and buffers.

    Args:
        make_model: Builds the model; called after everything was seeded.
        make_loss: ``make_loss(model, local_batch)`` gives unreduced losses, or a pair of losses and weights, as
            `lockstep.Update.backward` takes them.
        batch: One global batch: a tensor, or lists, tuples, dicts and dataclasses of them, divided over the ranks along
            their first dimension. With several steps it is used again.
        ranks: The numbers of ranks; one process is always run, to compare with.
        make_optimizer: From ``model.parameters()``; by default SGD with learning rate 0.1 and momentum 0.9.
        steps: How many steps.
        sync_batchnorm: As for `lockstep.replicate`.
        atol: What may differ.
        rtol: The same, relative to the largest value of each tensor.
        seed: Seeds python, numpy and torch.

    Raises:
        AssertionError: Something differs; says what, on which rank of how many, by how much, and the likely cause.
        LostRankError: A rank raised.

    Example:
        >>> import torch
        >>> from lockstep.testing import assert_same_step
        >>> def make_loss(model, batch):
        ...     x, y = batch
        ...     return torch.nn.functional.cross_entropy(model(x), y, reduction="none")
        >>> batch = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
        >>> assert_same_step(lambda: torch.nn.Linear(4, 3), make_loss, batch, ranks=(2,))
    """
    if steps < 1 or min(ranks, default=0) < 1:
        raise UsageError(
            f"steps={steps}, ranks={tuple(ranks)}: write at least one step, and numbers of ranks from 1 up."
        )
    plan = (make_model, make_loss, batch, make_optimizer or _sgd, steps, sync_batchnorm, seed)
    (alone,) = launch(run_steps, *plan, ranks=1)
    for size in sorted({*ranks} - {1}):
        traces = launch(run_steps, *plan, ranks=size)
        found = first_difference(alone, traces, atol, rtol)
        if found:
            raise AssertionError(
                f"{size} ranks do not do what one does: {found}. Likely cause: {likely_cause(alone, traces)}"
            )


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def run_steps(
    make_model: Callable[[], nn.Module],
    make_loss: Callable[[nn.Module, Any], Any],
    batch: Any,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    steps: int,
    sync_batchnorm: bool,
    seed: int,
) -> Trace:
    """What one rank does."""
    import lockstep

    world = lockstep.init(device="cpu", seed=seed)
    model = lockstep.replicate(make_model(), sync_batchnorm=sync_batchnorm)
    update = lockstep.Update(model, make_optimizer(model.parameters()))
    trace = Trace(before=_copies(model))
    trace.plain_batch_norms = [] if world.size == 1 else plain_batch_norms(model)
    mine = map_leaves(lambda leaf: _share(leaf, world.rank, world.size), batch)
    for number in range(steps):
        state = torch.get_rng_state()
        with update:
            losses = make_loss(model, mine)
            losses, weights = losses if isinstance(losses, tuple) else (losses, None)
            trace.drew = trace.drew or not torch.equal(state, torch.get_rng_state())
            if number == 0:
                trace.scalar_loss = losses.ndim == 0
                trace.untouched = untouched(model, losses)
            update.backward(losses, weights)
        if number == 0:
            trace.gradients = {
                name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()
            }
    trace.after = _copies(model)
    return trace


def _share(leaf: Any, rank: int, size: int) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.ndim:
        return leaf
    return leaf[rank * len(leaf) // size : (rank + 1) * len(leaf) // size]


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def untouched(model: nn.Module, losses: Tensor) -> list[str]:
    """Names of parameters that these losses do not depend on."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(losses.sum(), [p for _, p in named], retain_graph=True, allow_unused=True)
    return [name for (name, _), gradient in zip(named, gradients, strict=True) if gradient is None]


def plain_batch_norms(model: nn.Module) -> list[str]:
    """Names of batch norm layers that see one rank's samples only."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    return [name for name, module in model.named_modules() if isinstance(module, kinds)]
