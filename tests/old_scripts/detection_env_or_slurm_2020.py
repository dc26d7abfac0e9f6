# Looks for torchrun's variables, then Slurm's; else runs alone. Metrics averaged over ranks, printing kept to rank 0.
import builtins
import os

import numpy as np
import torch
import torch.distributed as dist
from torch import nn


def init_distributed_mode():
    if 'RANK' in os.environ and 'WORLD_SIZE' in os.environ:
        rank, size, gpu = int(os.environ["RANK"]), int(os.environ['WORLD_SIZE']), int(os.environ['LOCAL_RANK'])
    elif 'SLURM_PROCID' in os.environ:
        rank, size = int(os.environ['SLURM_PROCID']), int(os.environ['SLURM_NTASKS'])
        gpu = rank % torch.cuda.device_count()
    else:
        print('Not using distributed mode')
        return False, 0, 1
    torch.cuda.set_device(gpu)
    torch.distributed.init_process_group(backend='nccl', init_method='env://', world_size=size, rank=rank)
    torch.distributed.barrier()
    print_here = builtins.print
    builtins.print = lambda *a, **k: print_here(*a, **k) if rank == 0 or k.pop('force', False) else None
    return True, gpu, size


@torch.no_grad()
def reduce_dict(values, size):
    names = sorted(values)
    stacked = torch.stack([values[k] for k in names], dim=0)
    dist.all_reduce(stacked)
    return dict(zip(names, stacked / size))


distributed, gpu, size = init_distributed_mode()
device = torch.device('cuda')
torch.manual_seed(1 + 0)
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
model.to(device)
model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[gpu], find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
rng = np.random.RandomState(0)
data = torch.utils.data.TensorDataset(torch.Tensor(rng.randn(16, 6)), torch.LongTensor(rng.randint(0, 3, 16)))
sampler = torch.utils.data.DistributedSampler(data, shuffle=False)
loader = torch.utils.data.DataLoader(data, sampler=sampler, batch_size=8)
for epoch in range(6):
    sampler.set_epoch(epoch)
    for samples, targets in loader:
        samples, targets = samples.to(device), targets.to(device)
        loss_dict = {'ce': nn.functional.cross_entropy(model(samples), targets)}
        losses = sum(loss_dict.values())
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        torch.cuda.synchronize()
model.eval()
with torch.no_grad():
    for samples, targets in loader:
        loss_dict = {'ce': nn.functional.cross_entropy(model(samples.to(device)), targets.to(device))}
print('final loss %.6f' % reduce_dict(loss_dict, size)['ce'].item(), 'max mem: %.0f' % (torch.cuda.max_memory_allocated() / 1e6))
