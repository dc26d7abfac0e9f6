"""The report: facts of ranks put together, in words, and what a real run counts."""

import re

import pytest
from click.testing import CliRunner
from launching import run

from lockstep.compat.rehearsal.report.facts import Facts, from_plain, read_all, write
from lockstep.compat.rehearsal.report.page import put_together
from lockstep.compat.rehearsal.report.words import lines
from lockstep.compat.rehearsal.starts import wants_one_process
from lockstep.errors import UsageError
from lockstep.launcher.plan import Machine, Rehearsal, Wish, make_plan
from lockstep_cli import main

TWO = [
    Facts(
        rank=rank,
        size=2,
        steps=3,
        peak=2**20 * (rank + 1),
        collectives=((1, "broadcast", 8, 1), (3, "all_reduce", 4096, 2), (3, "barrier", 0, 1)),
        without_gradient=("head.bias", *(["tail.bias"] if rank else [])),
        unsynchronised=("bn",),
        same_epoch=("DistributedSampler of 8",),
        saved=("/runs/last.pt", f"/runs/rank{rank}.pt"),
        misplaced=(("train.py:9", "linear of tensors on cuda:0 and cpu", 3),),
    )
    for rank in (0, 1)
]


def test_the_report_says_all_that_was_found():
    assert lines(put_together(TWO)) == [
        "rehearsal: 2 ranks, 3 optimizer steps on each",
        "  peak memory     1.0 MiB (rank 0), 2.0 MiB (rank 1)",
        "  collectives     in the last step, by each rank:",
        "    2 all_reduce of 4.0 KiB",
        "    1 barrier",
        "  parameters without gradients:",
        "    head.bias",
        "    tail.bias (rank 1)",
        "  batch norm over one rank's samples only:",
        "    bn",
        "  samplers that shuffle every epoch alike (sampler.set_epoch(epoch)):",
        "    DistributedSampler of 8",
        "  checkpoints written by several ranks:",
        "    /runs/last.pt (ranks 0, 1)",
        "  tensors on the wrong device:",
        "    train.py:9: linear of tensors on cuda:0 and cpu, 6 times",
    ]


def test_what_is_well_takes_one_line():
    (*_, last) = lines(put_together([Facts(rank=0, size=1, steps=1, peak=1)]))

    assert last.startswith("  none: parameters without gradients, batch norm")


def test_what_only_starts_others_is_no_rank():
    report = put_together([Facts(rank=-1), *TWO])

    assert report.ranks == 2
    assert lines(put_together([Facts()])) == ["rehearsal: no rank took an optimizer step"]


def test_batch_norm_alone_is_no_finding_in_a_world_of_one():
    assert put_together([Facts(rank=0, size=1, steps=1, unsynchronised=("bn",))]).unsynchronised == ()


def test_facts_come_back_as_they_were(tmp_path):
    write(str(tmp_path), TWO[1])

    assert [TWO[1]] == read_all(str(tmp_path))
    assert from_plain(Facts()._asdict()) == Facts()


def test_long_lists_are_cut():
    names = tuple(f"layer.{i}" for i in range(13))

    assert "    ... and 3 more" in lines(put_together([Facts(rank=0, steps=1, without_gradient=names)]))


SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch import nn
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.spare = nn.Linear(2, 2, bias=False)
    def forward(self, x):
        return self.body(x)
model = nn.parallel.DistributedDataParallel(Net().cuda(), device_ids=[rank], find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(60, 4), torch.randn(60, 1))
loader = torch.utils.data.DataLoader(data, 4, sampler=torch.utils.data.DistributedSampler(data), num_workers=1)
try:
    for epoch in range(5):
        for x, y in loader:
            loss = ((model(x.cuda()) - y) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.save(model.state_dict(), sys.argv[1])
            optimizer.step()
    print("never here")
finally:
    print("closed", rank)
"""


def test_a_run_of_three_steps_ends_well_on_every_rank_and_reports(tmp_path):
    done = run(tmp_path, SCRIPT, "--device", "cpu", "--ranks", "3", "--steps", "3", arguments=(str(tmp_path / "x.pt"),))

    assert (done.returncode, sorted(re.findall(r"closed (\d)|(never here)", done.stdout))) == (
        0,
        [("0", ""), ("1", ""), ("2", "")],
    ), done.stderr
    report = done.stdout[done.stdout.index("rehearsal:") :].splitlines()
    assert report[0] == "rehearsal: 3 ranks, 3 optimizer steps on each"
    # 4 * 8 + 8 + 8 + 8 + 8 + 1 + 2 * 2 parameters in one bucket; buffers of batch norm from rank 0; who used which.
    assert "    1 all_reduce of 276 B" in report
    assert report[report.index("  parameters without gradients:") + 1] == "    spare.weight"
    assert "    body.1" in report
    assert "    DistributedSampler of 20 samples a rank: begun once, set_epoch never called" in report
    assert f"    {tmp_path / 'x.pt'} (ranks 0, 1, 2)" in report
    place = SCRIPT.splitlines().index(next(line for line in SCRIPT.splitlines() if "loss = " in line)) + 1
    assert f"    train.py:{place}: sub of tensors on cuda:0 and cpu, 3 times" in report
    assert f"lockstep: train.py:{place}: sub of tensors on cuda:0 and cpu; a GPU would refuse it" in done.stderr


SPAWNING = """
import torch, torch.distributed as dist, torch.multiprocessing as mp
assert torch.cuda.device_count() == 2
def work(rank, size):
    dist.init_process_group("nccl", init_method="tcp://localhost:1", rank=rank, world_size=size)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1).cuda(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.ones(4, 2).cuda(rank)).sum().backward()
        optimizer.step()
if __name__ == "__main__":
    mp.spawn(work, nprocs=torch.cuda.device_count(), args=(torch.cuda.device_count(),))
    raise SystemExit("ranks that ended early gave no result")
"""


def test_ranks_that_the_script_spawns_end_after_their_steps_and_the_script_with_them(tmp_path):
    done = run(tmp_path, SPAWNING, "--device", "cpu", "-n", "2", "--steps", "2")

    assert done.returncode == 0, done.stderr
    assert "rehearsal: 2 ranks, 2 optimizer steps on each" in done.stdout
    assert "    1 all_reduce of 12 B" in done.stdout


PLAIN = """
import threading, torch
assert type(torch.zeros).__name__ == "builtin_function_or_method"
assert not torch.cuda.is_available() and torch.device is type(torch.ones(1).device)
assert "lockstep.compat.rehearsal" not in __import__("sys").modules
"""


def test_nothing_of_it_is_there_without_being_asked_for(tmp_path):
    done = run(tmp_path, PLAIN, "-n", "1")

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--steps", "3"], "--steps belongs to a rehearsal: --device cpu"),
        (["--hide-cuda"], "--hide-cuda belongs to a rehearsal"),
        (["--device", "cpu", "--steps", "0"], "0 is not in the range"),
        (["--device", "cpu", "--nnodes", "2", "--master-addr", "x"], "rehearses on one machine"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, what, tmp_path):
    (tmp_path / "x.py").touch()
    done = CliRunner().invoke(main, ["run", *options, str(tmp_path / "x.py")])

    assert done.exit_code == 2
    assert what in done.output


@pytest.mark.parametrize("own_ranks", [False, True])
def test_there_are_as_many_devices_as_ranks_also_beside_gpus(own_ranks):
    machine = Machine(gpus=8, groups=((0, 1, 2, 3),))
    plan = make_plan(Wish(nproc_per_node="2", rehearsal=Rehearsal(own_ranks=own_ranks)), machine, {})

    assert [seat.device for seat in plan.seats] == ["cpu"] * (1 if own_ranks else 2)
    assert (plan.rehearsal.devices, plan.threads) == (2, 2)
    with pytest.raises(UsageError, match="one machine"):
        make_plan(Wish(nnodes="2", master_addr="x", rehearsal=Rehearsal()), machine, {})


@pytest.mark.parametrize(
    ("source", "own"),
    [
        ("mp.spawn(work, nprocs=torch.cuda.device_count(), args=(args,))", True),
        ("torch.multiprocessing.start_processes(work)", True),
        ("dist.init_process_group('nccl')\nfor r in range(4):\n    Process(target=work, args=(r,)).start()", True),
        ("model = nn.DataParallel(model)", True),
        ("if spawned:\n    mp.spawn(work)\nelse:\n    work(int(os.environ['LOCAL_RANK']))", False),
        ("parser.add_argument('--local_rank'); model = nn.DataParallel(model)", False),
        ("dist.init_process_group('nccl'); model = nn.DataParallel(model)", False),
        ("x.cuda(async=True); mp.spawn(work)", True),
        ("import lockstep\nlockstep.init()", False),
    ],
)
def test_who_starts_the_ranks_is_told_from_the_text(source, own):
    assert own == wants_one_process(source)
