"""Law: every base name of a folder comes out once, in the order of keys, complete or with a named reason."""

import io
import json
from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from formats import write_mds
from PIL import Image

from ppldm.cli.main import run
from ppldm.data.filelist import Source, read_sources
from ppldm.data.formats.csv_table import CAPTION_COLUMNS, IMAGE_COLUMNS
from ppldm.data.formats.open import open_part
from ppldm.prepare.convert.units import FolderUnit, Span, find_units, or_error
from ppldm.utils.errors import ConfigError, DataError, RowError
from ppldm.utils.finished import take_fingerprint


def demo_picture(size: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (size, size)).save(file, "JPEG")
    return file.getvalue()


PICTURES = [demo_picture(size) for size in (8, 9)]


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def read_folder(folder):
    return FolderUnit(folder).read(Span(0, 100, 100))


def load_only_row(folder):
    ((_, row),) = read_folder(folder)
    return row


def test_rows_come_sorted_by_key_whatever_the_names(tmp_path):
    names = ["0002", "0001", "a b", "red.heart", "心", "Ä", "B", "'"]
    for name in names:
        write(tmp_path, **{f"{name}.PNG": b"x", f"{name}.txt": name})
    rows = list(read_folder(tmp_path))
    assert [key for key, _ in rows] == sorted(names)
    assert [row.caption for _, row in rows] == sorted(names)


def test_hidden_files_other_suffixes_and_subfolders_are_no_rows(tmp_path):
    write(tmp_path, **{"a.jpg": b"x", "a.txt": "a", "._a.jpg": b"x", "b.doc": b"x", "stats.json": "{}", "noext": b"x"})
    (tmp_path / "c.jpg").mkdir()
    assert [key for key, _ in read_folder(tmp_path)] == ["a"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"a.txt": "a"}, "no_image"),
        ({"a.jpg": b"x"}, "no_caption"),
        ({"a.jpg": b"x", "a.png": b"x", "a.txt": "a"}, "two_images"),
        ({"a.jpg": b"x", "a.JPG": b"x", "a.txt": "a"}, "two_images"),
        ({"a.jpg": b"x", "a.txt": " \n\t "}, "empty_caption"),
        ({"a.jpg": b"x", "a.txt": b"\xff\xff\xff"}, "encoding"),
        ({"a.jpg": b"x", "a.txt": "a", "a.json": "{"}, "metadata"),
        ({"a.jpg": b"x", "a.txt": "a", "a.json": "[1]"}, "metadata"),
    ],
)
def test_an_incomplete_row_says_why(tmp_path, files, reason):
    write(tmp_path, **files, **{"z.jpg": b"x"})
    _, error = next(read_folder(tmp_path))
    assert isinstance(error, RowError) and error.reason == reason
    assert str(tmp_path) not in str(error)


@pytest.mark.parametrize(
    ("data", "caption"),
    [
        (b" a red\theart,\r\n big \n", "a red heart, big"),
        ("\ufeff心".encode(), "心"),
        ("红心".encode("gb18030"), "红心"),
    ],
)
def test_captions_are_one_line_of_text(tmp_path, data, caption):
    write(tmp_path, **{"a.webp": b"x", "a.txt": data})
    assert load_only_row(tmp_path).caption == caption


def test_metadata_comes_along_and_what_json_lacks_is_unknown(tmp_path):
    write(tmp_path, **{"a.jpg": b"x", "a.txt": "a", "a.json": '{"url": "u", "punsafe": NaN, "w": 1e999, "s": 0.5}'})
    assert load_only_row(tmp_path).meta == {"key": "a", "url": "u", "punsafe": None, "w": None, "s": 0.5}


def test_all_files_of_a_row_are_pieces_of_its_span(tmp_path):
    write(tmp_path, **{"a.jpg": b"x", "a.txt": "a"})
    (unit,) = find_units(tmp_path)
    found = []
    for files in ({}, {"a.jpg": b"y"}, {"a.txt": "b"}, {"a.json": "{}"}):
        write(tmp_path, **files)
        found.append(take_fingerprint(unit.input_pieces(unit.spans(10)[0]))["content"])
    assert len(set(found)) == 4


def test_folders_that_give_nothing_are_named_errors(tmp_path):
    with pytest.raises(ConfigError, match="no-such.*No such file"):
        find_units(tmp_path / "no-such")
    write(tmp_path, **{"a.txt": "a"})
    for attempt in (find_units, lambda folder: list(read_folder(folder))):
        with pytest.raises(DataError, match="no images"):
            attempt(tmp_path)


def read_to_convert(path):
    """(caption, image) of each row, or its reason, as conversion reads it."""
    units = find_units(path)
    return [outcome(row) for unit in units for span in unit.spans(3) for _, row in unit.read(span)]


def read_to_train(path, format):
    part = open_part(path, Source(Path("x.filelist"), (), format=format))
    return [outcome(or_error(part.read, row)) for row in range(len(part))]


def outcome(row):
    return row.reason if isinstance(row, RowError) else (row.caption, row.image, row.meta)


def test_a_folder_has_the_same_rows_for_conversion_and_training(tmp_path):
    write(
        tmp_path / "in",
        **{"a.jpg": b"x", "a.txt": "a", "a.json": '{"u": 1}', "b.PNG": b"y", "b.txt": "b", "c.txt": "c"},
    )
    write(tmp_path / "in", **{"d.jpg": b"x", "d.cls": "3", "e.cls": "1", "f.jpg": b"x", "f.JPG": b"y", "f.txt": "f"})
    (tmp_path / "in" / "g.jpg").symlink_to("nowhere")
    rows = read_to_convert(tmp_path / "in")
    assert rows == read_to_train(tmp_path / "in", "folder")
    assert rows[0] == ("a", b"x", {"key": "a", "u": 1}) and rows[1][:2] == ("b", b"y")
    assert rows[2:] == ["no_image", "no_caption", "no_image", "two_images", "unreadable"]


@pytest.mark.parametrize("image", IMAGE_COLUMNS)
@pytest.mark.parametrize("caption", CAPTION_COLUMNS)
def test_a_table_has_the_same_rows_for_conversion_and_training(tmp_path, image, caption):
    write(tmp_path, **{"0.jpg": PICTURES[0], "1.jpg": PICTURES[1]})
    lines = [
        f"n,{caption},{image},key",
        '1,"a, b",0.jpg,01',
        "2,,1.jpg,",
        '0.5," c\nd",1.jpg,x',
        "3,4",
        "5,e,,",
        "6,f,no.jpg,",
    ]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    rows = read_to_convert(tmp_path / "t.csv")
    assert rows == read_to_train(tmp_path / "t.csv", "csv")
    assert rows[0] == ("a, b", PICTURES[0], {"key": "01", "n": 1}) and rows[2][0] == "c d"
    assert [row for row in rows if isinstance(row, str)] == ["empty_caption", "columns", "no_image", "unreadable"]


@pytest.mark.parametrize(
    "first, second",
    [("dir", "path"), ("path", "image"), ("image", "file"), ("file", "filepath"), ("filepath", "file_name")],
)
def test_of_several_columns_the_same_names_the_picture(tmp_path, first, second):
    """But `file_name`, which is that of an imagefolder, goes first in a conversion."""
    write(tmp_path, **{"0.jpg": PICTURES[0]})
    (tmp_path / "t.csv").write_text(f"{second},{first},text\nno.jpg,0.jpg,a\n0.jpg,0.jpg,a\n")
    assert read_to_train(tmp_path / "t.csv", "csv")[0][0] == "a"
    assert (read_to_convert(tmp_path / "t.csv")[0] == "unreadable") == (second == "file_name")


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet", "t.mds"])
def test_columns_of_other_names_are_taken_where_they_are_named(tmp_path, name):
    """By the spellings of PaddleMIX's script too; and what other columns say is metadata."""
    rows = [{"picture": f"{n}.jpg", "label": f"00{n}", "text": "not this"} for n in range(2)]
    table, inside = tmp_path / "in" / name, [row | {"picture": PICTURES[n]} for n, row in enumerate(rows)]
    table.parent.mkdir()
    write(table.parent, **{f"{n}.jpg": PICTURES[n] for n in range(2)})
    if name == "t.csv":
        table.write_text("picture,label,text\n" + "".join(",".join(row.values()) + "\n" for row in rows))
    elif name == "t.jsonl":
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name == "t.parquet":
        pq.write_table(pa.Table.from_pylist(inside), table)
    else:
        columns = {one: ("str", None, lambda row, one=one: row[one].encode()) for one in ("label", "text")}
        write_mds(table, inside, columns | {"picture": ("bytes", None, lambda row: row["picture"])})
    flags = ["convert", str(table), "--out", str(tmp_path / "out"), "--num-workers", "1"]
    run([*flags, "--image_key", "picture", "--caption-col", "label"])
    (source,) = read_sources(tmp_path / "out/custom.filelist.list")
    with closing(open_part(source.parts[0], source)) as part:
        found = [part.read(number) for number in range(len(part))]
    assert [row.caption for row in found] == ["000", "001"] and [row.image for row in found] == PICTURES
    assert all(row.meta["text"] == "not this" for row in found)
    with pytest.raises(ConfigError, match="caption_col"):
        run([*flags, "--image_key", "picture", "--caption_key", "text"])
    with pytest.raises(DataError):
        run([*flags, "--image-col", "none", "--caption-col", "label", "--redo"])


def test_columns_are_named_of_tables_only(tmp_path):
    write(tmp_path / "in", **{"1.jpg": PICTURES[0], "1.txt": "a", "other.csv": "picture,label\n1.jpg,b\n"})
    with pytest.raises(ConfigError, match="name the file"):
        find_units(tmp_path / "in", columns=("picture", ""))
