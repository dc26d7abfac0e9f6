"""Which parameters a model has, and noticing when that changes."""

import weakref
from collections.abc import Callable, Collection, Iterable, KeysView
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from lockstep.parallel.slots import Slot, unfrozen

# Every module below a watched model, and whom to tell of a change. torch calls one pair of hooks for all modules of the
# process.
_watched: "weakref.WeakKeyDictionary[nn.Module, Members]" = weakref.WeakKeyDictionary()
_hooks: list[Any] = []


class Members:
    """The parameters of one model, each with a hook that says when its gradient has grown.

    Frozen parameters have it too, since they may be unfrozen, and so has one that is added or replaced later, from that
    moment on.

    Attributes:
        changed: Whether something may have changed since `scan`.
    """

    def __init__(
        self, module: nn.Module, arrived: Callable[[Slot, Tensor], None], ignored: Collection[str] = ()
    ) -> None:
        self._module = weakref.ref(module)
        self._arrived, self._ignored = arrived, ignored
        self._slots: dict[int, Slot] = {}
        self.changed = True
        watch(module, self)

    def scan(self) -> list[Slot]:
        """Give every parameter that can have a gradient now, in registration order; forget those that are gone."""
        module = self._module()
        if module is None:
            return [slot for slot in self._slots.values() if slot.param.requires_grad]
        named = {name: param for name, param in module.named_parameters() if name not in self._ignored}
        self.adopt(named.items())
        sparse = expecting_sparse(module)
        kept = {id(param) for param in named.values()}
        for gone in [slot for key, slot in self._slots.items() if key not in kept]:
            gone.hook.remove()
            del self._slots[id(gone.param)]
        found = []
        for name, param in named.items():
            slot = self._slots.get(id(param))
            if slot is not None and slot.trained():
                slot.name, slot.sparse = name, id(param) in sparse
                found.append(slot)
            elif slot is not None:
                # It lies in no layout from here on: unfrozen, it is noticed as a new one.
                slot.bucket, slot.sparse = None, False
        self.changed = False
        return found

    def adopt(self, named: Iterable[tuple[str, Any]]) -> None:
        """Put a hook on parameters that have none yet."""
        for name, param in named:
            if id(param) in self._slots or not (param.is_floating_point() or param.is_complex()):
                continue
            slot = self._slots[id(param)] = Slot(name, param)
            with unfrozen(param):
                slot.hook = param.register_post_accumulate_grad_hook(partial(self._arrived, slot))

    @property
    def slots(self) -> list[Slot]:
        """All of them, frozen ones too."""
        return list(self._slots.values())

    def owns(self, param: object) -> bool:
        """Whether a parameter is one of these."""
        return id(param) in self._slots

    @property
    def ids(self) -> KeysView[int]:
        """The ids of all of them."""
        return self._slots.keys()

    def look_again(self, params: Iterable[object]) -> bool:
        """Whether some of ``params`` have come into the model unnoticed; if so, they are known from here on."""
        module = self._module()
        if module is None:
            return False
        here = {id(param) for param in module.parameters()}
        if here.isdisjoint(map(id, params)):
            return False
        self.adopt(module.named_parameters())
        self.changed = True
        return True

    def stale(self, slots: Iterable[Slot]) -> bool:
        """Whether one of ``slots`` was frozen, or is no longer in the model."""
        module = self._module()
        if module is None:
            return False
        return any(not slot.trained() or lookup(module, slot.name) is not slot.param for slot in slots)


def lookup(module: nn.Module, name: str) -> object:
    """The parameter of that name, None if there is none."""
    *path, last = name.split(".")
    at: Any = module
    for step in path:
        at = at._modules.get(step)
        if at is None:
            return None
    return at._parameters.get(last)


def expecting_sparse(module: nn.Module) -> set[int]:
    """The ids of parameters of which a module says that their gradients are sparse."""
    return {
        id(param)
        for child in module.modules()
        if getattr(child, "sparse", False) is True
        for param in child.parameters(recurse=False)
    }


def watch(module: nn.Module, members: Members) -> None:
    """Tell ``members`` whenever a parameter, or a module, is added below ``module`` or replaced there."""
    if not _hooks:
        _hooks.append(register_module_parameter_registration_hook(_parameter_added))
        _hooks.append(register_module_module_registration_hook(_module_added))
    for child in module.modules():
        _watched[child] = members


def _parameter_added(module: nn.Module, name: str, param: Any) -> None:
    members = _watched.get(module)
    if members is not None and param is not None:
        members.changed = True
        members.adopt([(name, param)])


def _module_added(module: nn.Module, _: str, child: Any) -> None:
    members = _watched.get(module)
    if members is not None and child is not None:
        watch(child, members)
        members.changed = True
        members.adopt(child.named_parameters())
