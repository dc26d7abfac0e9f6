"""``DistributedDataParallel`` and ``Reducer`` with apex's options, on lockstep's reducer; and flat collectives."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten
from torch.distributed import ReduceOp

from lockstep.errors import UsageError
from lockstep.parallel import attach, peers, predivided, reducer
from lockstep.world import current

__all__ = [
    "DistributedDataParallel",
    "ReduceOp",
    "Reducer",
    "apply_flat_dist_call",
    "extract_tensors",
    "flat_dist_call",
    "flatten",
    "import_flatten_impl",
    "split_by_type",
    "split_half_float_double",
    "unflatten",
]

_NO_LIMIT = float(2**40)  # MiB


def import_flatten_impl() -> None:
    """Nothing to import."""


def apply_flat_dist_call(bucket: Sequence[Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Run a collective on tensors of one dtype as one; an all-reduce is divided by the number of ranks."""
    flat = flatten(bucket)  # type: ignore[no-untyped-call]
    call(flat, *(extra_args or ()))
    if call is dist.all_reduce:
        flat /= dist.get_world_size()
    for tensor, synced in zip(bucket, unflatten(flat, bucket), strict=True):  # type: ignore[no-untyped-call]
        tensor.copy_(synced)


def split_half_float_double(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors by dtype: float16, then float32, then float64; empty lists are left out."""
    kinds = (torch.float16, torch.float32, torch.float64)
    split = ([tensor for tensor in tensors if tensor.dtype == kind] for kind in kinds)
    return [bucket for bucket in split if bucket]


def split_by_type(tensors: Sequence[Tensor]) -> "OrderedDict[str, list[Tensor]]":
    """Tensors by type, in the order in which the types come first."""
    buckets: OrderedDict[str, list[Tensor]] = OrderedDict()
    for tensor in tensors:
        buckets.setdefault(tensor.type(), []).append(tensor)
    return buckets


@torch.no_grad()
def flat_dist_call(tensors: Sequence[Tensor], call: Callable[..., Any], extra_args: Any = None) -> None:
    """Run a collective on tensors, in one message for each type.

    Args:
        tensors: Any tensors, the same on each rank.
        call: ``torch.distributed.all_reduce``, which gives the average, ``broadcast`` or the like.
        extra_args: What follows the tensor in that call, such as ``(0,)`` for a broadcast.
    """
    for bucket in split_by_type(tensors).values():
        apply_flat_dist_call(bucket, call, extra_args)


def extract_tensors(maybe_tensor: Any, tensor_list: list[Tensor]) -> None:
    """Append every tensor in nested iterables to a list."""
    if isinstance(maybe_tensor, Tensor):
        tensor_list.append(maybe_tensor)
        return
    try:
        for item in maybe_tensor:
            extract_tensors(item, tensor_list)
    except TypeError:
        return


class Reducer:
    """Averages gradients, or tensors, when it is told to.

    Args:
        module_or_grads_list: A module, whose parameters take rank 0's values now; or tensors.
    """

    def __init__(self, module_or_grads_list: Any) -> None:
        self.module: nn.Module | None = None
        self.grads: list[Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            if _ranks() > 1:
                flat_dist_call([param.data for param in self.module.parameters()], dist.broadcast, (0,))
        else:
            extract_tensors(module_or_grads_list, self.grads)

    def reduce(self) -> None:
        """Average the module's gradients that are there, or the tensors, over ranks."""
        if _ranks() == 1:
            return
        tensors = self.grads
        if self.module is not None:
            tensors = [param.grad.data for param in self.module.parameters() if param.grad is not None]
        flat_dist_call(tensors, dist.all_reduce)


def _ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


class DistributedDataParallel(nn.Module):
    """One process for each device; gradients are averaged during backward, parameters begin as rank 0's.

    Buffers are never sent. What apex had to be told, or could not do, needs no telling: unused parameters, backwards
    that differ between ranks, several of them after one forward, any dtype, copies.

    Args:
        module: The model, on its device.
        message_size: Elements after which a bucket is sent.
        delay_allreduce: Send everything at the end of backward.
        shared_param: Not taken, as in apex.
        allreduce_trigger_params: Parameters with whose gradient a bucket is sent, whatever its size.
        retain_allreduce_buffers: Whether `allreduce_buffers` has the flat gradients.
        allreduce_always_fp32: Average half gradients in float32.
        num_allreduce_streams: Accepted; there is one channel.
        allreduce_communicators: ``(groups, streams)``, as many as ``num_allreduce_streams``; the first group is used.
        gradient_average: Whether gradients are averaged, or summed.
        gradient_predivide_factor: What gradients are divided by before the sum; sums stay divided by it.
        gradient_average_split_factor: Accepted, as in apex.
        prof: Accepted.

    Raises:
        ValueError: ``shared_param``, or options that exclude each other; there is no process group.
        MismatchError: Ranks have different models; names the first parameter that differs.
    """

    def __init__(
        self,
        module: nn.Module,
        message_size: int = 10000000,
        delay_allreduce: bool = False,
        shared_param: Any = None,
        allreduce_trigger_params: Sequence[Tensor] | None = None,
        retain_allreduce_buffers: bool = False,
        allreduce_always_fp32: bool = False,
        num_allreduce_streams: int = 1,
        allreduce_communicators: tuple[Sequence[Any], Sequence[Any]] | None = None,
        gradient_average: bool = True,
        gradient_predivide_factor: float = 1.0,
        gradient_average_split_factor: float | None = None,
        prof: bool = False,
    ) -> None:
        super().__init__()
        refuse(delay_allreduce, shared_param, allreduce_trigger_params, num_allreduce_streams, allreduce_communicators)
        self.world_size = _world_size()
        self.module = module
        self.message_size, self.delay_allreduce = int(message_size), delay_allreduce
        self.retain_allreduce_buffers, self.allreduce_always_fp32 = retain_allreduce_buffers, allreduce_always_fp32
        self.num_allreduce_streams, self.prof = num_allreduce_streams, prof
        self.gradient_average, self.gradient_predivide_factor = gradient_average, float(gradient_predivide_factor)
        self.gradient_average_split_factor = gradient_average_split_factor
        self.custom_allreduce_triggers = allreduce_trigger_params is not None
        # Kept by name: a copy has other parameters.
        wanted = {id(param) for param in allreduce_trigger_params or ()}
        self._triggers = {name for name, param in module.named_parameters() if id(param) in wanted}
        self._reducer: reducer.Reducer | None = None
        self._attached = False
        self._attach(allreduce_communicators[0][0] if allreduce_communicators else None)

    def _attach(self, group: Any = None) -> None:
        """Connect with the other ranks, all of which do it now; parameters take rank 0's values."""
        self._attached = True
        world = current()
        named = dict(self.module.named_parameters())
        first = next(iter(named.values()), None)
        device = world.device if first is None else first.device
        if first is not None and "nccl" in dist.get_backend() and any(p.device.type == "cpu" for p in named.values()):
            raise AssertionError("NCCL backend only supports model parameters to be on GPU.")
        buffers = {name for name, _ in self.module.named_buffers()}
        attach.refuse_unfit(self.module, world, buffers)
        if self.world_size == 1:
            return
        others = peers.Peers(group)
        itemsize = max((param.element_size() for param in named.values()), default=4)
        cap = _NO_LIMIT if self.delay_allreduce or self._triggers else self.message_size * itemsize / 2**20
        self._reducer = attach.attach(
            self.module,
            others,
            predivided.Predivided(others, self.gradient_predivide_factor, self.allreduce_always_fp32),
            device,
            caps=(cap,),
            ignored=buffers,
            ends=[named[name] for name in self._triggers],
        )
        if not self.gradient_average:
            self._reducer.times = self.world_size / self.gradient_predivide_factor
            predivided.keep_sums_sums(self._reducer.members.slots)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; a copy connects with the other ranks at its first forward that trains."""
        if not self._attached and self.training and torch.is_grad_enabled():
            self._attach()
        return self.module(*inputs, **kwargs)

    @property
    def needs_refresh(self) -> bool:
        """Whether buckets will be made anew; a model that changes is noticed without it."""
        return self._reducer is None or self._reducer.members.changed

    @needs_refresh.setter
    def needs_refresh(self, value: bool) -> None:
        if self._reducer is not None and value:
            self._reducer.members.changed = True

    @property
    def allreduce_buffers(self) -> list[Tensor]:
        """The flat gradients of each bucket, of which `.grad` are views; empty without ``retain_allreduce_buffers``."""
        if self._reducer is None or not self.retain_allreduce_buffers:
            return []
        buckets = {slot.bucket.number: slot.bucket for slot in self._reducer.members.slots if slot.bucket is not None}
        return [buckets[number].body for number in sorted(buckets)]

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward that begins now sends its gradients."""
        return self._reducer is None or self._reducer.syncing

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if self._reducer is not None:
            self._reducer.syncing = value

    def enable_allreduce(self) -> None:
        """Send gradients from the next backward on."""
        self.require_backward_grad_sync = True

    def disable_allreduce(self) -> None:
        """Keep gradients here, from the next backward on; they are averaged with those of the next one that sends."""
        self.require_backward_grad_sync = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backwards that begin within the block on this rank."""
        before = self.require_backward_grad_sync
        self.disable_allreduce()
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the connection to other ranks."""
        return self.__dict__ | {"_reducer": None, "_attached": False}


def _world_size() -> int:
    if not (dist.is_available() and dist.is_initialized()):
        raise UsageError(
            "Default process group has not been initialized, please make sure to call init_process_group: "
            "torch.distributed.init_process_group(backend, init_method='env://') before DistributedDataParallel(model)."
        )
    return dist.get_world_size()


def refuse(delay: bool, shared_param: Any, triggers: Any, streams: int, communicators: Any) -> None:
    """Raise for options that exclude each other."""
    if shared_param is not None:
        raise ValueError(
            "shared_param is no longer supported as an option.  It was misleadingly named from the start.  It turns "
            "out overlapping communication with computation should work fine with shared parameters.  If you still "
            "wish to delay communication to the end of the backward pass, use delay_allreduce=True|False instead."
        )
    if delay and triggers:
        raise ValueError("Setting allreduce_trigger_params is only valid if delay_allreduce=False.")
    if delay and streams > 1:
        raise ValueError("num_allreduce_streams > 1 is only valid if delay_allreduce=False.")
    if communicators is not None:
        assert streams > 1, "allreduce_communicators needs num_allreduce_streams > 1."
        assert [len(part) for part in communicators] == [streams, streams], (
            f"allreduce_communicators needs {streams} groups and {streams} streams, as many as num_allreduce_streams."
        )
