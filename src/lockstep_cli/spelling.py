"""Options may be written with - or _, as torchrun allows."""

from typing import Any

EITHER_SPELLING: dict[str, Any] = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda token: token.replace("_", "-"),
    "show_default": True,
}
