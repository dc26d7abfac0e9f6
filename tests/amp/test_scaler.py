"""The loss scale by itself."""

import pytest
import torch
from amp.programs import load
from hypothesis import given
from hypothesis import strategies as st

from lockstep.amp.scaler import SMALLEST_SCALE, LossScaler

RECORD = load("amp-loss-scaler")["trace"]


@pytest.mark.parametrize("case", RECORD["cases"], ids=lambda case: case["case"])
def test_the_scale_moves_as_in_apex(case):
    scaler, got = LossScaler(**case["constructor"]), []
    for row in case["sequence"]:
        entry = dict(row)
        if "gradients" in row:
            scaler.clear_overflow_state()
            bad = float("inf") if row["gradients"] == "overflow" else 2.0
            scaler.unscale([torch.tensor([1.0, bad]).half()], [torch.zeros(2)], scaler.loss_scale())
            entry["update_scale_returns"] = scaler.update_scale()
        else:
            entry["dynamic"] = scaler.dynamic
        got.append(entry | {"loss_scale": scaler.loss_scale(), "unskipped": scaler._unskipped})

    assert case["sequence"] == got


def test_unscaling_adds_up_as_in_apex():
    grads, master, stashed = torch.tensor([1.0, 2.0, 3.0]).half(), torch.zeros(3), torch.tensor([10.0, 20.0, 30.0])
    got = []
    LossScaler(4.0).unscale([grads], [master], 4.0)
    got.append(master.tolist())
    LossScaler(4.0).unscale_with_stashed([grads], [stashed], [master])
    got.append(master.tolist())
    LossScaler(4.0).unscale_with_stashed([grads], [stashed], [master], scale_override=(8, 2, 4))
    got.append(master.tolist())

    assert [row["master"] for row in RECORD["arithmetic"]] == got


def test_pain6_a_scale_never_reaches_zero():
    scaler = LossScaler("dynamic")
    for _ in range(1200):
        scaler.clear_overflow_state()
        scaler.check_and_scale([torch.tensor([float("nan")])], 1 / scaler.loss_scale())
        scaler.update_scale()

    assert scaler.loss_scale() == SMALLEST_SCALE


dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


@given(st.lists(st.tuples(dtypes, st.integers(0, 5)), max_size=5), st.integers(0, 24), st.data())
def test_one_pass_unscales_every_type_and_sees_any_value_that_is_not_finite(shapes, exponent, data):
    grads = [torch.full((n,), 0.5).to(dtype) * 2 for dtype, n in shapes]
    places = [(i, j) for i, grad in enumerate(grads) for j in range(len(grad))]
    bad = data.draw(st.sampled_from([None, *places]))
    if bad is not None:
        grads[bad[0]][bad[1]] = data.draw(st.sampled_from([float("inf"), -float("inf"), float("nan")]))
    expected = [(grad.double() / 2**exponent).to(grad.dtype) for grad in grads]
    scaler = LossScaler("dynamic")
    scaler.check_and_scale(grads, 2.0**-exponent)

    assert scaler.decide() == (bad is not None)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(expected, grads, strict=True))


def test_sparse_gradients_are_unscaled_too():
    grad = torch.sparse_coo_tensor([[1]], [[2.0, 4.0]], (3, 2), check_invariants=True)
    LossScaler("dynamic").check_and_scale([grad], 0.5)

    assert grad.to_dense().tolist() == [[0, 0], [1, 2], [0, 0]]
