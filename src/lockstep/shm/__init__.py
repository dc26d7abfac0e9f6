"""A torch.distributed backend: CPU ranks of one machine talk through shared memory. It knows tensors, not models.

`lockstep` registers it under the name ``shm`` when it is imported; what is here loads when a process group asks for it.
"""

from lockstep.shm.backend import SharedMemoryGroup
from lockstep.shm.segment import available, create

__all__ = ["SharedMemoryGroup", "available", "create"]
