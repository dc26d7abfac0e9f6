"""The layer: torch's batch norm, except that in training the batch is that of all ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from lockstep.errors import UsageError
from lockstep.parallel.batchnorm.function import Running, batch_norm_over_ranks
from lockstep.parallel.batchnorm.replicas import Seat, batch_norm_over_replicas


class SyncBatchNorm(_BatchNorm):
    """Batch norm over the global batch: what ordinary batch norm gives on all local batches together.

    In training, one small message in forward and one in backward (about ``2 * num_features`` floats each, float64 for
    float64 inputs). Local batches may differ in size and be empty. In eval mode, in a world of one and without a
    process group it is torch's ordinary batch norm, bit for bit, and sends nothing.

    Unlike torch's class of the same name it runs on CPU, and torch's `DistributedDataParallel` accepts it there. It
    takes the arguments of both torch's class and apex's. Its parameters and buffers are those of
    `torch.nn.BatchNorm2d`.

    Args:
        num_features: Channels, ``C``.
        eps: Added to the variance.
        momentum: How far running statistics move with each batch; None for their plain average over all batches.
        affine: Whether it learns a scale and a shift per channel.
        track_running_stats: Whether it keeps running statistics for eval mode.
        process_group: The ranks that normalise together, see `create_syncbn_process_group`; None for all.
        channel_last: Whether channels are the last dimension of inputs with 3 or more, instead of the second.
        fuse_relu: Whether ReLU follows.
        device: Where parameters are made.
        dtype: Of which type.
        bias: Whether an affine layer has a shift.

    Shape:
        ``(N, C)``, ``(N, C, L)``, ``(N, C, H, W)`` or ``(N, C, D, H, W)``, in and out; float32, float64, bfloat16 or
        float16 with statistics in float32 (float64 for float64).

    Raises:
        ValueError: In forward: fewer than 2 dimensions; or one value per channel in the whole world, on every rank.
        UsageError: In forward: other channels than ``num_features``.
        MismatchError: In forward: some ranks record gradients and some do not; on every rank.
        LateRankError: A rank did not come in time.
        LostRankError: A rank is gone.

    Example:
        >>> import torch, lockstep
        >>> layer = lockstep.SyncBatchNorm(3)
        >>> x = torch.randn(8, 3, 5, 5)
        >>> torch.equal(layer(x), torch.nn.BatchNorm2d(3)(x))
        True
    """

    # On the class, so that a converted BatchNorm2d needs none of them in its own state.
    channel_last: bool = False
    fuse_relu: bool = False
    _group: "_Group | None" = None
    _seat: Seat | None = None  # of a replica inside lockstep.DataParallel

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
        channel_last: bool = False,
        fuse_relu: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
    ) -> None:
        if not isinstance(channel_last, bool) or not isinstance(fuse_relu, bool):
            # torch's class has device and dtype in these places
            device, dtype, channel_last, fuse_relu = channel_last, fuse_relu or None, False, False
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        if not bias:
            self.register_parameter("bias", None)
        self.process_group = process_group
        self.channel_last = channel_last
        self.fuse_relu = fuse_relu

    @property
    def process_group(self) -> Any:
        """The ranks that normalise together; None for all."""
        return self._group and self._group.ranks

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self._group = None if group is None else _Group(group)

    def forward(self, input: Tensor, z: Tensor | None = None) -> Tensor:  # noqa: A002  (torch's name)
        """Normalise.

        Args:
            input: Values of this rank.
            z: Added to the output, before the ReLU (apex).
        """
        last = self.channel_last and input.dim() > 2
        x = input.movedim(-1, 1) if last else input
        together = self.training and (self._has_peers() or self._seat is not None)
        y = self._normalise_together(x) if together else super().forward(x)
        y = y.movedim(1, -1) if last else y
        y = y if z is None else y + z
        return y.relu() if self.fuse_relu else y

    def extra_repr(self) -> str:
        """What differs from a plain layer, after what is the same."""
        given = [f", {name}=True" for name in ("channel_last", "fuse_relu") if getattr(self, name)]
        same: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return "".join((same, *given))

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _has_peers(self) -> bool:
        if not (dist.is_available() and dist.is_initialized()):
            return False
        size = dist.get_world_size(self.process_group)
        if size < 1:
            raise UsageError(
                f"rank {dist.get_rank()} of {dist.get_world_size()}: this rank is not in the process_group of its "
                f"SyncBatchNorm. Give each rank the group that it is in, as create_syncbn_process_group does."
            )
        return size > 1

    def _normalise_together(self, x: Tensor) -> Tensor:
        self._check_input_dim(x)
        if x.shape[1] != self.num_features and (self.affine or self.track_running_stats):
            who = f"rank {dist.get_rank()} of {dist.get_world_size()}: " if self._seat is None else ""
            raise UsageError(  # else the running statistics would be broadcast against those of one channel
                f"{who}SyncBatchNorm({self.num_features}) got an input of size {list(x.shape)}, with {x.shape[1]} "
                f"channels (dimension 1). Give it {self.num_features}."
            )
        if self._seat is not None and self._has_peers():
            raise UsageError(
                f"rank {dist.get_rank()} of {dist.get_world_size()}: SyncBatchNorm inside DataParallel normalises over "
                f"the devices of one process, not over ranks as well. Start one rank per device instead: lockstep run."
            )
        running = None
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            running = Running(self.running_mean, self.running_var, self._count_batch())
        if self._seat is not None:
            return batch_norm_over_replicas(x, self.weight, self.bias, running, eps=self.eps, seat=self._seat)
        return batch_norm_over_ranks(x, self.weight, self.bias, running, eps=self.eps, group=self.process_group)

    def _count_batch(self) -> float:
        """Count one more batch; how far the running statistics move."""
        if self.num_batches_tracked is None:
            return self.momentum or 0.0
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum


class _Group:
    """Holds a process group, which torch cannot copy, so that a model can be copied (for a moving average, say)."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Group":
        return self

    def __reduce__(self) -> Any:
        raise UsageError(
            "a SyncBatchNorm with a process_group cannot be pickled, since the group ends with this process. Save "
            "model.state_dict(), or a model from lockstep.revert_sync_batchnorm(copy.deepcopy(model))."
        )


class BatchNorm(_BatchNorm):
    """Ordinary batch norm for 2 or more dimensions: what a layer goes back to that was never one of torch's."""

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")
