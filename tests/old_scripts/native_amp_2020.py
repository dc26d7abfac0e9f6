# python -m torch.distributed.launch --use_env main.py with torch.cuda.amp.
import os

import numpy as np
import torch
import torch.nn as nn
import torch.distributed as dist
from torch.cuda.amp import GradScaler, autocast

assert torch.cuda.is_available(), 'needs a GPU'
local_rank = int(os.environ['LOCAL_RANK'])
torch.cuda.set_device(local_rank)
dist.init_process_group('nccl')
torch.manual_seed(1)
torch.cuda.manual_seed_all(1)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).cuda()
model = nn.parallel.DistributedDataParallel(model, device_ids=[local_rank])
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scaler = GradScaler(init_scale=1024.0)
assert scaler.is_enabled()
rng = np.random.RandomState(0)
x = torch.from_numpy(rng.randn(16, 6).astype('float32')).cuda(non_blocking=True)
y = torch.from_numpy(rng.randint(0, 3, 16)).cuda(non_blocking=True)
mine = slice(dist.get_rank(), None, dist.get_world_size())
for it in range(6):
    optimizer.zero_grad()
    with autocast():
        output = model(x[mine])
        assert output.dtype == torch.float16
        loss = nn.functional.cross_entropy(output, y[mine])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
    scaler.step(optimizer)
    scaler.update()
if dist.get_rank() == 0:
    with torch.no_grad():
        print('final loss %.6f' % nn.functional.cross_entropy(model.module(x), y).item())
