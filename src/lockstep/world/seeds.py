"""The same model on every rank, and different dropout and augmentation."""

import random
import zlib

import torch


def plant(seed: int) -> None:
    """Seed python, numpy and torch (every device)."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def marks() -> tuple[int, int]:
    """A number for where python's generator stands, and one for numpy's: equal where the next draws are."""
    import numpy as np

    whole = np.random.get_state(legacy=False)
    inner = {name: np.asarray(value).tolist() for name, value in whole.pop("state").items()}
    return zlib.crc32(repr(random.getstate()).encode()), zlib.crc32(repr((inner, whole)).encode())


def plant_beside_torch(seed: int, python: bool, numpy: bool) -> None:
    """Seed the other generators; torch's stays where it is."""
    import numpy as np

    if python:
        random.seed(seed)
    if numpy:
        np.random.seed(seed % 2**32)


def own_seed(seed: int, rank: int) -> int:
    """The seed that a rank other than 0 goes on with; neighbouring seeds and ranks give unrelated ones.

    Example:
        >>> own_seed(0, 1) == own_seed(0, 1), own_seed(0, 1) == own_seed(1, 0)
        (True, False)
    """
    import numpy as np

    return int(np.random.SeedSequence((seed % 2**64, rank)).generate_state(1, np.uint64)[0] >> 1)
