"""What a script that was written for ``srun`` finds in its environment, on this one machine."""

import os
from collections.abc import Mapping
from pathlib import Path

COMMANDS = Path(__file__).parent / "commands"
"""Holds ``scontrol``, of which such scripts ask the names of the hosts."""

HOST = "localhost"


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Say torchrun's variables in Slurm's words.

    Example:
        >>> found = variables({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "PATH": "/bin"})
        >>> found["SLURM_PROCID"], found["SLURM_NTASKS"], found["SLURM_JOB_NODELIST"], found["SLURM_NODEID"]
        ('1', '2', 'localhost', '0')
    """
    rank, local_rank, size = environ["RANK"], environ["LOCAL_RANK"], environ["WORLD_SIZE"]
    host = dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURMD_NODENAME"), HOST)
    ranks = dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS_PER_NODE"), size)
    nodes = dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_STEP_NUM_NODES"), "1")
    jobs = dict.fromkeys(("SLURM_JOB_ID", "SLURM_JOBID"), str(os.getppid()))
    return {
        "SLURM_PROCID": rank,
        "SLURM_LOCALID": local_rank,
        "SLURM_NODEID": "0",
        "SLURM_TASKS_PER_NODE": size,
        "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1",
        **host,
        **ranks,
        **nodes,
        **jobs,
        "PATH": f"{COMMANDS}{os.pathsep}{environ.get('PATH', '')}",
    }
