# torchrun, accumulation by require_backward_grad_sync, torch.compile, autocast by device type, pinned batches.
import os
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

device = 'cuda'
dtype = 'bfloat16' if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else 'float16'
ddp = int(os.environ.get('RANK', -1)) != -1
assert ddp
init_process_group(backend='nccl')
ddp_rank, ddp_local_rank, world = int(os.environ['RANK']), int(os.environ['LOCAL_RANK']), int(os.environ['WORLD_SIZE'])
device = f'cuda:{ddp_local_rank}'
torch.cuda.set_device(device)
torch.manual_seed(1)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
device_type = 'cuda' if 'cuda' in device else 'cpu'
ptdtype = {'bfloat16': torch.bfloat16, 'float16': torch.float16}[dtype]
ctx = nullcontext() if device_type == 'cpu' else torch.amp.autocast(device_type=device_type, dtype=ptdtype)
rng = np.random.RandomState(0)
data, labels = rng.randn(16, 6).astype('float32'), rng.randint(0, 3, 16)


def get_batch(micro):
    take = range(16)[ddp_rank::world][micro * 4:micro * 4 + 4]
    x, y = torch.stack([torch.from_numpy(data[i]) for i in take]), torch.tensor([labels[i] for i in take])
    return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)


model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
scaler = torch.cuda.amp.GradScaler(enabled=(dtype == 'float16'))
model = torch.compile(model)
model = DDP(model, device_ids=[ddp_local_rank])
for it in range(6):
    for micro in range(2):
        model.require_backward_grad_sync = micro == 1
        x, y = get_batch(micro)
        with ctx:
            loss = F.cross_entropy(model(x), y) / 2
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
if ddp_rank == 0:
    x, y = torch.from_numpy(data).to(device), torch.from_numpy(labels).to(device)
    print('final loss %.6f' % F.cross_entropy(model.module(x), y).item())
destroy_process_group()
