"""What apex did to recurrent layers; autocast does it now."""


def has_old_rnns() -> bool:
    """Not since torch 1.0."""
    return False
