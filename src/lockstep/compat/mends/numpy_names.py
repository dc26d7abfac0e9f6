"""Names that went from numpy."""

from collections.abc import Callable
from typing import Any

from lockstep.compat.mends.row import Mend, missing_attribute

# name: (gone since, what to write, an expression that is true)
_NAMES = {
    "float": ("1.24", "float", "np.float is float"),
    "int": ("1.24", "int", "np.int is int"),
    "object": ("1.24", "object", "np.array([None], dtype=np.object).dtype == object"),
    "str": ("1.24", "str", "np.str is str"),
    "complex": ("1.24", "complex", "np.complex is complex"),
    "unicode": ("1.24", "str", "np.unicode is str"),
    "Inf": ("2.0", "np.inf", "np.Inf == float('inf')"),
    "Infinity": ("2.0", "np.inf", "np.Infinity == float('inf')"),
    "infty": ("2.0", "np.inf", "np.infty == float('inf')"),
    "PINF": ("2.0", "np.inf", "np.PINF == float('inf')"),
    "NINF": ("2.0", "-np.inf", "np.NINF == -float('inf')"),
    "NaN": ("2.0", "np.nan", "np.isnan(np.NaN)"),
    "NAN": ("2.0", "np.nan", "np.isnan(np.NAN)"),
    "float_": ("2.0", "np.float64", "np.float_ is np.float64"),
    "complex_": ("2.0", "np.complex128", "np.complex_ is np.complex128"),
    "string_": ("2.0", "np.bytes_", "np.string_ is np.bytes_"),
    "unicode_": ("2.0", "np.str_", "np.unicode_ is np.str_"),
    "bool8": ("2.0", "np.bool_", "np.bool8 is np.bool_"),
    "product": ("2.0", "np.prod", "np.product([2, 3]) == 6"),
    "cumproduct": ("2.0", "np.cumprod", "np.cumproduct([2, 3]).tolist() == [2, 6]"),
    "sometrue": ("2.0", "np.any", "np.sometrue([False, True])"),
    "alltrue": ("2.0", "np.all", "not np.alltrue([False, True])"),
    "round_": ("2.0", "np.round", "np.round_(1.4) == 1"),
    "msort": ("2.0", "np.sort(a, axis=0)", "np.msort([2, 1]).tolist() == [1, 2]"),
    "in1d": ("2.4", "np.isin", "np.in1d([[1, 2], [3, 4]], [2]).tolist() == [False, True, False, False]"),
    "trapz": ("2.4", "np.trapezoid", "np.trapz([1, 1, 1]) == 2"),
    "asscalar": ("1.23", "a.item()", "type(np.asscalar(np.array([3]))) is int"),
}


def _value(name: str) -> Callable[[], Any]:
    def find() -> Any:
        import numpy as np

        values: dict[str, Any] = {
            "float": float,
            "int": int,
            "object": object,
            "str": str,
            "complex": complex,
            "unicode": str,
            "NINF": -np.inf,
            "NaN": np.nan,
            "NAN": np.nan,
            "float_": np.float64,
            "complex_": np.complex128,
            "string_": np.bytes_,
            "unicode_": np.str_,
            "bool8": np.bool_,
            "product": np.prod,
            "cumproduct": np.cumprod,
            "sometrue": np.any,
            "alltrue": np.all,
            "round_": np.round,
            "msort": lambda a: np.sort(a, axis=0),
            "in1d": lambda a, *b, **more: np.isin(np.ravel(a), *b, **more),
            "trapz": getattr(np, "trapezoid", None),
            "asscalar": lambda a: a.item(),
        }
        return values.get(name, np.inf)

    return find


MENDS = tuple(
    Mend(
        old=f"np.{name}",
        gone=f"numpy {gone}",
        today=today,
        example=f"import numpy as np\nassert {true}",
        put=missing_attribute("numpy", name, _value(name)),
    )
    for name, (gone, today, true) in _NAMES.items()
)
