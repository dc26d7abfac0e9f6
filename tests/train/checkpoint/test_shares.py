"""Who writes what."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.train.checkpoint import shares


@given(
    sizes=st.lists(st.tuples(st.integers(0, 200), st.sampled_from([1, 2, 4, 8, 16])), max_size=8),
    ranks=st.integers(1, 6),
)
def test_shares_are_equal_and_hold_every_element_once_and_aligned(sizes, ranks):
    extents = [shares.Extent(str(n), "float32", (items,), size) for n, (items, size) in enumerate(sizes)]
    found = shares.divide(extents, ranks)
    held = [(piece.extent.name, item) for share in found for piece in share for item in range(piece.start, piece.stop)]
    bytes_of = [sum(piece.size for piece in share) for share in found]

    assert sorted(held) == sorted((extent.name, item) for extent in extents for item in range(extent.items))
    assert max(bytes_of) - min(bytes_of) <= 128  # two cache lines
    for share in found:
        at = 0
        for piece in share:
            assert at % piece.extent.itemsize == 0
            at += piece.size


def test_a_small_tensor_of_odd_size_moves_no_large_one_off_its_cache_line():
    sizes = {"generator": (626, 8), "weights": (4_000_000, 4), "step": (1, 4), "half": (32_000, 2)}
    extents = [shares.Extent(name, "float32", (items,), size) for name, (items, size) in sizes.items()]
    for share in shares.divide(extents, 2):
        at = 0
        for piece in share:
            assert piece.size < 10_000 or at % shares.LINE == 0
            at += piece.size
