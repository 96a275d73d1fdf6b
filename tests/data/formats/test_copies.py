"""Law: a file that is not read at random is copied once for everybody, in bounded room, or it is said why not."""

import gzip
import multiprocessing
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from formats import pack_mds, write_mds, write_parquet

from ppldm.data.filelist import Source
from ppldm.data.formats import base as copies_module
from ppldm.data.formats.layouts import CONTROL_LAYOUT, DEFAULT_LAYOUT
from ppldm.data.formats.open import build_indexes, open_part
from ppldm.data.formats.part import drop_indexes
from ppldm.data.formats.row import Row, encode_row
from ppldm.utils.errors import ConfigError, OutputError, PartError


def write_gzip(path, rows) -> Path:
    path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(b"".join(map(encode_row, rows))))
    return path.with_name(f"{path.name}.gz")


def write_table(path, rows) -> Path:
    write_parquet(path, rows)
    return path


def write_shard(path, rows) -> Path:
    write_mds(path.with_name(f"{path.name}.mds"), rows)
    return pack_mds(path.with_name(f"{path.name}.mds"), ".zstd")


WRITERS = {"part": write_gzip, "parquet": write_table, "mds": write_shard}
every_format = pytest.mark.parametrize("format", WRITERS)


@pytest.fixture
def rows(make_image):
    return [Row(f"caption {n}", make_image(n, (9 + n, 7)), {"key": f"{n}"}) for n in range(9)]


@pytest.fixture
def copies(cache_dir):
    return lambda: sorted(cache_dir.glob("copies/*"))


def open_as(format, path, layout=DEFAULT_LAYOUT):
    return open_part(path, Source(Path("x.filelist"), (), format=format, layout=layout))


@every_format
def test_one_copy_serves_all_and_is_made_again_where_it_is_gone(tmp_path, rows, copies, format):
    path = WRITERS[format](tmp_path / "p", rows)
    first, second = open_as(format, path), open_as(format, path)
    assert first.read(1) == rows[1]
    (copy,) = copies()
    before = copy.stat().st_ino
    assert second.read(2) == rows[2] and copy.stat().st_ino == before
    copy.unlink()
    assert first.read(3) == rows[3] and not copies(), "an open one is still read"
    assert open_as(format, path).read(4) == rows[4] and copies() == [copy]
    for part in (first, second):
        part.close()


@every_format
def test_a_source_that_was_moved_or_touched_finds_its_copy(tmp_path, rows, copies, format):
    path = WRITERS[format](tmp_path / "p", rows)
    assert open_as(format, path).read(0) == rows[0]
    (copy,) = copies()
    state = copy.stat().st_ino, copy.stat().st_size
    (tmp_path / "elsewhere").mkdir()
    for file in (path, path.with_name(f"{path.name}.idx")):
        file.rename(tmp_path / "elsewhere" / file.name)
    moved = tmp_path / "elsewhere" / path.name
    os.utime(moved)
    assert open_as(format, moved).read(5) == rows[5]
    assert copies() == [copy] and (copy.stat().st_ino, copy.stat().st_size) == state


@every_format
def test_a_source_that_was_replaced_is_not_read_from_the_old_copy(tmp_path, rows, format):
    path = WRITERS[format](tmp_path / "p", rows)
    part = open_as(format, path)
    assert part.read(0) == rows[0]
    WRITERS[format](tmp_path / "p", rows[::-1])
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 10**9))
    with pytest.raises(PartError, match="has changed since"):
        part.read(1)
    assert open_as(format, path).read(0) == rows[-1]


@every_format
def test_a_copy_is_made_of_what_was_indexed_and_of_nothing_else(tmp_path, rows, copies, format):
    path = WRITERS[format](tmp_path / "p", rows)
    open_as(format, path).read(0)
    (copy,) = copies()
    copy.unlink()
    before, data = path.stat().st_mtime_ns, bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    os.utime(path, ns=(before, before))  # so that the index still fits
    with pytest.raises(PartError, match="has changed since"):
        open_as(format, path).read(0)
    assert not copies()


@every_format
def test_copies_take_bounded_room_and_those_used_last_stay(tmp_path, rows, copies, caplog, monkeypatch, format):
    paths = [WRITERS[format](tmp_path / f"{number}", rows[number:]) for number in range(5)]
    monkeypatch.setattr(copies_module, "_warn_of_room", copies_module._warn_of_room.__wrapped__)

    def use(number):
        for copy in copies():  # so that the order does not hang on the clock's ticks
            os.utime(copy, ns=(copy.stat().st_mtime_ns - 10**10,) * 2)
        part = open_as(format, paths[number])
        assert part.read(0) == rows[number]
        part.close()

    use(0)
    size = copies()[0].stat().st_size
    left = copies()[0].with_name(".0.abc.tmp")  # of a process that was killed
    left.write_bytes(bytes(size))
    os.utime(left, (0, 0))
    monkeypatch.setenv("PPLDM_COPIES_GB", f"{3 * size / 1e9:.9f}")
    for number in (1, 2, 0, 3):
        use(number)
    assert sorted(copy.name.split("-")[2][0] for copy in copies()) == ["0", "2", "3"] and not left.exists()
    assert "has no room for the copies of all files" in caplog.text


def test_a_copy_that_is_being_made_stays(tmp_path, rows, copies, cache_dir, monkeypatch):
    (cache_dir / "copies").mkdir(parents=True)
    new = cache_dir / "copies" / ".1-2-p.gz.txt.abc.tmp"
    new.write_bytes(bytes(9000))
    os.utime(new, (time.time() - 60,) * 2)
    path = write_gzip(tmp_path / "p", rows)
    monkeypatch.setenv("PPLDM_COPIES_GB", "0.000009")
    assert open_as("part", path).read(0) == rows[0] and new.exists() and len(copies()) == 2


@every_format
@pytest.mark.parametrize("layout", [DEFAULT_LAYOUT, CONTROL_LAYOUT])
def test_what_would_be_larger_than_all_copies_is_refused_and_leaves_nothing(
    tmp_path, rows, copies, monkeypatch, format, layout
):
    rows = [Row(row.caption, row.image, row.meta, control=row.image) for row in rows]
    path = WRITERS[format](tmp_path / "p", rows)
    monkeypatch.setenv("PPLDM_COPIES_GB", "0.000001")
    with pytest.raises(PartError, match="p.* holds more than the 1e-06 GB that copies may take; .*PPLDM_COPIES_GB"):
        open_as(format, path, layout).read(0)
    assert not copies()


@every_format
def test_a_full_disk_is_named_with_the_remedy(tmp_path, rows, copies, monkeypatch, format):
    path = WRITERS[format](tmp_path / "p", rows)

    def fail(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(copies_module, "atomic_write", fail)
    with pytest.raises(OutputError, match="cannot write .*copies.*No space left.*ppldm repack") as caught:
        open_as(format, path).read(0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["x", "0", "-1", "inf", "nan"])
def test_a_limit_that_is_no_number_of_gigabytes_is_refused(tmp_path, rows, monkeypatch, text):
    monkeypatch.setenv("PPLDM_COPIES_GB", text)
    with pytest.raises(ConfigError, match=f"PPLDM_COPIES_GB={text} is not a number of gigabytes"):
        open_as("part", write_gzip(tmp_path / "p", rows))


@every_format
def test_what_describes_a_part_goes_with_it(tmp_path, rows, copies, format):
    (tmp_path / "elsewhere").mkdir()
    places = tmp_path / "p[1]", tmp_path / "1", tmp_path / "elsewhere/p[1]"  # parts of several data sets have one name
    path, *others = (WRITERS[format](place, rows[:number]) for place, number in zip(places, (9, 9, 5), strict=True))
    for file in (path, *others):
        open_as(format, file).read(0)
    before = {copy: copy.stat().st_ino for copy in copies()}
    drop_indexes(path)
    assert len(before) == 3 and len(copies()) == 2
    assert [open_as(format, other).read(0) for other in others] == [rows[0]] * 2 and len(copies()) == 2
    assert all(copy.stat().st_ino == before[copy] for copy in copies()), "those of others stay"


@every_format
def test_a_copy_that_may_only_be_read_is_read(tmp_path, rows, copies, monkeypatch, format):
    path = WRITERS[format](tmp_path / "p", rows)
    assert open_as(format, path).read(0) == rows[0]

    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert open_as(format, path).read(1) == rows[1] and len(copies()) == 1


@every_format
def test_many_threads_make_one_copy(tmp_path, rows, copies, monkeypatch, format):
    path, made, making = WRITERS[format](tmp_path / "p", rows), [], copies_module.making_copy
    open_as(format, path).read(0)

    def noted(*args):
        made.append(args)
        threading.Event().wait(0.2)
        return making(*args)

    monkeypatch.setattr(copies_module, "making_copy", noted)
    with ThreadPoolExecutor(4) as pool:
        parts = [open_as(format, path) for _ in range(4)]
        copies()[0].unlink()
        # Without the lock that Python 3.11 has around a cached property.
        list(pool.map(copies_module.IndexedRows._copy.func, parts))
    assert len(made) == 1 and [part.read(3) for part in parts] == [rows[3]] * 4


def _read_all(format, path, results):
    part = open_as(format, path)
    results.put([part.read(number).caption for number in range(len(part))])


@every_format
def test_processes_that_come_together_all_read_right(tmp_path, rows, copies, format):
    path = WRITERS[format](tmp_path / "p", rows)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    children = [context.Process(target=_read_all, args=(format, path, results)) for _ in range(3)]
    for child in children:
        child.start()
    found = [results.get(timeout=60) for _ in children]
    for child in children:
        child.join()
    assert found == [[row.caption for row in rows]] * 3
    assert [copy.suffix for copy in copies()] in ([".txt"], [".lines"], [".unpacked"])


def test_an_interrupted_index_goes_on_with_the_files_that_are_missing(tmp_path, rows, copies, monkeypatch):
    paths = [write_gzip(tmp_path / f"{number}", rows) for number in range(3)]
    paths[1].write_bytes(paths[1].read_bytes()[:-9])
    with pytest.raises(PartError, match="truncated"):
        build_indexes(paths, Source(Path("x.filelist"), ()))
    before = {copy: copy.stat().st_ino for copy in copies()}
    write_gzip(tmp_path / "1", rows)
    assert [summary.rows for summary in build_indexes(paths, Source(Path("x.filelist"), ()))] == [9, 9, 9]
    assert len({copy.name.split("-")[2] for copy in copies()}) == 3
    assert all(copy.stat().st_ino == inode for copy, inode in before.items())
