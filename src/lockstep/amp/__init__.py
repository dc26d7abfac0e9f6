"""Mixed precision as apex.amp had it, on today's torch, on CPU and CUDA, in fp16 and bf16.

Example:
    >>> import lockstep, torch
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> model, optimizer = lockstep.amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    >>> loss = model(torch.ones(3, 4)).float().square().mean()
    >>> with lockstep.amp.scale_loss(loss, optimizer) as scaled_loss:
    ...     scaled_loss.backward()
    >>> optimizer.step()
    >>> model = lockstep.amp.initialize(model, enabled=False)                 # turns the casts off again
"""

from lockstep.amp.casting import (
    disable_casts,
    float_function,
    half_function,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from lockstep.amp.front import initialize, scale_loss
from lockstep.amp.handle import init
from lockstep.amp.state import _amp_state, load_state_dict, master_params, state_dict

__all__ = [
    "_amp_state",
    "disable_casts",
    "float_function",
    "half_function",
    "init",
    "initialize",
    "load_state_dict",
    "master_params",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "scale_loss",
    "state_dict",
]
