import os
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from formats import WRITERS, add_member, write_folder, write_parquet, write_tar

from ppldm.data.filelist import Source, read_sources, write_filelist
from ppldm.data.formats.index import IndexSummary
from ppldm.data.formats.layouts import FORMATS
from ppldm.data.formats.open import open_part, summarize
from ppldm.data.formats.row import Row
from ppldm.data.order import Mix, StepSampler
from ppldm.data.select.expression import parse_where
from ppldm.data.select.selection import select_rows
from ppldm.utils.errors import ConfigError, FilelistError, PartError, RowError
from ppldm.utils.processes.ranks import World


@pytest.fixture
def rows(make_image):
    return [Row(f'picture {i} "图", {i}\'s', make_image(i, (20 + i % 3, 18)), {"key": f"{i:04}"}) for i in range(40)]


def source(format, idx_to_prompt=None):
    return Source(Path("x.filelist"), (), format=format, idx_to_prompt=idx_to_prompt)


def open_all(path, format, **options):
    part = open_part(path, source(format, **options))
    return [part.read(i) for i in range(len(part))]


def reasons(path, format, **options):
    found, part = [], open_part(path, source(format, **options))
    for i in range(len(part)):
        try:
            found.append(part.read(i).caption)
        except RowError as error:
            assert f"row {i}" in str(error) and "\n" not in str(error)
            found.append(error.reason)
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_rows_come_back_from_every_format(tmp_path, rows, format):
    assert set(WRITERS) == set(FORMATS)
    WRITERS[format](tmp_path / "p", rows)
    assert summarize(tmp_path / "p", source(format)) == IndexSummary(40, 18)
    part = open_part(tmp_path / "p", source(format))
    assert [part.read(i) for i in reversed(range(40))] == rows[::-1]
    assert part.widths.tolist() == [20 + i % 3 for i in range(40)] and set(part.heights) == {18}
    with pytest.raises(IndexError):
        part.read(40)


@pytest.mark.parametrize("format", FORMATS)
def test_samples_are_the_same_to_the_byte_whatever_the_format(tmp_path, rows, make_dataset, format):
    def samples(name):
        folder = tmp_path / f"as-{name}"
        folder.mkdir(exist_ok=True)
        for part, own in (("a", rows[:25]), ("b", rows[25:])):
            WRITERS[name](folder / part, own)
        write_filelist(folder / "f.filelist", ["a", "b"])
        (folder / "f.list").write_text(f"f.filelist format={name}\n")
        dataset = make_dataset(read_sources(folder / "f.list"))
        sampler = StepSampler(Mix(dataset.list_sizes, None, 7), 8, 4, World(1, 2), 3, 12)
        return [dataset[key] for batch in sampler for key in batch]

    expected, found = samples("part"), samples(format)
    assert len(found) == len(expected) == 36
    assert all(np.array_equal(a[key], b[key]) for a, b in zip(expected, found, strict=True) for key in a)


@pytest.mark.parametrize("format", [name for name in FORMATS if name != "part"])
def test_an_index_is_built_once_and_anew_when_the_file_changes(tmp_path, rows, cache_dir, format):
    path = tmp_path / "p"
    WRITERS[format](path, rows[:5])
    assert len(open_all(path, format)) == 5
    stored = {file: file.stat().st_mtime_ns for file in [*tmp_path.glob("*.idx"), *cache_dir.glob("*")]}
    assert stored and len(open_all(path, format)) == 5
    assert stored == {file: file.stat().st_mtime_ns for file in stored}
    WRITERS[format](path, rows[:9])
    assert open_all(path, format) == rows[:9]


@pytest.mark.parametrize("format", [name for name in FORMATS if name not in ("part", "folder")])
def test_a_file_taken_for_another_format_is_refused_whatever_index_it_has(tmp_path, rows, format):
    WRITERS[format](tmp_path / "p", rows)
    open_all(tmp_path / "p", format)
    for other in set(FORMATS) - {format}:
        for attempt in (open_part, summarize):
            with pytest.raises(PartError, match=r"/p\b") as caught:
                attempt(tmp_path / "p", source(other))
            assert "\n" not in str(caught.value)
    assert open_all(tmp_path / "p", format) == rows


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("state", ["missing", "empty", "folder"])
def test_what_is_not_there_is_one_line_with_its_name(tmp_path, format, state):
    path = tmp_path / "p"
    if state != "missing":
        path.mkdir() if state == "folder" else path.touch()
    for attempt in (open_part, summarize):
        with pytest.raises(PartError, match=r"/p\b") as caught:
            attempt(path, source(format))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_of_every_kind_of_tar_are_read(tmp_path, rows, format):
    rows = [Row(row.caption, row.image, {"key": f"{'d' * 90}/{i}{'n' * 60}"}) for i, row in enumerate(rows)]
    write_tar(tmp_path / "p", rows, format)
    assert open_all(tmp_path / "p", "webdataset") == rows


def test_samples_of_a_tar_are_runs_of_one_base_name(tmp_path, make_image):
    image = make_image()
    with tarfile.open(tmp_path / "p", "w") as tar:
        folder = tarfile.TarInfo("a")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        members = [
            *("a/0.JPG", "a/0.txt", "a/0.seg.png", "a/0.caption"),  # a sample, with others' files of its name
            *("b/0.png", "b/0.txt"),  # the same name in another folder
            *("1.txt", "1.png", "1.txt", "1.webp"),  # a name twice: two samples
            *("2.txt",),
            *("3.png",),
            *("4.png", "4.jpg", "4.txt"),
            *("__meta__.json", ".hidden.png", "README"),
            *("5.png", "5.txt", "5.json"),
        ]
        for name in members:
            add_member(tar, name, f"[{name}]".encode() if name.endswith(("txt", "json")) else image)
    assert reasons(tmp_path / "p", "webdataset") == [
        *("[a/0.txt]", "[b/0.txt]", "[1.txt]", "[1.txt]", "no_image", "no_caption", "two_images", "metadata")
    ]


@pytest.mark.parametrize("option", ["idx_to_prompt", "class_mapping"])
def test_a_class_becomes_its_prompt(tmp_path, make_image, option):
    with tarfile.open(tmp_path / "p", "w") as tar:
        for i, number in enumerate(["0\n", "7", "x"]):
            add_member(tar, f"{i}.jpg", make_image())
            add_member(tar, f"{i}.cls", number.encode())
    (tmp_path / "prompts.json").write_text('{"0": "tench", "1": "goldfish"}')
    write_filelist(tmp_path / "f.filelist", ["p"])
    (tmp_path / "f.list").write_text(f"f.filelist format=webdataset {option}=prompts.json\n")
    (found,) = read_sources(tmp_path / "f.list")
    assert reasons(tmp_path / "p", "webdataset", idx_to_prompt=found.idx_to_prompt) == ["tench", "class", "class"]
    assert reasons(tmp_path / "p", "webdataset") == ["no_caption"] * 3
    for text in ("[1]", '{"0": 1}', "{", None):
        table = tmp_path / f"{text}.json"
        if text:
            table.write_text(text)
        with pytest.raises(ConfigError, match="idx_to_prompt="):
            open_part(tmp_path / "p", source("webdataset", table))


def test_every_tar_that_is_cut_or_damaged_is_refused_or_read_whole(tmp_path, rows):
    write_tar(tmp_path / "whole", rows[:3])
    data = (tmp_path / "whole").read_bytes()
    end = len(data.rstrip(b"\0"))
    for length in range(1, end, 100):
        (tmp_path / "cut").write_bytes(data[:length])
        try:
            found = open_all(tmp_path / "cut", "webdataset")
        except (PartError, RowError):
            continue
        assert found == rows[: len(found)] and length % 512 == 0
    for name, changed in {
        "header": b"x" + data[1:],
        "second sample": data[: len(data) // 2 // 512 * 512]
        + b"\xff" * 512
        + data[len(data) // 2 // 512 * 512 + 512 :],
        "two tars": data + data,
        "gzip": b"\x1f\x8b" + data,
    }.items():
        (tmp_path / name).write_bytes(changed)
        with pytest.raises(PartError) as caught:
            open_part(tmp_path / name, source("webdataset"))
        assert name in str(caught.value) and "\n" not in str(caught.value)


def test_a_tar_that_changed_behind_a_fitting_index_gives_no_wrong_pair(tmp_path, rows):
    write_tar(tmp_path / "p", rows)
    open_all(tmp_path / "p", "webdataset")
    data = (tmp_path / "p").read_bytes()
    (tmp_path / "p").write_bytes(bytes(512) + data[:-512])
    os.utime(tmp_path / "p", (0, 0))
    part = open_part(tmp_path / "p", source("webdataset"))
    for i in range(len(part)):
        with pytest.raises(RowError):
            part.read(i)


def test_incomplete_samples_of_a_folder_stay_rows(tmp_path, rows):
    write_folder(tmp_path / "p", rows[:5])
    for gone in ("0000.txt", "0001.png"):
        (tmp_path / "p" / gone).unlink()
    (tmp_path / "p" / "0002.jpg").write_bytes(b"x")
    (tmp_path / "p" / "0003.txt").write_text(" ")
    (tmp_path / "p" / "alone.json").write_text("{}")
    assert reasons(tmp_path / "p", "folder")[:4] == ["no_caption", "no_image", "two_images", "empty_caption"]
    part = open_part(tmp_path / "p", source("folder"))
    assert len(part) == 5
    os.unlink(tmp_path / "p" / "0004.png")
    with pytest.raises(RowError) as caught:
        part.read(4)
    assert caught.value.reason == "unreadable"


def test_tables_are_read_as_they_are_quoted(tmp_path, rows):
    write_folder(tmp_path / "images", rows[:3])
    with open(tmp_path / "p", "wb") as file:
        file.write("\ufeffurl,dir,text,similarity\r\n".encode())
        file.write(b'u,images/0000.png,"a, ""quoted""\r\n  text",0.25\r\n')
        file.write(b"\r\nu,images/0001.png\r\nu,images/none.png,c,\r\nu,images/0002.png,,\r\n")
        file.write(b"u,images/0002.png," + "中文说明图片".encode("gb18030") + b",nan")
    assert reasons(tmp_path / "p", "csv") == [
        'a, "quoted" text',
        "columns",
        "unreadable",
        "empty_caption",
        "中文说明图片",
    ]
    part = open_part(tmp_path / "p", source("csv"))
    assert part.read(0).meta == {"key": "0000", "url": "u", "similarity": 0.25}
    assert part.read(4).meta == {"key": "0002", "url": "u", "similarity": "nan"}
    for text, message in {
        "a,b\n1,2\n": "columns a, b",
        "dir,text\nnone.png,x\n": "none of the first 1",
        'dir,text\n"' + "x" * 200_000: "none of the first 1",
        "dir,text\n": "no rows",
    }.items():
        (tmp_path / "bad").write_text(text)
        with pytest.raises(PartError, match=message):
            open_part(tmp_path / "bad", source("csv"))


@pytest.mark.parametrize("struct", [True, False])
def test_rows_of_a_parquet_file_without_image_or_text_stay_rows(tmp_path, rows, struct):
    write_parquet(tmp_path / "whole", rows, struct)
    table = pq.read_table(tmp_path / "whole").to_pylist()
    table[3]["image"], table[5]["text"] = None, None
    scores = [0.5, float("nan"), *[None] * 38]
    more = {"score": pa.array(scores), "tags": pa.array([["x"]] * 40)}
    schema = pq.read_schema(tmp_path / "whole")
    table = pa.Table.from_pylist(table, schema)
    for name, column in more.items():
        table = table.append_column(name, column)
    pq.write_table(table, tmp_path / "p")
    found = reasons(tmp_path / "p", "parquet")
    assert len(found) == 40 and found[3] == found[5] == "columns" and found[4] == rows[4].caption
    part = open_part(tmp_path / "p", source("parquet"))
    assert part.read(0).meta == {"key": "0000", "score": 0.5, "tags": ["x"]}
    assert part.read(1).meta == {"key": "0001", "tags": ["x"]}


@pytest.mark.parametrize("format", FORMATS)
def test_conditions_select_the_same_rows_of_every_format(tmp_path, rows, format):
    WRITERS[format](tmp_path / "p", rows)
    selected = select_rows(
        [Source(Path("x.filelist"), (tmp_path / "p",), format=format)],
        parse_where("width>20 and caption!='nothing' and key>='0005'"),
        min_side=10,
    )
    assert list(selected) == [i for i in range(5, 40) if i % 3]


def test_an_option_of_another_format_is_refused(tmp_path):
    (tmp_path / "f.filelist").write_text("p\n")
    for options in ("format=csv layout=laion_aes", "idx_to_prompt=x.json", "format=csv class_mapping=x.json"):
        (tmp_path / "f.list").write_text(f"f.filelist {options}\n")
        with pytest.raises(FilelistError, match="line 1: .* has a meaning only with format="):
            read_sources(tmp_path / "f.list")
