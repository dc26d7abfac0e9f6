"""What a rank measures of its own values."""

import pytest
import torch

from lockstep.parallel.batchnorm.kernels import kernels_for


@pytest.mark.parametrize("far", [0.0, 300.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((16, 5, 3, 3), id="by place"),
        pytest.param((3, 5, 8, 8), id="by plane"),
        pytest.param((3, 5, 3, 3), id="value by value"),
        pytest.param((9, 5), id="without planes"),
    ],
)
def test_every_way_of_measuring_gives_mean_and_variance_also_far_from_zero(shape, dtype, far):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 4 + far).to(dtype)
    mean, variance = kernels_for(x).measure(x, 1e-5)
    expected, about = torch.var_mean(x.double().transpose(0, 1).flatten(1), 1, correction=0)

    assert mean.dtype == variance.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(mean.double(), about, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(variance.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(16, 2, 3, 3), (3, 2, 8, 8)])
def test_constant_channels_have_variance_zero(shape):
    mean, variance = kernels_for(torch.empty(0)).measure(torch.full(shape, 7.0), 1e-5)

    assert (mean.tolist(), variance.tolist()) == ([7.0, 7.0], [0.0, 0.0])
