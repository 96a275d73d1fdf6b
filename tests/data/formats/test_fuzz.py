"""Ten thousand damaged rows and files: each gives its rows, rows counted by their reasons, or one line of ours.

Of what can still be read, every row is bad or a caption with a picture. Where a format has no checksum the bits of
either may have changed; never is one row's picture found under another row's caption. (In a format without checksum a
cut from within one row into another can leave a whole row, of which nothing tells; such formats are spared this one.)
"""

import gzip
import hashlib
import os
from collections import Counter
from contextlib import closing

import numpy as np
import pytest
from formats import WRITERS

from ppldm.data.filelist import Source, read_sources
from ppldm.data.formats.layouts import LAYOUTS
from ppldm.data.formats.open import open_part
from ppldm.data.formats.row import Row, decode_row, encode_row
from ppldm.data.images import decode_pixels
from ppldm.utils.errors import PpldmError, RowError

ROWS = 8


@pytest.fixture(scope="module")
def rows(make_image):
    """Captions so far apart that damage does not turn one into another."""
    images = [make_image(i, (9, 8), ("PNG", "JPEG", "WEBP")[i % 3]) for i in range(ROWS)]
    captions = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(ROWS)]
    return [Row(captions[i], images[i], {"key": f"{i}{captions[i][:9]}"}) for i in range(ROWS)]


def flip(rng, data, spot):
    data[spot] ^= 1 << rng.integers(8)


def overwrite(rng, data, spot):
    stop = min(spot + int(rng.integers(1, 64)), len(data))
    data[spot:stop] = rng.bytes(stop - spot)


def zero(rng, data, spot):
    stop = min(spot + int(rng.integers(1, 600)), len(data))
    data[spot:stop] = bytes(stop - spot)


def cut(rng, data, spot):
    del data[spot:]


def leave_out(rng, data, spot):
    del data[spot : spot + int(rng.integers(1, 600))]


def repeat(rng, data, spot):
    data[spot:spot] = data[spot : spot + int(rng.integers(1, 600))]


def insert(rng, data, spot):
    data[spot:spot] = rng.bytes(int(rng.integers(1, 16)))


def swap_headers(rng, data, _spot):
    """Those of two files of a tar, sound and in the wrong place."""
    headers = [start for start in range(0, len(data), 512) if data[start + 257 : start + 262] == b"ustar"]
    if headers:
        a, b = rng.choice(headers, 2)
        data[a : a + 512], data[b : b + 512] = data[b : b + 512], data[a : a + 512]


IN_PLACE = (flip, overwrite, zero, cut, insert)
ANY = (*IN_PLACE, leave_out, repeat)
TAR = (*ANY, swap_headers)


def damage(rng, data: bytes, damages=ANY) -> bytes:
    """`data` with one to three injuries."""
    data = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        if data:
            damages[rng.integers(len(damages))](rng, data, int(rng.integers(len(data))))
    return bytes(data)


def check_message(error: PpldmError) -> None:
    assert str(error) and "\n" not in str(error) and "\0" not in str(error)


def check_row(rows, row: Row) -> None:
    captions, images = [row.caption for row in rows], [row.image for row in rows]
    if row.caption in captions and row.image in images:
        assert captions.index(row.caption) == images.index(row.image)
    try:
        pixels = decode_pixels(row.image)
        assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
    except RowError as error:
        check_message(error)


def read_all(rows, path, source) -> Counter:
    """How many rows were read, were bad, or `refused`: the file as a whole."""
    try:
        with closing(open_part(path, source)) as part:
            found = Counter()
            for number in range(len(part)):
                try:
                    check_row(rows, part.read(number))
                    found["read"] += 1
                except RowError as error:
                    check_message(error)
                    found["bad"] += 1
            assert found.total() == len(part) > 0
            return found
    except PpldmError as error:
        check_message(error)
        return Counter(["refused"])


def test_damaged_rows(rows):
    rng, found = np.random.default_rng(1), Counter()
    layouts = list(LAYOUTS.values())
    for number in range(5000):
        line, layout = encode_row(rows[number % ROWS]), layouts[number % len(layouts)]
        try:
            check_row(rows, decode_row(damage(rng, line), "where", LAYOUTS["default"] if number % 2 else layout))
            found["read"] += 1
        except RowError as error:
            check_message(error)
            found["bad"] += 1
    assert found.total() == 5000 and min(found["read"], found["bad"]) > 400


def lines_of(rows) -> bytes:
    return b"".join(map(encode_row, rows))


# Format, writer, damages, how often.
FILES = {
    "members": ("part", WRITERS["part"], ANY, 1000),
    "one member": ("part", lambda path, rows: path.write_bytes(gzip.compress(lines_of(rows))), ANY, 600),
    "plain": ("part", lambda path, rows: path.write_bytes(lines_of(rows)), IN_PLACE, 800),
    "webdataset": ("webdataset", WRITERS["webdataset"], TAR, 800),
    "parquet": ("parquet", WRITERS["parquet"], ANY, 500),
    "mds": ("mds", WRITERS["mds"], ANY, 500),
    "csv": ("csv", WRITERS["csv"], IN_PLACE, 500),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_damaged_files(tmp_path, rows, name):
    """Files without an index, with one that is younger, and with one that claims to be as young."""
    format, write, damages, count = FILES[name]
    source, path = Source(tmp_path / "x.filelist", (), format=format), tmp_path / "part"
    write(path, rows)
    assert read_all(rows, path, source) == {"read": ROWS}
    index = path.with_name("part.idx")
    sound, sound_index = path.read_bytes(), index.read_bytes() if index.exists() else b""
    rng, found = np.random.default_rng(2), Counter()
    for number in range(count):
        index.unlink(missing_ok=True)
        if number % 3:
            index.write_bytes(sound_index)
        path.write_bytes(damage(rng, sound, damages))
        if number % 3 == 1:
            os.utime(path, (0, 0))
        found += read_all(rows, path, source)
    assert found["bad"] + found["refused"] > count / 10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["members", "plain", "webdataset", "csv"])
def test_damaged_indexes_change_nothing(tmp_path, rows, name):
    format, write, _, _ = FILES[name]
    source, path = Source(tmp_path / "x.filelist", (), format=format), tmp_path / "part"
    write(path, rows)
    read_all(rows, path, source)
    index = path.with_name("part.idx")
    sound, rng = index.read_bytes(), np.random.default_rng(3)
    for _ in range(150):
        index.write_bytes(damage(rng, sound))
        assert read_all(rows, path, source) == {"read": ROWS}


def test_damaged_filelists(tmp_path, rows, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        WRITERS["part"](tmp_path / f"part-{number}.gz", rows)
        (tmp_path / f"{number}.filelist").write_text(f"# a comment\n\npart-{number}.gz\n")
    lists = b"0.filelist 1.5 layout=default\n1.filelist 2 format=part\n[2].filelist 1\n"
    files = {"train.filelist.list": lists, "0.filelist": b"part-0.gz\npart-1.gz\n~/part-9.gz\n$HOME/*.gz\n"}
    rng, found = np.random.default_rng(4), Counter()
    for number in range(1200):
        name = list(files)[number % 2]
        (tmp_path / name).write_bytes(damage(rng, files[name]))
        try:
            for source in read_sources(tmp_path / name):
                assert source.parts and all(part.exists() for part in source.parts)
            found["read"] += 1
        except PpldmError as error:
            check_message(error)
            found["refused"] += 1
    assert found["refused"] > 100
