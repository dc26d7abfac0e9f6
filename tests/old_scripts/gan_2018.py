# DCGAN: two models and optimizers, DataParallel through nn.parallel.data_parallel inside forward, ngpu from the command line.
import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.nn.parallel

parser = argparse.ArgumentParser()
parser.add_argument('--cuda', action='store_true', default=True)
parser.add_argument('--ngpu', type=int, default=2)
opt = parser.parse_args()
device = torch.device("cuda:0" if opt.cuda else "cpu")
ngpu = int(opt.ngpu)
torch.manual_seed(1)


class Net(nn.Module):
    def __init__(self, *layers):
        super(Net, self).__init__()
        self.ngpu = ngpu
        self.main = nn.Sequential(*layers)

    def forward(self, input):
        if input.is_cuda and self.ngpu > 1:
            return nn.parallel.data_parallel(self.main, input, range(self.ngpu))
        return self.main(input)


netG = Net(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6)).to(device)
netD = Net(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1), nn.Sigmoid()).to(device)
criterion = nn.BCELoss()
optimizerD = torch.optim.SGD(netD.parameters(), lr=0.5)
optimizerG = torch.optim.SGD(netG.parameters(), lr=0.5)
rng = np.random.RandomState(0)
real = torch.Tensor(rng.randn(16, 6)).to(device)
noises = torch.Tensor(rng.randn(6, 16, 2))
for step in range(6):
    noise = noises[step].to(device)
    netD.zero_grad()
    label = torch.full((16,), 1.0, device=device)
    errD_real = criterion(netD(real).view(-1), label)
    errD_real.backward()
    fake = netG(noise)
    label.fill_(0)
    errD_fake = criterion(netD(fake.detach()).view(-1), label)
    errD_fake.backward()
    optimizerD.step()
    netG.zero_grad()
    label.fill_(1)
    errG = criterion(netD(fake).view(-1), label)
    errG.backward()
    optimizerG.step()
print('final loss %.6f' % (errD_real + errD_fake + errG).item())
