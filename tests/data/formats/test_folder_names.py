"""The names of a folder, grouped and in order, as a dict of sorted lists has them; listed once."""

import os
from collections import defaultdict
from pathlib import Path

import pytest

from ppldm.data.formats import folder as folder_names
from ppldm.data.formats.folder import SUFFIXES, FolderNames, list_samples, split_name
from ppldm.prepare.convert.units import FolderUnit

NAMES = [
    *("b.jpg", "b.txt", "a.JPG", "a.png", "c.json", "d.txt", "d.json", ".hidden.jpg", "e.doc", "noending", "f."),
    *("a.b.jpg", "a.b.txt", "é.jpg", "中文.txt", "x y.jpg", "new\nline.jpg", "10.jpg", "9.jpg", "b-.jpg", "b!.jpg"),
    os.fsdecode(b"\xff.jpg"),
]


def by_a_dict(names):
    samples = defaultdict(list)
    for name in sorted(names):
        if not name.startswith(".") and Path(name).suffix[1:].lower() in SUFFIXES:
            samples[Path(name).stem].append(name)
    return [
        samples[key] for key in sorted(samples) if {Path(name).suffix.lower() for name in samples[key]} != {".json"}
    ]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name in NAMES:
        (folder / name).touch()
    (folder / "folder.jpg").mkdir()
    os.utime(folder, (1, 1))
    return folder


@pytest.mark.parametrize("name", [*NAMES, "..x", "x.tar.gz", "x.JPG", "x.."])
def test_names_are_split_as_pathlib_does(name):
    assert split_name(name) == (Path(name).stem, Path(name).suffix[1:].lower())


def test_samples_are_those_of_a_dict(folder):
    names = FolderNames(folder)
    assert list(names) == by_a_dict(NAMES) and len(names) == len(by_a_dict(NAMES)) and names.has_images
    for outside in (-1, len(names)):
        with pytest.raises(IndexError):
            names[outside]


def test_a_folder_is_listed_once_for_all_spans_and_again_after_a_change(tmp_path, monkeypatch):
    for number in range(200):
        (tmp_path / f"{number:04}.jpg").touch()
    os.utime(tmp_path, (1, 1))
    listed, real = [], os.scandir
    monkeypatch.setattr(folder_names.os, "scandir", lambda path: listed.append(path) or real(path))
    unit = FolderUnit(tmp_path)
    spans = unit.spans(10)
    assert [key for span in spans for key, _ in unit.read(span)] == [f"{number:04}" for number in range(200)]
    assert sum(len(unit.input_pieces(span)) for span in spans) == 200 and len(listed) == 1
    (tmp_path / "0000a.jpg").touch()
    assert sum(span.rows for span in unit.spans(10)) == 201


def test_a_folder_that_has_just_changed_is_not_believed(tmp_path):
    (tmp_path / "a.jpg").touch()
    first = list_samples(tmp_path)
    (tmp_path / "b.jpg").touch()
    os.utime(tmp_path)  # maybe within the same tick
    assert (len(first), len(list_samples(tmp_path))) == (1, 2)
