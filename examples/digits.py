"""Handwritten digits on every device: `lockstep run examples/digits.py`, or `python examples/digits.py` on one."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset, random_split

import lockstep


def digits():
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(labels))
    return random_split(data, [1437, 360])


def network():
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 16, 10)),
    )


def main():
    world = lockstep.init(seed=0)
    train_set, test_set = digits()
    model = lockstep.replicate(network())
    update = lockstep.Update(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    train = lockstep.DataLoader(train_set, batch_size=64, shuffle=True)
    test = lockstep.DataLoader(test_set, batch_size=120)

    for epoch in range(6):
        model.train()
        loss = seen = 0
        for images, labels in train:
            with update:
                losses = cross_entropy(model(images), labels, reduction="none")
                update.backward(losses)
            loss, seen = loss + losses.detach().sum(), seen + len(labels)
        loss = lockstep.mean(loss, seen)

        model.eval()
        correct = seen = 0
        with torch.no_grad():
            for images, labels in test:
                correct, seen = correct + (model(images).argmax(1) == labels).sum(), seen + len(labels)
        accuracy, tested = lockstep.mean(correct, seen), lockstep.total(seen)
        world.print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f} on {tested} images")
    world.print(f"accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
