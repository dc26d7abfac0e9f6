"""Random models, buckets and sets of used parameters, on ranks that draw the same examples."""

import warnings
from itertools import chain

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from parallel.cases import Tool
from ranks import run_ranks
from torch import nn

import lockstep

EXAMPLES = 25


class Layers(nn.Module):
    def __init__(self, widths, kinds):
        super().__init__()
        torch.manual_seed(7)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # layers without any output are layers too
            pairs = zip(widths, kinds, strict=True)
            self.layers = nn.ModuleList(nn.Linear(5, width, dtype=kind) for width, kind in pairs)

    def forward(self, x, used):
        outs = [self.layers[i](x.to(self.layers[i].weight.dtype)) for i in sorted(used) if i < len(self.layers)]
        return sum(out.abs().square().sum().double() for out in outs) + x.sum() * 0


examples = st.fixed_dictionaries(
    {
        "layers": st.lists(
            st.tuples(st.integers(0, 40), st.sampled_from([torch.float64, torch.complex128])), min_size=1, max_size=6
        ),
        "caps": st.tuples(st.sampled_from([1e-6, 1e-3, 1.0]), st.sampled_from([1e-6, 2e-3, 25.0])),
        "used": st.lists(st.lists(st.sets(st.integers(0, 5)), min_size=4, max_size=4), min_size=1, max_size=4),
        "unsent": st.lists(st.booleans(), min_size=4, max_size=4),
    }
)


def train(tool, example, attach, no_sync):
    """Gradients after each step that was sent."""
    model = attach(Layers(*zip(*example["layers"], strict=True)))
    found = []
    for step, used in enumerate(example["used"]):
        loss = tool.loss(lambda number, x, used=used: model(x, used[number]), step)
        last = step == len(example["used"]) - 1
        if example["unsent"][step] and not last:
            with no_sync(model):
                loss.backward() if loss.requires_grad else None
            continue
        loss.backward() if loss.requires_grad else None
        lockstep.sync_gradients(model) if attach is not plain else None
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    return found


def plain(model):
    return model


def differences(rank, size):
    """How many examples were tried, and those that came out differently from one process."""
    tried, wrong = [], []

    @settings(
        derandomize=True,
        database=None,
        deadline=None,
        max_examples=EXAMPLES,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(example=examples)
    def compare(example):
        tried.append(example)
        first, others = example["caps"]
        actual = train(
            Tool([rank]),
            example,
            lambda model: lockstep.replicate(model, first_bucket_mb=first, bucket_mb=others),
            lockstep.no_sync,
        )
        expected = train(Tool(range(size)), example, plain, Tool([]).no_sync)
        pairs = zip(chain.from_iterable(actual), chain.from_iterable(expected), strict=True)
        if not all(same(*pair) for pair in pairs):
            wrong.append(example)

    compare()
    return len(tried), wrong


def same(actual, expected):
    if actual is None or expected is None:
        return actual is expected
    return torch.allclose(actual, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("size", [2, 3])
def test_any_model_any_buckets_any_unused_set_is_as_one_process(size):
    for tried, wrong in run_ranks(differences, size, size):
        assert tried == EXAMPLES
        assert wrong == []
