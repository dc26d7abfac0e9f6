"""What one rank of each node runs: nodes show each other what they have found, and measure the way between them.

``lockstep run --nnodes N --node-rank K --master-addr HOST -n 1 -m lockstep_cli.doctor.meet FOLDER``; the folder has
this node's page, and gets what all nodes have shown and what was measured.
"""

import json
import os
import sys
from pathlib import Path

from lockstep_cli.doctor import measure

PAGE, FOUND = "page.json", "found.json"


def main(folder: str) -> None:
    """Show, look, measure; what is known is on disk before the next thing begins."""
    import torch
    import torch.distributed as dist

    import lockstep

    mine = (Path(folder) / PAGE).read_bytes()
    world = lockstep.init(device="cpu", backend="gloo", timeout=measure.TIMEOUT)
    sizes = torch.zeros(world.size, dtype=torch.int64)
    sizes[world.rank] = len(mine)
    dist.all_reduce(sizes)
    own = torch.zeros(int(sizes.max()), dtype=torch.uint8)
    own[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    rows = [torch.empty_like(own) for _ in range(world.size)]
    dist.all_gather(rows, own)
    pages = [json.loads(bytes(row[:size].tolist())) for row, size in zip(rows, sizes.tolist(), strict=True)]
    dist.destroy_process_group()
    _keep(folder, pages, [])
    measured: list[measure.Row] = []
    for backend in ["gloo", *(["nccl"] if all(page["gpus"] and page["nccl"] for page in pages) else [])]:
        measured.append(measure.try_backend(backend))
        _keep(folder, pages, measured)


def _keep(folder: str, pages: list[object], measured: list[measure.Row]) -> None:
    found = {"pages": pages, "speed": measured, "interface": os.environ.get("GLOO_SOCKET_IFNAME", "")}
    (Path(folder) / FOUND).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
