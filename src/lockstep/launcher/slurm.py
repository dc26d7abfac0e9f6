"""What Slurm's variables add to the wish when ``srun lockstep run`` starts one launcher on each node. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from lockstep.errors import UsageError
from lockstep.launcher.plan import LaunchPlan, Machine, Wish
from lockstep.world.place import needed, number, outside_srun
from lockstep.world.slurm import first_host, port_of_job

_INTERACTIVE = "4294967290"  # the step that `salloc` opens its shell in, on clusters that have it so


class Followed(NamedTuple):
    """What was said, and what Slurm has added.

    Attributes:
        wish: With nodes, node rank and meeting place filled in.
        machine: With no more processors than Slurm gave.
        rules: Which choices of the plan come from Slurm, and from what.
        note: A sentence for the user; often empty.
    """

    wish: Wish
    machine: Machine
    rules: dict[str, str]
    note: str = ""

    def put_in(self, plan: LaunchPlan) -> LaunchPlan:
        """The plan that was made of this, with Slurm as the rule where it is."""
        choices = {
            name: choice._replace(rule=self.rules.get(name, choice.rule)) for name, choice in plan.choices.items()
        }
        return plan._replace(choices=choices)


def follow(wish: Wish, machine: Machine, environ: Mapping[str, str], *, alone: bool = False) -> Followed:
    """Fill in what the user has left to Slurm.

    Args:
        wish: What the user said. Any word about nodes or where they meet leaves all of that to the user.
        machine: What this node has.
        environ: The user's environment.
        alone: Whether the user wants this one node, whatever Slurm says: ``--standalone``.

    Raises:
        UsageError: Slurm's variables are there in part, start several launchers on a node, or promise GPUs that torch
            does not see.

    Example:
        >>> environ = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77", "SLURM_STEP_NODELIST": "gpu[3-4]"}
        >>> environ |= {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "1"}
        >>> wish = follow(Wish(), Machine(gpus=0, groups=((0, 1),)), environ).wish
        >>> wish.nnodes, wish.node_rank, wish.master_addr, wish.master_port
        ('2', 1, 'gpu3', 15077)
    """
    if "SLURM_JOB_ID" not in environ:
        return Followed(wish, machine, {})
    refuse_missing_gpus(wish, machine, environ)
    wish, machine, rules = share_of_node(wish, machine, environ)
    if alone or said_nodes(wish):
        return Followed(wish, machine, rules)
    if outside_srun(environ) or environ.get("SLURM_STEP_ID") == _INTERACTIVE:
        note = one_of_many(environ)
        return Followed(wish, machine, rules | ({"meeting": "this node of Slurm's job alone"} if note else {}), note)
    wish, meeting = meet(wish, environ)
    return Followed(wish, machine, rules | meeting)


def said_nodes(wish: Wish) -> bool:
    """Whether the user has said how many nodes there are, or where they meet."""
    return bool(wish.nnodes != "1" or wish.node_rank or wish.master_addr or wish.rdzv_backend or wish.rdzv_endpoint)


def meet(wish: Wish, environ: Mapping[str, str]) -> tuple[Wish, dict[str, str]]:
    """Nodes of this job step, and where they meet. A step of one task is one node, as without Slurm."""
    because = "SLURM_STEP_ID" if "SLURM_STEP_ID" in environ else "SLURM_STEPID"
    tasks = needed(("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), environ, because)
    nodes = needed(("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), environ, because)
    if tasks == 1:
        return wish, {}
    if tasks > nodes:
        raise UsageError(
            f"srun starts {tasks} tasks on {nodes} node{'s' * (nodes > 1)}, and each would start ranks for its whole "
            f"node. Write `srun --ntasks={nodes} --ntasks-per-node=1 lockstep run ...`, one launcher on each node, or "
            f"`srun python SCRIPT`, one task for each rank."
        )
    if "SLURM_PTY_PORT" in environ:
        raise UsageError(
            f"srun --pty starts {tasks} tasks, of which only the first is in this terminal, so the other nodes would "
            f"not come. Write --standalone for this node alone, or `srun lockstep run ...` without --pty for all."
        )
    rank = needed(("SLURM_NODEID",), environ, because)
    port = wish.master_port or environ.get("MASTER_PORT", "")
    if not port:
        port = port_of_job(environ["SLURM_JOB_ID"], environ[because])
    elif not isinstance(port, int):
        port = number("MASTER_PORT", environ, "MASTER_PORT")
    host = environ.get("MASTER_ADDR") or first_host(node_list(environ))
    wish = wish._replace(nnodes=str(nodes), node_rank=rank, master_addr=host, master_port=port)
    return wish, {"meeting": f"Slurm: node {rank} of {nodes} in {node_list(environ)}, job {environ['SLURM_JOB_ID']}"}


def node_list(environ: Mapping[str, str]) -> str:
    """The nodes of this step, or else of the job, as Slurm writes them."""
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    return next((environ[name] for name in names if name in environ), "")


def share_of_node(wish: Wish, machine: Machine, environ: Mapping[str, str]) -> tuple[Wish, Machine, dict[str, str]]:
    """Keep to the processors that Slurm gave, where it only counts them and does not bind.

    Example:
        >>> wide = Machine(gpus=0, groups=((0, 1), (2, 3), (4, 5)))
        >>> wish, machine, rules = share_of_node(Wish(), wide, {"SLURM_CPUS_ON_NODE": "2"})
        >>> wish.nproc_per_node, machine.threads, rules
        ('2', 2, {'ranks': 'SLURM_CPUS_ON_NODE=2', 'threads': 'SLURM_CPUS_ON_NODE=2', 'cores': 'SLURM_CPUS_ON_NODE=2'})
    """
    name = "SLURM_CPUS_ON_NODE"
    if name not in environ:
        return wish, machine, {}
    count = max(1, number(name, environ, name))
    if count >= machine.threads:
        return wish, machine, {}
    rule = f"{name}={count}"
    rules = {"cores": rule} if "OMP_NUM_THREADS" in environ else {"threads": rule, "cores": rule}
    if wish.nproc_per_node in ("auto", "cpu") and not machine.gpus and len(machine.groups) > count:
        wish, rules = wish._replace(nproc_per_node=str(count)), {"ranks": rule, **rules}
    return wish, machine._replace(quota=float(count)), rules


def refuse_missing_gpus(wish: Wish, machine: Machine, environ: Mapping[str, str]) -> None:
    """Training on the CPU of a node whose GPUs were asked for and given would only look like a slow one."""
    given = environ.get("SLURM_GPUS_ON_NODE", "0")
    if given == "0" or machine.gpus or wish.nproc_per_node != "auto" or wish.rehearsal:
        return
    raise UsageError(
        f"Slurm gives {given} GPU(s) on this node (SLURM_GPUS_ON_NODE), but torch sees none "
        f"(CUDA_VISIBLE_DEVICES={environ.get('CUDA_VISIBLE_DEVICES', 'unset')}). Install a torch that is built for "
        f"CUDA, or write -n cpu to train on the CPU."
    )


def one_of_many(environ: Mapping[str, str]) -> str:
    """What is said in a batch script or a shell of a job of several nodes, where only this one would be used."""
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "1")
    if nodes == "1":
        return ""
    return (
        f"lockstep: this is one of {nodes} nodes of Slurm's job {environ['SLURM_JOB_ID']}, and the only one used here. "
        f"For all: srun --ntasks={nodes} --ntasks-per-node=1 lockstep run ...; --standalone is without this line."
    )
