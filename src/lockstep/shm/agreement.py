"""The few words that every call compares with its peers, and the sentence when they differ.

The numbers are those of the C core.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist

from lockstep.errors import UsageError

KINDS = (
    *("", "all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "gather", "scatter", "all_to_all"),
    "barrier",
)
ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, GATHER, SCATTER, ALL_TO_ALL, BARRIER = range(1, 10)

OPS = ("", "sum", "avg", "product", "min", "max", "band", "bor", "bxor")
OF_BOOL, OF_COMPLEX, SCALED = 1 << 8, 1 << 9, 1 << 10
"""Added to an operation's number, which the core goes by without them: ranks compare what was called, not only what is
computed."""

_OPS = {name.upper(): number for number, name in enumerate(OPS)} | {"PREMUL_SUM": 1 | SCALED}

# The first ones can be reduced; all can be moved. The order is that of the core, and the same on all ranks.
_REDUCIBLE = (
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
)
DTYPES: tuple[torch.dtype, ...] = (
    *(getattr(torch, name) for name in _REDUCIBLE),
    *(torch.bool, torch.complex64, torch.complex128, torch.complex32),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)
NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}
UNKNOWN = len(DTYPES)

HALVES = (torch.float16, torch.bfloat16)
_FLOATING = frozenset({torch.float32, torch.float64, *HALVES})
_COMPLEX = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}
_WHOLES = {part: whole for whole, part in _COMPLEX.items()}
# True and False stay what they are: their sum is "any", their product "all".
OF_BOOLS = {"SUM": "BOR", "PRODUCT": "BAND", "MIN": "BAND", "MAX": "BOR", "BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}

Reduction = tuple[int, int, int]
"""The core's number of the operation, of the type it works in, and how many of these an element is."""


def reduction(dtype: torch.dtype, name: str) -> Reduction | None:
    """How the core reduces tensors of ``dtype`` by the operation that torch calls ``name``; None if it does not.

    Example:
        >>> reduction(torch.complex64, "SUM"), reduction(torch.int32, "AVG")
        ((513, 0, 2), None)
    """
    if dtype is torch.bool:
        return (_OPS[OF_BOOLS[name]] | OF_BOOL, NUMBERS[torch.uint8], 1) if name in OF_BOOLS else None
    if dtype in _COMPLEX:
        fits = name in ("SUM", "AVG", "PREMUL_SUM")
        return (_OPS[name] | OF_COMPLEX, NUMBERS[_COMPLEX[dtype]], 2) if fits else None
    if name not in _OPS or NUMBERS.get(dtype, UNKNOWN) >= len(_REDUCIBLE):
        return None
    bits = name in ("BAND", "BOR", "BXOR")
    if (bits and dtype in _FLOATING) or (name in ("AVG", "PREMUL_SUM") and dtype not in _FLOATING):
        return None
    return _OPS[name], NUMBERS[dtype], 1


REDUCTIONS = {
    (dtype, op): found
    for dtype in DTYPES
    for name, op in dist.ReduceOp.RedOpType.__members__.items()
    if (found := reduction(dtype, name)) is not None
}


def refuse_reduction(dtype: torch.dtype, op: object, who: str) -> UsageError:
    """What to say where there is no such reduction."""
    name, advice = str(op).rpartition(".")[2], "Convert the tensor first."
    if name == "AVG" and not dtype.is_floating_point:
        advice = "A mean of whole numbers is rarely whole: reduce their SUM, and divide in the dtype that you want."
    elif name == "PREMUL_SUM" and not dtype.is_floating_point:
        advice = "Multiply before, and reduce the SUM."
    return UsageError(f"{who}: shm has no {name} of {str(dtype).removeprefix('torch.')} tensors. {advice}")


def describe(words: tuple[int, int, int, int, int, int]) -> str:
    """A call in words.

    Example:
        >>> describe((7, BROADCAST, 0, 0, 1, 4))
        'broadcast of 4 float32 from 1'
        >>> describe((7, ALL_REDUCE, 1, 11, 0, 8))
        'all_reduce (sum) of 8 int64'
        >>> describe((7, ALL_REDUCE, 1 | OF_COMPLEX | SCALED, 0, 0, 8))
        'all_reduce (premul-sum) of 4 complex64'
    """
    _, kind, op, number, root, count = words
    if kind == BARRIER:
        return "barrier"
    type_ = DTYPES[number] if number < UNKNOWN else "other"
    if op & OF_BOOL:
        type_ = torch.bool
    elif op & OF_COMPLEX and type_ in _WHOLES:  # the core counts both parts
        type_, count = _WHOLES[type_], count // 2
    dtype = str(type_).removeprefix("torch.")
    name = "premul-sum" if op & SCALED else OPS[op & 255]
    text = f"{KINDS[kind]}{f' ({name})' if name else ''}"
    text += f" of {count} {dtype}" if kind != ALL_TO_ALL else f" of {dtype}"
    link = {REDUCE: "to", GATHER: "to", BROADCAST: "from", SCATTER: "from"}.get(kind)
    return f"{text} {link} {root}" if link else text


def say_difference(
    words: list[tuple[int, int, int, int, int, int]], shares: Callable[[int, int], tuple[int, int]], names: list[int]
) -> str:
    """Name both sides of a disagreement.

    Args:
        words: What every rank of the group brought.
        shares: For two ranks, what the first gives to the second and what the second takes from it.
        names: The ranks' numbers in the world.

    Example:
        >>> ours, theirs = (3, BARRIER, 0, 0, 0, 0), (3, ALL_REDUCE, 1, 0, 0, 8)
        >>> say_difference([ours, theirs], lambda a, b: (0, 0), [4, 6])
        'rank 4 called barrier, rank 6 called all_reduce (sum) of 8 float32'
    """
    other = next((rank for rank, row in enumerate(words) if row != words[0]), None)
    if other is not None:
        return f"rank {names[0]} called {describe(words[0])}, rank {names[other]} called {describe(words[other])}"
    pairs = [(a, b) for a in range(len(words)) for b in range(len(words))]
    giver, taker = next(pair for pair in pairs if len(set(shares(*pair))) == 2)
    given, taken = shares(giver, taker)
    return (
        f"in all_to_all rank {names[giver]} gives {given} elements to rank {names[taker]}, which takes {taken} from it"
    )
