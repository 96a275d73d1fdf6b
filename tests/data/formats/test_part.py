import base64
import gzip
import io
import multiprocessing
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import needs
import numpy as np
import pytest
from PIL import Image

from ppldm.data.filelist import Source
from ppldm.data.formats import index as stored_module
from ppldm.data.formats import open as container
from ppldm.data.formats import part as part_lines
from ppldm.data.formats import part as part_module
from ppldm.data.formats.index import GZIP_MEMBERS, PLAIN_LINES, read_index
from ppldm.data.formats.part import Part, index_path, write_part
from ppldm.data.formats.row import Row, decode_row, encode_row
from ppldm.utils.errors import ConfigError, PartError, RowError


def count_rows(path, layout="default"):
    return container.summarize(path, Source(Path("x.filelist"), (), layout=layout)).rows


def build_indexes(paths, num_workers=1):
    source = Source(Path("x.filelist"), ())
    return [summary.rows for summary in container.build_indexes(paths, source, num_workers)]


def read_all(path):
    part = Part(path)
    return [part.read(i) for i in range(len(part))]


def lines_of(rows):
    return b"".join(map(encode_row, rows))


def bgzip(data, block=1000):
    """Members that end anywhere in a row, then an empty one, as the bgzip program writes them."""
    blocks = [data[start : start + block] for start in range(0, len(data), block)]
    return b"".join(map(gzip.compress, [*blocks, b""]))


@pytest.mark.parametrize("count", [1, 2, 150])
def test_rows_come_back_at_random_and_by_plain_gzip(tmp_path, make_rows, count):
    rows = make_rows(0, count)
    index = write_part(tmp_path / "p.gz", iter(rows))
    assert (len(index.offsets), index.part_bytes) == (count, (tmp_path / "p.gz").stat().st_size)
    part = Part(tmp_path / "p.gz")
    assert [part.read(i) for i in reversed(range(count))] == rows[::-1]
    assert part.widths.tolist() == [20 + i % 3 for i in range(count)] and set(part.heights) == {18}
    with gzip.open(tmp_path / "p.gz") as file:
        assert [decode_row(line, "") for line in file] == rows


def test_the_same_rows_give_the_same_bytes(tmp_path, make_rows):
    for name in ("a.gz", "another-name.gz"):
        write_part(tmp_path / name, make_rows(0, 9))
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "another-name.gz").read_bytes()
    assert index_path(tmp_path / "a.gz").read_bytes() == index_path(tmp_path / "another-name.gz").read_bytes()


def test_a_failed_write_leaves_nothing(tmp_path, make_rows):
    def broken():
        yield from make_rows(0, 2)
        raise RowError("meta", "no")

    with pytest.raises(RowError):
        write_part(tmp_path / "p.gz", broken())
    with pytest.raises(PartError, match="no rows"):
        write_part(tmp_path / "p.gz", [])
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


def test_a_part_never_lies_beside_the_index_of_its_predecessor(tmp_path, make_rows, monkeypatch):
    def crash(*_):
        raise KeyboardInterrupt

    write_part(tmp_path / "p.gz", make_rows(0, 2))
    monkeypatch.setattr(part_module, "write_index", crash)
    with pytest.raises(KeyboardInterrupt):
        write_part(tmp_path / "p.gz", make_rows(2, 4))
    monkeypatch.undo()
    assert not index_path(tmp_path / "p.gz").exists() and read_all(tmp_path / "p.gz") == make_rows(2, 4)


def test_sizes_are_those_of_meta_or_of_the_turned_image(tmp_path, make_image):
    turned = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 10)).save(turned, "JPEG", exif=exif)
    rows = [
        Row("stated", make_image(), {"width": 70_000, "height": 5}),
        Row("half stated", make_image(size=(3, 4)), {"width": 7}),
        Row("absurd", make_image(size=(6, 7)), {"width": 10**30, "height": True}),
        Row("turned", turned.getvalue()),
        Row("no image", b"xx"),
    ]
    write_part(tmp_path / "p.gz", rows)
    part = Part(tmp_path / "p.gz")
    assert part.widths.tolist() == [65535, 3, 6, 10, 0] and part.heights.tolist() == [5, 4, 7, 30, 0]


def half_rows(data):
    """Two members for each row, neither of which is a line."""
    return b"".join(gzip.compress(line[:50]) + gzip.compress(line[50:]) for line in data.splitlines(keepends=True))


FOREIGN = {
    "half rows": half_rows,
    "one member": gzip.compress,
    "bgzip": bgzip,
    "plain": lambda data: data,
    "plain, CRLF": lambda data: data.replace(b"\n", b"\r\n"),
    "plain, blank lines": lambda data: b"\n" + data.replace(b"\n", b"\n\n"),
    "plain, no last newline": lambda data: data[:-1],
    "gzip, blank lines, no last newline": lambda data: gzip.compress(data.replace(b"\n", b"\n\n")[:-2]),
    "gzip, then zeros": lambda data: gzip.compress(data) + bytes(600),
    "two members": lambda data: gzip.compress(data[:1000]) + gzip.compress(data[1000:]),
}


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("name", ["part.gz", "part"])
def test_foreign_parts_read_alike_whatever_their_name(tmp_path, make_rows, kind, name):
    rows = make_rows(0, 130)
    (tmp_path / name).write_bytes(FOREIGN[kind](lines_of(rows)))
    assert count_rows(tmp_path / name) == 130
    assert read_all(tmp_path / name) == rows
    assert Part(tmp_path / name).widths.tolist() == [20 + i % 3 for i in range(130)]


@pytest.mark.parametrize("kind", ["one member", "plain"])
def test_a_foreign_part_is_indexed_once_and_anew_when_it_changes(tmp_path, make_rows, kind, cache_dir):
    path = tmp_path / "part.gz"
    path.write_bytes(FOREIGN[kind](lines_of(make_rows(0, 3))))
    assert len(read_all(path)) == 3
    stored = {file: file.stat().st_mtime_ns for file in [*tmp_path.glob("*.idx"), *cache_dir.glob("*")]}
    assert stored and len(read_all(path)) == 3
    assert stored == {file: file.stat().st_mtime_ns for file in stored}
    path.write_bytes(FOREIGN[kind](lines_of(make_rows(3, 8))))
    assert read_all(path) == make_rows(3, 8)


def test_a_bad_row_of_a_foreign_part_stays_a_row(tmp_path, make_rows):
    rows = make_rows(0, 3)
    for name, pack in {"plain": bytes, "packed": gzip.compress}.items():
        (tmp_path / name).write_bytes(pack(lines_of(rows[:1]) + b"broken\n" + lines_of(rows[1:])))
        part = Part(tmp_path / name)
        assert len(part) == 4 and part.read(2) == rows[1] and part.widths[1] == 0
        with pytest.raises(RowError, match=f"{name} row 1") as caught:
            part.read(1)
        assert caught.value.reason == "columns"


def test_an_own_part_without_index_gets_it_back(tmp_path, make_rows):
    write_part(tmp_path / "p.gz", make_rows(0, 30))
    before = index_path(tmp_path / "p.gz").read_bytes()
    index_path(tmp_path / "p.gz").unlink()
    assert read_all(tmp_path / "p.gz") == make_rows(0, 30)
    assert index_path(tmp_path / "p.gz").read_bytes() == before


def test_no_damage_to_an_index_goes_unnoticed(tmp_path, make_rows):
    path = tmp_path / "p.gz"
    write_part(path, make_rows(0, 3))
    sound, size = index_path(path).read_bytes(), path.stat().st_size
    damaged = [bytes([*sound[:i], sound[i] ^ 1, *sound[i + 1 :]]) for i in range(len(sound))]
    for data in [*damaged, sound[:-1], sound + b"x", sound[:10], b""]:
        index_path(path).write_bytes(data)
        assert read_index(index_path(path), size, (GZIP_MEMBERS,)) is None
    assert read_all(path) == make_rows(0, 3)
    assert index_path(path).read_bytes() == sound


def test_an_index_of_another_part_is_not_used(tmp_path, make_rows):
    write_part(tmp_path / "a.gz", make_rows(0, 3))
    write_part(tmp_path / "b.gz", make_rows(0, 4))
    shutil.copy(tmp_path / "a.gz", tmp_path / "b.gz")
    assert count_rows(tmp_path / "b.gz") == 3 and read_all(tmp_path / "b.gz") == make_rows(0, 3)


def test_kinds(tmp_path, make_rows):
    (tmp_path / "plain").write_bytes(lines_of(make_rows(0, 2)))
    write_part(tmp_path / "own.gz", make_rows(0, 2))
    for name, kind in {"plain": PLAIN_LINES, "own.gz": GZIP_MEMBERS}.items():
        Part(tmp_path / name)
        assert read_index(index_path(tmp_path / name), (tmp_path / name).stat().st_size, (kind,)).kind == kind


def _read_as_nobody(path, cache, queue):
    if os.geteuid() == 0:
        os.setuid(65534)
    os.environ["PPLDM_CACHE_DIR"] = str(cache)
    queue.put([row.caption for row in read_all(path)])


def test_the_index_of_a_part_in_a_read_only_folder_goes_into_the_cache(make_rows):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        folder.chmod(0o755)
        data, cache = folder / "data", folder / "cache"
        data.mkdir()
        cache.mkdir(mode=0o777)
        cache.chmod(0o777)
        write_part(data / "p.gz", make_rows(0, 3))
        index_path(data / "p.gz").unlink()
        data.chmod(0o555)
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        for _ in range(2):
            process = context.Process(target=_read_as_nobody, args=(data / "p.gz", cache, queue))
            process.start()
            assert queue.get(timeout=120) == [row.caption for row in make_rows(0, 3)]
            process.join()
        assert [path.suffix for path in cache.iterdir()] == [".idx"] and not index_path(data / "p.gz").exists()
        data.chmod(0o755)


def test_processes_that_index_at_once_do_no_harm(tmp_path, make_rows):
    rows = make_rows(0, 200)
    (tmp_path / "packed").write_bytes(gzip.compress(lines_of(rows)))
    pool = multiprocessing.get_context("fork").Pool(4)
    results = pool.map(read_all, [tmp_path / "packed"] * 8, chunksize=1)
    pool.close()  # and not its terminate(), which may wait for ever for a process that has just been forked
    pool.join()
    assert results == [rows] * 8
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(
    "name, change, message",
    [
        ("p.gz", lambda data: None, "No such file"),
        ("p.gz", lambda data: b"", "is empty"),
        ("p.gz", lambda data: b"\n\n", "no rows"),
        ("p.gz", lambda data: b"hello\n" * 300, "is a part that is not gzip"),
        ("p.gz", lambda data: bytes(range(3, 256)) * 90, "is a part that is not gzip"),
        ("p.txt", lambda data: b"hello\n" * 300, "is not a part file"),
        ("p.gz", lambda data: gzip.compress(b"hello\n" * 300), "is not a part file"),
        ("p.gz", lambda data: data[:-9], "truncated"),
        ("p.gz", lambda data: gzip.compress(gzip.decompress(data))[:-9], "truncated"),
        ("p.gz", lambda data: data[:12] + b"\xff\xff\xff" + data[15:], "damaged"),
        ("p.gz", lambda data: data + b"garbage", "damaged"),
        ("p.gz", lambda data: gzip.compress(gzip.decompress(data)) + b"garbage", "damaged"),
    ],
)
def test_what_is_no_sound_part_is_one_line_with_its_name(tmp_path, make_rows, name, change, message):
    path = tmp_path / name
    write_part(path, make_rows(0, 4))
    data = change(path.read_bytes())
    index_path(path).unlink()
    path.unlink() if data is None else path.write_bytes(data)
    for attempt in (Part, count_rows):
        with pytest.raises(PartError) as caught:
            attempt(path)
        assert message in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not list(tmp_path.glob("*.idx"))


def test_a_folder_is_no_part(tmp_path):
    with pytest.raises(PartError, match="folder"):
        Part(tmp_path)


def test_a_row_damaged_behind_a_fitting_index_is_a_bad_row(tmp_path, make_rows):
    path = tmp_path / "p.gz"
    write_part(path, make_rows(0, 3))
    data = bytearray(path.read_bytes())
    data[400] ^= 255  # among the codes; nothing may use one of the bits before them
    before = path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=(before, before))
    part = Part(path)
    with pytest.raises(RowError, match="row 0") as caught:
        part.read(0)
    assert caught.value.reason == "gzip" and part.read(1) == make_rows(1, 2)[0]
    for outside in (-1, 3):
        with pytest.raises(IndexError):
            part.read(outside)


def test_a_row_over_the_limit_is_refused(tmp_path, make_rows, monkeypatch):
    monkeypatch.setattr(part_lines.base, "MAX_ROW_BYTES", 100)
    (tmp_path / "plain").write_bytes(lines_of(make_rows(0, 2)))
    (tmp_path / "packed").write_bytes(gzip.compress(lines_of(make_rows(0, 2))))
    for name in ("plain", "packed"):
        with pytest.raises(PartError, match="over 100 bytes"):
            Part(tmp_path / name)


def test_a_closed_part_gives_its_file_back(tmp_path, make_rows):
    write_part(tmp_path / "p.gz", make_rows(0, 1))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        Part(tmp_path / "p.gz")
    assert len(os.listdir("/proc/self/fd")) == before


def set_times(path, offset_ns):
    """Make the index older (negative) or younger than its part by that much."""
    time = path.stat().st_mtime_ns + offset_ns
    os.utime(index_path(path), ns=(time, time))


def test_an_index_older_than_its_part_is_used_where_the_checksum_confirms_it(tmp_path, make_rows, monkeypatch):
    path = tmp_path / "p.gz"
    write_part(path, make_rows(0, 3))
    before = index_path(path).read_bytes()
    set_times(path, -(10**9))
    monkeypatch.setattr(Part, "_build", None)
    assert count_rows(path) == 3 and index_path(path).read_bytes() == before
    assert index_path(path).stat().st_mtime_ns >= path.stat().st_mtime_ns


def test_a_part_from_the_future_is_checked_once(tmp_path, make_rows, monkeypatch):
    path = tmp_path / "p.gz"
    write_part(path, make_rows(0, 3))
    os.utime(path, (4e9, 4e9))
    assert read_all(path) == make_rows(0, 3)
    monkeypatch.setattr(stored_module, "measure_file", None)
    assert read_all(path) == make_rows(0, 3)


def test_a_replaced_part_of_the_same_size_is_noticed(tmp_path, make_image):
    path, images = tmp_path / "p", [make_image(1, (9, 9)), make_image(1, (9, 9))]
    rows = [[Row(caption, image) for image in images] for caption in ("aa", "bb")]
    path.write_bytes(lines_of(rows[0]))
    assert read_all(path) == rows[0]
    path.write_bytes(lines_of([Row("b", images[0]), Row("bbb", images[1])]))
    os.utime(index_path(path), (1, 1))
    assert [row.caption for row in read_all(path)] == ["b", "bbb"]


def test_each_layout_has_an_index_of_its_own(tmp_path, make_rows, make_image):
    rows = [f"{base64.b64encode(make_image(i, (30 + i, 9))).decode()}\tcaption {i}\n".encode() for i in range(3)]
    for name, pack in {"plain": b"".join, "packed": lambda lines: gzip.compress(b"".join(lines))}.items():
        (tmp_path / name).write_bytes(pack(rows))
        layout = "alt-text2image_gen_filted_data_shuffle_watermark"
        part = Part(tmp_path / name, layout)
        assert part.widths.tolist() == [30, 31, 32] and part.read(2) == Row("caption 2", make_image(2, (32, 9)))
        assert count_rows(tmp_path / name, layout) == 3
        with pytest.raises(PartError, match="none of the first 3 rows"):
            Part(tmp_path / name)


def test_an_unknown_layout_is_refused(tmp_path, make_rows):
    write_part(tmp_path / "p.gz", make_rows(0, 1))
    with pytest.raises(ConfigError, match="unknown layout 'odd'; known: default, control, laion400m, "):
        Part(tmp_path / "p.gz", "odd")


def test_fields_are_read_without_the_image(tmp_path, make_rows):
    rows = [*make_rows(0, 2), Row("long " * 2000, b"x" * 9000, {"key": "é" * 3000})]
    noise = np.random.default_rng(0).bytes(9000)
    rows.append(Row("incompressible " + base64.b64encode(noise).decode(), noise, {"key": 1}))
    write_part(tmp_path / "own.gz", rows)
    (tmp_path / "plain").write_bytes(lines_of(rows))
    for name in ("own.gz", "plain"):
        part = Part(tmp_path / name)
        assert [part.read_fields(i) for i in range(4)] == [(row.caption, row.meta) for row in rows]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_many_parts_are_indexed_at_once(tmp_path, make_rows, num_workers):
    rows, sizes = make_rows(0, 60), [1, 7, 20, 3, 9]
    paths = [tmp_path / f"p{i}" for i in range(5)]
    for path, size, pack in zip(paths, sizes, [bytes, gzip.compress, bytes, bgzip, bytes], strict=True):
        path.write_bytes(pack(lines_of(rows[:size])))
    assert build_indexes([*paths, paths[0]], num_workers) == [*sizes, 1]
    stored = [path.stat().st_mtime_ns for path in tmp_path.rglob("*.idx")]
    assert len(stored) == 5 and build_indexes(paths, num_workers) == sizes
    assert [path.stat().st_mtime_ns for path in tmp_path.rglob("*.idx")] == stored
    assert [read_all(path) for path in paths] == [rows[:size] for size in sizes]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_part_that_cannot_be_indexed_is_named(tmp_path, make_rows, num_workers):
    for name, data in {"a": lines_of(make_rows(0, 2)), "b": b"nothing\n", "c": lines_of(make_rows(0, 2))}.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(PartError, match=f"{tmp_path}/b is not a part file"):
        build_indexes([tmp_path / name for name in "abc"], num_workers)
    assert build_indexes([]) == []


def test_another_layout_is_asked_of_the_part_and_not_of_its_copy(tmp_path, make_rows):
    (tmp_path / "packed").write_bytes(gzip.compress(lines_of(make_rows(0, 3))))
    Part(tmp_path / "packed")
    with pytest.raises(PartError, match=f"{tmp_path}/packed is not a part .* rows of the layout that was named"):
        Part(tmp_path / "packed", "vc")


@pytest.mark.parametrize("program", ["gzip", "pigz", "bgzip"])
def test_the_output_of_compressing_programs(tmp_path, make_rows, program):
    needs.need(program)
    rows = make_rows(0, 400)
    (tmp_path / "part").write_bytes(lines_of(rows))
    subprocess.run([program, str(tmp_path / "part")], check=True)
    assert not (tmp_path / "part").exists() and read_all(tmp_path / "part.gz") == rows


def test_gb18030_and_further_columns_in_a_foreign_part(tmp_path, make_image):
    image = base64.b64encode(make_image())
    lines = [b"caption\t\t" + image + b"\tmore\t\n", "一张照片\tNONE\t".encode("gb18030") + image + b"\r\n"]
    for name, pack in {"plain": bytes, "packed": gzip.compress, "bgzip": bgzip}.items():
        (tmp_path / name).write_bytes(pack(b"".join(lines)))
        assert read_all(tmp_path / name) == [Row("caption", make_image()), Row("一张照片", make_image())]


def test_one_stale_index_is_one_warning(tmp_path, make_rows, capsys):
    write_part(tmp_path / "part.gz", make_rows(0, 3))
    write_part(tmp_path / "other.gz", make_rows(0, 4))
    os.replace(tmp_path / "part.gz.idx", tmp_path / "other.gz.idx")
    for only_header in (True, False):
        size = (tmp_path / "other.gz").stat().st_size
        assert read_index(tmp_path / "other.gz.idx", size, (GZIP_MEMBERS,), only_header) is None
    build_indexes([tmp_path / "other.gz"])
    assert capsys.readouterr().err.count("is not used: it is stale") == 1
