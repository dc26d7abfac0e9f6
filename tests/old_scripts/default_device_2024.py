# torchrun, torch.set_default_device, devices by number, generators on the device, eager connection to one device.
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

rank = int(os.environ["LOCAL_RANK"])
device = torch.device(rank)
torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", rank))
torch.set_default_device(device)
assert torch.zeros(1).device == device

torch.manual_seed(1)
with torch.device("cpu"):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
model = nn.parallel.DistributedDataParallel(model.to(device), device_ids=[device])
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
rng = np.random.RandomState(0)
x, y = torch.tensor(rng.randn(16, 6), dtype=torch.float32), torch.tensor(rng.randint(0, 3, 16))
assert x.is_cuda
shuffle = torch.Generator(device=device).manual_seed(3)
for step in range(6):
    order = torch.randperm(16, generator=shuffle)[dist.get_rank()::dist.get_world_size()]
    with torch.autocast(device.type, enabled=False):
        loss = nn.functional.cross_entropy(model(x[order]), y[order])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
dist.barrier(device_ids=[rank])
if dist.get_rank() == 0:
    print(f"final loss {nn.functional.cross_entropy(model.module(x), y).item():.6f}")
dist.destroy_process_group()
