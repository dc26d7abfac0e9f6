"""Batches and layers to compare on, and the reference: ordinary batch norm on the concatenated batch in one process."""

from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st
from torch import nn


@dataclass(frozen=True)
class Case:
    """A layer and the local batch sizes of its ranks."""

    sizes: tuple[int, ...]
    channels: int = 3
    rest: tuple[int, ...] = (5, 4)
    layout: str = "contiguous"
    dtype: torch.dtype = torch.float64
    options: dict = field(default_factory=dict)
    seed: int = 0

    def batch(self):
        """The global batch and the gradient that arrives at its output."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (sum(self.sizes), self.channels, *self.rest)
        x, dy = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        return (3 * x + 2).to(self.dtype), dy.to(self.dtype)

    def layer(self, kind):
        """The layer with parameters and running statistics that are not its first ones."""
        layer = kind(self.channels, **self.options)
        ramp = torch.linspace(0.5, 1.5, self.channels)
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        for number, tensor in enumerate([*layer.parameters(), *layer.buffers()]):
            if tensor.is_floating_point():
                tensor.data.copy_(ramp + number)
        return layer.to(wide)

    def laid_out(self, x):
        """A tensor of the same values in this case's memory format."""
        if self.layout == "channels_last" and x.dim() in (4, 5):
            return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
        if self.layout == "strided":
            return torch.stack((x, x), -1)[..., 0]
        if self.layout == "transposed":
            return x.transpose(0, 1).contiguous().transpose(0, 1)
        return x

    def share(self, rank):
        """Where a rank's local batch lies in the global one."""
        return slice(sum(self.sizes[:rank]), sum(self.sizes[: rank + 1]))


def reference(case):
    """Output, gradients and buffers of ordinary batch norm on the global batch, in float64."""
    x, dy = (tensor.double() for tensor in case.batch())
    layer = case.layer({2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[x.dim()])
    return results(layer.double(), x.requires_grad_(), dy)


def results(layer, x, dy):
    """Output, gradients and buffers of one training step."""
    y = layer(x)
    y.backward(dy)
    return {
        "y": y.detach(),
        "dx": x.grad,
        **{f"d{name}": parameter.grad for name, parameter in layer.named_parameters()},
        **dict(layer.named_buffers()),
    }


def assert_joined(case, by_rank, expected, tolerance):
    """Local outputs and gradients make up the global ones; buffers are equal."""
    for name, value in expected.items():
        parts = [mine[name] for mine in by_rank]
        if name in ("y", "dx"):
            together = torch.cat(parts)
        elif name.startswith("d"):
            together = sum(parts)
        else:
            together = parts[0]
            assert all(torch.equal(together, part) for part in parts), name
        far = (together.double() - value.double()).abs() - tolerance * (1 + value.double().abs())
        assert not (far > 0).any(), f"{name} is off in {case}: {together} instead of {value}"


@st.composite
def cases(draw, ranks, dtypes=(torch.float64,)):
    """Any layer, any shape, any memory format, any local sizes with two values per channel in all."""
    sizes = draw(st.tuples(*[st.integers(0, 4)] * ranks).filter(any))
    rest = draw(st.sampled_from([(), (3,), (40,), (3, 5), (7, 6), (2, 3, 2), (2, 5, 4)]))
    if sum(sizes) == 1 and rest == ():
        sizes = (sizes[0] + 1, *sizes[1:])
    return Case(
        sizes=sizes,
        channels=draw(st.sampled_from([1, 3, 4, 65])),
        rest=rest,
        layout=draw(st.sampled_from(["contiguous", "channels_last", "strided", "transposed"])),
        dtype=draw(st.sampled_from(dtypes)),
        options={
            "affine": draw(st.booleans()),
            "track_running_stats": draw(st.booleans()),
            "momentum": draw(st.sampled_from([0.1, 0.7, None])),
            "eps": draw(st.sampled_from([1e-5, 1e-2])),
        },
        seed=draw(st.integers(0, 99)),
    )
