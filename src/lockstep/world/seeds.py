"""The same model on every rank, and different dropout and augmentation."""

import random

import torch


def plant(seed: int) -> None:
    """Seed python, numpy and torch (every device)."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def own_seed(seed: int, rank: int) -> int:
    """The seed that a rank other than 0 goes on with; neighbouring seeds and ranks give unrelated ones.

    Example:
        >>> own_seed(0, 1) == own_seed(0, 1), own_seed(0, 1) == own_seed(1, 0)
        (True, False)
    """
    import numpy as np

    return int(np.random.SeedSequence((seed % 2**64, rank)).generate_state(1, np.uint64)[0] >> 1)
