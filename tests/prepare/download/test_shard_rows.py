"""Rows of metadata are cut into shards without loss, and columns are found or named in an error."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.prepare.download.part import (
    RowColumns,
    find_columns,
    find_parts,
    read_shards,
    regroup,
    sample_urls,
)
from ppldm.prepare.metadata import Table
from ppldm.utils.errors import ConfigError, DataError


def write(path, num_rows=10, row_group_size=4, **columns):
    table = {"URL": [f"http://a/{row}" for row in range(num_rows)], "TEXT": [str(row) for row in range(num_rows)]}
    pq.write_table(pa.table(table | columns), path, row_group_size=row_group_size)
    return path


@settings(deadline=None)
@given(st.lists(st.integers(0, 7)), st.integers(1, 9))
def test_regrouping_keeps_rows_and_order(lengths, size):
    numbers = iter(range(sum(lengths)))
    tables = [pa.table({"n": pa.array([next(numbers) for _ in range(length)], pa.int64())}) for length in lengths]
    groups = [table["n"].to_pylist() for table in regroup(tables, size)]
    assert [number for group in groups for number in group] == list(range(sum(lengths)))
    assert all(len(group) == size for group in groups[:-1]) and all(groups)
    assert len(groups) == -(-sum(lengths) // size)


@pytest.mark.parametrize("size", [1, 3, 4, 10, 11])
def test_a_shard_is_its_rows_of_the_file(tmp_path, size):
    path = write(tmp_path / "a.parquet", hash=list(range(10)))
    part = Table(path, 10, number=1)
    columns = find_columns(path)
    shards = dict(read_shards(part, columns, size, range(100)))
    assert shards.keys() == set(range(-(-10 // size)))
    for number, table in shards.items():
        rows = list(range(number * size, min(10, number * size + size)))
        assert table.to_pydict() == {
            "hash": rows, "caption": [str(row) for row in rows], "url": [f"http://a/{row}" for row in rows],
        }  # fmt: skip
    assert [number for number, _ in read_shards(part, columns, size, {0})] == [0]


def test_parts_are_ordered_by_their_numbers(tmp_path):
    for name in ("part_10", "part_2", "part_1"):
        write(tmp_path / f"{name}.parquet")
    (tmp_path / "_SUCCESS").touch()
    assert [(part.number, part.path.stem, part.rows) for part in find_parts(tmp_path, 0)] == [
        (1, "part_1", 10), (2, "part_2", 10), (10, "part_10", 10),
    ]  # fmt: skip
    assert [part.path.stem for part in find_parts(tmp_path, 10)] == ["part_10"]
    with pytest.raises(ConfigError, match=r"--part-id 3 is not in .* 3 part\(s\), 1 to 10"):
        find_parts(tmp_path, 3)


def test_names_without_numbers_are_counted(tmp_path):
    write(tmp_path / "laion-art.parquet")
    assert [part.number for part in find_parts(tmp_path / "laion-art.parquet", 0)] == [1]
    write(tmp_path / "2B-en-4.5_7.parquet")
    assert [part.number for part in find_parts(tmp_path, 0)] == [1, 2]
    assert find_parts(tmp_path / "2B-en-4.5_7.parquet", 0)[0].number == 7


def test_parts_that_are_missing_or_broken(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        find_parts(tmp_path / "none", 0)
    with pytest.raises(ConfigError, match="no parquet files"):
        find_parts(tmp_path, 0)
    (tmp_path / "part_1.parquet").write_bytes(b"PAR1 not quite")
    with pytest.raises(DataError, match="part_1.parquet"):
        find_parts(tmp_path, 0)


def test_columns_of_both_published_schemas_are_found(tmp_path):
    first = write(tmp_path / "a.parquet", AESTHETIC_SCORE=[5.0] * 10, similarity=[0.3] * 10)
    second = write(tmp_path / "b.parquet", aesthetic=[8.0] * 10, LANGUAGE=["en"] * 10)
    assert list(find_columns(first).kept.items()) == [("similarity", "similarity"), ("AESTHETIC_SCORE",) * 2]
    assert list(find_columns(second).kept) == ["aesthetic", "LANGUAGE"]
    assert find_columns(second, names=("AESTHETIC_SCORE",)).kept == {"AESTHETIC_SCORE": "aesthetic"}
    pq.write_table(pa.table({"url": ["a"], "caption": ["b"]}), tmp_path / "c.parquet")
    columns = find_columns(tmp_path / "c.parquet")
    assert (columns.url, columns.caption) == ("url", "caption")


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"url": "link"}, "no column link.*--url-col"),
        ({"names": ["nope"]}, "no column 'nope'"),
        ({"names": ["key"]}, "img2dataset writes one of that name"),
        ({"names": ["list"]}, "not of numbers, text or truth"),
    ],
)
def test_columns_that_cannot_be(tmp_path, flags, message):
    path = write(tmp_path / "a.parquet", key=[""] * 10, list=[[1]] * 10)
    with pytest.raises(ConfigError, match=message):
        find_columns(path, **flags)


def test_the_sample_is_of_rows_that_have_a_url_and_always_the_same(tmp_path):
    path = write(tmp_path / "a.parquet", URL=[None if row % 2 else f"http://a/{row}" for row in range(10)])
    part = Table(path, 10, number=1)
    urls = sample_urls(part, "URL", 6)
    assert urls and len(set(urls)) == len(urls) and urls == sample_urls(part, "URL", 6)
    assert sample_urls(part, "URL", 99) == [f"http://a/{row}" for row in range(0, 10, 2)]


def test_a_damaged_file_is_named_whether_it_is_sampled_or_read(tmp_path):
    path = write(tmp_path / "a.parquet")
    columns = find_columns(path)
    damaged = bytearray(path.read_bytes())
    damaged[10:100] = b"\xff" * 90
    path.write_bytes(damaged)
    part = Table(path, 10, number=1)
    with pytest.raises(DataError, match="a.parquet is damaged.*fetch"):
        list(read_shards(part, columns, 4, {0}))
    with pytest.raises(DataError, match="a.parquet is damaged.*fetch"):
        sample_urls(part, columns.url, 10)


def test_columns_of_another_name_are_the_same_columns():
    first = RowColumns("URL", "TEXT", {name: name for name in ("similarity", "AESTHETIC_SCORE")})
    second = RowColumns("url", "text", {name: name for name in ("aesthetic", "similarity")})
    same = second.under_names(first.kept)
    assert same == RowColumns("url", "text", {"similarity": "similarity", "AESTHETIC_SCORE": "aesthetic"})
    assert list(same.kept) == list(first.kept) and first.under_names(first.kept) == first
    for other in (
        ("similarity",),
        ("similarity", "aesthetic", "punsafe"),
        ("similarity", "punsafe"),
        ("aesthetic",) * 2,
        ("aesthetic", "AESTHETIC_SCORE"),
    ):
        assert second.under_names(other) is None
