"""A folder of pictures is read at all levels, by whatever reads it: every picture once, or a word about it."""

import io
import logging
import random
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ppldm.data.filelist import read_sources
from ppldm.data.formats.csv_table import CsvTable
from ppldm.data.formats.open import open_part
from ppldm.evaluation.pictures import open_pictures
from ppldm.prepare.convert.units import find_units
from ppldm.training.commands.finetune import read_pictures
from ppldm.utils.errors import FilelistError, PartError


def picture(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def plant(root: Path, seed: int) -> set[str]:
    """A tree of folders with pictures at any level; the captions, which are the pictures' paths."""
    rng, captions, folders = random.Random(seed), set(), [root]
    root.mkdir()
    for number in range(rng.randint(1, 7)):
        folder = rng.choice(folders) / rng.choice(["cats", "a b", "é", f"{number}", "x.png", "part_1"])
        folder.mkdir(exist_ok=True)
        folders.append(folder)
    for number, folder in enumerate(dict.fromkeys(folders)):
        for name in range(rng.choice([0, 1, 3])):
            path = folder / f"{name}.png"
            if path.is_dir():
                continue
            path.write_bytes(picture(100 * number + name))
            caption = path.relative_to(root).as_posix()
            path.with_suffix(".txt").write_text(caption)
            captions.add(caption)
    if not captions:
        (root / "only.png").write_bytes(picture(9999))
        (root / "only.txt").write_text("only.png")
        captions = {"only.png"}
    (root / ".hidden").mkdir()
    (root / ".hidden" / "x.png").write_bytes(picture(1))
    return captions


def rows_of_list(path: Path) -> list[str]:
    parts = [(part, source) for source in read_sources(path) for part in source.parts]
    rows = [open_part(part, source.without_parts()) for part, source in parts]
    return [own.read(number).caption for own in rows for number in range(len(own))]


def doors(root: Path, beside: Path) -> dict[str, list[str]]:
    beside.mkdir()
    (beside / "data.filelist").write_text(f"{root}\n")
    (beside / "data.list").write_text("data.filelist format=folder\n")
    units = find_units(root)
    return {
        "convert": [row.caption for unit in units for span in unit.spans(2) for _, row in unit.read(span)],
        "training": rows_of_list(beside / "data.list"),
        "evaluate": open_pictures(root).captions,
        "evaluate, ids": open_pictures(root).ids,
        "finetune": [path.relative_to(root).as_posix() for path in read_pictures(root, "a").files],
    }


@pytest.mark.parametrize("seed", range(12))
def test_every_picture_of_a_tree_is_read_once_at_every_door(tmp_path, seed):
    captions = plant(tmp_path / "pictures", seed)
    for door, found in doors(tmp_path / "pictures", tmp_path / "beside").items():
        assert sorted(found) == sorted(captions), door


def test_folders_that_have_their_own_line_are_read_by_it_alone(tmp_path):
    for name in ("a", "a/b", "a/b/c", "a/d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(picture(1))
        (tmp_path / name / "x.txt").write_text(name)
    for lines, lists in (
        (["a\na/b\n"], ["1.filelist format=folder\n"]),
        (["a/b\n", "a\n"], ["1.filelist 2 format=folder\n", "2.filelist 1 format=folder\n"]),
        (["a\n", "a/b\n"], ["1.filelist 2 format=folder\n", "2.filelist 1 format=folder\n"]),
    ):
        for number, text in enumerate(lines, start=1):
            (tmp_path / f"{number}.filelist").write_text(text)
        (tmp_path / "all.list").write_text("".join(lists))
        assert sorted(rows_of_list(tmp_path / "all.list")) == ["a", "a/b", "a/b/c", "a/d"]
        own = {source.path.stem: [part.name for part in source.parts] for source in read_sources(tmp_path / "all.list")}
        assert len(lines) == 1 or sorted(map(sorted, own.values())) == [["a", "d"], ["b", "c"]]


def test_a_line_all_of_whose_folders_have_lines_of_their_own_adds_nothing(tmp_path):
    for name in ("a/b", "a/c", "empty"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("a/b", "a/c"):
        (tmp_path / name / "x.png").write_bytes(picture(1))
        (tmp_path / name / "x.txt").write_text(name)
    (tmp_path / "all.list").write_text("1.filelist format=folder\n")
    for lines in ("a\na/b\na/c\n", "a/c\na/b\na\n"):
        (tmp_path / "1.filelist").write_text(lines)
        assert sorted(rows_of_list(tmp_path / "all.list")) == ["a/b", "a/c"]
    (tmp_path / "1.filelist").write_text("a\nempty\n")
    with pytest.raises(PartError, match="no images .* in the folder .*empty or below it"):
        rows_of_list(tmp_path / "all.list")


def test_links_to_folders_are_not_followed_and_the_log_says_so(tmp_path, caplog):
    captions = plant(tmp_path / "pictures", 3)
    plant(tmp_path / "elsewhere", 4)
    (tmp_path / "pictures" / "outside").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "pictures" / "round").symlink_to(tmp_path / "pictures")
    with caplog.at_level(logging.WARNING):
        for door, found in doors(tmp_path / "pictures", tmp_path / "beside").items():
            assert sorted(found) == sorted(captions), door
    for name in ("outside", "round"):
        assert f"{tmp_path}/pictures/{name} is a link to a folder and is not followed" in caplog.text
    (tmp_path / "named").symlink_to(tmp_path / "elsewhere")  # itself it may be one
    assert find_units(tmp_path / "named") and len(open_pictures(tmp_path / "named"))


def test_what_is_not_read_beside_pictures_is_named(tmp_path, caplog):
    plant(tmp_path / "pictures", 0)
    for name in ("more.tar", "table.csv", "x.parquet"):
        (tmp_path / "pictures" / name).write_bytes(b"")
    (tmp_path / "pictures" / "own.png").write_bytes(picture(0))
    (tmp_path / "pictures" / "part_1").mkdir(exist_ok=True)
    (tmp_path / "pictures" / "part_1.csv").write_bytes(b"")
    with caplog.at_level(logging.WARNING):
        find_units(tmp_path / "pictures")
    assert "3 files such as more.tar are not read beside pictures" in caplog.text


@pytest.mark.parametrize("name, told", [("metadata.csv", 1), ("table.csv", 0)])
def test_a_training_on_a_table_is_told_once_which_pictures_it_leaves_out(tmp_path, caplog, name, told):
    for place, letter in enumerate("ab"):
        (tmp_path / f"{letter}.png").write_bytes(picture(place))
    (tmp_path / name).write_text("file_name,text\na.png,a\n")
    for _ in range(2):
        assert CsvTable(tmp_path / name).read(0).caption == "a"
    assert caplog.text.count(f"{name}: no line for 1 picture(s) such as {tmp_path / 'b.png'}") == told


def test_a_folder_that_cannot_be_listed_is_one_line(tmp_path, monkeypatch):
    from ppldm.data.formats import folder as folder_names

    plant(tmp_path / "pictures", 0)
    (tmp_path / "1.filelist").write_text("pictures\n")
    (tmp_path / "all.list").write_text("1.filelist format=folder\n")

    def refuse(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(folder_names.os, "scandir", refuse)
    with pytest.raises(FilelistError, match="cannot read the folder .*pictures: Permission denied"):
        read_sources(tmp_path / "all.list")
