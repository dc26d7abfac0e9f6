"""Amp against the same training written by hand in plain torch, to the bit."""

import pytest
import torch
from amp.programs import build, half_is, inputs, load, make_optimizer, targets
from torch import nn

from lockstep import amp

NAMES = ["basic-O0-mlp-float32", "overflow-O2-mlp-float16", "overflow-O2-conv-adam-float16", "adam-O2-mlp-bfloat16"]
NAMES += [
    f"{kind}-O1-{net}" for kind, net in [("basic", "mlp-bfloat16"), ("basic", "conv-float16"), ("adam", "mlp-float16")]
]
NAMES += [
    "overflow-O1-mlp-float16",
    "overflow-O1-mlp-bfloat16",
    "basic-O3-mlp-float16",
    "keepbn-O3-string-True-conv-float16",
]


def batches(program):
    for number in range(1, program["steps"] + 1):
        x = inputs(program["batch"]["x"], number)
        factor = float(program.get("loss_times", {}).get(str(number), 1))
        yield x, targets(program["batch"]["target"], number, len(x)), factor


def by_amp(program):
    model = build(program["model"])
    optimizer = make_optimizer(program["optimizer"], model.parameters())
    model, optimizer = amp.initialize(model, optimizer, verbosity=0, **program["initialize"])
    losses = []
    for x, target, factor in batches(program):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), target)
        with amp.scale_loss(loss * factor, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()]


def by_hand(program, half):
    options = program["initialize"]
    level, scale = options["opt_level"], options.get("loss_scale", {"O0": 1.0, "O3": 1.0}.get(options["opt_level"]))
    keep = options.get("keep_batchnorm_fp32", level == "O2")
    model = build(program["model"])
    for module in model.modules() if level in ("O2", "O3") else []:
        if not (keep and isinstance(module, nn.modules.batchnorm._BatchNorm)):
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.data = tensor.data.to(half) if tensor.is_floating_point() else tensor.data
    params = list(model.parameters())
    masters = [p.detach().float().requires_grad_() if level == "O2" and p.dtype == half else p for p in params]
    optimizer = make_optimizer(program["optimizer"], masters)
    dynamic, scale, losses = scale in (None, "dynamic"), 2.0**16 if scale in (None, "dynamic") else scale, []
    for x, target, factor in batches(program):
        model.zero_grad()
        with torch.autocast("cpu", dtype=half, enabled=level == "O1"):
            out = forward(model, x.to(half) if level in ("O2", "O3") else x, gelu_in_fp32=level == "O1")
        loss = nn.functional.cross_entropy(out.float(), target)
        (loss * factor * scale).backward()
        losses.append(loss.item())
        grads = [p.grad.to(m.dtype) / scale for p, m in zip(params, masters, strict=True)]
        if dynamic and not all(grad.isfinite().all() for grad in grads):
            scale /= 2
            continue
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad
        optimizer.step()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                if param is not master:
                    param.copy_(master)
    return losses, [p.detach().clone() for p in params]


def forward(model, x, gelu_in_fp32):
    for layer in model:
        x = layer(x.float() if gelu_in_fp32 and isinstance(layer, nn.GELU) else x)
    return x


@pytest.mark.parametrize("name", NAMES)
def test_amp_is_plain_torch_to_the_bit(name):
    record = load(name)
    with half_is(record["half"]):
        losses, params = by_amp(record["program"])
        amp.initialize(nn.Identity(), enabled=False)
        expected_losses, expected = by_hand(record["program"], getattr(torch, record["half"]))

    assert expected_losses == losses
    assert [torch.equal(a, b) for a, b in zip(expected, params, strict=True)] == [True] * len(params)
