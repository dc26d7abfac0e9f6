"""The kernels for CUDA give what those for CPU give."""

import pytest
import torch

from lockstep.parallel.batchnorm.kernels import _CPU, _CUDA

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_equals_cpu(dtype, layout):
    torch.manual_seed(0)
    x, dy = (torch.randn(6, 65, 7, 5).to(dtype).contiguous(memory_format=layout) for _ in range(2))
    weight, bias, mean, variance, mean_dy, mean_dy_xhat = torch.rand(6, 65).unbind()
    invstd = (variance + 1e-5).rsqrt()
    calls = {
        "measure": (x, 1e-5),
        "normalise": (x, weight, bias, mean, variance, 1e-5),
        "gradient_sums": (dy, x, mean, invstd),
        "input_gradient": (dy, x, weight, mean, invstd, mean_dy, mean_dy_xhat),
    }
    for name, arguments in calls.items():
        there = [a.cuda() if isinstance(a, torch.Tensor) else a for a in arguments]
        expected, found = getattr(_CPU, name)(*arguments), getattr(_CUDA, name)(*there)
        torch.testing.assert_close(found, expected, check_device=False, rtol=2e-2, atol=2e-2, msg=name)
