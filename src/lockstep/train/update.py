"""One training step: the true mean gradient over every sample of every rank and micro-batch, then the optimizer."""

import math
import warnings
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lockstep.data import DataLoader
from lockstep.errors import NotFiniteError, UsageError
from lockstep.parallel.attach import reducer_of
from lockstep.parallel.reducer import Reducer
from lockstep.train.precision import autocast_for, backward_for
from lockstep.train.stepping import Scaler, step, total_norm, zero_grad_of
from lockstep.train.totals import Alone, Ranks, Together
from lockstep.train.weights import share_of
from lockstep.world import World, current

_FIRST_STEPS = 3  # as many as it takes to believe that equal losses are no accident: a head of zeros gives them once


class Scheduler(Protocol):
    """A learning rate scheduler, torch's or one like it."""

    def step(self) -> Any:
        """Move on by one optimizer step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Go on from there."""
        ...


class Update:
    """The steps of one model and its optimizer.

    The gradient of a step is that of (sum of w * loss) / (sum of w), both sums over all ranks and micro-batches, so it
    does not depend on how the samples fall on them. Each ``with`` is one micro-batch: the forward pass, under autocast,
    then one `backward`. After ``accumulate`` of them (fewer at the end of a `lockstep.DataLoader`'s epoch) gradients
    are reduced over the ranks, once, and the optimizer steps. They stay in ``.grad`` until the next step begins.

    Args:
        model: The model that the optimizer trains; with several ranks, one that `lockstep.replicate` or
            `lockstep.DistributedDataParallel` has connected.
        optimizer: Any torch optimizer.
        precision: ``"fp32"``, ``"bf16"``, or ``"fp16"``, which scales the losses dynamically (``torch.amp.GradScaler``)
            and skips a step that overflowed, on all ranks alike.
        accumulate: Micro-batches per step.
        clip_norm: Largest norm of the step's whole gradient, after averaging and unscaling; None does not clip.
        scheduler: Moves on by one at every optimizer step, and not when one is skipped.

    Attributes:
        stepped: Whether the last micro-batch, or `flush`, ended in an optimizer step.
        step_count: Optimizer steps so far.

    Raises:
        UsageError: Several ranks and a model that nothing connects; arguments that make no sense.

    Example:
        >>> import lockstep, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> for batch in (torch.ones(4, 2), torch.ones(3, 2)):
        ...     with update:
        ...         update.backward(model(batch).square())
        >>> update.step_count
        2
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        precision: str = "fp32",
        accumulate: int = 1,
        clip_norm: float | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        if accumulate < 1:
            raise UsageError(f"accumulate={accumulate}: a step takes at least one micro-batch.")
        if clip_norm is not None and not clip_norm > 0:
            raise UsageError(f"clip_norm={clip_norm}: write a positive number, or None not to clip.")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise UsageError(
                "scheduler=ReduceLROnPlateau: it moves by a number of each epoch, not by the step. Leave it out here, "
                "and call scheduler.step(lockstep.mean(total, count)) after each validation: the same number on every "
                "rank, else learning rates part."
            )
        self._world = current()
        self._optimizer, self._scheduler = optimizer, scheduler
        self._zero_grad = zero_grad_of(optimizer)
        self._precision, self._accumulate, self._clip_norm = precision, accumulate, clip_norm
        self._autocast = autocast_for(precision, self._world.device.type)
        self._run_backward = backward_for(precision, self._world.device.type)
        self._scaler = Scaler(self._world.device.type) if precision == "fp16" else None
        self._model, self._groups = model, len(optimizer.param_groups)
        reducer = refuse_unconnected(model, optimizer, self._world)
        self._ranks: Ranks = Alone() if reducer is None else Together(reducer)
        self._loss_of_step = float("nan")
        self._reference: float | None = None
        self._inside = self._awaiting = False
        self._norm: Tensor | None = None
        self.stepped = False
        self.step_count = 0
        self._all_same = True  # ranks' losses so far, in the first steps
        self._micro_batches = 0  # of the step that is being made
        self._weight: float | Tensor = 0.0
        self._loss: float | Tensor = 0.0
        self._feed = self._world.feed
        self._fed_by, self._given = self._feed.current, self._feed.given
        self._feed.call_at_end(self._end_of)

    def __enter__(self) -> "Update":
        if self._inside:
            raise UsageError(
                f"{self._who()}: `with update` inside itself. Each `with` is one micro-batch; close it first."
            )
        if len(self._optimizer.param_groups) != self._groups:
            refuse_unconnected(self._model, self._optimizer, self._world)
            self._groups = len(self._optimizer.param_groups)
        self._inside, self._awaiting, self.stepped = True, True, False
        if not self._micro_batches:
            self._zero_grad()  # at the start: another model's backward may have left gradients here
            self._weight, self._loss, self._fed_by = 0.0, 0.0, self._feed.current
        self._given = self._feed.given
        if self._autocast is not None:
            self._autocast.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        missing, self._inside, self._awaiting = self._awaiting, False, False
        if self._autocast is not None:
            self._autocast.__exit__(kind, error, trace)
        if kind is not None:
            self._micro_batches = 0
            self._ranks.give_up()
            return
        if missing:
            self._micro_batches = 0
            raise UsageError(
                f"{self._who()}: `with update` ended without update.backward(losses), which takes the place of "
                f"loss.backward(). Every rank takes every step; a rank without samples calls it with its empty losses."
            )
        if self._micro_batches == self._accumulate:
            self._finish()

    def backward(self, losses: Tensor, weights: Tensor | None = None, *, count: float | None = None) -> None:
        """Run the backward pass of one micro-batch, inside ``with update``.

        Args:
            losses: One loss per sample, token or pixel, in any shape (``reduction="none"``); empty where this rank has
                no samples. A scalar is taken as the mean of ``count`` losses.
            weights: What each loss weighs, in a shape that can be expanded to the losses'; 0 masks. None: 1 each.
            count: Of how many losses a scalar is the mean. None: of one, so that every micro-batch on every rank weighs
                the same, as a mean of means does; right only if they all have equally many samples.

        Raises:
            UsageError: Not inside ``with update``, a second time in it, or with losses that no parameter can learn
                from.
        """
        if not self._awaiting or not losses.requires_grad:
            self._refuse_backward()
        value, times, weight = share_of(losses, weights, count)
        self._awaiting = False
        self._micro_batches += 1
        self._weight = self._weight + weight
        self._loss += (value.detach() if value.is_cuda else value.item()) * times
        ranks = self._ranks
        if ranks.size == 1 and self._micro_batches == 1:
            self._reference = float(weight) * self._accumulate or 1.0
        if self._reference is None and count is None and losses.ndim == 0:
            self._warn_of_uneven_means()
        reference = self._reference or self._first_reference(weight)
        times *= ranks.size  # the reducer gives the mean over ranks, a step needs the sum
        scaled = value if times == reference else value * (times / reference)
        if self._scaler is not None:
            scaled = self._scaler.scale(scaled)
        if self._micro_batches < self._accumulate:
            ranks.keep(self._run_backward, scaled)
        else:
            ranks.announce(self._weight, self._loss)
            self._run_backward(scaled)

    def flush(self) -> None:
        """Step with the micro-batches there are, if any: the shorter group at the end of the data.

        A `lockstep.DataLoader` calls it at the end of its epoch for the updates that it feeds, so it is needed only
        with other loaders. Every rank calls it, or none.
        """
        if self._inside:
            raise UsageError(f"{self._who()}: update.flush() inside `with update`; call it after the block.")
        self.stepped = False
        if self._micro_batches:
            self._ranks.announce(self._weight, self._loss)
            self._finish()

    def _end_of(self, loader: object) -> None:
        """A loader's epoch is over; another one's, such as the validation's, is not our end."""
        if loader is not self._loader():
            return
        if self._micro_batches:
            self.flush()
        elif self._feed.given > self._given + 1:  # the end is one, too
            self._ranks.meet()

    def _loader(self) -> object | None:
        """The `lockstep.DataLoader` that feeds this step; None where it is another one, or gone."""
        return self._fed_by() if self._fed_by is not None else None

    def _refuse_backward(self) -> None:
        if not self._inside:
            raise UsageError(
                f"{self._who()}: update.backward() outside `with update:`. Write `with update:` around the forward "
                f"pass and this call: the block is one micro-batch."
            )
        if not self._awaiting:
            raise UsageError(
                f"{self._who()}: a second update.backward() in one `with update`. Add the losses and call it once, or "
                f"open another `with` for another micro-batch."
            )
        raise UsageError(
            f"{self._who()}: the losses don't depend on any parameter that requires grad. Was the model frozen, "
            f"or run under torch.no_grad()?"
        )

    def _first_reference(self, weight: float | Tensor) -> float:
        """What losses are divided by before backward, the same on all ranks: the weight of the heaviest step so far.

        Gradients then come out at their final size or below, which fp16 needs, and exactly so in steps of that weight:
        these need no correction. A rank that is alone knows each step's weight in time, but for micro-batches to come.
        """
        self._reference = self._ranks.add_up(weight, self._settings()) * self._accumulate or 1.0
        return self._reference

    def _warn_of_uneven_means(self) -> None:
        """Means of different numbers of samples are about to weigh the same."""
        loader = self._loader()
        if self._world.is_main and isinstance(loader, DataLoader) and loader.even is False:
            warnings.warn(
                f"{self._who()}: update.backward(loss) takes a scalar as one loss, whatever it is the mean of, but the "
                f"local batches of this lockstep.DataLoader differ in size: the samples of small ones would weigh more "
                f"than in one process. Write update.backward(loss, count=len(batch)), or give the losses one by one "
                f"(reduction='none').",
                stacklevel=3,
            )

    def _settings(self) -> str:
        """What has to be the same on every rank, on one line."""
        groups = [
            " ".join(f"{name}={value}" for name, value in group.items() if isinstance(value, int | float | tuple))
            + f" of {len(group['params'])} parameters"
            for group in self._optimizer.param_groups
        ]
        return (
            f"{type(self._optimizer).__name__}({'; '.join(groups)}), precision={self._precision!r}, "
            f"accumulate={self._accumulate}, clip_norm={self._clip_norm}"
        )

    def _finish(self) -> None:
        """Reduce over the ranks, then clip and step."""
        assert self._reference is not None
        weight, loss, bad_ranks = self._ranks.collect()
        self._micro_batches = 0
        if bad_ranks:
            raise NotFiniteError(
                f"{self._who()}: the losses of rank(s) {', '.join(map(str, bad_ranks))} are NaN in step "
                f"{self.step_count}; the step was not made. Look at that rank's batch and at the learning rate. "
                f"The mean over an empty batch is NaN too: then write count=len(batch)."
            )
        if weight == 0:
            warnings.warn(f"{self._who()}: step skipped, its losses weigh nothing on any rank.", stacklevel=4)
            return
        if self.step_count < _FIRST_STEPS:
            self._look_for_same_samples(weight, loss)
        factor = self._reference / weight
        self._reference = max(self._reference, weight)
        self._loss_of_step = loss / weight
        self.stepped, self._norm = step(self._optimizer, factor, self._scaler, self._clip_norm)
        if self._norm is None and self._feed.shared:
            self._norm = total_norm(self._optimizer)  # now: another model's backward, as in a GAN, may add to .grad
        if self.stepped:
            self.step_count += 1
            if self._scheduler is not None:
                self._scheduler.step()

    def _look_for_same_samples(self, weight: float, loss: float) -> None:
        """Nothing but a loader or sampler that knows of ranks keeps them from all training on the same samples."""
        size, mine = self._ranks.size, (float(self._weight), float(self._loss))
        same = all(
            math.isclose(size * own, whole, rel_tol=1e-6) for own, whole in zip(mine, (weight, loss), strict=True)
        )
        self._all_same = self._all_same and same and loss != 0 and size > 1 and self._loader() is None
        if self._all_same and self._world.is_main and self.step_count == _FIRST_STEPS - 1:
            warnings.warn(
                f"{self._who()}: all ranks had the same losses in each of the first {_FIRST_STEPS} steps, so they seem "
                f"to train on the same samples. Write lockstep.DataLoader in place of torch's, which divides them "
                f"between the ranks.",
                stacklevel=5,
            )

    def _who(self) -> str:
        return f"rank {self._world.rank} of {self._world.size}, step {self.step_count}"

    @property
    def unfinished(self) -> bool:
        """Whether there are micro-batches of a step that has not been made yet; `state_dict` has no place for them."""
        return self._inside or bool(self._micro_batches)

    @property
    def loss(self) -> float:
        """The mean loss of the last step over all ranks and micro-batches; NaN before the first."""
        return self._loss_of_step

    @property
    def grad_norm(self) -> float:
        """Norm of the last step's whole gradient before clipping; without ``clip_norm`` computed when asked for.

        With several updates it is computed in every step, as the backward of one may reach another's model.
        """
        norm = self._norm if self._norm is not None else total_norm(self._optimizer)
        return float(norm)

    @property
    def scale(self) -> float:
        """What losses are multiplied by against underflow; 1 unless the precision is ``"fp16"``."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def state_dict(self) -> dict[str, Any]:
        """Optimizer, scaler, scheduler and counts; micro-batches of a step that is not finished are not in it."""
        return {
            "step_count": self.step_count,
            "reference": self._reference,
            "optimizer": self._optimizer.state_dict(),
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            UsageError: It has a scheduler or a loss scaler where this update has none, or the other way round.
        """
        parts = {"scaler": self._scaler, "scheduler": self._scheduler}
        for name, part in parts.items():
            if (part is None) != (state_dict[name] is None):
                there, here = ("no", "a") if state_dict[name] is None else ("a", "no")
                raise UsageError(
                    f"{self._who()}: the saved update has {there} {name}, this one has {here} {name}. Make it with the "
                    f"same precision and scheduler."
                )
        self._optimizer.load_state_dict(state_dict["optimizer"])
        for name, part in parts.items():
            if part is not None:
                part.load_state_dict(state_dict[name])
        self.step_count, self._reference = state_dict["step_count"], state_dict["reference"]
        self._micro_batches = 0


def refuse_unconnected(model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> Reducer | None:
    """The model's reducer, none in a world of one; raise if the optimizer would train something apart on each rank."""
    reducer = reducer_of(model)
    if world.size == 1:
        return reducer
    who = f"rank {world.rank} of {world.size}"
    if reducer is None:
        raise UsageError(
            f"{who}: nothing averages the gradients of this {type(model).__name__}. Write model = "
            f"lockstep.replicate(model) before lockstep.Update(model, optimizer), in place of torch's "
            f"DistributedDataParallel too."
        )
    known = {id(parameter) for parameter in model.parameters()}
    strangers = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if strangers:
        raise UsageError(
            f"{who}: the optimizer has {len(strangers)} parameter(s) that the model has not (the first of shape "
            f"{tuple(strangers[0].shape)}); they would be trained apart on each rank. Build the optimizer from "
            f"model.parameters(), after replicate()."
        )
    return reducer
