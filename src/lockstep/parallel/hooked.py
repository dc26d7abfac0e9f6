"""A bucket as torch's communication hooks see it."""

from torch import Tensor, nn

from lockstep.parallel.flat import Bucket


class HookBucket:
    """Has the methods of ``torch.distributed.GradBucket``, which cannot be made in Python."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._buffer = bucket.body

    def index(self) -> int:
        """The bucket's number in the order of sending."""
        return self._bucket.number

    def is_last(self) -> bool:
        """Whether it is the last one of this backward."""
        return self._bucket.last

    def buffer(self) -> Tensor:
        """All gradients, flat."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Use another tensor for what follows."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """The gradients, views of the buffer."""
        return list(self._bucket.views)

    def parameters(self) -> list[nn.Parameter]:
        """Their parameters, in the same order."""
        return list(self._bucket.params)
