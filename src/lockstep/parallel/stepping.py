"""An optimizer's step with gradients that were not averaged averages them first: no rank ever trains apart."""

import weakref
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lockstep.parallel.rates import rates_of

if TYPE_CHECKING:
    from lockstep.parallel.peers import Peers
    from lockstep.parallel.reducer import Reducer

_followed: list[Any] = []
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def follow_optimizers(reducers: "Mapping[Any, Reducer]") -> None:
    """Before any optimizer's step, ask those of ``reducers`` whose parameters it has."""
    if _followed:
        return

    strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        params = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        # The optimizer itself is the first argument.
        has_closure = any(arg is not None for arg in args[1:]) or kwargs.get("closure") is not None
        mine = [reducer for reducer in reducers.values() if not reducer.members.ids.isdisjoint(map(id, params))]
        if not mine and optimizer not in strangers:
            # Casting can put new parameters in a model's dictionaries without a word (torch.__future__'s overwriting).
            mine = [reducer for reducer in reducers.values() if reducer.look_again(params)]
            if not mine:
                strangers.add(optimizer)
        for reducer in mine:
            reducer.before_step(params, has_closure, rates_of(optimizer.param_groups))
        if mine and isinstance(optimizer, torch.optim.LBFGS):
            return with_mean_loss(args, kwargs, mine[0].peers)
        return None

    _followed.append(register_optimizer_step_pre_hook(before_step))


def with_mean_loss(args: tuple[Any, ...], kwargs: dict[str, Any], peers: "Peers") -> Arguments:
    """The arguments of a step whose closure gives the mean of the ranks' losses, as its gradients are means already.

    LBFGS decides by the loss how far to go and how often to look: by a loss of its own each rank would train apart, and
    call backward another number of times than the others.
    """

    def whole(closure: Callable[[], Any]) -> Callable[[], Any]:
        def mean_loss() -> Any:
            loss = torch.as_tensor(closure()).detach().clone()
            peers.add_up(loss)
            return loss / peers.size

        return mean_loss

    optimizer, *rest = args
    kwargs = {
        name: whole(value) if name == "closure" and value is not None else value for name, value in kwargs.items()
    }
    return (optimizer, *[value if value is None else whole(value) for value in rest]), kwargs
