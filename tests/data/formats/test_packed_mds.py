"""Law: a compressed shard gives the rows of the shard in it, in bounded room, or says what is wrong with it."""

import hashlib
import json
import os
import struct
from pathlib import Path

import pytest
from formats import PACK, pack_mds, write_mds

from ppldm.data.filelist import Source
from ppldm.data.formats.open import open_part, summarize
from ppldm.data.formats.row import Row
from ppldm.utils.errors import PartError, RowError

SOURCE = Source(Path("x.filelist"), (), format="mds")
COUNT = 9


@pytest.fixture
def rows(make_image):
    return [Row(f"caption {n}", make_image(n, (9 + n, 7)), {"key": f"{n}"}) for n in range(COUNT)]


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """Those that are in the cache folder, by name."""
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path / "cache"))
    return lambda: sorted(path.name for path in (tmp_path / "cache").glob("copies/*.unpacked"))


def write_packed(path, rows, suffix=".zstd") -> Path:
    write_mds(path, rows)
    return pack_mds(path, suffix)


def read_all(part) -> list[Row]:
    return [part.read(number) for number in range(len(part))]


@pytest.mark.parametrize("suffix", PACK)
def test_every_compression_gives_the_rows_of_the_shard(tmp_path, rows, copies, suffix):
    write_mds(tmp_path / "plain.mds", rows)
    path = write_packed(tmp_path / "shard.00000.mds", rows, suffix)
    plain, part = open_part(tmp_path / "plain.mds", SOURCE), open_part(path, SOURCE)
    assert not copies()  # only a row needs one
    assert read_all(part) == read_all(plain) == rows and len(copies()) == 1
    assert part.widths.tolist() == plain.widths.tolist() == [9 + n for n in range(COUNT)]
    assert part.read_fields(3) == plain.read_fields(3)
    assert part.identity[0] == path.stat().st_size  # of the file that is there


def test_the_index_is_enough_to_count(tmp_path, rows, copies):
    path = write_packed(tmp_path / "shard.00000.mds", rows)
    assert summarize(path, SOURCE).rows == COUNT  # makes index and columns
    (tmp_path / "cache" / "copies" / copies()[0]).unlink()
    assert summarize(path, SOURCE).rows == COUNT and not copies()


def test_a_shard_that_was_replaced_is_not_read_from_the_old_copy(tmp_path, rows, copies):
    path = write_packed(tmp_path / "shard.00000.mds", rows)
    part = open_part(path, SOURCE)
    assert part.read(0) == rows[0]
    write_packed(tmp_path / "shard.00000.mds", rows[::-1])
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 10**9))
    with pytest.raises(PartError, match="has changed since"):
        part.read(1)
    path.with_name(path.name + ".idx").unlink()
    assert open_part(path, SOURCE).read(0) == rows[-1]


@pytest.mark.parametrize("suffix", PACK)
def test_damage_is_named_by_the_shard(tmp_path, rows, copies, suffix):
    path = write_packed(tmp_path / "shard.00000.mds", rows, suffix)
    sound = path.read_bytes()
    for damaged in (b"\xff" * 20 + sound, sound[: len(sound) // 2], sound[:3]):
        path.write_bytes(damaged)
        path.with_name(path.name + ".idx").unlink(missing_ok=True)
        with pytest.raises(PartError, match=str(path)):
            open_part(path, SOURCE)


def test_a_shard_longer_or_shorter_than_it_says_is_refused(tmp_path, rows, copies):
    write_mds(tmp_path / "s.mds", rows)
    sound = (tmp_path / "s.mds").read_bytes()
    for damaged in (sound + b"\0", sound[:-1]):
        (tmp_path / "s.mds").write_bytes(damaged)
        with pytest.raises(PartError, match="not an MDS shard"):
            open_part(pack_mds(tmp_path / "s.mds", ".zstd"), SOURCE)


def test_a_damaged_row_is_named_by_shard_and_row(tmp_path, rows, copies):
    write_mds(tmp_path / "s.mds", rows)
    data = bytearray((tmp_path / "s.mds").read_bytes())
    data[struct.unpack_from("<I", data, 4 + 4 * 2)[0]] += 1  # the length of a caption
    (tmp_path / "s.mds").write_bytes(data)
    part = open_part(pack_mds(tmp_path / "s.mds", ".zstd"), SOURCE)
    with pytest.raises(RowError, match=r"s\.mds\.zstd row 2: damaged MDS data"):
        part.read(2)
    assert part.read(3) == rows[3]


@pytest.mark.parametrize("suffix", ["", ".zstd"])
@pytest.mark.parametrize("name", ["sha1", "md5", "sha256", "blake2b"])
def test_what_index_json_says_of_a_shard_must_be_so(tmp_path, rows, copies, suffix, name):
    write_mds(tmp_path / "s.mds", rows)
    path = pack_mds(tmp_path / "s.mds", suffix) if suffix else tmp_path / "s.mds"
    data = path.read_bytes()

    def open_stated(num_bytes, digest, **more):
        file = {"basename": path.name, "bytes": num_bytes, "hashes": {name: digest, "xxh64": "0"}}
        shard = {"raw_data": {"basename": "s.mds", "bytes": 1, "hashes": {}}, "zip_data": file}
        stated = shard if suffix else {"raw_data": file, "zip_data": None}
        (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": [stated]} | more))
        os.utime(tmp_path / "index.json", ns=(1, (tmp_path / "index.json").stat().st_mtime_ns + next(ticks)))
        return len(open_part(path, SOURCE))

    ticks, digest = iter(range(10**6, 10**9, 10**6)), hashlib.new(name, data).hexdigest()
    with pytest.raises(PartError, match=f"{path} does not have the {name} that index.json says"):
        open_stated(len(data), digest[::-1])
    with pytest.raises(PartError, match=f"has {len(data)} bytes where index.json says 5"):
        open_stated(5, digest)
    assert open_stated(len(data), digest) == COUNT
    path.with_name(path.name + ".idx").unlink()
    assert open_stated(len(data), "", shards={"not": "a list"}) == COUNT
