"""From what a step left behind on one rank and on several to what differs, and why that is likely so. Pure."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Trace:
    """What some steps left behind on one rank.

    Attributes:
        before: Parameters and buffers at the start, by name.
        gradients: Those of the first step; None where a parameter had none on any rank.
        after: Parameters and buffers at the end.
        scalar_loss: Whether the loss came as one number.
        drew: Whether forward or loss drew random numbers.
        plain_batch_norms: Names of batch norm layers that look at this rank's samples only.
        untouched: Names of parameters that had no gradient from this rank's own samples.
    """

    before: dict[str, Tensor]
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    scalar_loss: bool = False
    drew: bool = False
    plain_batch_norms: list[str] = field(default_factory=list)
    untouched: list[str] = field(default_factory=list)


def first_difference(alone: Trace, traces: list[Trace], atol: float, rtol: float) -> str:
    """Describe the first thing that is not the same as in one process; empty if everything is.

    Args:
        alone: The one process.
        traces: One for each rank.
        atol: Absolute tolerance.
        rtol: Relative to the largest value of each tensor.
    """
    for rank, trace in enumerate(traces):
        for kind in ("before", "gradients", "after"):
            expected: dict[str, Tensor | None] = getattr(alone, kind)
            found: dict[str, Tensor | None] = getattr(trace, kind)
            for name, value in expected.items():
                what = difference(value, found.get(name), atol, rtol)
                if what:
                    return f"{_WHAT[kind]} {name!r} differs on rank {rank}: {what}"
    return ""


_WHAT = {
    "before": "before the first step,",
    "gradients": "the gradient of",
    "after": "after the last step,",
}


def difference(expected: Tensor | None, found: Tensor | None, atol: float, rtol: float) -> str:
    """Say by how much two tensors differ; empty if they agree.

    Example:
        >>> difference(torch.tensor([2.0, 1.0]), torch.tensor([2.0, 1.5]), atol=1e-5, rtol=1e-5)
        'by 0.5, where the largest value is 2'
    """
    if expected is None or found is None:
        return (
            ""
            if expected is found
            else f"there is {'none' if found is None else 'one'}, alone it is the other way round"
        )
    if expected.shape != found.shape:
        return f"its shape is {tuple(found.shape)}, alone {tuple(expected.shape)}"
    if not expected.numel():
        return ""
    most, size = float((expected.double() - found.double()).abs().max()), float(expected.double().abs().max())
    return "" if most <= atol + rtol * size else f"by {most:.2g}, where the largest value is {size:.2g}"


def likely_cause(alone: Trace, traces: list[Trace]) -> str:
    """Say what is most likely to have made the difference."""
    if any(
        not torch.equal(value, trace.before[name])
        for trace in traces
        for name, value in alone.before.items()
        if name in trace.before
    ):
        return "make_model() gives another model each time: seed everything that it draws from."
    if alone.drew:
        return "the forward pass draws random numbers (dropout, noise), each rank its own: use model.eval() or p=0."
    if traces[0].plain_batch_norms:
        names = ", ".join(map(repr, traces[0].plain_batch_norms[:3]))
        return f"batch norm that is not synchronised: {names}. lockstep.replicate converts it by default."
    if alone.scalar_loss:
        return "the loss was averaged before it was summed over ranks: return one loss per sample (reduction='none')."
    uneven = [name for name in alone.gradients if len({name in trace.untouched for trace in traces}) > 1]
    if uneven:
        return (
            f"parameter {uneven[0]!r} was used on some ranks only: does the forward pass depend on the rank, or on the "
            f"number of samples?"
        )
    return "not plain: look for operations over the whole batch (sorting, normalising, counting) inside model or loss."
