"""Runs the little programs of tests/golden and holds what comes out against what legacy apex recorded."""

import contextlib
import io
import json
import math
import os
from pathlib import Path

import torch
from torch import nn

from lockstep import amp

FOLDER = Path(__file__).parents[1] / "golden"


def load(name):
    return json.loads((FOLDER / f"{name}.json").read_text())


def names(*beginnings):
    return sorted(p.stem for p in FOLDER.glob("*.json") if p.stem.startswith(beginnings))


@contextlib.contextmanager
def half_is(half):
    """`LOCKSTEP_HALF` as a file has it, and amp off again at the end."""
    before = os.environ.get("LOCKSTEP_HALF")
    os.environ["LOCKSTEP_HALF"] = "bf16" if half == "bfloat16" else "fp16"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        amp.initialize(nn.Identity(), enabled=False)
        torch.set_num_threads(threads)
        if before is None:
            del os.environ["LOCKSTEP_HALF"]
        else:
            os.environ["LOCKSTEP_HALF"] = before


def counting(shape):
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)


def build(spec, offset=0):
    """A Sequential by its description, its parameters by their formulas."""
    layers = spec["torch.nn.Sequential of"]
    model = nn.Sequential(
        *(getattr(nn, layer[0])(*layer[1], **(layer[2] if len(layer) > 2 else {})) for layer in layers)
    )
    fill(model, offset)
    return model


def fill(model, offset=0):
    k = offset
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        for name, param in own.items():
            n = counting(param.shape)
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                wave = (torch.sin if name == "weight" else torch.cos)(0.7 * n + 0.1 * k) / 10
                value = 1 + wave if name == "weight" else wave
            elif name == "weight":
                value = 1.5 * torch.sin(0.37 * n + 0.013 * n * n + 0.1 * k) / math.sqrt(param.numel() / param.shape[0])
            else:
                value = torch.cos(0.5 * n + 0.1 * k) / 10
            param.data.copy_(value.float())
        k += bool(own)


def inputs(shape, s):
    n = counting(shape)
    return torch.sin(0.23 * n + 0.017 * n * n + 0.9 * s + 0.05 * n * s).float()


def targets(spec, s, samples):
    if spec["kind"] == "class":
        return (3 * torch.arange(samples) + s) % spec["classes"]
    n = counting(spec["shape"])
    return torch.cos(0.31 * n + 0.007 * n * n + 0.5 * s).float()


def make_optimizer(spec, params):
    return getattr(torch.optim, spec["class"].rsplit(".", 1)[1])(params, **spec["kwargs"])


def norms(optimizer):
    return [0.0 if p.grad is None else p.grad.float().norm().item() for p in amp.master_params(optimizer)]


def summary(tensor):
    flat = tensor.detach().double().flatten()
    return {"dtype": dtype_name(tensor.dtype), "sum": flat.sum().item(), "first8": flat[:8].tolist()}


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


class Comparison:
    """Every number against its record, within the tight tolerance unless told otherwise."""

    def __init__(self, record, tight=True, times=1.0):
        self.tolerance = record["tolerance"]["tight"] if tight else record["tolerance"]
        self.times = times
        self.wrong = []

    def exact(self, where, expected, got):
        if expected != got:
            self.wrong.append(f"{where}: recorded {expected}, got {got}")

    def near(self, where, kind, expected, got):
        if isinstance(expected, list):
            if len(expected) != len(got):
                self.wrong.append(f"{where}: recorded {len(expected)} numbers, got {len(got)}")
            for i, (e, g) in enumerate(zip(expected, got, strict=False)):
                self.near(f"{where}[{i}]", kind, e, g)
            return
        expected, got = float(expected), float(got)
        if math.isfinite(expected):
            bounds = self.tolerance[kind]
            ok = abs(got - expected) <= self.times * (bounds["atol"] + bounds["rtol"] * abs(expected))
        else:
            ok = str(expected) == str(got)
        if not ok:
            self.wrong.append(f"{where}: recorded {expected}, got {got}")

    def tensors(self, where, recorded, got):
        for name, expected in recorded.items() if isinstance(recorded, dict) else enumerate(recorded):
            mine = summary(got[name])
            self.exact(f"{where} {name} dtype", expected["dtype"], mine["dtype"])
            self.near(f"{where} {name} sum", "sums", expected["sum"], mine["sum"])
            self.near(f"{where} {name}", "values", expected["first8"], mine["first8"])

    def final(self, record, models, optimizers):
        """The end state: ``models`` by prefix."""
        params, buffers = {}, {}
        for prefix, model in models.items():
            params |= {prefix + name: p for name, p in model.named_parameters()}
            buffers |= {prefix + name: b for name, b in model.named_buffers()}
        self.tensors("parameter", record["params"], params)
        self.tensors("buffer", record.get("buffers", {}), buffers)
        if "masters" in record:
            recorded = record["masters"]
            recorded = list(recorded.values()) if isinstance(recorded, dict) else recorded
            self.tensors("master", recorded, [p for o in optimizers for p in amp.master_params(o)])
        self.exact("amp.state_dict()", record["amp_state_dict"], dict(amp.state_dict()))
        if "model_state_dict_dtypes" in record:
            (model,) = models.values()
            dtypes = {name: dtype_name(t.dtype) for name, t in model.state_dict().items()}
            self.exact("state dict dtypes", record["model_state_dict_dtypes"], dtypes)
        if "optimizer_params_per_group" in record:
            groups = [group["params"] for group in optimizers[0].state_dict()["param_groups"]]
            self.exact("parameters of groups", record["optimizer_params_per_group"], groups)

    def check(self):
        if self.wrong:
            raise AssertionError("\n".join(self.wrong[:12]))


@contextlib.contextmanager
def printed():
    """Lines that are written meanwhile, once it is over."""
    lines, stream = [], io.StringIO()
    with contextlib.redirect_stdout(stream):
        yield lines
    lines.extend(stream.getvalue().splitlines())


def scales():
    state = list(amp.state_dict().values())
    return [s["loss_scale"] for s in state], [s["unskipped"] for s in state]


def expected_lines(record):
    lines = record["trace"].get("printed_by_initialize")
    while isinstance(lines, str):
        lines = load(lines.removeprefix("as in ").removesuffix(".json"))["trace"]["printed_by_initialize"]
    return lines


def run_plain(record, compare, wrap=None):
    """One model, one loss, micro-steps. ``wrap`` puts the model into something after `initialize`."""
    program, trace = record["program"], record["trace"]
    model = build(program["model"])
    layers = program.get("optimizer_layers")
    params = [p for name in layers for p in model[int(name)].parameters()] if layers else model.parameters()
    optimizer = make_optimizer(program["optimizer"], params)
    with printed() as lines:
        model, optimizer = amp.initialize(model, optimizer, **program["initialize"])
    if record["half"] != "bfloat16" and expected_lines(record) is not None:
        compare.exact("lines of initialize", expected_lines(record), lines)
    called = wrap(model) if wrap else model
    seen = []
    hooks = [layer.register_forward_hook(lambda m, a, out: seen.append(dtype_name(out.dtype))) for layer in model]
    records = {step["step"]: step for step in trace["steps"]}
    for step in range(1, program["steps"] + 1):
        if step == program.get("add_param_group", {}).get("before_step"):
            added = program["add_param_group"]
            new = [p for name in added["layers"] for p in model[int(name)].parameters()]
            optimizer.add_param_group({"params": new, **added["kwargs"]})
        if program.get("model_zero_grad"):
            model.zero_grad()
        optimizer.zero_grad()
        losses, after = [], []
        for micro in range(1, program.get("micro_steps", 1) + 1):
            losses.append(micro_step(program, called, optimizer, step, micro))
            after.append([scales()[0][0], scales()[1][0]])
        if step == 1:
            for hook in hooks:
                hook.remove()
            recorded = trace.get("layer_output_dtypes_first_forward")
            compare.exact("types of layers", recorded, seen[: len(model)] if recorded else None)
        grad_norms = norms(optimizer)
        with printed() as lines:
            optimizer.step()
        if step in records:
            compare_step(compare, records[step], losses, after, grad_norms, lines)
    compare.final(trace["final"], {"": model}, [optimizer])
    return model, optimizer


def micro_step(program, model, optimizer, step, micro):
    """A forward and a backward; gives the loss."""
    micro_steps = program.get("micro_steps", 1)
    s = program.get("fixed_s", (step - 1) * micro_steps + micro)
    x = inputs(program["batch"]["x"], s)
    loss = getattr(nn.functional, program["criterion"])(model(x), targets(program["batch"]["target"], s, len(x)))
    times = program.get("loss_times", {})
    factor = float(times.get(str(step), times.get(f"{step}.{micro}", 1)))
    delay = {"delay_unscale": True} if micro in program.get("delay_unscale", []) else {}
    with amp.scale_loss(loss * factor / micro_steps, optimizer, **delay) as scaled:
        scaled.backward()
    return loss.item()


def compare_step(compare, record, losses, after, grad_norms, lines):
    where = f"step {record['step']}"
    one = not isinstance(record["loss"], list)
    compare.near(f"{where} loss", "loss", record["loss"], losses[0] if one else losses)
    compare.exact(f"{where} scale", [record["loss_scale"], record["unskipped"]], after[-1])
    if "after_each_micro_step" in record:
        compare.exact(f"{where} micro-steps", record["after_each_micro_step"], after)
    compare.exact(f"{where} lines", record.get("printed", []), lines)
    if record["grad_norms"] is not None:
        compare.near(f"{where} gradient", "grad_norms", record["grad_norms"], grad_norms)
