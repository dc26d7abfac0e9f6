"""Functions that went from torch, or now return something else."""

import functools
from collections.abc import Callable
from typing import Any

from lockstep.compat.mends.row import Mend, Note, Put, missing_attribute, module, replacement

_torch = module("torch")


def _gone(name: str, function: Callable[..., Any]) -> Put:
    """For a name that torch has not, or has only to say that it is gone."""

    def make(_: object, note: Note) -> Callable[..., Any]:
        @functools.wraps(function)
        def noted(*args: Any, **named: Any) -> Any:
            note()
            return function(*args, **named)

        return noted

    return replacement(_torch, name, make)


def _lstsq(b: Any, a: Any) -> tuple[Any, Any]:
    import torch

    return torch.linalg.lstsq(a, b).solution, torch.linalg.qr(a).R


def _solve(b: Any, a: Any) -> tuple[Any, Any]:
    import torch

    return torch.linalg.solve(a, b), torch.linalg.lu_factor(a).LU


def _symeig(a: Any, eigenvectors: bool = False, upper: bool = True) -> tuple[Any, Any]:
    import torch

    triangle = "U" if upper else "L"
    if eigenvectors:
        return tuple(torch.linalg.eigh(a, UPLO=triangle))
    return torch.linalg.eigvalsh(a, UPLO=triangle), a.new_empty(0)


def _eig(a: Any, eigenvectors: bool = False) -> tuple[Any, Any]:
    """Eigenvalues ``(n, 2)``, real and imaginary part; a pair of complex eigenvectors stands as two real columns."""
    import torch

    values, vectors = torch.linalg.eig(a)
    columns, j = [], 0
    while eigenvectors and j < len(values):
        paired = bool(values[j].imag != 0)
        columns += [vectors[:, j].real, vectors[:, j].imag] if paired else [vectors[:, j].real]
        j += 2 if paired else 1
    return torch.view_as_real(values), torch.stack(columns, 1) if columns else a.new_empty(0)


def _dims(ndim: int) -> list[int]:
    return list(range(-ndim, 0))


def _norm(normalized: bool) -> str:
    return "ortho" if normalized else "backward"


def _rfft(x: Any, signal_ndim: int, normalized: bool = False, onesided: bool = True) -> Any:
    import torch

    transform = torch.fft.rfftn if onesided else torch.fft.fftn
    return torch.view_as_real(transform(x, dim=_dims(signal_ndim), norm=_norm(normalized)))


def _irfft(x: Any, signal_ndim: int, normalized: bool = False, onesided: bool = True, signal_sizes: Any = None) -> Any:
    import torch

    values, dims, norm = torch.view_as_complex(x.contiguous()), _dims(signal_ndim), _norm(normalized)
    if onesided:
        return torch.fft.irfftn(values, s=signal_sizes or None, dim=dims, norm=norm)
    return torch.fft.ifftn(values, dim=dims, norm=norm).real


def _ifft(x: Any, signal_ndim: int, normalized: bool = False) -> Any:
    import torch

    values = torch.view_as_complex(x.contiguous())
    return torch.view_as_real(torch.fft.ifftn(values, dim=_dims(signal_ndim), norm=_norm(normalized)))


def _stft(original: Any, note: Note) -> Any:
    @functools.wraps(original)
    def stft(x: Any, *args: Any, **named: Any) -> Any:
        if named.get("return_complex") is not None or x.is_complex() or len(args) > _STFT_COMPLEX:
            return original(x, *args, **named)
        import torch

        note()
        return torch.view_as_real(original(x, *args, **named, return_complex=True))

    return stft


_STFT_COMPLEX = 7  # positional arguments before return_complex


def _istft(original: Any, note: Note) -> Any:
    @functools.wraps(original)
    def istft(x: Any, *args: Any, **named: Any) -> Any:
        if x.is_complex():
            return original(x, *args, **named)
        import torch

        note()
        return original(torch.view_as_complex(x.contiguous()), *args, **named)

    return istft


def _from_numpy(original: Any, note: Note) -> Any:
    @functools.wraps(original)
    def from_numpy(array: Any) -> Any:
        try:
            return original(array)
        except ValueError:
            if all(stride >= 0 for stride in array.strides):
                raise
            note()
            return original(array.copy())

    return from_numpy


_A = "import torch\na, b = torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([[3.0], [4.0]])\n"

MENDS = (
    Mend(
        old="torch.gels",
        gone="torch 1.3",
        today="torch.linalg.lstsq(A, B).solution",
        example=_A + "assert torch.allclose(a @ torch.gels(b, a)[0], b)",
        put=missing_attribute("torch", "gels", lambda: _lstsq),
    ),
    Mend(
        old="torch.lstsq",
        gone="torch 1.13",
        today="torch.linalg.lstsq(A, B).solution: the arguments change places",
        example=_A + "assert torch.allclose(a @ torch.lstsq(b, a)[0], b)",
        put=_gone("lstsq", _lstsq),
    ),
    Mend(
        old="torch.gesv",
        gone="torch 1.2",
        today="torch.linalg.solve(A, B)",
        example=_A + "assert torch.allclose(a @ torch.gesv(b, a)[0], b)",
        put=missing_attribute("torch", "gesv", lambda: _solve),
    ),
    Mend(
        old="torch.solve",
        gone="torch 1.13",
        today="torch.linalg.solve(A, B): the arguments change places",
        example=_A + "assert torch.allclose(a @ torch.solve(b, a)[0], b)",
        put=_gone("solve", _solve),
    ),
    Mend(
        old="torch.symeig",
        gone="torch 2.0",
        today="torch.linalg.eigh(A), or torch.linalg.eigvalsh(A)",
        example=_A + "values, vectors = torch.symeig(a, eigenvectors=True)\n"
        "assert torch.allclose(vectors @ values.diag() @ vectors.t(), a, atol=1e-5)\n"
        "assert torch.allclose(torch.symeig(a)[0], values)",
        put=_gone("symeig", _symeig),
    ),
    Mend(
        old="torch.eig",
        gone="torch 1.13",
        today="torch.linalg.eig(A), whose results are complex",
        example=_A + "values, vectors = torch.eig(a, True)\n"
        "assert torch.allclose(a @ vectors, vectors * values[:, 0], atol=1e-5)\n"
        "turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])\n"
        "values, vectors = torch.eig(turn, eigenvectors=True)\n"
        "assert values[:, 1].abs().tolist() == [1.0, 1.0] and vectors.shape == (2, 2)",
        put=_gone("eig", _eig),
    ),
    Mend(
        old="torch.btrifact",
        gone="torch 1.2",
        today="torch.linalg.lu_factor(A)",
        example=_A + "lu, pivots = torch.btrifact(a[None])\nassert lu.shape == (1, 2, 2)",
        put=missing_attribute("torch", "btrifact", lambda: _torch().linalg.lu_factor),
    ),
    Mend(
        old="torch.rfft",
        gone="torch 1.8",
        today="torch.fft.rfftn(x, dim=...), whose result is complex",
        example="import torch\nx = torch.arange(8.0).view(2, 4)\n"
        "assert torch.allclose(torch.rfft(x, 1)[..., 0], torch.fft.rfft(x).real)\n"
        "assert torch.rfft(x, 2, onesided=False).shape == (2, 4, 2)",
        put=missing_attribute("torch", "rfft", lambda: _rfft),
    ),
    Mend(
        old="torch.irfft",
        gone="torch 1.8",
        today="torch.fft.irfftn(x, s=..., dim=...) of a complex tensor",
        example="import torch\nx = torch.arange(10.0).view(2, 5)\ny = torch.view_as_real(torch.fft.rfft(x))\n"
        "assert torch.allclose(torch.irfft(y, 1, signal_sizes=(5,)), x, atol=1e-5)",
        put=missing_attribute("torch", "irfft", lambda: _irfft),
    ),
    Mend(
        old="torch.ifft",
        gone="torch 1.8",
        today="torch.fft.ifftn(x, dim=...) of a complex tensor",
        example="import torch\nx = torch.randn(3, 4, 2)\ny = torch.view_as_complex(x)\n"
        "assert torch.allclose(torch.view_as_complex(torch.ifft(x, 1)), torch.fft.ifft(y))",
        put=missing_attribute("torch", "ifft", lambda: _ifft),
    ),
    Mend(
        old="torch.stft without return_complex",
        gone="torch 2.0",
        today="torch.view_as_real(torch.stft(..., return_complex=True))",
        example="import torch\nassert torch.stft(torch.ones(400), 64, window=torch.ones(64)).shape[-1] == 2",
        put=replacement(_torch, "stft", _stft),
    ),
    Mend(
        old="torch.istft of real numbers",
        gone="torch 2.0",
        today="torch.istft(torch.view_as_complex(x), ...)",
        example="import torch\nx = torch.randn(400)\nw = torch.hann_window(64)\n"
        "y = torch.view_as_real(torch.stft(x, 64, window=w, return_complex=True))\n"
        "assert torch.allclose(torch.istft(y, 64, window=w, length=400), x, atol=1e-5)",
        put=replacement(_torch, "istft", _istft),
    ),
    Mend(
        old="torch.from_numpy(a[::-1])",
        gone="the beginning",
        today="torch.from_numpy(a[::-1].copy())",
        example="import torch, numpy\nassert torch.from_numpy(numpy.arange(3)[::-1]).tolist() == [2, 1, 0]",
        put=replacement(_torch, "from_numpy", _from_numpy),
        sign=r"from_numpy",
    ),
)
