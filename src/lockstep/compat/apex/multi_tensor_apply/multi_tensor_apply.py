"""What `multi_tensor_applier` is."""

from collections.abc import Callable
from typing import Any


class MultiTensorApply:
    """Calls ``op(chunk_size, noop_flag_buffer, tensor_lists, *args)``.

    Attributes:
        available: Always True; scripts ask before they use amp_C.
        warned: Kept for scripts that look.
        import_err: None, likewise.
        chunk_size: What the kernels were told; nothing here needs it.
    """

    available = True
    warned = False
    import_err = None

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def check_avail(self) -> None:
        """Always there."""

    def __call__(self, op: Callable[..., Any], noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
        """Call it."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
