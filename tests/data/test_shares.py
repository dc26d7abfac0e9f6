from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.shares import count_batches, end_of_epoch, own_positions, share


@given(n=st.integers(0, 1000), size=st.integers(1, 16))
def test_every_place_of_a_batch_is_taken_once_and_in_order(n, size):
    assert list(range(n)) == [place for rank in range(size) for place in share(n, rank, size)]


@given(n=st.integers(0, 200), batch=st.integers(1, 40), size=st.integers(1, 7), start=st.integers(0, 220))
def test_own_positions_are_the_shares_of_the_batches_one_by_one(n, batch, size, start):
    for rank in range(size):
        expected = []
        for at in range(start, n, batch):
            expected += [at + place for place in share(min(batch, n - at), rank, size)]

        assert expected == own_positions(start, n, batch, rank, size).tolist()


@given(n=st.integers(0, 200), batch=st.integers(1, 40), start=st.integers(0, 200), drop_last=st.booleans())
def test_an_epoch_ends_behind_its_last_batch(n, batch, start, drop_last):
    heads = [at for at in range(start, n, batch) if at + batch <= n or not drop_last]

    assert len(heads) == count_batches(max(0, n - start), batch, drop_last)
    assert not heads or end_of_epoch(start, n, batch, drop_last) == min(heads[-1] + batch, n)
    assert heads or end_of_epoch(start, n, batch, drop_last) <= max(start, n if not drop_last else start)
