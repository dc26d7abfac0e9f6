"""A training that depends on everything a checkpoint has to bring back: order, dropout, optimizer, schedule, scale."""

import random

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

import lockstep

SAMPLES, BATCH = 50, 12  # five global batches an epoch, the last with two samples


class Noisy(torch.utils.data.Dataset):
    """Samples with augmentation from all three generators, drawn in the rank's own process."""

    def __init__(self, noise):
        self.noise = noise

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        noise = self.noise * (random.random() + np.random.rand() + float(torch.rand(())))
        return torch.full((6,), index / SAMPLES) + torch.arange(6.0) * noise, float(index % 7)


def network(dropout=0.0):
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(dropout), nn.Tanh(), nn.Linear(16, 1))


class Run:
    """Everything of one run, and what it has seen."""

    def __init__(self, directory, *, noise=0.0, dropout=0.0, accumulate=1, double=False, **options):
        self.world = lockstep.init(device="cpu", seed=3)
        model = network(dropout)
        self.model = lockstep.replicate(model.double() if double else model)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        self.update = lockstep.Update(self.model, optimizer, accumulate=accumulate, scheduler=scheduler)
        self.train = lockstep.DataLoader(Noisy(noise), batch_size=BATCH, shuffle=True)
        self.seen, self.losses, self.epochs = [], [], []
        parts = {"model": self.model, "update": self.update, "train": self.train}
        self.checkpoint = lockstep.Checkpoint(directory, **parts, **options)

    def go(self, epochs, stop_after=None):
        """Train; ``stop_after`` leaves the loop behind so many batches, as if the script had ended there."""
        batches = 0
        for epoch in self.checkpoint.epochs(epochs):
            self.epochs.append(epoch)
            for features, labels in self.train:
                x = features.to(next(self.model.parameters()).dtype)
                with self.update:
                    found = self.model(x).squeeze(1)
                    self.update.backward(mse_loss(found, labels.to(found.dtype), reduction="none"))
                if self.update.stepped:
                    self.losses.append(self.update.loss)
                given = self.train.positions()
                self.seen.append(sorted(lockstep.gather(given[len(given) - len(labels) :]).tolist()))
                self.checkpoint.step()
                batches += 1
                if batches == stop_after:
                    return self
        return self

    def weights(self):
        """Every value of the model, as bytes."""
        return {name: value.numpy().tobytes() for name, value in self.model.state_dict().items()}
