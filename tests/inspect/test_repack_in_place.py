"""Law: a part that is rewritten in place keeps its name and every line, and is ordinary gzip to every other reader."""

import base64
import gzip
import io
import json

import pytest
from formats import write_mds, write_parquet
from PIL import Image

from ppldm.data.filelist import write_filelist
from ppldm.data.formats import part as part_module
from ppldm.data.formats.index import GZIP_MEMBERS
from ppldm.data.formats.part import Part, write_part
from ppldm.data.formats.row import Row, encode_row
from ppldm.inspect.repack import repack
from ppldm.utils.errors import ConfigError, OutputError, PartError


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_image(number: int, size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (number, 255 - number, 9)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def rows():
    return [Row(f"caption {n} 图", make_image(n, (9 + n, 7)), {"key": f"{n}"}) for n in range(12)]


@pytest.fixture
def filelist(tmp_path, rows):
    """Two parts of ordinary gzip, one with a bad row, a blank line and no last newline, and one of our own."""
    lines = [*map(encode_row, rows)]
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"".join(lines)))
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"".join([*lines[:3], b"bad\n", b"\n", *lines[3:]])[:-1]))
    write_part(tmp_path / "c.gz", rows)
    write_filelist(tmp_path / "f.filelist", ["a.gz", "b.gz", "c.gz"])
    return tmp_path / "f.filelist"


def read_as_paddlemix(path) -> list[tuple[str, bytes]]:
    """The steps of PaddleMIX's reader: lines of gzip, the first three columns between tabs, UTF-8, base64."""
    with gzip.open(path, "rb") as file:
        columns = [line.strip().split(b"\t")[:3] for line in file]
    return [(vec[0].decode("utf-8"), base64.b64decode(vec[2])) for vec in columns if len(vec) == 3]


def test_all_rows_stay_and_no_copy_is_needed(tmp_path, rows, filelist, cache_dir, capsys):
    names = ("a.gz", "b.gz", "c.gz")
    before = {name: [Part(tmp_path / name).read_line(n) for n in range(len(Part(tmp_path / name)))] for name in names}
    others = {name: read_as_paddlemix(tmp_path / name) for name in names}
    untouched = (tmp_path / "c.gz").stat().st_ino
    repack([str(filelist)], in_place=True, json=True)
    report = json.loads(capsys.readouterr().out)
    assert (report["parts"], report["rewritten"]) == (3, 2)
    assert report["bytes_after"] == sum((tmp_path / name).stat().st_size for name in ("a.gz", "b.gz"))
    assert not list(cache_dir.glob("copies/*")), "they hold what is in the part now"
    for name in names:
        part = Part(tmp_path / name)
        assert part._index.kind == GZIP_MEMBERS
        assert [part.read_line(n) for n in range(len(part))] == before[name]
        assert read_as_paddlemix(tmp_path / name) == others[name]
    assert others["a.gz"] == [(row.caption, row.image) for row in rows]
    assert (tmp_path / "c.gz").stat().st_ino == untouched and not list(cache_dir.glob("copies/*"))
    repack([str(filelist)], in_place=True)
    assert capsys.readouterr().out.startswith("0 of 3 part(s) rewritten in place")


def test_a_part_that_is_named_twice_is_rewritten_once(tmp_path, filelist, capsys):
    write_filelist(tmp_path / "g.filelist", ["a.gz"])
    repack([str(filelist), str(tmp_path / "g.filelist")], in_place=True, json=True)
    assert json.loads(capsys.readouterr().out)["rewritten"] == 2


def test_another_layout_keeps_its_own_sizes(tmp_path):
    small, large = (base64.b64encode(make_image(1, size)).decode() for size in ((20, 18), (30, 28)))
    (tmp_path / "p.gz").write_bytes(gzip.compress(f"{large}\tcaption\t{small}\n".encode() * 3))
    layout = "alt-text2image_gen_filted_data_shuffle_watermark"
    write_filelist(tmp_path / "f.filelist", ["p.gz"])
    repack([str(tmp_path / "f.filelist")], in_place=True, layout=layout)
    assert Part(tmp_path / "p.gz", layout).widths.tolist() == [30] * 3
    assert Part(tmp_path / "p.gz").widths.tolist() == [20] * 3


def test_a_disk_needs_room_for_one_file_more(tmp_path, rows, filelist, cache_dir, monkeypatch):
    """At no time are there more than the parts and one file that is being written."""
    seen, write = [], part_module.atomic_write

    def noted(path, *args, **kwargs):
        seen.append(sorted(file.name for file in tmp_path.glob(".*.tmp") if not file.name.startswith(".f.")))
        return write(path, *args, **kwargs)

    monkeypatch.setattr(part_module, "atomic_write", noted)
    repack([str(filelist)], in_place=True, num_workers=1)
    assert len(seen) == 4 and max(map(len, seen)) == 1, "columns, then the part beside them; never two parts"
    assert not cache_dir.exists(), "nothing is copied on the way"


def test_what_is_stopped_leaves_every_part_whole(tmp_path, rows, filelist, monkeypatch, capsys):
    before = {name: read_as_paddlemix(tmp_path / name) for name in ("a.gz", "b.gz")}
    compress, calls = part_module._compress, []

    def fail(line):
        calls.append(line)
        if len(calls) > 15:
            raise OSError(28, "No space left on device")
        return compress(line)

    monkeypatch.setattr(part_module, "_compress", fail)
    with pytest.raises(OutputError, match="cannot write .*b.gz: No space left on device"):
        repack([str(filelist)], in_place=True)
    assert {name: read_as_paddlemix(tmp_path / name) for name in before} == before
    assert not list(tmp_path.glob(".*.tmp"))
    monkeypatch.undo()
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path / "cache"))
    repack([str(filelist)], in_place=True)
    assert capsys.readouterr().out.startswith("1 of 3 part(s) rewritten in place")
    assert {name: read_as_paddlemix(tmp_path / name) for name in before} == before


def test_a_damaged_part_is_named_and_stays_as_it_is(tmp_path, filelist):
    damaged = (tmp_path / "a.gz").read_bytes()[:-9]
    (tmp_path / "a.gz").write_bytes(damaged)
    with pytest.raises(PartError, match="a.gz is truncated; get it again"):
        repack([str(filelist)], in_place=True)
    assert (tmp_path / "a.gz").read_bytes() == damaged


@pytest.mark.parametrize("format, write", [("parquet", write_parquet), ("mds", write_mds)])
def test_formats_that_can_hold_more_than_a_part_are_refused(tmp_path, rows, format, write):
    write(tmp_path / "p", rows)
    data = (tmp_path / "p").read_bytes()
    write_filelist(tmp_path / "f.filelist", ["p"])
    (tmp_path / "f.list").write_text(f"f.filelist format={format}\n")
    with pytest.raises(ConfigError, match=f"p is of format={format}, and only parts of gzip .* name --out DIR"):
        repack([str(tmp_path / "f.list")], in_place=True)
    assert (tmp_path / "p").read_bytes() == data


@pytest.mark.parametrize("options", [{}, {"out": "x", "in_place": True}])
def test_one_place_must_be_named(filelist, options):
    with pytest.raises(ConfigError, match="say where the parts go: --out DIR, or --in-place"):
        repack([str(filelist)], **options)
