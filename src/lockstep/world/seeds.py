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


def derive_seed(*key: int) -> int:
    """Give a 63-bit seed for a key, such as a seed and a rank; neighbouring keys give unrelated ones.

    Example:
        >>> derive_seed(0, 1) == derive_seed(0, 1), derive_seed(0, 1) == derive_seed(1, 0)
        (True, False)
    """
    import numpy as np

    return int(np.random.SeedSequence([number % 2**64 for number in key]).generate_state(1, np.uint64)[0] >> 1)
