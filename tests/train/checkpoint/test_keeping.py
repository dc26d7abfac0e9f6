"""Which checkpoints stay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep.train.checkpoint.keeping import Best, Name, to_prune

names = st.builds(Name, st.integers(1, 50), st.integers(0, 50))
notes = st.dictionaries(st.just("a"), st.floats())


@given(
    whole=st.lists(st.tuples(names, notes), unique_by=lambda pair: pair[0].serial, min_size=1),
    keep=st.integers(1, 5),
    best=st.none() | st.builds(Best, st.just("a"), st.integers(1, 3), st.booleans()),
    data=st.data(),
)
def test_the_newest_stays_and_so_do_the_newest_ones_and_the_best(whole, keep, best, data):
    newest = data.draw(st.sampled_from([name for name, _ in whole]))
    gone = set(to_prune(whole, newest, keep, best))
    left = {name for name, _ in whole} - gone
    values = [n["a"] for _, n in whole if n.get("a", float("nan")) == n.get("a", float("nan")) and "a" in n]

    assert newest in left
    assert set(sorted((name for name, _ in whole), reverse=True)[:keep]) <= left
    if best and values:
        wanted = min(values) if best.lowest else max(values)
        assert any(n.get("a") == wanted for name, n in whole if name in left)
    assert len(left) <= keep + 1 + (best.most if best else 0)


@pytest.mark.parametrize(("wish", "stay"), [(("accuracy", 1), [1, 3, 4]), (("loss", 1, "lowest"), [2, 3, 4])])
def test_keep_best_keeps_the_best_besides_the_newest(tmp_path, wish, stay):
    checkpoint = lockstep.Checkpoint(tmp_path, values={}, keep=2, keep_best=wish)
    for accuracy, loss in [(0.9, 0.5), (0.7, 0.1), (0.8, 0.3), (float("nan"), float("nan"))]:
        checkpoint.note(accuracy=accuracy, loss=loss)
        checkpoint.save(wait=True)

    assert stay == sorted(int(path.name[:6]) for path in tmp_path.iterdir())


@pytest.mark.parametrize("wish", ["accuracy", ("accuracy",), ("accuracy", 0), ("loss", 1, "smallest"), 3])
def test_a_keep_best_that_makes_no_sense_is_refused(tmp_path, wish):
    with pytest.raises(lockstep.UsageError, match="keep_best="):
        lockstep.Checkpoint(tmp_path, values={}, keep_best=wish)


def test_with_every_steps_only_these_and_the_end_are_saved(tmp_path):
    checkpoint = lockstep.Checkpoint(tmp_path, values={}, every_steps=4, keep=99)
    for _ in checkpoint.epochs(3):
        for _ in range(3):
            checkpoint.step()

    assert [4, 8, 9] == sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.iterdir())


def test_with_neither_the_end_of_every_epoch_is_saved(tmp_path):
    checkpoint = lockstep.Checkpoint(tmp_path, values={}, keep=99)
    for _ in checkpoint.epochs(3):
        for _ in range(3):
            checkpoint.step()

    assert [3, 6, 9] == sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.iterdir())


def test_with_every_minutes_a_step_saves_once_the_time_has_passed(tmp_path):
    checkpoint = lockstep.Checkpoint(tmp_path, values={}, every_minutes=1e-9, keep=99)
    checkpoint.step()
    checkpoint.step()
    checkpoint.save(wait=True)

    assert [1, 2, 2] == sorted(int(path.name.rpartition("-")[2]) for path in tmp_path.iterdir())


def test_a_loader_that_is_forgotten_is_warned_of(tmp_path):
    checkpoint = lockstep.Checkpoint(tmp_path, values={})
    for _ in train if (train := lockstep.DataLoader(range(3))) else ():
        checkpoint.step()
    with pytest.warns(UserWarning, match="no part of the checkpoint"):
        checkpoint.save(wait=True)


def test_the_loader_of_an_evaluation_is_not_taken_for_one_that_was_forgotten(tmp_path, recwarn):
    train, test = lockstep.DataLoader(range(3)), lockstep.DataLoader(range(2))
    checkpoint = lockstep.Checkpoint(tmp_path, values={}, train=train)
    for _ in checkpoint.epochs(2):
        list(train)
        list(test)

    assert [] == [str(warning.message) for warning in recwarn]


def test_a_loader_of_earlier_days_is_not_taken_for_one_either(tmp_path, recwarn):
    others = lockstep.DataLoader(range(2))
    list(others)
    checkpoint = lockstep.Checkpoint(tmp_path, values={})
    for _ in checkpoint.epochs(2):
        checkpoint.step()

    assert [] == [str(warning.message) for warning in recwarn]
    del others


@pytest.mark.parametrize("options", [{"keep": 0}, {"every_steps": 0}, {"every_minutes": 0}, {"keep_best": "x"}])
def test_arguments_that_make_no_sense_are_refused(tmp_path, options):
    with pytest.raises(lockstep.UsageError):
        lockstep.Checkpoint(tmp_path, values={}, **options)


@pytest.mark.parametrize("parts", [{}, {"model": 3}, {"model": object()}])
def test_parts_without_a_state_are_refused(tmp_path, parts):
    with pytest.raises(lockstep.UsageError):
        lockstep.Checkpoint(tmp_path, **parts)


def test_a_checkpoint_of_other_parts_is_refused_by_name(tmp_path):
    lockstep.Checkpoint(tmp_path, a={}, b={}).save(wait=True)

    assert lockstep.Checkpoint(tmp_path, a={}).restore()
    with pytest.raises(lockstep.UsageError, match=r"has no part 'c'; it has \['a', 'b'\]"):
        lockstep.Checkpoint(tmp_path, a={}, c={}).restore()


def test_a_model_of_another_shape_is_refused_by_part(tmp_path):
    import torch

    lockstep.Checkpoint(tmp_path, net=torch.nn.Linear(2, 2)).save(wait=True)

    with pytest.raises(lockstep.UsageError, match=r"part 'net': RuntimeError: Error(.|\n)*size mismatch"):
        lockstep.Checkpoint(tmp_path, net=torch.nn.Linear(2, 3)).restore()


def test_saving_in_the_middle_of_a_step_is_refused(tmp_path):
    import torch

    model = torch.nn.Linear(2, 1)
    update = lockstep.Update(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulate=2)
    checkpoint = lockstep.Checkpoint(tmp_path, model=model, update=update)
    with update:
        update.backward(model(torch.ones(3, 2)))
    with pytest.raises(lockstep.UsageError, match="in the middle of an Update's step"):
        checkpoint.save()
