"""The same model on every rank, and different dropout and augmentation."""

import random

import torch


def plant(seed: int) -> None:
    """Seed python, numpy and torch (every device)."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def derive_seed(*key: int) -> int:
    """Give a 63-bit seed for a key, such as a seed and a rank; neighbouring keys give unrelated ones.

    Example:
        >>> derive_seed(0, 1) == derive_seed(0, 1), derive_seed(0, 1) == derive_seed(1, 0)
        (True, False)
    """
    import numpy as np

    return int(np.random.SeedSequence([number % 2**64 for number in key]).generate_state(1, np.uint64)[0] >> 1)
