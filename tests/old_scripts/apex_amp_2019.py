# python -m torch.distributed.launch main.py with apex: O1, apex's DistributedDataParallel.
import argparse

import numpy as np
import torch
import torch.nn as nn
from apex import amp
from apex.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=0, type=int)
parser.add_argument("--opt-level", default="O1", type=str)
args = parser.parse_args()

torch.backends.cudnn.benchmark = True
torch.cuda.set_device(args.local_rank)
torch.distributed.init_process_group(backend='nccl', init_method='env://')

torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale=128.0, verbosity=0)
model = DDP(model, delay_allreduce=True)
criterion = nn.CrossEntropyLoss().cuda()

rng = np.random.RandomState(0)
x = torch.from_numpy(rng.randn(16, 6).astype('float32')).cuda()
y = torch.from_numpy(rng.randint(0, 3, 16)).cuda()
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
for epoch in range(6):
    loss = criterion(model(x[rank::size]), y[rank::size])
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 100.0)
    optimizer.step()
torch.cuda.synchronize()
if args.local_rank == 0:
    print('final loss %.6f' % criterion(model.module(x).float(), y).item())
