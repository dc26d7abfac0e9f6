"""Does a script start its ranks itself, or drive all devices from one process? Told from its text. Pure."""

import ast

_STARTS = frozenset(("spawn", "start_processes", "Process"))
_READS_ITS_RANK = frozenset(("LOCAL_RANK", "local_rank", "SLURM_PROCID", "SLURM_LOCALID"))


def wants_one_process(source: str) -> bool:
    """Whether one process is what the script wants, as ``python script.py`` gives it.

    Those are scripts that call ``mp.spawn`` or start a ``Process`` for each device, and those of one process that
    drives every device with ``torch.nn.DataParallel``. One that can be started either way, and reads its local rank, is
    started as ranks.

    Example:
        >>> wants_one_process("mp.spawn(main_worker, nprocs=torch.cuda.device_count())")
        True
        >>> wants_one_process("model = nn.DataParallel(model).cuda()")
        True
        >>> wants_one_process("parser.add_argument('--local_rank'); mp.spawn(f)")
        False
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:  # an old script: async=True, print statements
        return "mp.spawn" in source and "local_rank" not in source
    called, words, names = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called.add(_last_name(node.func))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            words.add(node.value.lstrip("-").replace("-", "_"))
        if isinstance(node, (ast.Name, ast.Attribute)):
            names.add(_last_name(node))
    if words & _READS_ITS_RANK:
        return False
    grouped = "init_process_group" in names
    return bool(called & {"spawn", "start_processes"} or (called & _STARTS and grouped)) or (
        bool(called & {"DataParallel", "data_parallel"}) and not grouped
    )


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
