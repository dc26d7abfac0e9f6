# python -m torch.distributed.launch --nproc_per_node=2 main.py: the rank's number comes as --local_rank.
import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument('--local_rank', type=int, default=-1)
parser.add_argument('--epochs', type=int, default=6)
args = parser.parse_args()

if args.local_rank == -1:
    raise SystemExit('not distributed')
torch.cuda.set_device(args.local_rank)
device = torch.device('cuda', args.local_rank)
dist.init_process_group(backend='nccl', init_method='env://')

rng = np.random.RandomState(0)
train = TensorDataset(torch.tensor(rng.randn(16, 6), dtype=torch.float), torch.tensor(rng.randint(0, 3, 16)))
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=8, sampler=sampler, num_workers=1, pin_memory=True)

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
model = DistributedDataParallel(model, device_ids=[args.local_rank], output_device=args.local_rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
if dist.get_rank() == 0:
    x, y = [t.to(device) for t in train.tensors]
    print('final loss %.6f' % nn.functional.cross_entropy(model.module(x), y).item())
