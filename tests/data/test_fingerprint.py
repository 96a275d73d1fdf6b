import json
import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ppldm.data.filelist import (
    Fingerprint,
    PartPrint,
    Source,
    find_difference,
    find_same_part,
    read_sources,
    take_fingerprint,
    write_filelist,
)
from ppldm.data.formats.part import write_part
from ppldm.data.formats.tar import read_class_prompts
from ppldm.data.select.selection import select_rows


def make_print(lists, **options):
    """A Fingerprint of lists of parts, given as letters: the same letter is the same content under any name."""
    made = take_fingerprint([], [], [])
    for number, letters in enumerate(lists):
        source = Source(Path(f"list{number}"), tuple(Path(f"{letter}{place}") for place, letter in enumerate(letters)))
        parts = [(100, (1000, ord(letter))) for letter in letters]
        made = Fingerprint(made.lists + take_fingerprint([source], *zip(*parts, strict=True)).lists)
    return Fingerprint(tuple(replace(one, options=one.options | options) for one in made.lists))


@pytest.mark.parametrize(
    "then, now, difference",
    [
        (["abc"], ["abc"], None),
        (["abc"], ["abx"], r"in list 1, list0, part 3 was c2 \(100 rows, 1000 bytes, CRC-32 00000063\) and is now x2 "),
        (["abc", "d"], ["abc", "e"], "in list 2, list1, part 1 was d0 .* and is now e0 "),
        (["abc"], ["abcd"], "list0, d3 .* was added"),
        (["abc"], ["dabc"], "list0, d0 .* was added"),
        (["abc"], ["ab"], "list0, c2 .* is gone"),
        (["abc"], ["ac"], "list0, b1 .* is gone"),
        (["abc"], ["acb"], "list0, the parts stand in another order: c1 .* is part 2, where b1 "),
        (["abc"], ["abc", "d"], "list 2, list1, was added"),
        (["abc", "d"], ["abc"], "list 2, list1, is gone"),
        (["ab", "cd"], ["abc", "d"], "list 1, list0, c2 .* was added"),
    ],
)
def test_the_first_list_or_part_that_differs_is_named(then, now, difference):
    then, now = make_print(then), make_print(now)
    assert (then.digest == now.digest) == (difference is None)
    found = find_difference(then, now)
    assert found is None if difference is None else re.search(difference, found), found


def test_options_are_part_of_the_data():
    base = make_print(["ab"])
    for name in ("layout", "format", "idx_to_prompt"):
        other = make_print(["ab"], **{name: "other"})
        assert other.digest != base.digest and f"was read with {name} " in find_difference(base, other)


def test_the_record_is_the_fingerprint_and_small():
    numbers = random.Random(3)
    source = Source(Path("all.filelist"), tuple(Path(f"/data/part-{number:06}.gz") for number in range(5000)))
    contents = [(numbers.randrange(10**9), numbers.randrange(2**32)) for _ in source.parts]
    made = take_fingerprint([source], [numbers.randrange(5000, 7000) for _ in source.parts], contents)
    assert Fingerprint.from_record(made.record) == made and len(made.record) < 20 * 5000
    assert Fingerprint.from_record(made.record).digest == made.digest


def prints_of(path):
    sources = read_sources(path)
    selection = select_rows(sources)
    return take_fingerprint(sources, np.diff(selection.starts).tolist(), selection.contents)


def test_moved_renamed_and_linked_files_are_the_same_data(tmp_path, make_rows):
    write_part(tmp_path / "a.gz", make_rows(0, 4))
    write_part(tmp_path / "b.gz", make_rows(4, 9))
    write_filelist(tmp_path / "one.filelist", ["a.gz", "b.gz"])
    first = prints_of(tmp_path / "one.filelist")
    (tmp_path / "other").mkdir()
    shutil.copy(tmp_path / "a.gz", tmp_path / "other/x.gz")
    os.symlink(tmp_path / "b.gz", tmp_path / "other/y.gz")
    write_filelist(tmp_path / "other/two.filelist", ["x.gz", "y.gz"])
    second = prints_of(tmp_path / "other/two.filelist")
    assert second.digest == first.digest and find_difference(first, second) is None
    write_part(tmp_path / "other/x.gz", make_rows(1, 5))
    third = prints_of(tmp_path / "other/two.filelist")
    assert third.lists[0].parts[0].rows == first.lists[0].parts[0].rows
    assert "part 1 was a.gz (4 rows" in find_difference(first, third) and "is now x.gz" in find_difference(first, third)


def test_the_table_of_classes_is_part_of_the_data(tmp_path):
    prints = []
    for caption in ("tench", "goldfish"):
        (tmp_path / "table.json").write_text(json.dumps({"0": caption}))
        os.utime(tmp_path / "table.json", (1, 1))
        source = Source(Path("s"), (), format="webdataset", idx_to_prompt=tmp_path / "table.json")
        read_class_prompts.cache_clear()
        prints.append(take_fingerprint([source], [], []))
    assert prints[0].digest != prints[1].digest
    assert "idx_to_prompt CRC-32" in find_difference(*prints)


def test_a_layout_counts_where_there_are_columns_to_lay_out():
    def of(format, layout):
        return take_fingerprint([Source(Path("s"), (), format=format, layout=layout)], [], []).digest

    assert of("part", "default") != of("part", "vc")
    assert of("csv", "default") == of("csv", "vc") != of("part", "default")


@pytest.mark.parametrize("format, same", [("part", True), ("webdataset", True), ("folder", False), ("csv", False)])
def test_parts_of_equal_content_are_found_where_the_content_is_in_them(format, same):
    one, other = make_print(["abc"], format=format), make_print(["xy", "zb"], format=format)
    assert find_same_part(one, other) == (("b1", "b1") if same else None)
    assert find_same_part(one, make_print(["xyz"], format=format)) is None


def test_a_part_is_known_by_rows_bytes_and_checksum():
    part = PartPrint("a", 1, 2, 3)
    assert replace(part, name="b").content == part.content
    assert len({part.content, *(replace(part, **{name: 9}).content for name in ("rows", "bytes", "crc32"))}) == 4
