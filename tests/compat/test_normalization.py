"""apex.normalization against the recorded reference, and its dtypes."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from faces import apex

from tests.compat.traces import cases, departures, index, load

norm = apex.normalization
functional = apex.normalization.fused_layer_norm
SUMS = {"rtol": 1e-5, "atol": 1e-5}
HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("memory_efficient", [False, True])
@pytest.mark.parametrize("case", cases("normalization"), ids=lambda case: case["case"])
def test_golden_normalization(case, memory_efficient):
    tolerance = load("normalization")["tolerance"]
    made = case["case"].replace(")", f", memory_efficient={memory_efficient})")
    layer = eval(made, vars(norm))
    n = index(*case["shape"])
    x = (0.4 + 1.3 * torch.sin(0.23 * n + 0.017 * n * n)).float().requires_grad_()
    with torch.no_grad():
        for name, param in layer.named_parameters():
            m = index(*param.shape)
            param.copy_(1 + torch.sin(0.7 * m) / 2 if name == "weight" else torch.cos(0.7 * m) / 5)

    y = layer(x)
    y.backward(torch.cos(0.31 * n + 0.011 * n * n).float())

    wrong = departures(case["output"], y, tolerance, SUMS) + departures(case["grad_input"], x.grad, tolerance, SUMS)
    for name, param in layer.named_parameters():
        wrong += departures(case[f"grad_{name}"], param.grad, tolerance, SUMS)
    assert [] == wrong
    assert case["eps"] == layer.eps


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"])
def test_dtypes_are_apexs(name, half):
    """Plain ones give the input's dtype, mixed ones that of the parameters."""
    layer = getattr(norm, name)(8)
    x = torch.randn(4, 8)
    mixed = name.startswith("Mixed")

    assert (torch.float32 if mixed else half) == layer(x.to(half)).dtype
    assert torch.float32 == layer(x).dtype
    assert half == layer.to(half)(x.to(half)).dtype


@pytest.mark.parametrize("half", HALVES)
def test_half_input_is_normalised_in_float32_and_rounded_once(half):
    x = torch.randn(16, 32).to(half)

    assert torch.equal(F.layer_norm(x.float(), [32]).to(half), norm.FusedLayerNorm(32)(x))
    assert torch.equal(F.rms_norm(x.float(), [32], None, 1e-5).to(half), norm.FusedRMSNorm(32)(x))


def test_under_autocast_the_result_has_autocasts_dtype():
    layer = norm.FusedLayerNorm(8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.randn(4, 8))
        z = functional.fused_rms_norm(torch.randn(4, 8), 8)

    assert (torch.bfloat16, torch.bfloat16) == (y.dtype, z.dtype)


def test_functions_have_apexs_default_eps():
    x = torch.full((2, 4), 1e-3) * torch.tensor([1.0, -1.0, 1.0, -1.0])

    assert torch.equal(F.layer_norm(x, [4], eps=1e-6), functional.fused_layer_norm(x, 4))
    assert torch.equal(F.rms_norm(x, [4], eps=1e-6), functional.fused_rms_norm(x, [4]))


def test_functions_with_parameters():
    x, w, b = torch.randn(3, 4), torch.randn(4), torch.randn(4)
    half = x.half()

    assert torch.equal(F.layer_norm(x, [4], w, b, 1e-6), functional.fused_layer_norm_affine(x, w, b, 4))
    assert torch.equal(F.rms_norm(x, [4], w, 1e-6), functional.fused_rms_norm_affine(x, w, 4))
    assert torch.float32 == functional.mixed_dtype_fused_layer_norm_affine(half, w, b, 4).dtype
    assert torch.float32 == functional.mixed_dtype_fused_rms_norm_affine(half, w, 4).dtype
    assert torch.allclose(F.rms_norm(x, [4], w, 1e-5), functional.manual_rms_norm(x, [4], w, 1e-5))


@pytest.mark.parametrize("name", ["FusedLayerNorm", "FusedRMSNorm", "MixedFusedLayerNorm", "MixedFusedRMSNorm"])
def test_an_empty_batch_goes_through_both_ways(name):
    x = torch.zeros(0, 8, requires_grad=True)
    layer = getattr(norm, name)(8)

    layer(x).sum().backward()

    assert (0, 8) == x.grad.shape
    assert torch.equal(torch.zeros(8), layer.weight.grad)


@pytest.mark.parametrize("name", ["MixedFusedLayerNorm", "MixedFusedRMSNorm"])
def test_mixed_ones_have_parameters(name):
    with pytest.raises(RuntimeError, match="elementwise_affine = False"):
        getattr(norm, name)(8, elementwise_affine=False)


def test_double_is_computed_in_double():
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    layer = norm.FusedLayerNorm(8).double()

    assert torch.autograd.gradcheck(layer, (x,))


def test_keys_are_torchs():
    assert ["weight", "bias"] == list(norm.FusedLayerNorm(4).state_dict())
    assert ["weight"] == list(norm.FusedRMSNorm(4).state_dict())
    assert [] == list(norm.FusedLayerNorm(4, elementwise_affine=False).state_dict())
