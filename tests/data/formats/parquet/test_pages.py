"""A value that is read from its page alone is the one that pyarrow reads, however the table was written."""

import os
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppldm.data.formats.open_file import OpenFile
from ppldm.data.formats.parquet import table as parquet_table
from ppldm.data.formats.parquet.byte_cache import ByteCache
from ppldm.data.formats.parquet.pages import UnknownPages
from ppldm.data.formats.parquet.snappy_blocks import BLOCK_BYTES, find_blocks
from ppldm.data.formats.parquet.table import ParquetTable, _find_leaf, _LineReader
from ppldm.data.formats.row import Row
from ppldm.utils.errors import RowError


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


def read_all(path, order=None) -> list[bytes | None]:
    """What is read page by page; UnknownPages where it cannot be."""
    reader = _LineReader(path, OpenFile(path))
    found = {}
    num_rows = int(reader._starts[-1])
    for row in order or random.Random(1).sample(range(num_rows), num_rows):
        group = int(reader._starts.searchsorted(row, side="right")) - 1
        assert group in reader._by_page
        found[row] = reader._images[0].read(group, row - int(reader._starts[group]), "here")
    reader.close()
    return [found[row] for row in sorted(found)]


def write(path, values, kind="binary", required=False, **options):
    column = pa.array(values, pa.large_binary() if kind == "large" else pa.binary())
    if kind == "struct":
        column = pa.StructArray.from_arrays([column, pa.array(["p"] * len(values))], ["bytes", "path"])
    field = pa.field("image", column.type, nullable=not required)
    schema = pa.schema([("key", pa.int64()), field, ("text", pa.string())])
    arrays = [pa.array(range(len(values))), column, pa.array(["a"] * len(values))]
    pq.write_table(pa.table(arrays, schema=schema), path, **options)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip", "brotli"])
@pytest.mark.parametrize("dictionary", [True, False])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_values_are_those_that_pyarrow_reads(tmp_path, compression, dictionary, version):
    path, values = tmp_path / "p", make_values(150)
    options = {"compression": compression, "use_dictionary": dictionary, "data_page_version": version}
    for page_bytes, rows_of_group, kind in [(1 << 20, 1000, "binary"), (100, 40, "struct"), (5000, 60, "large")]:
        sizes = {"data_page_size": page_bytes, "row_group_size": rows_of_group, "write_batch_size": 7}
        write(path, values, kind, **sizes, **options)
        assert read_all(path) == values
    there = [value for value in values if value is not None]
    write(path, there, required=True, row_group_size=50, dictionary_pagesize_limit=4000, **options)
    assert read_all(path) == there


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.sampled_from([b"", b"ab", b"cde" * 50]), st.binary(max_size=300)), min_size=1),
    st.sampled_from(["none", "snappy", "zstd"]),
    st.booleans(),
    st.sampled_from(["1.0", "2.0"]),
    st.integers(1, 400),
    st.integers(1, 60),
    st.integers(1, 20),
)
def test_any_values_in_pages_of_any_size(
    tmp_path_factory, values, compression, dictionary, version, page_bytes, rows_of_group, batch
):
    path = tmp_path_factory.getbasetemp() / "any.parquet"
    write(
        path,
        values,
        compression=compression,
        use_dictionary=dictionary,
        data_page_version=version,
        data_page_size=page_bytes,
        row_group_size=rows_of_group,
        write_batch_size=batch,
    )
    assert read_all(path) == values


@pytest.mark.parametrize(
    "options, match",
    [
        ({"use_dictionary": False, "column_encoding": {"image": "DELTA_LENGTH_BYTE_ARRAY"}}, "encoding 6"),
        ({"use_dictionary": False, "column_encoding": {"image": "DELTA_BYTE_ARRAY"}}, "encoding 7"),
    ],
)
def test_pages_in_other_encodings_are_read_by_group(tmp_path, options, match):
    path, values = tmp_path / "p", [b"x" * n for n in range(1, 50)]
    write(path, values, **options)
    with pytest.raises(UnknownPages, match=match):
        read_all(path)
    table = ParquetTable(path)
    assert [table.read(row).image for row in range(49)] == values


def test_columns_that_are_not_plain_have_no_pages_here(tmp_path):
    def leaf(column):
        pq.write_table(pa.table({"image": column, "text": ["a"]}), tmp_path / "p")
        with pq.ParquetFile(tmp_path / "p") as table:
            return _find_leaf(table, "image")

    assert leaf(pa.array([b"x"])) == 0
    assert leaf(pa.array([{"path": "p", "bytes": b"x"}])) == 0  # fields of a struct come by name
    for column in ([[b"x"]], [[{"bytes": b"x"}]], ["text"], [{"bytes": [b"x"]}], [{"bytes": "text"}]):
        assert leaf(pa.array(column)) is None
    assert leaf(pa.array([b"xy"], pa.binary(2))) is None


def test_a_struct_without_bytes_is_null(tmp_path):
    column = pa.array([{"bytes": b"x"}, None, {"bytes": None}, {"bytes": b""}, {"bytes": b"y"}] * 9)
    pq.write_table(pa.table({"image": column, "text": ["a"] * 45}), tmp_path / "p")
    assert read_all(tmp_path / "p") == [b"x", None, None, b"", b"y"] * 9


def test_captions_of_large_groups_are_made_in_blocks(tmp_path):
    names = [f"caption {number}" for number in range(700)]
    table = pa.table({"image": [b"x"] * 700, "text": names, "number": range(700)})
    pq.write_table(table, tmp_path / "p")
    table = ParquetTable(tmp_path / "p")
    rows = [table.read(row) for row in random.Random(0).sample(range(700), 700)]
    assert sorted(rows, key=lambda row: row.meta["number"]) == [
        Row(name, b"x", {"number": n}) for n, name in enumerate(names)
    ]
    assert len(parquet_table._TEXTS) >= 3


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


def test_a_picture_is_read_without_its_group(tmp_path, monkeypatch):
    """Of an uncompressed page its own bytes, of a snappy page the blocks that hold it; a page is found once."""
    values = [random.Random(seed).randbytes(60_000) for seed in range(60)]
    for compression in ("none", "snappy"):
        path = tmp_path / compression
        write(path, values, compression=compression, row_group_size=20)
        table = ParquetTable(path)
        for row in range(60):
            table.read(row)
        sizes, read = [], OpenFile.read
        monkeypatch.setattr(OpenFile, "read", lambda *a, read=read, sizes=sizes: sizes.append(a[2]) or read(*a))
        assert all(table.read(row).image == values[row] for row in range(60))
        monkeypatch.undo()
        assert max(sizes) == 60_000 if compression == "none" else 60_000 < max(sizes) < 60_000 + 2 * BLOCK_BYTES


def test_what_is_kept_is_bounded(tmp_path, monkeypatch):
    values = [random.Random(seed).randbytes(3000) for seed in range(300)]
    write(tmp_path / "p", values, compression="gzip", use_dictionary=False, data_page_size=9000, write_batch_size=3)
    table = ParquetTable(tmp_path / "p")
    monkeypatch.setattr(parquet_table, "_CACHE", ByteCache(50_000))
    for row in random.Random(0).sample(range(300), 300):
        assert table.read(row).image == values[row]
        assert parquet_table._CACHE.num_bytes <= 50_000 and len(parquet_table._CACHE) > 1


def test_damaged_bytes_anywhere_never_make_another_row(tmp_path):
    values = make_values(12, seed=3)
    write(tmp_path / "p", values, compression="snappy", data_page_size=400, row_group_size=6, write_batch_size=2)
    good = (tmp_path / "p").read_bytes()
    expected = [value or None for value in values]
    ParquetTable(tmp_path / "p")
    before, rng = (tmp_path / "p").stat(), random.Random(0)
    for _ in range(300):
        data = bytearray(good)
        data[rng.randrange(4, len(data) // 2)] ^= rng.randrange(1, 256)
        data[rng.choice([place for place in range(4, 400)])] ^= rng.randrange(256)
        (tmp_path / "p").write_bytes(data)
        os.utime(tmp_path / "p", ns=(before.st_atime_ns, before.st_mtime_ns))
        table = ParquetTable(tmp_path / "p")
        for row in range(12):
            try:
                assert table.read(row).image == expected[row]
            except RowError as error:
                assert error.reason == "unreadable" or expected[row] is None
        table.close()


@pytest.mark.parametrize("kind", ["noise", "text", "zeros", "mixed"])
def test_blocks_of_snappy_are_those_of_the_whole(kind):
    rng = random.Random(5)
    for size in (1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 77):
        noise, text = rng.randbytes(size), b"".join(b"%d," % n for n in range(size))[:size]
        data = {"noise": noise, "text": text, "zeros": bytes(size), "mixed": (noise[: size // 2] + text)[:size]}[kind]
        packed = pa.Codec("snappy").compress(data, asbytes=True)
        blocks = find_blocks(packed, size)
        if blocks is None:
            assert kind != "noise", "many elements"
            continue
        for _ in range(20):
            start = rng.randrange(size)
            stop = rng.randrange(start, size + 1)
            assert (
                blocks.read(start, stop, lambda at, length, packed=packed: packed[at : at + length]) == data[start:stop]
            )


def test_blocks_that_refer_to_others_are_not_taken_apart():
    size = BLOCK_BYTES + 4
    literal = bytes([62 << 2]) + (BLOCK_BYTES - 1).to_bytes(3, "little") + random.Random(0).randbytes(BLOCK_BYTES)
    copy = bytes([3 << 2 | 3]) + (4).to_bytes(4, "little")  # 4 bytes of the block before
    packed = bytes([size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + literal + copy
    assert len(pa.Codec("snappy").decompress(packed, size, asbytes=True)) == size
    assert find_blocks(packed, size) is None
    assert find_blocks(packed[:-5] + bytes([3 << 2]) + b"abcd", size) is not None
    crossing = bytes([62 << 2]) + (size - 1).to_bytes(3, "little") + bytes(size)
    assert find_blocks(packed[:3] + crossing, size) is None
