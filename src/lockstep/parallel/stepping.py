"""An optimizer's step with gradients that were not averaged averages them first: no rank ever trains apart."""

import weakref
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from lockstep.parallel.reducer import Reducer

_followed: list[Any] = []


def follow_optimizers(reducers: "Mapping[Any, Reducer]") -> None:
    """Before any optimizer's step, ask those of ``reducers`` whose parameters it has."""
    if _followed:
        return

    strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
            reducer.before_step(params, has_closure)

    _followed.append(register_optimizer_step_pre_hook(before_step))
