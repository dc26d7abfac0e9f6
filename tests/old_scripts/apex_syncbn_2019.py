# apex O2 with FusedSGD and synchronised batch norm, mp.spawn inside a class-less script.
import os

import numpy as np
import torch
import torch.nn as nn
import torch.distributed as dist
from apex import amp
from apex.optimizers import FusedSGD
from apex.parallel import DistributedDataParallel, convert_syncbn_model

local_rank = int(os.environ.get('LOCAL_RANK', 0))
torch.cuda.set_device(local_rank)
dist.init_process_group('nccl')
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
model = convert_syncbn_model(model).cuda()
optimizer = FusedSGD(model.parameters(), lr=0.5)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", keep_batchnorm_fp32=True, loss_scale="dynamic")
model = DistributedDataParallel(model)
rng = np.random.RandomState(0)
x = torch.from_numpy(rng.randn(16, 6).astype('float32')).cuda()
y = torch.from_numpy(rng.randint(0, 3, 16)).cuda()
half = slice(local_rank * 8, local_rank * 8 + 8)
taken = 0
while taken < 6:
    loss = nn.functional.cross_entropy(model(x[half]).float(), y[half])
    optimizer.zero_grad()
    scale = amp.state_dict()['loss_scaler0']['loss_scale']
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    taken += amp.state_dict()['loss_scaler0']['loss_scale'] >= scale
out = model(x[half]).float()
loss = nn.functional.cross_entropy(out, y[half])
dist.all_reduce(loss)
if local_rank == 0:
    print('final loss %.6f' % (loss.item() / dist.get_world_size()))
