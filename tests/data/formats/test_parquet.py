"""Rows of parquet files are those that pyarrow reads, in any order, however the table was written."""

import os
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.data.formats.parquet_table import ParquetTable
from ppldm.data.formats.row import Row
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


def make_values(count: int, seed: int = 0) -> list[bytes | None]:
    """Values that compress and that do not, alike ones, empty ones, none at all, some larger than a page."""
    rng = random.Random(seed)
    word = rng.randbytes(700)
    kinds = [
        lambda: None,
        lambda: b"",
        lambda: word,
        lambda: rng.randbytes(rng.randrange(1, 9)),
        lambda: rng.randbytes(rng.randrange(3000)),
        lambda: rng.randbytes(rng.randrange(90_000, 200_000)),
        lambda: word * rng.randrange(1, 40),
        lambda: bytes(rng.randrange(70_000)),
    ]
    return [rng.choices(kinds, (2, 1, 2, 2, 4, 1, 2, 1))[0]() for _ in range(count)]


def read_all(path) -> list[bytes | None]:
    """The images of all rows, read in some order; None of a row that has none."""
    table, found = ParquetTable(path), {}
    for row in random.Random(1).sample(range(len(table)), len(table)):
        try:
            found[row] = table.read(row).image
        except RowError as error:
            assert error.reason == "columns"
            found[row] = None
    table.close()
    return [found[row] for row in sorted(found)]


def write(path, values, kind="binary", required=False, **options):
    column = pa.array(values, pa.large_binary() if kind == "large" else pa.binary())
    if kind == "struct":
        column = pa.StructArray.from_arrays([column, pa.array(["p"] * len(values))], ["bytes", "path"])
    field = pa.field("image", column.type, nullable=not required)
    schema = pa.schema([("key", pa.int64()), field, ("text", pa.string())])
    arrays = [pa.array(range(len(values))), column, pa.array(["a"] * len(values))]
    pq.write_table(pa.table(arrays, schema=schema), path, **options)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip", "brotli", "lz4"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_values_are_those_that_pyarrow_reads(tmp_path, compression, dictionary, version):
    path, values = tmp_path / "p", make_values(60)
    options = {"compression": compression, "use_dictionary": dictionary, "data_page_version": version}
    for page_bytes, rows_of_group, kind in [(1 << 20, 1000, "binary"), (100, 40, "struct"), (5000, 60, "large")]:
        sizes = {"data_page_size": page_bytes, "row_group_size": rows_of_group, "write_batch_size": 7}
        write(path, values, kind, **sizes, **options)
        assert read_all(path) == [value or None for value in values]


@pytest.mark.parametrize("encoding", ["DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
def test_values_in_other_encodings_are_read(tmp_path, encoding):
    values = [b"x" * n for n in range(1, 50)]
    write(tmp_path / "p", values, use_dictionary=False, column_encoding={"image": encoding})
    assert read_all(tmp_path / "p") == values


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.sampled_from([b"", b"ab", b"cde" * 50]), st.binary(max_size=300)), min_size=1),
    st.sampled_from(["none", "snappy", "zstd"]),
    st.booleans(),
    st.integers(1, 60),
)
def test_any_values_in_groups_of_any_size(tmp_path_factory, values, compression, required, rows_of_group):
    path = tmp_path_factory.getbasetemp() / "any.parquet"
    values = [value or b"-" for value in values] if required else [*values, b"good"]
    write(path, values, required=required, compression=compression, row_group_size=rows_of_group)
    assert read_all(path) == [value or None for value in values]


@pytest.mark.parametrize("rows_of_group", [1, 7, 64, 1000])
def test_rows_come_in_any_order_from_any_groups(write_table, cache_dir, rows_of_group):
    path, rows = write_table(rows_of_group=rows_of_group)
    table = ParquetTable(path)
    for row in [0, 199, *np.random.default_rng(0).permutation(200).tolist()]:
        assert table.read(row) == rows[row]
        assert table.read_fields(row) == (rows[row].caption, rows[row].meta)
    assert len(table) == 200 and table.widths.tolist() == [20 + row % 3 for row in range(200)]
    assert sorted(path.parent.glob("p.*")) == [path, path.with_name("p.parquet.idx")]
    assert len(list(cache_dir.glob("copies/*"))) == 1
    for outside in (-1, 200):
        with pytest.raises(IndexError):
            table.read(outside)


def test_captions_of_any_length_are_read_without_the_image(tmp_path):
    names = ["x" * length for length in (1, 4000, 4095, 4096, 9000)]
    pq.write_table(pa.table({"image": [b"x" * 9999] * 5, "text": names, "number": range(5)}), tmp_path / "p")
    table = ParquetTable(tmp_path / "p")
    assert [table.read_fields(row) for row in range(5)] == [(name, {"number": n}) for n, name in enumerate(names)]
    assert table.read(4) == Row(names[4], b"x" * 9999, {"number": 4})


def test_a_struct_without_bytes_is_null(tmp_path):
    column = pa.array([{"bytes": b"x"}, None, {"bytes": None}, {"bytes": b""}, {"bytes": b"y"}] * 9)
    pq.write_table(pa.table({"image": column, "text": ["a"] * 45}), tmp_path / "p")
    assert read_all(tmp_path / "p") == [b"x", None, None, None, b"y"] * 9


def test_text_that_is_no_utf8_makes_no_row_whichever_column_it_is_in(tmp_path):
    """Pyarrow reads such a record as a whole or not at all, also for the path of a picture."""
    bad = pa.Array.from_buffers(pa.string(), 3, pa.array([b"p", b"\xff", b"q"]).buffers())
    good = pa.array(["a", "b", "c"])
    image = pa.array([b"x", b"y", b"z"])
    for columns in (
        {"image": image, "text": good, "other": bad},
        {"image": image, "text": bad},
        {"image": pa.StructArray.from_arrays([image, bad], ["bytes", "path"]), "text": good},
    ):
        pq.write_table(pa.table(columns), tmp_path / "p")
        (tmp_path / "p.idx").unlink(missing_ok=True)
        table = ParquetTable(tmp_path / "p")
        assert [table.read(row).image for row in (0, 2)] == [b"x", b"z"]
        with pytest.raises(RowError) as error:
            table.read(1)
        assert error.value.reason == "columns"
        table.close()


def test_a_table_that_changes_while_it_is_open_is_an_error(write_table):
    path, rows = write_table()
    table = ParquetTable(path)
    assert table.read(3) == rows[3]
    os.utime(path, (1, 1))
    assert table.read(4) == rows[4], "the content is the same"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(PartError, match="p.parquet row 3: .* has changed"):
        table.read(3)


def test_a_damaged_file_is_one_line_and_leaves_no_copy(write_table, cache_dir):
    path, _ = write_table(compression="gzip", use_dictionary=False)
    data = bytearray(path.read_bytes())
    for place in range(9000, 9100):
        data[place] ^= 0xA5
    path.write_bytes(data)
    with pytest.raises(PartError, match="cannot read .*p.parquet: GZipCodec failed.*; get it again") as caught:
        ParquetTable(path)
    assert "\n" not in str(caught.value) and not list(cache_dir.glob("copies/*"))
