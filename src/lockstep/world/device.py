"""Which device is this rank's. The decision is pure; only ``claim_device`` touches a device."""

import torch

from lockstep.errors import UsageError
from lockstep.world.place import Place


def pick_device(wanted: str, place: Place, cuda_devices: int) -> str:
    """Choose this rank's device.

    Args:
        wanted: ``"auto"``, ``"cpu"``, ``"cuda"`` or one device such as ``"cuda:1"``.
        place: Where this process stands.
        cuda_devices: How many CUDA devices it can see.

    Returns:
        The device's name.

    Raises:
        UsageError: There is no such device, or there are more local ranks than devices.

    Example:
        >>> from lockstep.world.place import ALONE
        >>> pick_device("auto", ALONE, cuda_devices=0), pick_device("auto", ALONE, cuda_devices=2)
        ('cpu', 'cuda:0')
    """
    kind, _, index = wanted.partition(":")
    if kind == "auto":
        kind = "cuda" if cuda_devices else "cpu"
    if kind == "cpu":
        return "cpu"
    if kind != "cuda" or (index and not index.isdecimal()):
        raise UsageError(f"device={wanted!r} is not one that lockstep knows: write 'auto', 'cpu', 'cuda' or 'cuda:1'.")
    if not cuda_devices:
        raise UsageError(
            f"rank {place.rank}: device={wanted!r}, but torch sees no CUDA device here. Write device='cpu'."
        )
    chosen = int(index) if index else own_index(place, cuda_devices)
    if chosen >= cuda_devices:
        raise UsageError(
            f"rank {place.rank}: local rank {place.local_rank} wants cuda:{chosen}, past the last of {cuda_devices} "
            f"visible device(s). Start at most {cuda_devices} ranks on this node, make more devices visible "
            f"(CUDA_VISIBLE_DEVICES), or write device='cpu'."
        )
    return f"cuda:{chosen}"


def own_index(place: Place, cuda_devices: int) -> int:
    """The device of a local rank; 0 where the batch system shows each task only its own."""
    bound = cuda_devices == 1 and place.launcher in ("Slurm", "Open MPI", "PMI")
    return 0 if bound else place.local_rank


def claim_device(wanted: str, place: Place) -> torch.device:
    """Choose this rank's device and make it the current one, before any process group or CUDA context exists."""
    device = torch.device(pick_device(wanted, place, torch.cuda.device_count() if wanted != "cpu" else 0))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def identity(device: torch.device) -> str:
    """A name that two ranks of a machine share only if they share the GPU; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def find_shared(identities: list[tuple[str, str]]) -> tuple[int, int] | None:
    """Find two ranks on one GPU.

    Args:
        identities: Host and GPU of every rank, by rank; an empty GPU is a CPU.

    Returns:
        The two lowest ranks that share one, or None.

    Example:
        >>> find_shared([("a", "gpu-1"), ("b", "gpu-1"), ("a", "gpu-1")])
        (0, 2)
    """
    owners: dict[tuple[str, str], int] = {}
    for rank, where in enumerate(identities):
        if where[1] and where in owners:
            return owners[where], rank
        owners[where] = rank
    return None
