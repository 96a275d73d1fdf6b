"""Rows of parquet files are read in place, in any order and bounded memory, whatever the row groups are."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppldm.data.formats.parquet import groups as parquet_groups
from ppldm.data.formats.parquet import pages as parquet_pages
from ppldm.data.formats.parquet import table as parquet_table
from ppldm.data.formats.parquet.byte_cache import ByteCache
from ppldm.data.formats.parquet.table import ParquetTable
from ppldm.utils.errors import PartError, RowError


@pytest.fixture
def write_table(tmp_path, make_rows):
    def write(count=200, rows_of_group=50, name="p.parquet", **options):
        rows = make_rows(0, count)
        columns = {"image": [row.image for row in rows], "text": [row.caption for row in rows]}
        columns["key"] = [row.meta["key"] for row in rows]
        pq.write_table(pa.table(columns), tmp_path / name, row_group_size=rows_of_group, **options)
        return tmp_path / name, rows

    return write


BY_GROUP = {"compression": "lz4"}  # pages in this are not read one by one


@pytest.fixture(autouse=True)
def no_groups_of_other_tests(monkeypatch):
    for name in ("_CACHE", "_TEXTS"):
        monkeypatch.setattr(parquet_table, name, ByteCache(256 << 20))
    monkeypatch.setattr(parquet_pages, "_PLACES", ByteCache(64 << 20))


def num_kept():
    return len(parquet_table._CACHE) + len(parquet_table._TEXTS) + len(parquet_pages._PLACES)


@pytest.mark.parametrize("options", [{}, BY_GROUP], ids=["page", "group"])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("rows_of_group", [1, 7, 64, 1000])
def test_rows_come_in_any_order_from_any_groups(write_table, monkeypatch, cache_dir, large, rows_of_group, options):
    if large:
        monkeypatch.setattr(parquet_groups, "_LARGE_GROUP_BYTES", 0)
        monkeypatch.setattr(parquet_table, "_LARGE_TEXT_BYTES", 0)
    path, rows = write_table(rows_of_group=rows_of_group, **options)
    table = ParquetTable(path)
    for row in [0, 199, *np.random.default_rng(0).permutation(200).tolist(), *range(200)]:
        assert table.read(row) == rows[row]
    assert len(table) == 200 and table.widths.tolist() == [20 + row % 3 for row in range(200)]
    assert sorted(path.parent.glob("p.*")) == [path, path.with_name("p.parquet.idx")] and not cache_dir.exists()
    for outside in (-1, 200):
        with pytest.raises(IndexError):
            table.read(outside)
    assert bool(num_kept()) is not large
    table.close()
    assert not num_kept() and not parquet_table._CACHE.num_bytes


def test_the_groups_that_are_kept_are_bounded_over_all_tables(write_table, monkeypatch):
    tables = [ParquetTable(write_table(name=f"{number}.parquet", **BY_GROUP)[0]) for number in range(3)]
    cache = parquet_table._CACHE
    cache.limit = 3 * 50 * 1300
    rows = [(table, row) for table in tables for row in range(0, 200, 50)]
    for table, row in rows * 2:
        table.read(row)
        assert cache.num_bytes == sum(value.nbytes for value, _ in cache._kept.values()) <= cache.limit
    assert 1 < len(cache) < len(rows)
    latest = next(reversed(cache._kept.values()))
    tables[-1].read(199)
    assert next(reversed(cache._kept.values())) is latest, "read again from memory"


def test_a_table_that_changes_while_it_is_open_is_an_error(write_table):
    path, rows = write_table()
    table = ParquetTable(path)
    assert table.read(3) == rows[3]
    os.utime(path, (1, 1))
    assert table.read(4) == rows[4], "the content is the same"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(PartError, match="p.parquet row 3: .* has changed"):
        table.read(3)


def test_a_group_damaged_behind_a_fitting_index_has_bad_rows(write_table):
    path, rows = write_table(compression="gzip", use_dictionary=False)
    ParquetTable(path)
    before, data = path.stat().st_mtime_ns, bytearray(path.read_bytes())
    for place in range(9000, 9100):
        data[place] ^= 0xA5
    path.write_bytes(data)
    os.utime(path, ns=(before, before))
    table, bad = ParquetTable(path), []
    for row in range(200):
        try:
            assert table.read(row) == rows[row]
        except RowError as error:
            assert error.reason == "unreadable" and f"p.parquet row {row}: damaged parquet data" in str(error)
            bad.append(row)
    assert bad and max(bad) < 50, "in the damaged group alone"
