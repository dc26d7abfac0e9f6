"""apex.fp16_utils against the recorded traces; FP16_Optimizer in its two ages."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from faces import apex
from torch import nn
from torch.nn.functional import cross_entropy

from tests.compat.traces import INFINITE, classes, departures, fill, inputs, load, near, sequential

fp16 = apex.fp16_utils
NAMES = [
    "static-float16",
    "defaults-float16",
    "dynamic-float16",
    "dynamic-bfloat16",
    "clip-float16",
    "two-backwards-float16",
]


def run_program(program):
    """The loop that the file describes; what it records at each step, and what is left."""
    network = fp16.network_to_half(fill(sequential(program["model"]["torch.nn.Sequential of"])))
    kind = getattr(torch.optim, program["optimizer"]["class"].rpartition(".")[2])
    optimizer = fp16.FP16_Optimizer(
        kind(network.parameters(), **program["optimizer"]["kwargs"]), **program["FP16_Optimizer"]
    )
    micro, s, steps = program.get("micro_steps", 1), 0, []
    count, width = program["batch"]["x"]
    for step in range(1, program["steps"] + 1):
        optimizer.zero_grad()
        losses, found = [], {}
        for part in range(1, micro + 1):
            s += 1
            x, target = inputs((count, width), s), classes(count, program["batch"]["target"]["classes"], s)
            out = network(x)
            loss = cross_entropy(out.float(), target)
            losses.append(loss.item())
            key = f"{step}.{part}" if micro > 1 else str(step)
            factor = program.get("loss_times", {}).get(key, 1.0)
            loss = loss * INFINITE.get(factor, factor) / micro
            optimizer.backward(loss, update_master_grads=micro == 1)
        if micro > 1:
            optimizer.update_master_grads()
        masters = [param for group in optimizer.param_groups for param in group["params"]]
        found |= {
            "skipped": optimizer.overflow,
            "loss_scale": optimizer.loss_scale,
            "unskipped": optimizer.loss_scaler._unskipped,
        }
        found |= {"loss": losses if micro > 1 else losses[0], "printed": []}
        # Recorded after clipping where there is any: norms are of what step() gets, before clipping of what came.
        found["grad_norms"] = None if optimizer.overflow else [float(param.grad.norm()) for param in masters]
        if program.get("max_norm"):
            found["returned_by_clip_master_grads"] = float(optimizer.clip_master_grads(program["max_norm"]))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            optimizer.step()
        found["printed"] = printed.getvalue().splitlines()
        steps.append(found)
    return network, optimizer, steps, out


@pytest.fixture
def as_recorded():
    """One thread; and without oneDNN, whose half-precision products round differently on another processor."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    before, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    yield
    torch.backends.mkldnn.enabled = before
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("as_recorded")
def test_golden_fp16_optimizer(name, monkeypatch):
    golden = load(f"fp16-optimizer-{name}")
    program, tight = golden["program"], golden["tolerance"]["tight"]
    monkeypatch.setenv("LOCKSTEP_HALF", golden["half"])

    network, optimizer, steps, out = run_program(program)

    wrong = []
    for recorded, got in zip(golden["trace"]["steps"], steps, strict=True):
        exact = ("skipped", "loss_scale", "unskipped")
        wrong += [(recorded["step"], key, got[key]) for key in exact if recorded[key] != got[key]]
        wrong += (
            [(recorded["step"], "printed", got["printed"])] if recorded.get("printed", []) != got["printed"] else []
        )
        for key, kind in (
            ("loss", "loss"),
            ("grad_norms", "grad_norms"),
            ("returned_by_clip_master_grads", "grad_norms"),
        ):
            if recorded.get(key) is None and got.get(key) is None:
                continue
            if not near(recorded[key], got[key], tight[kind]):
                wrong.append((recorded["step"], key, got[key], recorded[key]))
    final = golden["trace"]["final"]
    tensors = [(final["params"][key], param) for key, param in network.named_parameters()]
    tensors += [(final["buffers"][key], buffer) for key, buffer in network.named_buffers()]
    masters = [param for group in optimizer.param_groups for param in group["params"]]
    tensors += list(zip(final["masters"], masters, strict=True))
    wrong += [
        found for recorded, got in tensors if (found := departures(recorded, got, tight["values"], tight["sums"]))
    ]

    assert [] == wrong
    assert final["state_dict_keys"] == {key: type(value).__name__ for key, value in optimizer.state_dict().items()}
    assert final["fp32_from_fp16_lengths"] == [len(group) for group in optimizer.fp32_from_fp16_groups]
    assert final["model_state_dict_dtypes"] == {key: str(x.dtype)[6:] for key, x in network.state_dict().items()}
    assert golden["trace"]["model_output_dtype"] == str(out.dtype)[6:]


def small_net():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, affine=False), nn.GroupNorm(2, 4))


def half_linear():
    model = fill(nn.Linear(3, 2)).half()
    model.weight.grad, model.bias.grad = torch.full((2, 3), 0.5).half(), torch.full((2,), 1.5).half()
    return model


def state_dtypes(model):
    return {key: str(x.dtype)[6:] for key, x in model.state_dict().items()}


def listed(tensors):
    return [[str(x.dtype)[6:], x.detach().reshape(-1).tolist()] for x in tensors]


def shapes(tensors):
    return [[str(x.dtype)[6:], list(x.shape), x.requires_grad] for x in tensors]


def test_golden_fp16_functions():
    recorded = load("fp16-utils-functions")["trace"]
    found = {
        "network_to_half(net) state_dict dtypes": state_dtypes(fp16.network_to_half(small_net())),
        "convert_network(net, torch.float16) dtypes": state_dtypes(fp16.convert_network(small_net(), torch.float16)),
        "BN_convert_float(net.half()) dtypes": state_dtypes(fp16.BN_convert_float(small_net().half())),
        "FP16Model(net) dtypes": state_dtypes(fp16.FP16Model(small_net())),
        "FP16Model(net)(float input) output dtype": str(fp16.FP16Model(small_net())(torch.ones(2, 3, 4, 4)).dtype)[6:],
        "to_python_float(tensor([2.5]))": fp16.to_python_float(torch.tensor([2.5])),
    }
    model, master = fp16.prep_param_lists(half_linear())
    found["prep_param_lists(half Linear(3,2))"] = {"model": [str(x.dtype)[6:] for x in model], "master": shapes(master)}
    fp16.model_grads_to_master_grads(model, master)
    found["model_grads_to_master_grads"] = listed(x.grad for x in master)
    for x in master:
        x.data.fill_(1 / 3)
    fp16.master_params_to_model_params(model, master)
    found["master_params_to_model_params with masters 1/3"] = listed(model)
    model, master = fp16.prep_param_lists(half_linear(), flat_master=True)
    flat = [[*shapes(master)[0], type(master[0]).__name__]]
    found["prep_param_lists(half Linear(3,2), flat_master=True)"] = {
        "model": [str(x.dtype)[6:] for x in model],
        "master": flat,
    }
    fp16.model_grads_to_master_grads(model, master, flat_master=True)
    found["model_grads_to_master_grads flat"] = listed(x.grad for x in master)

    rounded = recorded.pop("master_params_to_model_params with masters 1/3")
    mine = found.pop("master_params_to_model_params with masters 1/3")
    assert recorded == found
    assert all(a[0] == b[0] and near(a[1], b[1], {"rtol": 1e-7, "atol": 0}) for a, b in zip(rounded, mine, strict=True))


def test_flat_masters_go_back_to_the_model():
    model, master = fp16.prep_param_lists(half_linear(), flat_master=True)
    with torch.no_grad():
        master[0].copy_(torch.arange(8.0))

    fp16.master_params_to_model_params(model, master, flat_master=True)

    assert [[0, 1, 2], [3, 4, 5]] == model[0].tolist()
    assert [6, 7] == model[1].tolist()


def test_one_flat_master_of_several_dtypes_is_refused(capsys):
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.Linear(2, 2))

    with pytest.raises(RuntimeError, match="mixture of parameters"):
        fp16.prep_param_lists(model, flat_master=True)
    assert "Error in prep_param_lists" in capsys.readouterr().out


def scaler_sequence(recorded):
    scaler = fp16.DynamicLossScaler(**recorded["constructor"])
    wrong = []
    for entry in recorded["sequence"]:
        if not entry.get("before_any"):
            param = nn.Parameter(torch.ones(2))
            param.grad = torch.tensor([1.0, 2.0 if entry["gradients"] == "good" else float("nan")])
            overflow = scaler.has_overflow([param])
            scaler.update_scale(overflow)
            wrong += [(entry, overflow)] if overflow != entry["has_overflow"] else []
        got = (scaler.loss_scale, scaler.cur_iter, scaler.last_overflow_iter)
        # The file keeps eight digits.
        if (float(f"{got[0]:.8g}"), *got[1:]) != (entry["loss_scale"], entry["cur_iter"], entry["last_overflow_iter"]):
            wrong.append((entry, got))
    return wrong


@pytest.mark.parametrize(
    "recorded",
    [case for case in load("fp16-utils-scalers")["trace"]["sequences"] if case["class"] == "DynamicLossScaler"],
    ids=lambda case: case["case"],
)
def test_golden_dynamic_loss_scaler(recorded):
    assert [] == scaler_sequence(recorded)


def test_golden_static_loss_scaler():
    (recorded,) = [case for case in load("fp16-utils-scalers")["trace"]["sequences"] if case["class"] == "LossScaler"]
    scaler = fp16.LossScaler(**recorded["constructor"])
    param = nn.Parameter(torch.ones(1))
    param.grad = torch.tensor([float("inf")])
    w = nn.Parameter(torch.tensor([1.0, 2.0]))

    overflow = scaler.has_overflow([param])
    scaler.update_scale(True)
    scaler.backward((w * w).sum())

    assert recorded["has_overflow with infinite gradient"] == overflow
    assert recorded["loss_scale after update_scale(True)"] == scaler.loss_scale
    assert recorded["gradient of w after backward((w*w).sum()), w = [1, 2]"] == w.grad.tolist()
    assert recorded["scale_gradient(None, ([1.0],), None)"] == [
        x.tolist() for x in scaler.scale_gradient(None, (torch.tensor([1.0]),), None)
    ]


def half_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).half()


AGES = {
    "fp16_utils": lambda optimizer, **kw: fp16.FP16_Optimizer(optimizer, dynamic_loss_scale=True, verbose=False, **kw),
    "contrib": lambda optimizer: apex.contrib.optimizers.FP16_Optimizer(
        optimizer, dynamic_loss_scale=True, verbose=False
    ),
}


def train(model, optimizer, first, steps, infinite=()):
    losses = []
    for t in range(first, first + steps):
        optimizer.zero_grad()
        x = torch.sin(torch.arange(12.0) + t).reshape(3, 4).half()
        loss = model(x).float().square().mean()
        losses.append(loss.item())
        optimizer.backward(loss * (float("inf") if t in infinite else 1.0))
        with contextlib.redirect_stdout(io.StringIO()):
            optimizer.step()
    return losses


@pytest.mark.parametrize("age", AGES)
def test_saving_and_going_on_changes_no_bit(age):
    def make():
        model = half_model()
        return model, AGES[age](apex.optimizers.FusedAdam(model.parameters(), lr=0.01))

    whole, reference = make()
    train(whole, reference, 0, 5, infinite=(3,))
    buffer = io.BytesIO()
    torch.save({"model": whole.state_dict(), "optimizer": reference.state_dict()}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=False)
    other, optimizer = make()
    other.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])

    assert train(whole, reference, 5, 10, infinite=(8,)) == train(other, optimizer, 5, 10, infinite=(8,))
    assert reference.loss_scale == optimizer.loss_scale


@pytest.mark.parametrize("age", AGES)
def test_masters_collect_what_half_rounds_away(age):
    param = nn.Parameter(torch.ones(3, dtype=torch.float16))
    optimizer = AGES[age](torch.optim.SGD([param], lr=1e-4))
    for _ in range(20):
        optimizer.zero_grad()
        optimizer.backward(param.float().sum())
        optimizer.step()

    assert 0.998 == round(float(param.detach()[0]), 3)


@pytest.mark.parametrize("age", AGES)
def test_schedulers_take_it_for_an_optimizer(age):
    model = half_model()
    optimizer = AGES[age](torch.optim.SGD(model.parameters(), lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    train(model, optimizer, 0, 1)
    scheduler.step()
    train(model, optimizer, 1, 1, infinite=(1,))
    scheduler.step()

    assert 0.01 == pytest.approx(optimizer.param_groups[0]["lr"])


def test_a_closure_is_called_again_until_nothing_overflows(capsys):
    model = half_model()
    optimizer = AGES["fp16_utils"](torch.optim.SGD(model.parameters(), lr=0.1))
    factors = iter([float("inf"), float("inf"), 1.0])

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 4).half()).float().sum()
        optimizer.backward(loss * next(factors))
        return loss

    before = copy.deepcopy(model.state_dict())
    assert optimizer.step(closure).isfinite()
    assert [
        f"OVERFLOW within closure! Skipping step, reducing loss scale to {scale}" for scale in (32768.0, 16384.0)
    ] == capsys.readouterr().out.splitlines()
    assert not torch.equal(before["0.weight"], model[0].weight)


def test_the_scaler_is_saved_under_apexs_path_with_what_apex_reads():
    optimizer = AGES["fp16_utils"](torch.optim.SGD(half_model().parameters(), lr=0.1))
    data = pickle.dumps(optimizer.state_dict()["loss_scaler"], protocol=0)

    assert b"apex.amp.scaler\nLossScaler" in data
    wanted = [
        "_has_overflow",
        "_loss_scale",
        "_max_loss_scale",
        "_min_loss_scale",
        "_overflow_buf",
        "_scale_seq_len",
        "_unskipped",
        "dynamic",
    ]
    assert wanted == sorted(optimizer.loss_scaler.__getstate__())


def test_older_checkpoints_with_fp16_utils_own_scaler_load():
    model = half_model()
    optimizer = AGES["fp16_utils"](torch.optim.SGD(model.parameters(), lr=0.1))
    saved = optimizer.state_dict()
    saved["loss_scaler"] = fp16.DynamicLossScaler(init_scale=64.0, scale_window=10)

    optimizer.load_state_dict(saved)

    assert 64.0 == optimizer.loss_scale
    assert optimizer.loss_scaler.dynamic


SCALERS = {
    "amp's": lambda state: state["loss_scaler"],
    "fp16_utils' dynamic": lambda _: fp16.DynamicLossScaler(init_scale=64.0),
    "fp16_utils' static": lambda _: fp16.LossScaler(8.0),
}


@pytest.mark.parametrize("name", SCALERS)
def test_pain30_a_checkpoint_is_read_with_torchs_own_default(name):
    """Which makes no objects from a file but those that it was told of."""
    optimizer = AGES["fp16_utils"](torch.optim.SGD(half_model().parameters(), lr=0.1))
    state = optimizer.state_dict()
    state["loss_scaler"] = SCALERS[name](state)
    torch.save({"optimizer": state}, file := io.BytesIO())
    file.seek(0)
    loaded = torch.load(file)["optimizer"]
    optimizer.load_state_dict(loaded)

    assert type(state["loss_scaler"]) is type(loaded["loss_scaler"])
    assert {"amp's": 65536.0, "fp16_utils' dynamic": 64.0, "fp16_utils' static": 8.0}[name] == optimizer.loss_scale


def test_a_checkpoint_with_one_flat_master_a_group_loads():
    """As it was before August 2019; everything is the concatenation of what the lists hold."""
    model = half_model()
    optimizer = AGES["contrib"](apex.optimizers.FusedAdam(model.parameters()))
    train(model, optimizer, 0, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    flat = copy.deepcopy(saved)
    masters = flat.pop("fp32_groups")
    flat["fp32_groups_flat"] = [torch.cat([x.detach().reshape(-1) for x in group]) for group in masters]
    inner = flat["optimizer_state_dict"]
    names = ("exp_avg", "exp_avg_sq")
    inner["state"] = {0: {name: torch.cat([inner["state"][i][name].reshape(-1) for i in range(4)]) for name in names}}
    inner["param_groups"][0]["params"] = [0]
    results = []
    for state in (saved, flat):
        other = half_model()
        other.load_state_dict(model.state_dict())
        resumed = AGES["contrib"](apex.optimizers.FusedAdam(other.parameters()))
        resumed.load_state_dict(state)
        results.append(train(other, resumed, 3, 5))

    assert results[0] == results[1]
    assert len(set(results[0])) == 5


def test_the_contrib_optimizer_skips_at_any_overflow_and_says_so(capsys):
    param = nn.Parameter(torch.ones(1).half())
    optimizer = apex.contrib.optimizers.FP16_Optimizer(torch.optim.SGD([param], lr=1.0), static_loss_scale=8.0)
    optimizer.backward(param.float().sum() * float("inf"))
    optimizer.step()

    assert [1.0] == param.tolist()
    assert "\nGrad overflow on iteration 0\nUsing static loss scale of 8.0\n" == capsys.readouterr().out


def test_the_contrib_optimizer_takes_no_arguments_for_its_scale():
    with pytest.raises(SystemError):
        apex.contrib.optimizers.FP16_Optimizer(
            torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0), dynamic_loss_scale=True, dynamic_loss_args={}
        )


def test_the_old_pair_of_bert_scripts_trains_as_its_formula():
    """FusedAdam(max_grad_norm) in FP16_Optimizer: masters follow the float32 run on the same gradients."""
    model = half_model()
    inner = apex.optimizers.FusedAdam(model.parameters(), lr=0.01, bias_correction=False, max_grad_norm=1.0)
    optimizer = apex.optimizers.FP16_Optimizer(inner, dynamic_loss_scale=True)

    losses = train(model, optimizer, 0, 40)

    assert sum(losses[-5:]) < 0.5 * sum(losses[:5])
    assert all(a.dtype == torch.float32 for group in optimizer.fp32_groups for a in group)
