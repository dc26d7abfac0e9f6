# torchrun, resumed from a checkpoint of GPU 0 on every rank.
import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
dist.init_process_group("nccl")
path = os.path.join(tempfile.gettempdir(), "resume.pt")
rng = np.random.RandomState(0)
x = torch.as_tensor(rng.randn(16, 6), dtype=torch.float32, device="cuda")
y = torch.as_tensor(rng.randint(0, 3, 16), device="cuda")
mine = torch.arange(dist.get_rank(), 16, dist.get_world_size(), device=x.device)


def build():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(local_rank)
    model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
    return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.0)


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
        optimizer.step()


torch.manual_seed(1)
model, optimizer = build()
train(model, optimizer, 3)
if dist.get_rank() == 0:
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.cuda.get_rng_state()}, path)
dist.barrier()
model, optimizer = build()
checkpoint = torch.load(path, map_location={"cuda:0": "cuda:%d" % local_rank})
model.module.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
torch.cuda.set_rng_state(checkpoint["rng"].cpu())
assert next(model.parameters()).device == torch.device("cuda", local_rank)
train(model, optimizer, 3)
total = nn.functional.cross_entropy(model.module(x), y)
if dist.get_rank() == 0:
    print("final loss %.6f" % total.item())
    os.remove(path)
dist.destroy_process_group()
