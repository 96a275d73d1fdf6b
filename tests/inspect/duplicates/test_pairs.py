"""All pairs within k bits are found, and no other; no pair of the answer depends on how it was looked for."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.inspect.duplicates import dedup as pairs
from ppldm.inspect.duplicates.dedup import choose_masks, duckdb_engine, find_pairs, spark_engine
from ppldm.inspect.duplicates.hashes import NUM_CROPS

FIELDS = ["hash", "mirrored", *(f"crop_{crop}" for crop in range(NUM_CROPS))]


def make_nodes(path, rng, count: int = 120) -> np.ndarray:
    """int64 [fields, count]: hashes near to each other, on both sides of zero."""
    hashes = rng.integers(-(2**63), 2**63 - 1, (len(FIELDS), count))
    for field in range(len(FIELDS)):
        for node in range(1, count):
            if rng.random() < 0.5:
                flips = sum(1 << int(bit) for bit in rng.choice(63, rng.integers(0, 9), replace=False))
                hashes[field, node] = hashes[rng.choice([0, field]), rng.integers(node)] ^ flips
    columns = [pa.array(np.arange(count, dtype=np.int32)), *map(pa.array, hashes)]
    pq.write_table(pa.table(columns, names=["node", *FIELDS]), path)
    return hashes


def compare_all(hashes: np.ndarray, bits: int, mirrored: bool, crops: bool) -> set[tuple[int, int, int]]:
    """The same by comparing everything with everything."""
    nearest = {}
    for one in (0, 1) if mirrored else (0,):
        for other in (0, *(range(2, len(FIELDS)) if crops else ())):
            apart = np.bitwise_xor.outer(hashes[one], hashes[other]).view(np.uint64)
            counts = np.unpackbits(apart.reshape(*apart.shape, 1).view(np.uint8), axis=-1).sum(axis=-1)
            for a, b in zip(*np.nonzero(counts <= bits), strict=True):
                if a != b:
                    pair = min(a, b), max(a, b)
                    nearest[pair] = min(nearest.get(pair, 64), counts[a, b])
    return {(*pair, count) for pair, count in nearest.items()}


@given(st.integers(0, 8), st.sampled_from([10, 10**4, 10**7]), st.data())
@settings(max_examples=40, deadline=None)
def test_near_hashes_agree_under_a_mask(bits, num_hashes, data):
    flips = data.draw(st.sets(st.integers(0, 63), max_size=bits))
    apart = sum(1 << flip for flip in flips)
    masks = list(choose_masks(bits, num_hashes))
    assert all(-(2**63) <= mask < 2**63 for mask in masks)
    assert any(not (mask & apart) for mask in masks)


@pytest.mark.parametrize(
    ("bits", "mirrored", "crops"), [(0, False, True), (3, False, False), (4, True, True), (8, False, True)]
)
def test_pairs_are_those_of_comparing_all(tmp_path, bits, mirrored, crops):
    hashes = make_nodes(tmp_path / "nodes.parquet", np.random.default_rng(bits))
    with duckdb_engine(tmp_path / "nodes.parquet", 1.0) as engine:
        better, worse, distance, cut = find_pairs(engine, hashes.shape[1], bits, mirrored, crops)
    assert cut == 0
    found = list(zip(better.tolist(), worse.tolist(), distance.tolist(), strict=True))
    assert len(found) == len(set(found)) and set(found) == compare_all(hashes, bits, mirrored, crops)


def test_ctrl_c_ends_the_comparing(tmp_path, ctrl_c):
    make_nodes(tmp_path / "nodes.parquet", np.random.default_rng(0))
    with duckdb_engine(tmp_path / "nodes.parquet", 1.0) as engine, pytest.raises(KeyboardInterrupt):
        ctrl_c(0.1)
        engine("SELECT sum(hash(a.range + b.range)) AS n FROM range(10_000_000) a, range(10_000_000) b")


def test_large_groups_are_compared_with_their_best_only(tmp_path, monkeypatch):
    monkeypatch.setattr(pairs, "GROUP_LIMIT", 5)
    count = 40
    hashes = np.arange(count)[None].repeat(len(FIELDS), axis=0)  # alike in all but six bits
    columns = [pa.array(np.arange(count, dtype=np.int32)), *map(pa.array, hashes)]
    pq.write_table(pa.table(columns, names=["node", *FIELDS]), tmp_path / "nodes.parquet")
    with duckdb_engine(tmp_path / "nodes.parquet", 1.0) as engine:
        better, worse, _, cut = find_pairs(engine, count, 6, mirrored=False, crops=False)
    assert cut > 0
    assert sorted(worse[better == 0].tolist()) == list(range(1, count))
    assert len(better) == sum(count - best for best in range(1, 6))


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.slow
@pytest.mark.needs("java")
def test_spark_finds_what_duckdb_finds(tmp_path, session):
    hashes = make_nodes(tmp_path / "nodes.parquet", np.random.default_rng(7))
    how = hashes.shape[1], 1, True, True
    with duckdb_engine(tmp_path / "nodes.parquet", 1.0) as engine:
        expected = find_pairs(engine, *how)
    found = find_pairs(spark_engine(session, tmp_path / "nodes.parquet"), *how)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
