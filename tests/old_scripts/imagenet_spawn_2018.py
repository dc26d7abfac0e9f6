# python main.py --multiprocessing-distributed: the script starts a process for each GPU with mp.spawn. The default URL is
# a multicast address, which torch gave up long ago.
import argparse
import os
import random
import shutil
import tempfile

import numpy as np
import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.utils.data

parser = argparse.ArgumentParser()
parser.add_argument('-j', '--workers', default=2, type=int)
parser.add_argument('--epochs', default=6, type=int)
parser.add_argument('-b', '--batch-size', default=16, type=int)
parser.add_argument('--world-size', default=1, type=int)
parser.add_argument('--rank', default=0, type=int)
parser.add_argument('--dist-url', default='tcp://224.66.41.62:23456', type=str)
parser.add_argument('--dist-backend', default='nccl', type=str)
parser.add_argument('--seed', default=1, type=int)
parser.add_argument('--gpu', default=None, type=int)
parser.add_argument('--multiprocessing-distributed', action='store_true', default=True)
parser.add_argument('--checkpoint', default=os.path.join(tempfile.gettempdir(), 'checkpoint.pth.tar'))


def main():
    args = parser.parse_args()
    random.seed(args.seed)
    args.distributed = args.world_size > 1 or args.multiprocessing_distributed
    ngpus_per_node = torch.cuda.device_count()
    if args.multiprocessing_distributed:
        args.world_size = ngpus_per_node * args.world_size
        mp.spawn(main_worker, nprocs=ngpus_per_node, args=(ngpus_per_node, args))
    else:
        main_worker(args.gpu, ngpus_per_node, args)
    os.remove(args.checkpoint)


def main_worker(gpu, ngpus_per_node, args):
    args.gpu = gpu
    if args.distributed:
        args.rank = args.rank * ngpus_per_node + gpu
        dist.init_process_group(backend=args.dist_backend, init_method=args.dist_url,
                                world_size=args.world_size, rank=args.rank)
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    torch.cuda.set_device(args.gpu)
    model.cuda(args.gpu)
    args.batch_size = int(args.batch_size / ngpus_per_node)
    args.workers = int((args.workers + ngpus_per_node - 1) / ngpus_per_node)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[args.gpu])
    criterion = nn.CrossEntropyLoss().cuda(args.gpu)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    cudnn.benchmark = True

    rng = np.random.RandomState(0)
    train = torch.utils.data.TensorDataset(torch.Tensor(rng.randn(16, 6)), torch.LongTensor(rng.randint(0, 3, 16)))
    sampler = torch.utils.data.distributed.DistributedSampler(train)
    loader = torch.utils.data.DataLoader(train, batch_size=args.batch_size, shuffle=(sampler is None),
                                         num_workers=args.workers, pin_memory=True, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, target in loader:
            images = images.cuda(args.gpu, non_blocking=True)
            target = target.cuda(args.gpu, non_blocking=True)
            loss = criterion(model(images), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not args.multiprocessing_distributed or args.rank % ngpus_per_node == 0:
            torch.save({'epoch': epoch + 1, 'state_dict': model.state_dict()}, args.checkpoint + '.new')
            shutil.move(args.checkpoint + '.new', args.checkpoint)
    dist.barrier()
    checkpoint = torch.load(args.checkpoint, map_location='cuda:{}'.format(args.gpu))
    model.load_state_dict(checkpoint['state_dict'])
    model.eval()
    if args.rank == 0:
        images, target = [t.cuda(args.gpu) for t in train.tensors]
        with torch.no_grad():
            print('final loss %.6f' % criterion(model.module(images), target).item())


if __name__ == '__main__':
    main()
