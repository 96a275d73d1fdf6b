"""Ordinary gzip gives the same rows, errors and numbers as a part with a member a row."""

import base64
import gzip
import os
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from isal import igzip

from ppldm.data.formats.index import PACKED_LINES, find_smallest_side
from ppldm.data.formats.part import Part, index_path, write_part
from ppldm.data.formats.row import Row, decode_row, encode_row
from ppldm.utils.errors import PartError


def make_lines(count, seed=0, max_bytes=40_000):
    """Rows of many sizes; captions repeat, as captions do."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(0, np.log(max_bytes), count)).astype(int)
    return [
        encode_row(Row(f"a picture of number {i % 7}", rng.bytes(int(size)), {"n": i})) for i, size in enumerate(sizes)
    ]


def pack(level=6, strategy=zlib.Z_DEFAULT_STRATEGY, memory=8):
    def packed(data):
        compress = zlib.compressobj(level, zlib.DEFLATED, 31, memory, strategy)
        return compress.compress(data) + compress.flush()

    return packed


def flush_often(data):
    """Blocks that end anywhere, some of them empty, some stored."""
    compress, pieces = zlib.compressobj(9, zlib.DEFLATED, 31), []
    for number, start in enumerate(range(0, len(data), 7001)):
        pieces.append(compress.compress(data[start : start + 7001]))
        pieces.append(compress.flush((zlib.Z_SYNC_FLUSH, zlib.Z_PARTIAL_FLUSH, zlib.Z_FULL_FLUSH)[number % 3]))
    return b"".join(pieces) + compress.flush()


def named(data):
    """A header with everything in it: an extra field, a name, a comment, a checksum."""
    header = b"\x1f\x8b\x08\x1e" + bytes(6) + b"\x03\0abc" + b"name\0" + b"comment\0"
    return header + (zlib.crc32(header) & 0xFFFF).to_bytes(2, "little") + gzip.compress(data)[10:]


WRITERS = {
    **{f"zlib {level}": pack(level) for level in (0, 1, 6, 9)},
    "fixed codes": pack(strategy=zlib.Z_FIXED),
    "no matches": pack(strategy=zlib.Z_HUFFMAN_ONLY),
    "runs": pack(strategy=zlib.Z_RLE),
    "short blocks": pack(9, memory=1),
    **{f"isal {level}": lambda data, level=level: igzip.compress(data, level) for level in (0, 2, 3)},
    "flushes": flush_often,
    "members": lambda data: b"".join(
        gzip.compress(data[i : i + 50_000]) + bytes(3) for i in range(0, len(data), 50_000)
    ),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_rows_are_those_of_the_text_whatever_wrote_it(tmp_path, writer):
    lines = make_lines(150)
    (tmp_path / "p.gz").write_bytes(WRITERS[writer](b"".join(lines)))
    part = Part(tmp_path / "p.gz")
    assert part._index.kind == PACKED_LINES and part.identity[0] == (tmp_path / "p.gz").stat().st_size
    for row in np.random.default_rng(1).permutation(len(lines)).tolist():
        assert part.read_line(row) == lines[row]
        assert part.read(row) == decode_row(lines[row], "")
        assert part.read_fields(row) == (f"a picture of number {row % 7}", {"n": row})


def test_a_header_with_all_fields_is_passed_over(tmp_path):
    lines = make_lines(5)
    data = named(b"".join(lines))
    (tmp_path / "p.gz").write_bytes(data)
    assert [Part(tmp_path / "p.gz").read_line(row) for row in range(5)] == lines


def test_all_layouts_share_a_copy(tmp_path, cache_dir, make_image):
    image = base64.b64encode(make_image()).decode()
    (tmp_path / "p.gz").write_bytes(gzip.compress(f"{image}\tcaption\t{image}\n".encode() * 3))
    layout = "alt-text2image_gen_filted_data_shuffle_watermark"
    assert Part(tmp_path / "p.gz", layout).read(1).caption == "caption"
    assert Part(tmp_path / "p.gz").read(1).image == make_image()
    assert len(list(cache_dir.glob("copies/*"))) == 1


def outcome(path):
    try:
        part = Part(path)
        return [part.read_line(row) for row in range(len(part))]
    except PartError as error:
        return str(error)


def by_python(path):
    """The rows, or the error, that Python's gzip leads to."""
    try:
        with gzip.open(path) as file:
            return [line if line.endswith(b"\n") else line + b"\n" for line in file if line.strip()]
    except EOFError:
        return f"part file {path} is truncated; get it again"
    except (OSError, zlib.error) as error:
        return f"part file {path} is damaged ({error}); get it again"


def test_cut_and_damaged_parts_are_errors_where_they_are_for_python_s_gzip(tmp_path, cache_dir):
    data = gzip.compress(b"".join(make_lines(90))) + gzip.compress(b"".join(make_lines(9)))
    assert len(data) > 2 << 17, "or most damage is found while one row a member is looked for"
    rng, errors = np.random.default_rng(0), 0
    for number in range(100):
        damaged = bytearray(data)
        if number % 3 == 0:
            del damaged[int(rng.integers(20, len(data))) :]
        else:
            for place in rng.integers(10, len(data), 1 + number % 2):
                damaged[place] ^= 1 << rng.integers(8)
        path = tmp_path / f"{number}.gz"
        path.write_bytes(damaged)
        expected, found = by_python(path), outcome(path)
        errors += isinstance(found, str)
        if isinstance(found, str) and (" byte " in found or "not a part" in found):
            continue  # found before: damaged or cut within the first bytes
        assert found == expected, number
    assert errors > 60 and len(list(cache_dir.glob("copies/*"))) <= 100 - errors, "a copy is whole or absent"


def test_many_threads_read_one_part(tmp_path):
    lines = make_lines(60)
    (tmp_path / "p.gz").write_bytes(gzip.compress(b"".join(lines)))
    part = Part(tmp_path / "p.gz")
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(part.read_line, list(range(60)) * 5)) == lines * 5


BLANKS = {
    "plain": bytes,
    "packed": gzip.compress,
    "members": lambda data: b"".join(gzip.compress(line) for line in data.splitlines(keepends=True)),
    "no last newline": lambda data: gzip.compress(data[:-1]),
}


@pytest.mark.parametrize("kind", BLANKS)
@pytest.mark.parametrize("blanks", [(0,), (9,), (0, 0, 3, 3, 9, 9), (5,), ()])
def test_blank_lines_are_no_rows_and_are_counted(tmp_path, kind, blanks):
    lines = make_lines(9, max_bytes=300)
    for place in sorted(blanks, reverse=True):
        lines.insert(place, b" \t\n" if place == 3 else b"\n")
    (tmp_path / "p.gz").write_bytes(BLANKS[kind](b"".join(lines)))
    part = Part(tmp_path / "p.gz")
    lost = kind == "no last newline" and lines[-1] == b"\n"  # then the last newline ended a row, or a blank line
    assert all(part.read_line(row).endswith(b"\n") for row in range(9))
    assert len(part) == 9 and part.count_blank_lines(0, 9) == len(blanks) - lost
    assert sum(part.count_blank_lines(start, min(start + 2, 9)) for start in range(0, 9, 2)) == len(blanks) - lost


def test_members_that_are_blank_are_no_rows(tmp_path, make_rows):
    write_part(tmp_path / "own.gz", make_rows(0, 3))
    blank = gzip.compress(b"\n")
    (tmp_path / "p.gz").write_bytes(blank + (tmp_path / "own.gz").read_bytes() + blank)
    part = Part(tmp_path / "p.gz")
    assert [part.read(row) for row in range(3)] == make_rows(0, 3) and len(part) == 3
    assert part.count_blank_lines(0, 3) == 2


@pytest.mark.parametrize("size", [(0, 18), (18, 0), (-1, 5), (True, 5), (5, None)])
def test_sizes_that_cannot_be_are_taken_from_the_image(tmp_path, make_image, size):
    write_part(
        tmp_path / "p.gz", [Row("x", make_image(size=(20, 18)), dict(zip(("width", "height"), size, strict=True)))]
    )
    part = Part(tmp_path / "p.gz")
    assert (part.widths[0], part.heights[0]) == (20, 18)


@pytest.mark.parametrize("pack_rows", [bytes, gzip.compress])
def test_a_part_that_grew_under_a_newer_index_is_indexed_again(tmp_path, make_rows, pack_rows):
    path = tmp_path / "p.gz"
    path.write_bytes(pack_rows(b"".join(map(encode_row, make_rows(0, 3)))))
    assert len(Part(path)) == 3
    with open(path, "ab") as file:
        file.write(pack_rows(b"".join(map(encode_row, make_rows(3, 5)))))
    os.utime(path, (1, 1))
    part = Part(path)
    assert [part.read(row) for row in range(len(part))] == make_rows(0, 5)


@pytest.mark.parametrize("pack_rows", [bytes, gzip.compress])
def test_a_part_that_changes_while_it_is_open_is_an_error_at_its_next_row(tmp_path, make_rows, pack_rows):
    path = tmp_path / "p.gz"
    path.write_bytes(pack_rows(b"".join(map(encode_row, make_rows(0, 3)))))
    part = Part(path)
    assert part.read(1) == make_rows(1, 2)[0]
    os.replace(tmp_path / "p.gz.idx", path)
    with pytest.raises(PartError, match="p.gz row 1: .* has changed since it was opened"):
        part.read(1)


def test_an_index_overwritten_in_use_changes_nothing(tmp_path, make_rows):
    write_part(tmp_path / "p.gz", make_rows(0, 3))
    part = Part(tmp_path / "p.gz")
    index_path(tmp_path / "p.gz").write_bytes(b"\xff" * 96)
    assert [part.read(row) for row in range(3)] == make_rows(0, 3)


def test_one_builds_an_index_and_the_others_wait_for_it(tmp_path, monkeypatch):
    (tmp_path / "p.gz").write_bytes(gzip.compress(b"".join(make_lines(30))))
    scanned, real = [], Part._build

    def scan(part):
        scanned.append(part.path)
        assert (tmp_path / "p.gz.idx.lock").exists()
        threading.Event().wait(0.3)
        return real(part)

    monkeypatch.setattr(Part, "_build", scan)
    with ThreadPoolExecutor(4) as pool:
        assert {len(part) for part in pool.map(Part, [tmp_path / "p.gz"] * 4)} == {30}
    assert len(scanned) == 1 and not list(tmp_path.glob("*.lock"))


@pytest.mark.parametrize(
    "sides, smallest", [([(0, 0), (9, 5)], 5), ([(0, 7), (8, 9)], 8), ([(0, 0)], 65535), ([], 65535)]
)
def test_the_smallest_side_is_of_known_sizes(sides, smallest):
    widths, heights = np.array(sides, np.uint16).reshape(-1, 2).T
    assert find_smallest_side(widths, heights) == smallest
