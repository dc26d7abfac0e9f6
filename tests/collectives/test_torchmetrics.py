"""torchmetrics works beside lockstep, unchanged: it sees the process group that init made."""

import pytest
import torch
from ranks import run_ranks
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

import lockstep

LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 2, 0, 1, 1, 0])
PREDICTIONS = torch.tensor([0, 1, 1, 0, 2, 2, 2, 1, 1, 0, 0])


def measure(rank, size):
    world = lockstep.init(device="cpu")
    accuracy = MulticlassAccuracy(3, average="micro")
    f1 = MulticlassF1Score(3, average="macro")
    for start in range(0, len(LABELS), 4):
        mine = slice(start + rank, min(start + 4, len(LABELS)), world.size)
        if len(LABELS[mine]):
            accuracy.update(PREDICTIONS[mine], LABELS[mine])
            f1.update(PREDICTIONS[mine], LABELS[mine])
    correct = sum(int(PREDICTIONS[i] == LABELS[i]) for i in range(rank, len(LABELS), size))
    ours = lockstep.mean(correct, len(range(rank, len(LABELS), size)))
    return float(accuracy.compute()), float(f1.compute()), ours


@pytest.mark.parametrize("size", [2, 3])
def test_accuracy_and_f1_over_ranks_equal_one_process(size):
    alone = run_ranks(measure, 1, 1, backend=None)[0]

    for result in run_ranks(measure, size, size):
        assert result == pytest.approx(alone, abs=1e-7)
        assert result[0] == pytest.approx(result[2], abs=1e-7)
