"""An optimizer around another one, that schedulers and torch's checks take for an optimizer."""

from typing import Any

from torch.optim.optimizer import Optimizer


class WrappedOptimizer(Optimizer):
    """Has the groups and the state of ``optim``; whatever it does not define itself is ``optim``'s.

    torch's own ``__init__`` is not called: it would make groups and state, and there must be one of each.
    """

    optim: Optimizer

    def __init__(self, optim: Optimizer) -> None:
        self.__dict__["optim"] = optim

    def __getattr__(self, name: str) -> Any:
        # Only for what is not found the usual way; a copy is asked for names before it has an `optim`. What amp puts on
        # an optimizer belongs to the one that it was given.
        if name == "optim" or name.startswith(("__", "_amp")):
            raise AttributeError(name)
        return getattr(self.optim, name)

    @property
    def param_groups(self) -> Any:
        """The wrapped optimizer's."""
        return self.optim.param_groups

    @param_groups.setter
    def param_groups(self, value: Any) -> None:
        self.optim.param_groups = value

    @property
    def state(self) -> Any:
        """The wrapped optimizer's."""
        return self.optim.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optim.state = value

    @property
    def defaults(self) -> Any:
        """The wrapped optimizer's."""
        return self.optim.defaults

    @defaults.setter
    def defaults(self, value: Any) -> None:
        self.optim.defaults = value

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """The wrapped optimizer's."""
        self.optim.zero_grad() if set_to_none is None else self.optim.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The wrapped optimizer's."""
        self.optim.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """The wrapped optimizer's."""
        self.optim.add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Everything, the wrapped optimizer included; a step that amp or a scheduler put in place stays here."""
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take it back."""
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.optim!r})"
