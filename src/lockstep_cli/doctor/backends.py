"""Whether ranks can talk: gloo, shared memory and NCCL, as torch and lockstep were built."""

from lockstep_cli.doctor.inside import Inside
from lockstep_cli.doctor.line import Line, broken, doubtful, fine


def judge(inside: Inside) -> list[Line]:
    """Say which backends there are.

    Example:
        >>> [(line.about, line.state) for line in judge(Inside(torch="2.13.0", gloo=True))]
        [('gloo', 'fine'), ('shm', 'fine'), ('NCCL', 'fine')]
    """
    if inside.trouble:
        return []
    return [judge_gloo(inside), judge_shm(inside), judge_nccl(inside)]


def judge_gloo(inside: Inside) -> Line:
    """Ranks meet over gloo, whatever they compute on."""
    if inside.gloo:
        return fine("gloo", "there")
    return broken("gloo", "torch is built without it", "Install torch's own wheel instead of this build.")


def judge_shm(inside: Inside) -> Line:
    """Without shm there is gloo."""
    if not inside.shm:
        return fine("shm", "there")
    remedy = (
        "CPU ranks use gloo instead, which is slower; on Linux, install lockstep again where there is a C compiler."
    )
    return doubtful("shm", inside.shm, remedy)


def judge_nccl(inside: Inside) -> Line:
    """NCCL is only missed where there are GPUs."""
    if inside.nccl:
        return fine("NCCL", inside.nccl)
    if not inside.gpus:
        return fine("NCCL", "torch is built without it; not needed without GPUs")
    remedy = "Install torch's own wheel for CUDA, which brings NCCL."
    return broken("NCCL", "torch is built without it", remedy)
