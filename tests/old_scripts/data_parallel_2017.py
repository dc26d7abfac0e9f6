# python main.py: one process, every GPU. Variable, CUDA tensor types, cuDNN switches.
import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.backends.cudnn as cudnn
from torch.autograd import Variable

parser = argparse.ArgumentParser()
parser.add_argument('--lr', default=0.5, type=float)
parser.add_argument('--epochs', default=6, type=int)
parser.add_argument('--no-cuda', action='store_true')
args = parser.parse_args()
args.cuda = not args.no_cuda and torch.cuda.is_available()

torch.manual_seed(1)
if args.cuda:
    torch.cuda.manual_seed(1)
cudnn.benchmark = True

rng = np.random.RandomState(0)
images = torch.from_numpy(rng.randn(16, 6).astype('float32'))
labels = torch.from_numpy(rng.randint(0, 3, 16)).type(torch.LongTensor)

model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
criterion = nn.CrossEntropyLoss()
if args.cuda:
    model = torch.nn.DataParallel(model, device_ids=range(torch.cuda.device_count())).cuda()
    criterion = criterion.cuda()
optimizer = torch.optim.SGD(model.parameters(), args.lr)

for epoch in range(args.epochs):
    input = images.cuda()
    target = labels.cuda()
    assert isinstance(input, torch.cuda.FloatTensor) and isinstance(target, torch.cuda.LongTensor)
    input_var, target_var = Variable(input), Variable(target)
    output = model(input_var)
    loss = criterion(output, target_var)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.cuda.synchronize()
print('final loss %.6f' % criterion(model(images.cuda()), labels.cuda()).data.cpu().numpy())
