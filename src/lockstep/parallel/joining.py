"""What a rank that has run out of data does while others go on."""

from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.distributed.algorithms.join import JoinHook

from lockstep.parallel.reducer import Reducer


class Shadow(JoinHook):
    """Takes part in what a `DistributedDataParallel` sends in a step, with nothing of its own."""

    def __init__(
        self, module: nn.Module, reducer: Reducer, sync_buffers: Callable[[Reducer], None], ignored: Collection[str]
    ) -> None:
        self._module, self._reducer, self._sync_buffers, self._ignored = module, reducer, sync_buffers, ignored

    def main_hook(self) -> None:
        """One forward and backward of the others."""
        peers = self._reducer.peers
        self._sync_buffers(self._reducer)
        syncing = torch.zeros(1, device=self._reducer.device)
        peers.wait(peers.sum_soon(syncing))
        if syncing.item():
            self._reducer.keep_company()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All have run out: everybody takes the model of a rank that went on to the end."""
        peers = self._reducer.peers
        last = peers.line_up(torch.tensor(is_last_joiner, device=self._reducer.device)).tolist()
        named = (*self._module.named_parameters(), *self._module.named_buffers())
        for tensor in (t for name, t in named if name not in self._ignored and t.layout is torch.strided):
            whole = tensor.detach().contiguous()
            peers.broadcast(whole, source=last.index(True))
            tensor.detach().copy_(whole)
        steps = torch.tensor(self._reducer.steps, device=self._reducer.device)
        peers.broadcast(steps, source=last.index(True))
        self._reducer.steps = int(steps.item())
