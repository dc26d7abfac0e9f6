import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UsageError
from lockstep.world.place import ALONE, Place, find_place, tasks_per_node

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NNODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ALONE),
        (TORCHRUN, Place(3, 4, 1, 2, 1, 2, "torchrun")),
        (SLURM, Place(5, 7, 1, 3, 2, 3, "Slurm")),
        (OPEN_MPI, Place(2, 4, 0, 2, 1, 2, "Open MPI")),
        (PMI, Place(1, 2, 1, 2, 0, 1, "PMI")),
        ({**PMI, **OPEN_MPI}, Place(2, 4, 0, 2, 1, 2, "Open MPI")),
        ({**OPEN_MPI, **SLURM}, Place(5, 7, 1, 3, 2, 3, "Slurm")),
        ({**SLURM, **TORCHRUN}, Place(3, 4, 1, 2, 1, 2, "torchrun")),
    ],
    ids=["alone", "torchrun", "slurm", "mpi", "pmi", "mpi-over-pmi", "slurm-over-mpi", "torchrun-over-slurm"],
)
def test_the_place_is_read_from_the_first_launcher_that_left_its_variables(environ, expected):
    assert find_place(environ) == expected


def test_a_batch_script_outside_srun_is_alone_whatever_its_jobs_task_count():
    """Slurm sets SLURM_PROCID=0 and SLURM_NTASKS in the batch script too, where waiting for 7 ranks would be a hang."""
    environ = {k: v for k, v in SLURM.items() if "STEP" not in k} | {"SLURM_PROCID": "0", "SLURM_JOB_ID": "9"}

    assert find_place(environ) == ALONE


def test_an_interactive_shell_of_srun_is_alone():
    """`srun --pty bash` makes a step of one task inside a job of seven."""
    environ = {**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NODEID": "0"}

    assert find_place({**environ, "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_STEP_NUM_NODES": "1"}).size == 1


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE is not"]),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "0"}, ["WORLD_SIZE=2", "RANK is not"]),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"}, ["RANK=1", "LOCAL_RANK is not"]),
        ({"RANK": "one", "WORLD_SIZE": "2"}, ["RANK='one'", "not a number"]),
        ({**TORCHRUN, "WORLD_SIZE": ""}, ["WORLD_SIZE=''", "not a number"]),
        ({**TORCHRUN, "RANK": "4"}, ["RANK=4", "WORLD_SIZE=4"]),
        ({**TORCHRUN, "RANK": "-1"}, ["RANK=-1", "WORLD_SIZE=4"]),
        ({**TORCHRUN, "LOCAL_RANK": "2"}, ["LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"]),
        ({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, ["'2(y2)'"]),
        ({"OMPI_COMM_WORLD_RANK": "0"}, ["OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE is not"]),
    ],
)
def test_half_set_or_contradicting_variables_raise_and_are_named(environ, words):
    with pytest.raises(UsageError) as error:
        find_place(environ)

    assert [word for word in words if word not in str(error.value)] == []


def test_rank_and_world_size_are_enough_on_one_host():
    """What people set by hand for init_process_group on one machine."""
    environ = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}

    assert find_place(environ) == Place(1, 3, 1, 3, 0, 1, "torchrun")


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=4))
def test_slurms_task_counts_expand_as_slurm_writes_them(entries):
    text = ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in entries)

    assert tasks_per_node(text) == [count for count, times in entries for _ in range(times)]
