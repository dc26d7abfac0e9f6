"""Saving and going on: apex's format, and the same numbers to the bit."""

import copy
import io

import pytest
import torch
from amp.programs import (
    Comparison,
    build,
    half_is,
    inputs,
    load,
    make_optimizer,
    names,
    norms,
    printed,
    scales,
    targets,
)
from torch import nn

from lockstep import amp

CASES = load("amp-state-dict")["trace"]["cases"]


def start(num_losses=1, opt_level="O2"):
    model = nn.Linear(2, 2)
    return amp.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), opt_level=opt_level, num_losses=num_losses, verbosity=0
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["case"])
def test_amp_states_are_saved_and_loaded_as_in_apex(case):
    name = case["case"]
    start(int(name.split("num_losses=")[1][0]) if "num_losses=" in name else 2 if "argument" in case else 1)
    if "argument" not in case:
        destination = {"x": 1} if "returns_the_destination" in case else None
        state = amp.state_dict(destination) if destination else amp.state_dict()
        assert case.get("state_dict", dict(state)) == dict(state)
        assert case.get("keys", list(state)) == list(state)
        assert (state is destination) == bool(destination)
        return
    with printed() as lines:
        if "raises" in case:
            with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"other\""):
                amp.load_state_dict(case["argument"])
        else:
            amp.load_state_dict(case["argument"])

    assert case["printed"] == lines
    assert case["state_dict_after"] == dict(amp.state_dict())


def test_pain18_states_of_a_process_without_amp_are_empty_and_ignored():
    before = amp.state_dict()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 4.0, "unskipped": 1}})
    amp.initialize(nn.Linear(2, 2), enabled=False)

    assert (dict(before), dict(amp.state_dict())) == ({}, {})


class Run:
    """A training that can be saved and gone on with."""

    def __init__(self, program):
        self.program = program
        self.model = build(program["model"])
        self.optimizer = make_optimizer(program["optimizer"], self.model.parameters())
        self.model, self.optimizer = amp.initialize(self.model, self.optimizer, verbosity=0, **program["initialize"])

    def step(self, number):
        program = self.program
        self.optimizer.zero_grad()
        x = inputs(program["batch"]["x"], number)
        loss = nn.functional.cross_entropy(self.model(x), targets(program["batch"]["target"], number, len(x)))
        with amp.scale_loss(loss * float(program["loss_times"].get(str(number), 1)), self.optimizer) as scaled:
            scaled.backward()
        grad_norms = norms(self.optimizer)
        self.optimizer.step()
        return loss.item(), scales(), grad_norms

    def save(self):
        parts = {"model": self.model, "optimizer": self.optimizer, "amp": amp}
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        return file.getvalue()

    def load(self, saved, order=("model", "optimizer", "amp")):
        states = torch.load(io.BytesIO(saved))
        for part in order:
            {"model": self.model, "optimizer": self.optimizer, "amp": amp}[part].load_state_dict(states[part])


@pytest.mark.parametrize("name", names("roundtrip-"))
def test_a_run_that_is_saved_and_resumed_goes_on_as_the_uninterrupted_one_of_apex(name):
    record = load(name)
    compare, program = Comparison(record, tight=False), record["program"]
    with half_is(record["half"]):
        run = Run(program)
        recorded = record["trace"]["steps"]
        for number in range(1, 6):
            compare.near(f"step {number}", "loss", recorded[number - 1]["loss"], run.step(number)[0])
        saved = run.save()
        compare.exact(
            "saved amp", record["trace"]["saved_after_step_5"]["amp"], dict(torch.load(io.BytesIO(saved))["amp"])
        )
        run = Run(program)
        run.load(saved)
        for number in range(6, 11):
            loss, (scale, unskipped), grad_norms = run.step(number)
            row = recorded[number - 1]
            compare.near(f"step {number}", "loss", row["loss"], loss)
            compare.exact(f"step {number}", [row["loss_scale"], row["unskipped"]], [scale[0], unskipped[0]])
            if row["grad_norms"]:
                compare.near(f"step {number}", "grad_norms", row["grad_norms"], grad_norms)
        compare.final(record["trace"]["final"], {"": run.model}, [run.optimizer])

    compare.check()


def program_at(level, optimizer):
    program = load("roundtrip-O2-float16")["program"]
    options = {"O0": {"loss_scale": "dynamic"}, "O3": {"loss_scale": "dynamic"}}.get(level, {})
    return program | {
        "initialize": {"opt_level": level, **options},
        "optimizer": {"class": f"torch.optim.{optimizer}", "kwargs": {"lr": 0.002}},
        "loss_times": {"3": "inf", "8": "inf"},
    }


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("order", [("model", "optimizer", "amp"), ("amp", "optimizer", "model")], ids="-".join)
def test_the_next_ten_losses_after_saving_in_the_middle_are_the_same_to_the_bit(level, half, order):
    optimizer = "SGD" if level == "O3" and half == "float16" else "AdamW"  # Adam's eps is 0 in fp16
    with half_is(half):
        run = Run(program_at(level, optimizer))
        for number in range(1, 6):
            run.step(number)
        saved = run.save()
        uninterrupted = [run.step(number) for number in range(6, 16)]
        run = Run(program_at(level, optimizer))
        run.load(saved, order)
        resumed = [run.step(number) for number in range(6, 16)]

    assert list(map(repr, uninterrupted)) == list(map(repr, resumed))  # skipped steps have norms that are nan


def test_the_old_way_of_saving_masters_by_hand_goes_on_to_the_bit():
    """As BERT scripts did: the private names that they call are there."""
    with half_is("float16"):
        run = Run(program_at("O2", "AdamW"))
        for number in range(1, 6):
            run.step(number)
        halves = {name: p.detach().clone() for name, p in [*run.model.named_parameters(), *run.model.named_buffers()]}
        optimizer = copy.deepcopy(run.optimizer.state_dict())
        masters = [m.detach().clone() for m in amp.master_params(run.optimizer)]
        scaler = amp.state_dict()
        uninterrupted = [run.step(number) for number in range(6, 16)]
        run = Run(program_at("O2", "AdamW"))
        run.model.load_state_dict({name: t.float() for name, t in halves.items()})
        run.optimizer._lazy_init_maybe_master_weights()
        run.optimizer._amp_stash.lazy_init_called = True
        run.optimizer.load_state_dict(optimizer)
        for param, saved in zip(amp.master_params(run.optimizer), masters, strict=True):
            param.data.copy_(saved.data)
        amp.load_state_dict(scaler)
        resumed = [run.step(number) for number in range(6, 16)]

    assert list(map(repr, uninterrupted)) == list(map(repr, resumed))  # skipped steps have norms that are nan


def test_pain14_model_state_dict_at_o2_holds_the_masters_in_fp32():
    with half_is("bfloat16"):
        run = Run(program_at("O2", "AdamW"))
        for number in range(1, 4):
            run.step(number)
        state = run.model.state_dict()
        masters = dict(zip((n for n, _ in run.model.named_parameters()), amp.master_params(run.optimizer), strict=True))

    assert {name: t.dtype for name, t in state.items() if t.is_floating_point()} == {
        name: torch.float32 for name, t in state.items() if t.is_floating_point()
    }
    assert [name for name, master in masters.items() if not torch.equal(master, state[name])] == []
    assert not {t.data_ptr() for t in masters.values() if t is not None} & {
        state[n].data_ptr() for n in ("0.weight", "3.weight", "5.weight")
    }


@pytest.mark.parametrize("when", ["before the first step", "after steps"])
def test_pain14_loading_into_a_model_at_o2_is_not_overwritten_by_the_next_step(when):
    with half_is("bfloat16"):
        run = Run(program_at("O2", "SGD"))
        for number in range(1, 3) if when == "after steps" else []:
            run.step(number)
        wanted = {name: torch.full_like(t, 0.5) for name, t in run.model.state_dict().items() if t.is_floating_point()}
        run.model.load_state_dict(wanted, strict=False)
        run.optimizer.param_groups[0]["lr"] = 0.0
        run.step(9)

    assert [n for n, p in run.model.named_parameters() if not torch.equal(p, torch.full_like(p, 0.5))] == []


@pytest.mark.parametrize("when", ["before the first step", "after steps"])
def test_what_is_written_into_parameters_at_o2_survives_the_next_step(when):
    """Clamps, swaps for evaluation and initialisations by hand: `p.data` says nothing of them."""
    with half_is("bfloat16"):
        run = Run(program_at("O2", "SGD"))
        for number in range(1, 3) if when == "after steps" else []:
            run.step(number)
        for param in run.model.parameters():
            param.data.clamp_(-0.01, 0.01)
        run.optimizer.param_groups[0]["lr"] = 0.0
        run.step(9)

    assert max(p.abs().max().item() for p in run.model.parameters()) <= 0.0101


def test_optimizer_state_loaded_before_the_first_step_stays_in_fp32():
    with half_is("float16"):
        run = Run(program_at("O2", "AdamW"))
        run.step(1)
        state = run.optimizer.state_dict()
        run = Run(program_at("O2", "AdamW"))
        run.optimizer.load_state_dict(state)
        got = run.optimizer.state_dict()["state"]

    assert all(torch.equal(state["state"][i]["exp_avg"], got[i]["exp_avg"]) for i in got)
