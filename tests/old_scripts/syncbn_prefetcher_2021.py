# Synchronised batch norm, a prefetcher on its own stream, times taken with events.
import os

import numpy as np
import torch
import torch.nn as nn
import torch.distributed as dist


class data_prefetcher():
    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        input, target = self.next_input, self.next_target
        if input is not None:
            input.record_stream(torch.cuda.current_stream())
            target.record_stream(torch.cuda.current_stream())
            self.preload()
        return input, target


gpu = int(os.environ['LOCAL_RANK'])
torch.cuda.set_device(gpu)
dist.init_process_group(backend='nccl', init_method='env://')
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda(gpu)
model = nn.parallel.DistributedDataParallel(model, device_ids=[gpu], output_device=gpu)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
rng = np.random.RandomState(0)
data = torch.utils.data.TensorDataset(torch.Tensor(rng.randn(16, 6)), torch.LongTensor(rng.randint(0, 3, 16)))
sampler = torch.utils.data.distributed.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, 8, sampler=sampler, pin_memory=True)
start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
for epoch in range(6):
    sampler.set_epoch(epoch)
    prefetcher = data_prefetcher(loader)
    input, target = prefetcher.next()
    while input is not None:
        start.record()
        loss = nn.functional.cross_entropy(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        end.record()
        torch.cuda.synchronize()
        assert start.elapsed_time(end) > 0
        input, target = prefetcher.next()
half = slice(gpu * 8, gpu * 8 + 8)
x, y = [t[half].cuda() for t in data.tensors]
loss = nn.functional.cross_entropy(model(x), y)
dist.reduce(loss, 0)
if dist.get_rank() == 0:
    print('final loss %.6f' % (loss.item() / dist.get_world_size()))
