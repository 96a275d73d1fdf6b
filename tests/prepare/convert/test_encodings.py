"""Laws: a row whose text was not UTF-8 is counted and one is shown, wherever text is read; what it is read as can be
said; a byte order mark before a file of text is no part of what it says."""

import base64
import gzip
import json
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ppldm.data.formats.layouts import LAYOUTS
from ppldm.data.formats.parquet_table import ParquetTable
from ppldm.data.formats.part import Part
from ppldm.inspect.stats import stats
from ppldm.inspect.verify import verify
from ppldm.prepare.convert.convert import convert, convert_source, describe
from ppldm.prepare.provenance.forget import forget_rows
from ppldm.prepare.provenance.forgotten import Forgotten
from ppldm.utils.errors import ConfigError
from ppldm.utils.pictures import save_png

BOM = b"\xef\xbb\xbf"
KINDS = ("folder", "tar", "csv", "jsonl", "json")


def write_source(folder, kind, captions: list[bytes], bom: bool = False):
    """A source of one row for each caption, each of which is in an encoding of its own."""
    folder.mkdir()
    mark, lines = BOM if bom else b"", []
    for row, caption in enumerate(captions):
        save_png(folder / f"{row}.png", np.full((8, 8, 3), row, np.uint8))
        if kind in ("folder", "tar"):
            (folder / f"{row}.txt").write_bytes(mark + caption)
        elif kind == "json":
            (folder / f"{row}.txt").write_bytes(b"plain")
            (folder / f"{row}.json").write_bytes(mark + b'{"note": "' + caption + b'"}')
        elif kind == "csv":
            lines.append(f"{row}.png".encode() + b"," + caption)
        else:
            lines.append(f'{{"file_name": "{row}.png", "text": "'.encode() + caption + b'"}')
    if kind == "csv":
        (folder / "metadata.csv").write_bytes(mark + b"\n".join([b"file_name,text", *lines]))
    if kind == "jsonl":
        (folder / "metadata.jsonl").write_bytes(mark + b"\n".join(lines))
    if kind == "tar":
        with tarfile.open(folder.parent / "x.tar", "w") as archive:
            for path in sorted(folder.iterdir()):
                archive.add(path, path.name)
        return folder.parent / "x.tar"
    return folder


def texts(out, kind) -> list[str]:
    rows = [Part(path).read(row) for path in sorted(out.glob("parts/*.gz")) for row in range(len(Part(path)))]
    return [row.meta["note"] if kind == "json" else row.caption for row in rows]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoding", ["gb18030", "latin-1"])
def test_rows_that_are_not_utf8_are_counted_shown_and_read_as_it_is_said(tmp_path, kind, encoding):
    words = ["caf\xe9 cr\xe8me", "plain", "\u5fc3"] if encoding == "gb18030" else ["caf\xe9", "plain", "\xfcber"]
    source = write_source(tmp_path / "in", kind, ["\u56fe ok".encode(), *(word.encode(encoding) for word in words)])
    manifest = convert_source(source, tmp_path / "out", num_workers=1, rows_per_part=3, caption_encoding=encoding)
    assert texts(tmp_path / "out", kind) == ["\u56fe ok", *words]
    told = manifest["not_utf8"]
    assert (told["rows"], told["encoding"]) == (2, encoding) and words[0] in told["example"]
    line = describe(manifest).splitlines()[-1]
    assert line.startswith(f"  not UTF-8, read as {encoding}: 2, for example '1': ") and "--caption-encoding" in line
    # Again it is the same; and what is said of a row that is forgotten goes with it.
    again = convert_source(source, tmp_path / "out", num_workers=1, rows_per_part=3, caption_encoding=encoding)
    assert again == manifest
    forget_rows(tmp_path / "out", Forgotten(keys=frozenset(["1", "000000001"])))
    assert words[0] not in (tmp_path / "out/manifest.json").read_text()
    assert words[0] not in "".join(path.read_text() for path in (tmp_path / "out/.convert").glob("*.json"))


def test_a_part_of_utf8_says_nothing_and_an_unknown_encoding_is_named(tmp_path):
    source = write_source(tmp_path / "in", "folder", ["\u56fe".encode(), b"b"])
    assert "not_utf8" not in convert_source(source, tmp_path / "out", num_workers=1)
    for name in ("nonsense", "hex"):
        with pytest.raises(ConfigError, match=f"--caption-encoding {name} is not known"):
            convert(str(source), str(tmp_path / "two"), caption_encoding=name, num_workers=1)
    (tmp_path / "in/0.txt").write_bytes(b"caf\xe9!")
    bad = convert_source(source, tmp_path / "three", num_workers=1, caption_encoding="utf-8")
    assert bad["skipped"] == {"encoding": 1}


def test_verify_and_stats_count_the_rows_of_parts(tmp_path, capsys):
    source = write_source(tmp_path / "in", "folder", [b"a", b"b"])
    image = convert_source(source, tmp_path / "out", num_workers=1)
    assert image["rows_out"] == 2
    part = Part(tmp_path / "out/parts/part-00000.gz")
    lines = [part.read_line(0), part.read_line(1).replace(b"b", "\u5fc3".encode("gbk"), 1)]
    (tmp_path / "plain").write_bytes(b"".join(lines))
    (tmp_path / "x.filelist").write_text("plain\n")
    for command in (verify, stats):
        command([str(tmp_path / "x.filelist")], num_workers=1, json=True)
        told = json.loads(capsys.readouterr().out)["not_utf8"]
        assert told == {"rows": 1, "encoding": "gb18030", "example": f"{tmp_path / 'plain'} row 1: '\u5fc3'"}
        command([str(tmp_path / "x.filelist")], num_workers=1)
        assert "not UTF-8, read as gb18030: 1, for example" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_a_mark_before_a_file_is_no_part_of_its_first_text(tmp_path, kind):
    source = write_source(tmp_path / "in", kind, [b"a cat", b"a dog"], bom=True)
    manifest = convert_source(source, tmp_path / "out", num_workers=1)
    assert manifest["rows_out"] == 2 and texts(tmp_path / "out", kind) == ["a cat", "a dog"]


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize("packed", ["plain", "members", "one member"])
def test_a_mark_before_a_part_is_no_part_of_its_first_row(tmp_path, layout, packed):
    """Whichever column is the first, and also where the part is compressed."""
    chosen, lines = LAYOUTS[layout], []
    save_png(tmp_path / "x.png", np.zeros((8, 8, 3), np.uint8))
    for caption in ("a cat", "a dog"):
        columns = [b"c"] * 13
        columns[chosen.image] = base64.b64encode((tmp_path / "x.png").read_bytes())
        if chosen.control:
            columns[chosen.control] = columns[chosen.image]
        columns[chosen.caption] = caption.encode()
        if chosen.caption_keys:
            columns[chosen.caption] = json.dumps({chosen.caption_keys[0]: caption}).encode()
        lines.append(b"\t".join(columns) + b"\n")
    lines[0] = BOM + lines[0]
    stored = {"plain": b"".join(lines), "members": b"".join(map(gzip.compress, lines))}
    (tmp_path / "part").write_bytes(stored.get(packed) or gzip.compress(b"".join(lines)))
    read = Part(tmp_path / "part", layout)
    assert [read.read(row).caption for row in range(2)] == ["a cat", "a dog"]
    assert [read.read_fields(row)[0] for row in range(2)] == ["a cat", "a dog"]
    assert read.widths.tolist() == [8, 8] and read.read_line(0) == lines[0].removeprefix(BOM)


LISTS = [["a", "b"], [], [1, None, 2.5], [["x"], {"y": 1}], {"box": [1, 2]}]


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_lists_of_a_table_are_metadata(tmp_path, kind):
    (tmp_path / "in").mkdir()
    save_png(tmp_path / "in/x.png", np.zeros((8, 8, 3), np.uint8))
    image = (tmp_path / "in/x.png").read_bytes()
    if kind == "parquet":
        columns = {"tags": [["a", "b"], []], "boxes": [[[1, 2]], None], "about": [{"n": 1}, {"n": None}]}
        table = pa.table({"image": [image] * 2, "text": ["one", "two"], **columns})
        pq.write_table(table, tmp_path / "x.parquet")
        read = ParquetTable(tmp_path / "x.parquet")
        found = [read.read(row).meta for row in range(2)]
        assert found == [
            {"tags": ["a", "b"], "boxes": [[1, 2]], "about": {"n": 1}},
            {"tags": [], "about": {"n": None}},
        ]
        source = tmp_path / "x.parquet"
    else:
        rows = [{"file_name": "x.png", "text": "t", "own": one} for one in LISTS]
        (tmp_path / "in/metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
        source, found = tmp_path / "in", [{"own": one} for one in LISTS]
    convert_source(source, tmp_path / "out", num_workers=1)
    part = Part(tmp_path / "out/parts/part-00000.gz")
    assert [part.read(row).meta.items() >= one.items() for row, one in enumerate(found)] == [True] * len(found)
