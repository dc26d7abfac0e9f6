"""A training script as an apex user wrote it in 2019: amp O1, apex DDP, synchronised batch norm, a checkpoint."""

import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import convert_syncbn_model
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
parser.add_argument("--opt-level", type=str, default="O1")
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--checkpoint", type=str, default="amp_checkpoint.pt")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

use_cuda = torch.cuda.is_available()
device = torch.device("cuda", args.local_rank) if use_cuda else torch.device("cpu")
if use_cuda:
    torch.cuda.set_device(args.local_rank)
torch.distributed.init_process_group(backend="nccl" if use_cuda else "gloo", init_method="env://")
torch.manual_seed(torch.distributed.get_rank())

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
dataset = torch.utils.data.TensorDataset(images[:1440], labels[:1440])
sampler = torch.utils.data.distributed.DistributedSampler(dataset)
loader = torch.utils.data.DataLoader(dataset, batch_size=32, sampler=sampler)

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
)  # fmt: skip
model = convert_syncbn_model(model).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
model = DDP(model, delay_allreduce=True)

start = 0
if args.resume:
    checkpoint = torch.load(args.checkpoint, map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    start = checkpoint["epoch"]

for epoch in range(start, args.epochs):
    sampler.set_epoch(epoch)
    model.train()
    for data, target in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.to(device)), target.to(device))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 5.0)
        optimizer.step()

    model.eval()
    with torch.no_grad():
        correct = (model(images[1440:].to(device)).argmax(1).cpu() == labels[1440:]).float().mean().item()
    if torch.distributed.get_rank() == 0:
        scale = amp.state_dict()["loss_scaler0"]["loss_scale"]
        print(f"epoch {epoch}: loss {loss.item():.4f}, accuracy {correct:.4f}, loss scale {scale:g}")
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "amp": amp.state_dict(),
            "epoch": epoch + 1,
        }
        torch.save(state, args.checkpoint)
    torch.distributed.barrier()
