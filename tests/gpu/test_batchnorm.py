"""The kernels for CUDA give what those for CPU give."""

import pytest
import torch

from lockstep.parallel.batchnorm.kernels import _CPU, _CUDA, Statistics

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_equals_cpu(dtype, layout):
    torch.manual_seed(0)
    x, dy = (torch.randn(6, 65, 7, 5).to(dtype).contiguous(memory_format=layout) for _ in range(2))
    weight, bias, mean, variance = torch.rand(4, 65).unbind()
    over = Statistics(mean, variance, (variance + 1e-5).rsqrt(), 1e-5, 210)
    calls = {
        "measure": (x, 1e-5),
        "normalise": (x, weight, bias, over),
        "gradient_sums": (dy, x, over),
        "input_gradient": (dy, x, weight, over, 210 * torch.rand(2 * 65)),
    }
    for name, arguments in calls.items():
        there = [on_gpu(argument) for argument in arguments]
        expected, found = getattr(_CPU, name)(*arguments), getattr(_CUDA, name)(*there)
        torch.testing.assert_close(found, expected, check_device=False, rtol=2e-2, atol=2e-2, msg=name)


def on_gpu(argument):
    """The same there: a tensor, statistics or a number."""
    if isinstance(argument, Statistics):
        return Statistics(*map(on_gpu, argument))
    return argument.cuda() if isinstance(argument, torch.Tensor) else argument
