"""Law: every base name of a folder comes out once, in the order of keys, complete or with a named reason."""

import pytest

from ppldm.prepare.convert.source import find_units, read_folder
from ppldm.utils.errors import ConfigError, DataError, RowError
from ppldm.utils.jobs import take_fingerprint


def write(folder, **files):
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def load_only_row(folder):
    (row,) = read_folder(folder)
    return row.load()


def test_rows_come_sorted_by_key_whatever_the_names(tmp_path):
    names = ["0002", "0001", "a b", "red.heart", "心", "Ä", "B", "'"]
    for name in names:
        write(tmp_path, **{f"{name}.PNG": b"x", f"{name}.txt": name})
    rows = list(read_folder(tmp_path))
    assert [row.key for row in rows] == sorted(names)
    assert [row.load().caption for row in rows] == sorted(names)


def test_hidden_files_other_suffixes_and_subfolders_are_no_rows(tmp_path):
    write(tmp_path, **{"a.jpg": b"x", "a.txt": "a", "._a.jpg": b"x", "b.gif": b"x", "stats.json": "{}", "noext": b"x"})
    (tmp_path / "c.jpg").mkdir()
    assert [row.key for row in read_folder(tmp_path)] == ["a"]


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"a.txt": "a"}, "no_image"),
        ({"a.jpg": b"x"}, "no_caption"),
        ({"a.jpg": b"x", "a.png": b"x", "a.txt": "a"}, "two_images"),
        ({"a.jpg": b"x", "a.txt": " \n\t "}, "empty_caption"),
        ({"a.jpg": b"x", "a.txt": b"\xff\xff\xff"}, "encoding"),
        ({"a.jpg": b"x", "a.txt": "a", "a.json": "{"}, "metadata"),
        ({"a.jpg": b"x", "a.txt": "a", "a.json": "[1]"}, "metadata"),
    ],
)
def test_an_incomplete_row_says_why(tmp_path, files, reason):
    write(tmp_path, **files, **{"z.jpg": b"x"})
    with pytest.raises(RowError) as raised:
        next(read_folder(tmp_path)).load()
    assert raised.value.reason == reason
    assert str(tmp_path) not in str(raised.value)


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
    assert load_only_row(tmp_path).meta == {"url": "u", "punsafe": None, "w": None, "s": 0.5}


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
        list(read_folder(tmp_path / "no-such"))
    write(tmp_path, **{"a.txt": "a"})
    with pytest.raises(DataError, match="no images in"):
        list(read_folder(tmp_path))
