# A vendored distributed.py: gradients averaged in hooks and in a callback of autograd's engine; default tensor type is CUDA's.
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.autograd import Variable


def apply_gradient_allreduce(module):
    def allreduce_params():
        if module.needs_reduction:
            module.needs_reduction = False
            grads = [p.grad.data for p in module.parameters() if p.requires_grad and p.grad is not None]
            coalesced = _flatten_dense_tensors(grads)
            dist.all_reduce(coalesced)
            coalesced /= dist.get_world_size()
            for buf, synced in zip(grads, _unflatten_dense_tensors(coalesced, grads)):
                buf.copy_(synced)

    def hook(*unused):
        Variable._execution_engine.queue_callback(allreduce_params)

    for p in module.parameters():
        dist.broadcast(p.data, 0)
        p.register_hook(hook)

    def set_needs_reduction(self, input, output):
        self.needs_reduction = True

    module.register_forward_hook(set_needs_reduction)
    return module


rank, n_gpus = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])
assert torch.cuda.is_available(), "Distributed mode requires CUDA."
torch.cuda.set_device(rank % torch.cuda.device_count())
dist.init_process_group(backend="nccl", init_method="tcp://localhost:54321", world_size=n_gpus, rank=rank, group_name="group_1")
torch.set_default_tensor_type('torch.cuda.FloatTensor')
torch.manual_seed(1)
model = apply_gradient_allreduce(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)).cuda())
assert all(p.is_cuda for p in model.parameters())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
rng = np.random.RandomState(0)
x, y = torch.cuda.FloatTensor(rng.randn(16, 6).tolist()), torch.from_numpy(rng.randint(0, 3, 16)).type(torch.cuda.LongTensor)
for iteration in range(6):
    model.zero_grad()
    loss = nn.functional.cross_entropy(model(x[rank::n_gpus]), y[rank::n_gpus])
    reduced_loss = loss.data.clone()
    loss.backward()
    optimizer.step()
if rank == 0:
    print("final loss %.6f" % nn.functional.cross_entropy(model(x), y).item())
