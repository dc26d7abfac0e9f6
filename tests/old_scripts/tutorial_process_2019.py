# The distributed tutorial: a Process for each rank, gradients averaged by hand.
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.multiprocessing import Process


def average_gradients(model):
    size = float(dist.get_world_size())
    for param in model.parameters():
        dist.all_reduce(param.grad.data, op=dist.ReduceOp.SUM)
        param.grad.data /= size


def run(rank, size):
    torch.manual_seed(1)
    device = torch.device("cuda:{}".format(rank))
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    rng = np.random.RandomState(0)
    data, target = torch.Tensor(rng.randn(16, 6)), torch.LongTensor(rng.randint(0, 3, 16))
    mine = slice(rank * 16 // size, (rank + 1) * 16 // size)
    for epoch in range(6):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data[mine].to(device)), target[mine].to(device))
        loss.backward()
        average_gradients(model)
        optimizer.step()
    if rank == 0:
        print('final loss %.6f' % F.cross_entropy(model(data.to(device)), target.to(device)).item())


def init_processes(rank, size, fn, backend='nccl'):
    os.environ['MASTER_ADDR'] = '127.0.0.1'
    os.environ['MASTER_PORT'] = '29500'
    dist.init_process_group(backend, rank=rank, world_size=size)
    fn(rank, size)


if __name__ == "__main__":
    size = torch.cuda.device_count()
    processes = []
    for rank in range(size):
        p = Process(target=init_processes, args=(rank, size, run))
        p.start()
        processes.append(p)
    for p in processes:
        p.join()
