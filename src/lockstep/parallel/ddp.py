"""torch's DistributedDataParallel, its interface on lockstep's reducer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from lockstep.collectives.nested import map_leaves
from lockstep.errors import UsageError
from lockstep.parallel.attach import alone, attach, before_first_forward, no_sync, refuse_unfit
from lockstep.parallel.buffers import take_first
from lockstep.parallel.engine import NO_BACKWARD, current_backward
from lockstep.parallel.joining import Shadow
from lockstep.parallel.peers import Peers
from lockstep.parallel.reducer import Reducer
from lockstep.parallel.transport import Hooked, Summed
from lockstep.world import current


class DistributedDataParallel(nn.Module, Joinable):
    """Drop-in for ``torch.nn.parallel.DistributedDataParallel``: its arguments and attributes, lockstep's reducer.

    What torch needs to be told, or gets wrong, needs no telling: unused parameters, branches that depend on the rank,
    checkpoints of any kind, a backward through `module` or one of its methods, parameters that come, go, freeze or
    change their dtype. `docs/reducer.md` has the list. ``state_dict`` keys begin with ``module.``, as torch's do;
    `lockstep.replicate` keeps them plain.

    Args:
        module: The model, on its device. Where ranks differ in values, the first rank's win.
        device_ids: The one CUDA device that inputs are moved to, or None.
        output_device: Kept as an attribute; outputs stay where the model makes them.
        dim: Kept as an attribute.
        broadcast_buffers: The older name of ``forward_sync_buffers``; False leaves buffers out at the beginning too.
        init_sync: Make the ranks' models equal now.
        process_group: The ranks that share; None for all.
        bucket_cap_mb: MiB in a bucket, 25 if None. The first one has 1 MiB.
        find_unused_parameters: Accepted, and not needed.
        check_reduction: Accepted, and not needed.
        gradient_as_bucket_view: Accepted; gradients always are.
        static_graph: Accepted, and not needed.
        delay_all_reduce_named_params: Accepted; these parameters are averaged with the others.
        param_to_hook_all_reduce: Accepted, with the one before.
        mixed_precision: Not accepted: use ``torch.autocast``, or `lockstep.Update`'s precision.
        device_mesh: A mesh of one dimension, in place of ``process_group``.
        skip_all_reduce_unused_params: Accepted, and not needed.
        bucket_cap_mb_list: MiB in the first bucket, the second, and so on; the last for all others.
        batched_grad_copy: Accepted; small gradients are always copied together.
        forward_sync_buffers: Before each forward in training mode, give all ranks the first rank's buffers; True if
            None. Nothing is sent in eval mode or under ``no_grad``.

    Raises:
        MismatchError: Ranks have different models; names the first parameter that differs and the ranks.
        UsageError: ``mixed_precision``; several device ids; a parameter on another GPU than this rank's, or without
            values.

    Example:
        >>> import lockstep, torch
        >>> model = lockstep.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> model(torch.ones(3, 2)).shape, list(model.state_dict())
        (torch.Size([3, 1]), ['module.weight', 'module.bias'])
    """

    def __init__(  # torch's signature
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        super().__init__()
        Joinable.__init__(self)
        if mixed_precision is not None:
            raise UsageError(
                "mixed_precision is not supported; use torch.autocast, or lockstep.Update(..., precision='bf16')."
            )
        if device_ids is not None and len(device_ids) > 1:
            raise UsageError(f"device_ids={list(device_ids)}: one process drives one device; start one rank for each.")
        if process_group is not None and device_mesh is not None:
            raise UsageError("Give process_group or device_mesh, not both.")
        self.module = module
        self.device_ids = list(device_ids) if device_ids else None
        self.output_device, self.dim = output_device, dim
        self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
        self.gradient_as_bucket_view, self.batched_grad_copy = gradient_as_bucket_view, batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.check_reduction, self.mixed_precision = check_reduction, None
        self.delay_all_reduce_named_params = delay_all_reduce_named_params
        self.param_to_hook_all_reduce = param_to_hook_all_reduce
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.require_forward_param_sync = True
        self.forward_sync_buffers = next((x for x in (forward_sync_buffers, broadcast_buffers) if x is not None), True)
        self._caps = tuple(bucket_cap_mb_list or (1.0, 25.0 if bucket_cap_mb is None else bucket_cap_mb))
        self.process_group = device_mesh.get_group(mesh_dim=0) if device_mesh is not None else process_group
        if broadcast_buffers is False and forward_sync_buffers is None:
            self.parameters_to_ignore |= {name for name, _ in module.named_buffers()}
        self._reducer: Reducer | None = None
        self._attach(init_sync)

    def _attach(self, equal: bool) -> None:
        world = current()
        first = next(self.module.parameters(), None)
        self.device = world.device if first is None else first.device
        self.device_type = self.device.type
        refuse_unfit(self.module, world, self.parameters_to_ignore)
        if self.process_group is None and dist.is_initialized():
            self.process_group = dist.group.WORLD
        if self.process_group is None or self.process_group.size() == 1:
            alone.add(self.module)
            return
        if self.process_group is dist.group.WORLD:
            world.ranks.barrier()
        peers = Peers(self.process_group)
        self._reducer = attach(
            self.module,
            peers,
            Summed(peers),
            self.device,
            caps=self._caps,
            ignored=self.parameters_to_ignore,
            equal=equal,
        )
        self.module.register_forward_pre_hook(before_first_forward)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module on inputs moved to ``device_ids``; in training buffers are made equal before."""
        reducer = self._reducer
        if reducer is not None and self.training and torch.is_grad_enabled() and current_backward() == NO_BACKWARD:
            if self._join_config.enable:
                Join.notify_join_context(self)
                self._sync_buffers(reducer)
                reducer.peers.wait(reducer.peers.sum_soon(torch.full((1,), float(reducer.syncing), device=self.device)))
            else:
                self._sync_buffers(reducer)
        if self.device_ids:
            device = (
                torch.device(self.device_type, self.device_ids[0])
                if isinstance(self.device_ids[0], int)
                else self.device_ids[0]
            )
            inputs, kwargs = map_leaves(
                lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, (inputs, kwargs)
            )
        return self.module(*inputs, **kwargs)

    def _sync_buffers(self, reducer: Reducer) -> None:
        if self.forward_sync_buffers and reducer.syncing:
            with torch.no_grad():
                take_first(self.module, reducer.peers, self.parameters_to_ignore)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backwards that begin within the block on this rank, wherever the forward was."""
        with no_sync(self):
            yield

    def sync_gradients(self) -> None:
        """Average what has not been averaged yet; see `lockstep.sync_gradients`."""
        if self._reducer is not None:
            self._reducer.sync()

    def register_comm_hook(self, state: object, hook: Callable[[Any, Any], Any]) -> None:
        """Send buckets by one of torch's communication hooks, or one of your own.

        Args:
            state: The hook's first argument.
            hook: ``hook(state, bucket)`` gives a future of the bucket's averaged gradients; it divides by itself.
                ``bucket`` has the methods of ``torch.distributed.GradBucket``.

        Raises:
            UsageError: Not callable, or the second one.
        """
        if not callable(hook):
            raise UsageError(f"register_comm_hook needs a function of state and bucket, not {type(hook).__name__}.")
        if self._reducer is None:
            return
        if isinstance(self._reducer.transport, Hooked):
            raise UsageError("A communication hook is registered already; register one only.")
        self._reducer.travel_by(Hooked(self._reducer.peers, state, hook))

    @property
    def broadcast_buffers(self) -> bool:
        """The older name of ``forward_sync_buffers``."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward that begins now sends its gradients; `no_sync` sets it."""
        return self._reducer is None or self._reducer.syncing

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        if self._reducer is not None:
            self._reducer.syncing = value

    def join(
        self,
        divide_by_initial_world_size: bool = False,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[Any]:
        """Let ranks run out of data at different times: within this context, those that have keep the others company.

        Args:
            divide_by_initial_world_size: Divide by all ranks even when some have run out. torch's default, but then
                gradients shrink as ranks run out; here they are averaged over the ranks that still have data.
            enable: False makes it do nothing.
            throw_on_early_termination: Raise on all ranks as soon as one has run out.
        """
        if self._reducer is None:
            return nullcontext()
        return Join(
            [self], enable, throw_on_early_termination, divide_by_initial_world_size=divide_by_initial_world_size
        )

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What torch's ``Join`` calls on a rank that has run out."""
        if self._reducer is None:
            return JoinHook()
        self._reducer.over_active = not kwargs.get("divide_by_initial_world_size", False)
        return Shadow(self.module, self._reducer, self._sync_buffers, self.parameters_to_ignore)

    @property
    def join_device(self) -> torch.device:
        """Where ``Join`` puts its own messages."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """By whom they go."""
        return self.process_group

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the connection to other ranks."""
        return {key: value for key, value in self.__dict__.items() if key not in ("_reducer", "process_group")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Connect again, with all ranks."""
        self.process_group = None
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._reducer = None
        self._attach(equal=True)
