# Image classification with apex: a prefetcher on its own stream, options of amp as words of the command line, apex's DDP
# and synchronised batch norm, a warm-up, averages over ranks, saving and going on. Random images instead of a data set.
import argparse
import os
import shutil

import numpy as np
import torch
import torch.backends.cudnn as cudnn
import torch.distributed as dist
import torch.nn as nn
import torch.utils.data
import torch.utils.data.distributed

try:
    from apex.parallel import DistributedDataParallel as DDP
    from apex.parallel import convert_syncbn_model
    from apex.fp16_utils import *
    from apex import amp, optimizers
    from apex.multi_tensor_apply import multi_tensor_applier
except ImportError:
    raise ImportError("this script needs apex")


def fast_collate(batch, memory_format):
    images = [sample[0] for sample in batch]
    target = torch.tensor([sample[1] for sample in batch], dtype=torch.int64)
    h, w = images[0].shape[:2]
    stacked = torch.zeros((len(images), 3, h, w), dtype=torch.uint8).contiguous(memory_format=memory_format)
    for number, image in enumerate(images):
        stacked[number] += torch.from_numpy(np.rollaxis(np.asarray(image, dtype=np.uint8), 2))
    return stacked, target


class RandomImages(torch.utils.data.Dataset):
    def __init__(self, seed, count):
        rng = np.random.RandomState(seed)
        self.images = rng.randint(0, 256, (count, 8, 8, 3)).astype(np.uint8)
        self.labels = rng.randint(0, 5, count)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index])


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument('-j', '--workers', default=0, type=int)
    parser.add_argument('--epochs', default=6, type=int)
    parser.add_argument('--start-epoch', default=0, type=int)
    parser.add_argument('-b', '--batch-size', default=8, type=int)
    parser.add_argument('--lr', default=0.8, type=float)
    parser.add_argument('--momentum', default=0.9, type=float)
    parser.add_argument('--weight-decay', default=1e-4, type=float)
    parser.add_argument('--print-freq', default=1, type=int)
    parser.add_argument('--resume', default='', type=str)
    parser.add_argument('--prof', default=2, type=int)
    parser.add_argument('--folder', default='', type=str)
    parser.add_argument("--local_rank", default=0, type=int)
    parser.add_argument('--opt-level', type=str, default='O2')
    parser.add_argument('--keep-batchnorm-fp32', type=str, default='True')
    parser.add_argument('--loss-scale', type=str, default='128.0')
    parser.add_argument('--channels-last', type=bool, default=True)
    return parser.parse_args()


class data_prefetcher():
    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([0.485 * 255, 0.456 * 255, 0.406 * 255]).cuda().view(1, 3, 1, 1)
        self.std = torch.tensor([0.229 * 255, 0.224 * 255, 0.225 * 255]).cuda().view(1, 3, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = None
            self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)
            self.next_input = self.next_input.float()
            self.next_input = self.next_input.sub_(self.mean).div_(self.std)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        input = self.next_input
        target = self.next_target
        if input is not None:
            input.record_stream(torch.cuda.current_stream())
        if target is not None:
            target.record_stream(torch.cuda.current_stream())
        self.preload()
        return input, target


class AverageMeter(object):
    def __init__(self):
        self.sum = self.count = self.avg = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def adjust_learning_rate(optimizer, epoch, step, len_epoch):
    lr = args.lr * (0.1 ** (epoch // 30))
    if epoch < 5:
        lr = lr * float(step + epoch * len_epoch) / (5. * len_epoch)
    for param_group in optimizer.param_groups:
        param_group['lr'] = lr


def accuracy(output, target, topk=(1,)):
    batch_size = target.size(0)
    _, pred = output.topk(max(topk), 1, True, True)
    pred = pred.t()
    correct = pred.eq(target.view(1, -1).expand_as(pred))
    return [correct[:k].view(-1).float().sum(0, keepdim=True).mul_(100.0 / batch_size) for k in topk]


def reduce_tensor(tensor):
    rt = tensor.clone()
    dist.all_reduce(rt, op=dist.ReduceOp.SUM)
    rt /= args.world_size
    return rt


def train(train_loader, model, criterion, optimizer, epoch):
    losses, top1 = AverageMeter(), AverageMeter()
    model.train()
    prefetcher = data_prefetcher(train_loader)
    input, target = prefetcher.next()
    i = 0
    while input is not None:
        i += 1
        if args.prof >= 0 and i == args.prof:
            torch.cuda.cudart().cudaProfilerStart()
        adjust_learning_rate(optimizer, epoch, i, len(train_loader))
        if args.prof >= 0: torch.cuda.nvtx.range_push("forward")
        output = model(input)
        if args.prof >= 0: torch.cuda.nvtx.range_pop()
        loss = criterion(output, target)
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        if i % args.print_freq == 0:
            prec1, prec5 = accuracy(output.data, target, topk=(1, 5))
            reduced_loss = reduce_tensor(loss.data) if args.distributed else loss.data
            prec1 = reduce_tensor(prec1) if args.distributed else prec1
            losses.update(to_python_float(reduced_loss), input.size(0))
            top1.update(to_python_float(prec1), input.size(0))
            torch.cuda.synchronize()
        input, target = prefetcher.next()
    return losses.avg


def validate(val_loader, model, criterion):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    prefetcher = data_prefetcher(val_loader)
    input, target = prefetcher.next()
    while input is not None:
        with torch.no_grad():
            output = model(input)
            loss = criterion(output, target)
        prec1, = accuracy(output.data, target, topk=(1,))
        if args.distributed:
            loss, prec1 = reduce_tensor(loss.data), reduce_tensor(prec1)
        losses.update(to_python_float(loss), input.size(0))
        top1.update(to_python_float(prec1), input.size(0))
        input, target = prefetcher.next()
    return top1.avg, losses.avg


def save_checkpoint(state, is_best, filename='checkpoint.pth.tar'):
    torch.save(state, os.path.join(args.folder, filename))
    if is_best:
        shutil.copyfile(os.path.join(args.folder, filename), os.path.join(args.folder, 'model_best.pth.tar'))


def main():
    global best_prec1, args
    args = parse()
    cudnn.benchmark = True
    best_prec1 = 0
    torch.manual_seed(1)
    args.distributed = 'WORLD_SIZE' in os.environ and int(os.environ['WORLD_SIZE']) > 1
    args.gpu = 0
    args.world_size = 1
    if args.distributed:
        args.gpu = args.local_rank
        torch.cuda.set_device(args.gpu)
        torch.distributed.init_process_group(backend='nccl', init_method='env://')
        args.world_size = torch.distributed.get_world_size()
    assert torch.backends.cudnn.enabled, "Amp requires cudnn backend to be enabled."
    memory_format = torch.channels_last if args.channels_last else torch.contiguous_format

    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))
    model = convert_syncbn_model(model)
    model = model.cuda().to(memory_format=memory_format)
    args.lr = args.lr * float(args.batch_size * args.world_size) / 256.
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    model, optimizer = amp.initialize(model, optimizer,
                                      opt_level=args.opt_level,
                                      keep_batchnorm_fp32=args.keep_batchnorm_fp32,
                                      loss_scale=args.loss_scale)
    if args.distributed:
        model = DDP(model, delay_allreduce=True)
    criterion = nn.CrossEntropyLoss().cuda()

    if args.resume:
        def resume():
            global best_prec1
            checkpoint = torch.load(args.resume, map_location=lambda storage, loc: storage.cuda(args.gpu))
            args.start_epoch = checkpoint['epoch']
            best_prec1 = checkpoint['best_prec1']
            model.load_state_dict(checkpoint['state_dict'])
            optimizer.load_state_dict(checkpoint['optimizer'])
            amp.load_state_dict(checkpoint['amp'])
            print("=> loaded checkpoint '{}' (epoch {})".format(args.resume, checkpoint['epoch']))
        resume()

    train_dataset, val_dataset = RandomImages(0, 32), RandomImages(1, 16)
    train_sampler = val_sampler = None
    if args.distributed:
        train_sampler = torch.utils.data.distributed.DistributedSampler(train_dataset)
        val_sampler = torch.utils.data.distributed.DistributedSampler(val_dataset)
    collate_fn = lambda b: fast_collate(b, memory_format)
    train_loader = torch.utils.data.DataLoader(
        train_dataset, batch_size=args.batch_size, shuffle=(train_sampler is None),
        num_workers=args.workers, pin_memory=True, sampler=train_sampler, collate_fn=collate_fn)
    val_loader = torch.utils.data.DataLoader(
        val_dataset, batch_size=args.batch_size, shuffle=False,
        num_workers=args.workers, pin_memory=True, sampler=val_sampler, collate_fn=collate_fn)

    for epoch in range(args.start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        average = train(train_loader, model, criterion, optimizer, epoch)
        prec1, val_loss = validate(val_loader, model, criterion)
        if args.local_rank == 0:
            print('epoch %d: training %.6f' % (epoch, average))
            is_best = prec1 > best_prec1
            best_prec1 = max(prec1, best_prec1)
            if args.folder:
                save_checkpoint({
                    'epoch': epoch + 1,
                    'state_dict': model.state_dict(),
                    'best_prec1': best_prec1,
                    'optimizer': optimizer.state_dict(),
                    'amp': amp.state_dict(),
                }, is_best)
    if args.local_rank == 0:
        print('final loss %.6f' % val_loss)


if __name__ == '__main__':
    main()
