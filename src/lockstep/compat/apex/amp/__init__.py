"""``apex.amp``: lockstep.amp under apex's names.

``from apex.amp import _amp_state`` gives the state itself; ``apex.amp._amp_state`` in ``sys.modules`` is the module, as
in apex.
"""

from . import (
    _initialize,
    _process_optimizer,
    amp,
    compat,
    frontend,
    handle,
    lists,
    opt,
    rnn_compat,
    scaler,
    utils,
    wrap,
)
from .__version__ import VERSION, __version__
from ._amp_state import _amp_state, master_params
from .amp import (
    float_function,
    half_function,
    init,
    promote_function,
    register_float_function,
    register_half_function,
    register_promote_function,
)
from .frontend import initialize, load_state_dict, state_dict
from .handle import disable_casts, scale_loss

__all__ = [
    "VERSION",
    "__version__",
    "_amp_state",
    "_initialize",
    "_process_optimizer",
    "amp",
    "compat",
    "disable_casts",
    "float_function",
    "frontend",
    "half_function",
    "handle",
    "init",
    "initialize",
    "lists",
    "load_state_dict",
    "master_params",
    "opt",
    "promote_function",
    "register_float_function",
    "register_half_function",
    "register_promote_function",
    "rnn_compat",
    "scale_loss",
    "scaler",
    "state_dict",
    "utils",
    "wrap",
]
