"""Block and page ids in and out: every form that holds integers, and every one that does not."""

from __future__ import annotations

import array
import ctypes
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcached._core import Pool
from kvcached.errors import BlockError
from tests.children import run_script
from tests.ranges import host_range

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("nothing_stays")

NUM_BLOCKS = 3000  # ids beyond what 8 bits hold


class Index:
    """An int as numpy's scalars are one."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


def of_dtype(dtype: Any) -> Callable[[list[int]], np.ndarray]:
    return lambda ids: np.array(ids, dtype=dtype)


def strided(ids: list[int]) -> np.ndarray:
    table = np.full((len(ids), 3), -7, dtype=np.int64)
    table[:, 1] = ids
    return table[:, 1]


def read_only(ids: list[int]) -> np.ndarray:
    made = np.array(ids, dtype=np.int64)
    made.flags.writeable = False
    return made


# name -> (how it is made, the integers that it can hold)
BITS = {np.int16: (-(1 << 15), 1 << 15), np.uint16: (0, 1 << 16), np.int32: (-(1 << 31), 1 << 31)}
BITS |= {np.uint32: (0, 1 << 32), np.int64: (-(1 << 63), 1 << 63), np.uint64: (0, 1 << 64)}
ANY = (-(1 << 70), 1 << 70)
FORMS: dict[str, tuple[Callable[[list[int]], Any], tuple[int, int]]] = {
    "list": (list, ANY),
    "tuple": (tuple, ANY),
    "generator": (lambda ids: (i for i in ids), ANY),
    "deque": (deque, ANY),
    "keys": (dict.fromkeys, ANY),
    "list of numpy scalars": (lambda ids: list(np.array(ids, dtype=np.int64)), BITS[np.int64]),
    "tuple of index": (lambda ids: tuple(map(Index, ids)), ANY),
    "array.array q": (lambda ids: array.array("q", ids), BITS[np.int64]),
    "array.array I": (lambda ids: array.array("I", ids), BITS[np.uint32]),
    "memoryview": (lambda ids: memoryview(array.array("l", ids)), BITS[np.int64]),
    "ctypes": (lambda ids: (ctypes.c_int32 * len(ids))(*ids), BITS[np.int32]),
    "strided": (strided, BITS[np.int64]),
    "backwards": (lambda ids: np.array(ids[::-1], dtype=np.int64)[::-1], BITS[np.int64]),
    "read-only": (read_only, BITS[np.int64]),
    "little-endian": (of_dtype("<i8" if sys.byteorder == "little" else ">i8"), BITS[np.int64]),
    **{np.dtype(dtype).name: (of_dtype(dtype), bounds) for dtype, bounds in BITS.items()},
}


@pytest.fixture(scope="module")
def whole_pool() -> Iterator[Pool]:
    made = Pool(host_range(num_blocks=NUM_BLOCKS), max_reserved_bytes=1 << 30)
    yield made
    made.shutdown()


@pytest.fixture
def pool(whole_pool) -> Pool:
    whole_pool.clear()
    return whole_pool


def taken(pool: Pool) -> int:
    return NUM_BLOCKS - pool.available_size()


def free_blocks(pool: Pool) -> tuple[int, int, list[int]]:
    return pool.available_size(), pool.held_size(), sorted(pool.free_ids())


class TestIn:
    @pytest.mark.parametrize("form", FORMS)
    @given(data=st.data())
    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_what_was_allocated_is_known_in_every_form(self, pool, form, data):
        pool.clear()
        make, _ = FORMS[form]
        ids = pool.alloc(data.draw(st.integers(0, 300)))
        order = data.draw(st.randoms(use_true_random=False))
        order.shuffle(ids)
        pages = pool.pages_of(ids)
        assert pool.pages_of(make(ids)) == pages
        occupied = pool.get_page_occupancy(pages)
        assert pool.get_page_occupancy(make(pages) if form != "keys" else pages) == occupied
        pool.free(make(ids))
        assert taken(pool) == 0
        pool.claim(make(ids))
        assert taken(pool) == len(ids)
        pool.free(ids)

    @pytest.mark.parametrize("form", FORMS)
    @given(data=st.data())
    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_a_foreign_id_among_them_changes_nothing(self, pool, form, data):
        pool.clear()
        make, (least, bound) = FORMS[form]
        ids = pool.alloc(data.draw(st.integers(1, 100)))
        beyond = st.integers(max(least, -(1 << 70)), -1) if least < 0 else st.nothing()
        above = st.integers(pool.id_space, bound - 1)
        foreign = data.draw(above | beyond)
        wrong = list(ids)
        wrong.insert(data.draw(st.integers(0, len(ids))), foreign)
        for call in (pool.pages_of, pool.free, pool.claim):
            if call == pool.claim:
                pool.free(ids)
            before = free_blocks(pool)
            with pytest.raises(BlockError, match=f"no block has id {foreign}$"):
                call(make(wrong))
            assert free_blocks(pool) == before
        with pytest.raises(ValueError, match=rf"page {foreign} is outside a pool of \d+ pages"):
            pool.get_page_occupancy(make([0, foreign]))

    @pytest.mark.parametrize(
        ("bad", "why"),
        [
            pytest.param("12", "ids are a str", id="str"),
            pytest.param("", "ids are a str", id="no str"),
            pytest.param(5, "ids are a int", id="an int"),
            pytest.param(None, "ids are a NoneType", id="None"),
            pytest.param([1.0], "an id is a float", id="a float"),
            pytest.param((1, "2"), "an id is a str", id="a str among them"),
            pytest.param([[1]], "an id is a list", id="a list among them"),
            pytest.param([None], "an id is a NoneType", id="None among them"),
            pytest.param([np.float32(1)], "an id is a float32", id="a numpy float"),
            pytest.param(np.zeros(3), 'format "d"', id="float64"),
            pytest.param(np.zeros(3, np.float16), 'format "e"', id="float16"),
            pytest.param(np.zeros(3, bool), r'format "\?"', id="bool"),
            pytest.param(np.zeros(3, complex), 'format "Zd"', id="complex"),
            pytest.param(np.zeros(3, object), 'format "O"', id="objects"),
            pytest.param(
                np.zeros(3, ">i4" if sys.byteorder == "little" else "<i4"), 'format "[<>]i"', id="swapped"
            ),
            pytest.param(np.zeros(3, "i4,i4"), 'format "T', id="records"),
            pytest.param(np.zeros(3, "datetime64[s]"), "an id is a datetime64", id="times"),
            pytest.param(np.zeros((2, 2), int), "2 dimensions", id="2-D"),
            pytest.param(np.zeros((), int), "0 dimensions", id="0-D"),
            pytest.param([np.zeros(2, int)], "an id is a ndarray", id="an array among them"),
            pytest.param(memoryview(b"ab").cast("c"), 'format "c"', id="characters"),
        ],
    )
    def test_what_holds_no_ids(self, pool, bad, why):
        for call in (pool.free, pool.claim, pool.pages_of, pool.get_page_occupancy):
            with pytest.raises(
                TypeError, match=rf"{why}.*: give ids as a list or tuple of ints or as a one-dim"
            ):
                call(bad)
        assert taken(pool) == 0

    def test_an_error_of_theirs_comes_through(self, pool):
        class Trap:
            def __index__(self) -> int:
                raise KeyError("mine")

        def items() -> Iterator[int]:
            yield 1
            raise KeyError("mine")

        for ids in ([1, Trap()], (Trap(),), items()):
            with pytest.raises(KeyError, match="mine"):
                pool.free(ids)
        assert taken(pool) == 0

    def test_a_list_that_changes_while_it_is_read(self, pool):
        ids: list[Any] = pool.alloc(20)

        class Shorten:
            def __index__(self) -> int:
                del ids[2:]
                return first

        first, ids[0] = ids[0], Shorten()
        kept = ids[2:]
        pool.free(ids)
        assert taken(pool) == len(kept)
        pool.free(kept)

    def test_pages_of_a_range(self):
        ftensor = host_range()
        assert ftensor.map(np.array([3, 5, 3])) == [3, 5]
        ftensor.unmap(np.array([5], np.uint8))
        ftensor.prepare_unmap(1, (3,))
        assert ftensor.mapped_pages() == []
        ftensor.commit_unmap(1)

    def test_every_call_that_takes_an_id(self, pool):
        """A negative one or one of many digits is refused as the ids that are merely too high."""
        geometry, ftensor = pool.geometry, pool.ftensor
        for number in (-1, 1 << 32, -(1 << 80)):
            for call in (geometry.index, geometry.pages_of_row):
                with pytest.raises(BlockError, match=f"no block has id {number}$"):
                    call(number)
            for call in (
                ftensor.map,
                ftensor.unmap,
                lambda pages: ftensor.prepare_unmap(1, pages),
            ):
                with pytest.raises(ValueError, match=rf"page {number} is outside the range of \d+ pages"):
                    call([number])
        with pytest.raises(BlockError, match="no block has id of thousands of digits"):
            pool.free([10**5000])


class TestOut:
    @given(n=st.integers(0, 300))
    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    def test_the_same_ids_in_every_form(self, pool, n):
        pool.clear()
        ids = pool.alloc(n)
        assert type(ids) is list and all(type(i) is int for i in ids) and len(set(ids)) == n
        pool.free(ids)
        made = pool.alloc_array(n)
        assert made.dtype == np.int64 and made.shape == (n,) and made.tolist() == ids
        assert made.flags.owndata and made.flags.writeable and made.flags.c_contiguous
        pool.free(made)
        for out in (
            np.full(n, -1, np.int64),
            np.full(n, -1, np.int32),
            np.zeros(n, np.uint64),
            np.zeros(n, np.uint32),
            np.full(n + 2, -1, np.int64)[1:-1],
            array.array("q", [-1] * n),
            array.array("i", [-1] * n),
            memoryview(array.array("l", [-1] * n)),
            (ctypes.c_int32 * n)(),
        ):
            assert pool.alloc_into(out) is True
            assert list(out) == ids
            assert taken(pool) == n
            pool.free(out)
        assert taken(pool) == 0

    def test_a_window_of_an_array_is_all_that_is_written(self, pool):
        whole = np.full(10, -1, np.int64)
        assert pool.alloc_into(whole[3:6])
        assert (whole[:3] == -1).all() and (whole[6:] == -1).all() and (whole[3:6] >= 0).all()
        pool.free(whole[3:6])

    @pytest.mark.parametrize(
        ("bad", "why"),
        [
            pytest.param([0, 0], "a list takes no ids", id="list"),
            pytest.param(5, "a int takes no ids", id="int"),
            pytest.param(bytes(8), "is read-only", id="bytes"),
            pytest.param(read_only([1, 2]), "is read-only", id="read-only"),
            pytest.param(np.zeros(8, np.int64)[::2], "is not contiguous", id="strided"),
            pytest.param(np.zeros(3, np.int64)[::-1], "is not contiguous", id="backwards"),
            pytest.param(np.zeros((2, 2), np.int64), "has 2 dimensions", id="2-D"),
            pytest.param(np.zeros((), np.int64), "has 0 dimensions", id="0-D"),
            pytest.param(np.zeros(3), 'format "d"', id="float64"),
            pytest.param(np.zeros(3, np.float32), 'format "f"', id="float32"),
            pytest.param(np.zeros(3, np.int16), "has 16-bit items", id="int16"),
            pytest.param(bytearray(8), "has 8-bit items", id="bytearray"),
            pytest.param(np.zeros(3, bool), r'format "\?"', id="bool"),
            pytest.param(
                np.zeros(3, ">i8" if sys.byteorder == "little" else "<i8"), 'format "[<>][ql]"', id="swapped"
            ),
            pytest.param(np.zeros(0), 'format "d"', id="no floats"),
        ],
    )
    def test_what_takes_no_ids(self, pool, bad, why):
        with pytest.raises(TypeError, match=rf"{why}.*: give a writable, contiguous, one-dimensional array"):
            pool.alloc_into(bad)
        assert taken(pool) == 0

    def test_more_than_there_are(self, pool):
        out = np.full(NUM_BLOCKS + 1, -1, np.int64)
        assert pool.alloc_into(out) is False
        assert (out == -1).all()
        for n in (NUM_BLOCKS + 1, 1 << 31, 1 << 32, 1 << 63, 10**30):
            assert pool.alloc(n) is None
            assert pool.alloc_array(n) is None
            assert not pool.try_to_reserve(n)
        assert taken(pool) == 0
        assert pool.reserve_demand(10**30) == NUM_BLOCKS

    def test_numbers_of_blocks_that_are_none(self, pool):
        for call in (pool.alloc, pool.alloc_array, pool.reserve_demand, pool.try_to_reserve):
            for n in (-1, -(10**30)):
                with pytest.raises(ValueError, match="a number of blocks must be 0 or more"):
                    call(n)
            for n in (1.0, "1", None, [1]):
                with pytest.raises(TypeError):
                    call(n)
            with pytest.raises(TypeError):
                call()
        for n in (np.int64(3), Index(3), True):
            pool.free(pool.alloc(n))
            pool.free(pool.alloc_array(n))

    def test_without_numpy(self):
        code = (
            "import sys; sys.modules['numpy'] = None\n"
            "from kvcached import _core\n"
            "from kvcached.errors import KVCachedConfigError\n"
            "g = _core.Geometry.solve(2, 4096, _core.granularity('cpu'))\n"
            "p = _core.Pool(_core.FTensor('cpu', g, 64))\n"
            "try: p.alloc_array(3)\n"
            "except KVCachedConfigError as error:\n"
            "    assert 'needs numpy' in str(error) and isinstance(error.__cause__, ImportError)\n"
            "else: raise SystemExit('no error')\n"
            "assert p.available_size() == 64\n"
            "p.free(p.alloc(3))\n"
        )
        done = run_script(code)
        assert done.returncode == 0, done.stderr
