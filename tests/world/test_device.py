import pytest

from lockstep.errors import UsageError
from lockstep.world.device import find_shared, pick_device
from lockstep.world.place import ALONE, Place

THIRD = Place(2, 4, 2, 4, 0, 1, "torchrun")


@pytest.mark.parametrize(
    ("wanted", "place", "count", "expected"),
    [
        ("auto", ALONE, 0, "cpu"),
        ("auto", THIRD, 0, "cpu"),
        ("auto", THIRD, 4, "cuda:2"),
        ("cpu", THIRD, 4, "cpu"),
        ("cuda", THIRD, 4, "cuda:2"),
        ("cuda:0", ALONE, 2, "cuda:0"),
        ("auto", THIRD._replace(launcher="Slurm"), 1, "cuda:0"),
    ],
    ids=["alone", "no-gpu", "local-rank", "cpu-on-gpus", "cuda", "by-index", "bound-by-slurm"],
)
def test_a_rank_gets_the_device_of_its_local_rank(wanted, place, count, expected):
    assert pick_device(wanted, place, count) == expected


@pytest.mark.parametrize(
    ("wanted", "place", "count", "words"),
    [
        ("auto", THIRD, 2, ["local rank 2", "2 visible device"]),
        ("cuda:7", ALONE, 2, ["cuda:7", "2 visible device"]),
        ("cuda", THIRD, 0, ["rank 2", "no CUDA device"]),
        ("tpu", ALONE, 0, ["'tpu'", "'auto'"]),
        ("cuda:first", ALONE, 2, ["'cuda:first'", "'cuda:1'"]),
    ],
)
def test_a_device_that_is_not_there_raises_and_is_named(wanted, place, count, words):
    with pytest.raises(UsageError) as error:
        pick_device(wanted, place, count)

    assert [word for word in words if word not in str(error.value)] == []


def test_two_ranks_on_one_gpu_are_found_and_ranks_on_cpus_are_not():
    assert find_shared([("a", "1"), ("a", "2"), ("a", "1")]) == (0, 2)
    assert find_shared([("a", ""), ("a", "")]) is None
    assert find_shared([("a", "1"), ("b", "1")]) is None
