import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from filelists import read_filelist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from ppldm.data.filelist import (
    Source,
    expand_braces,
    list_parts,
    read_filelist_list,
    read_sources,
    write_filelist,
)
from ppldm.data.formats.layouts import LAYOUTS
from ppldm.data.formats.open import open_part
from ppldm.utils.errors import ConfigError, FilelistError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def parts(tmp_path):
    """Folder with part files a, b, c and filelists x (a, b) and y (c)."""
    for name in "abc":
        (tmp_path / name).write_text("row")
    (tmp_path / "x.filelist").write_text("# two parts\n\na\r\n  b  \n")
    (tmp_path / "y.filelist").write_text("\ufeffc")
    return tmp_path


def write(path, text):
    path.write_text(text)
    return path


def test_lines_that_say_nothing_are_skipped(parts):
    assert read_filelist(parts / "x.filelist") == [parts / "a", parts / "b"]
    assert read_filelist(parts / "y.filelist") == [parts / "c"]


def test_a_filelist_comes_back(tmp_path):
    write_filelist(tmp_path / "f", ["/x/part 1.gz", "/x/part=2.gz"])
    assert read_filelist(tmp_path / "f") == [Path("/x/part 1.gz"), Path("/x/part=2.gz")]
    with pytest.raises(FilelistError):
        write_filelist(tmp_path / "g", [])


@pytest.mark.parametrize(
    "text, names",
    [
        ("a.tar", ["a.tar"]),
        ("{08..10}.tar", ["08.tar", "09.tar", "10.tar"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{a,b}/{0..1}", ["a/0", "a/1", "b/0", "b/1"]),
        ("{a}${1..3}", ["{a}${1..3}"]),
    ],
)
def test_braces(text, names):
    assert expand_braces(text) == names


def test_a_line_with_braces_is_several_unless_a_file_is_called_so(parts, monkeypatch):
    monkeypatch.setenv("HERE", str(parts))
    write(parts / "z.filelist", "{a,b}\n${HERE}/{c,[d-z]}.tar")
    for name in ("c.tar", "e.tar", "f.tar"):
        (parts / name).write_text("row")
    assert read_filelist(parts / "z.filelist") == [parts / name for name in ("a", "b", "c.tar", "e.tar", "f.tar")]
    (parts / "{a,b}").write_text("row")
    assert read_filelist(parts / "z.filelist")[0] == parts / "{a,b}"
    write(parts / "z.filelist", "x/{0..99999999}.tar")
    with pytest.raises(FilelistError, match="line 1: x.* stands for more than 1,000,000 files; name them in several"):
        read_filelist(parts / "z.filelist")
    write(parts / "z.filelist", "pipe:aws s3 cp s3://a/b.tar -")
    with pytest.raises(FilelistError, match="line 1: pipe:.* is a command.*; name the file or address it copies"):
        read_filelist(parts / "z.filelist")


def test_a_relative_path_is_beside_the_file_or_else_in_the_working_directory(parts, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in "ad":
        (elsewhere / name).write_text("")
    monkeypatch.chdir(elsewhere)
    filelist = write(parts / "f", "a\nd\nnowhere\n")
    assert read_filelist(filelist) == [parts / "a", Path("d"), parts / "nowhere"]


def test_home_and_environment_are_expanded(parts, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("DATA", str(parts))
    assert read_filelist(write(parts / "f", "~/p\n$DATA/a\n${DATA}/b\n")) == [
        Path("/home/someone/p"),
        parts / "a",
        parts / "b",
    ]


@pytest.mark.parametrize(
    "line, weight, name",
    [
        ("x.filelist", None, "x.filelist"),
        ("x.filelist 0.5", 0.5, "x.filelist"),
        ("x.filelist\t2", 2.0, "x.filelist"),
        ("x.filelist 1e-3 layout=default", 0.001, "x.filelist"),
        ("x.filelist layout=default", None, "x.filelist"),
        ("my own.filelist 3", 3.0, "my own.filelist"),
        ("my own.filelist", None, "my own.filelist"),
        ("k=v.filelist 0.5", 0.5, "k=v.filelist"),
    ],
)
def test_weight_and_options_are_read_from_the_right(parts, line, weight, name):
    (parts / name).touch()
    assert read_filelist_list(write(parts / "l", line)) == [Source(parts / name, weight=weight)]


@pytest.mark.parametrize(
    "name, text, lists",
    [
        ("t.filelist.list", "x.filelist\ny.filelist\n", [("x.filelist", "ab", None), ("y.filelist", "c", None)]),
        ("t", "x.filelist 1\ny.filelist 3\n", [("x.filelist", "ab", 1.0), ("y.filelist", "c", 3.0)]),
        ("t.list", "z 1\n", [("z", "a", 1.0)]),
        ("t", "a\nc\n", [("t", "ac", None)]),
        ("t", "z\n", [("t", "z", None)]),
    ],
)
def test_sources_are_a_list_of_filelists_or_one_filelist(parts, name, text, lists):
    write(parts / "z", "a\n")
    sources = read_sources(write(parts / name, text))
    assert [(source.path, source.parts, source.weight) for source in sources] == [
        (parts / path, tuple(parts / part for part in names), weight) for path, names, weight in lists
    ]


def test_patterns_are_expanded_in_order_without_indexes(parts, monkeypatch):
    for name in ("part-10.gz", "part-9.gz", "part-9.gz.idx", "deep/er/part-1.gz", "part-[x].gz"):
        (parts / name).parent.mkdir(parents=True, exist_ok=True)
        (parts / name).touch()
    monkeypatch.setenv("DATA", str(parts))
    found = {
        "part-*": ["part-10.gz", "part-9.gz", "part-[x].gz"],
        "$DATA/part-?.gz": ["part-9.gz"],
        "**/part-1*": ["deep/er/part-1.gz", "part-10.gz"],
        "part-[x].gz": ["part-[x].gz"],
        "part-[0-9].gz": ["part-9.gz"],
    }
    for line, names in found.items():
        assert read_filelist(write(parts / "f", line)) == [parts / name for name in names]
        assert read_sources(parts / "f")[0].parts == tuple(parts / name for name in names)
    folder = parts / "[lists]"
    folder.mkdir()
    monkeypatch.chdir(parts)
    assert read_filelist(write(folder / "f", "deep/**/part-*")) == [Path("deep/er/part-1.gz")]
    assert read_filelist(write(folder / "f", "part-1.gz")) == [folder / "part-1.gz"]
    (folder / "part-3").touch()
    assert read_filelist(write(folder / "f", "part-?")) == [folder / "part-3"]


def test_a_pattern_in_a_list_gives_each_filelist_the_weight(parts):
    items = read_filelist_list(write(parts / "l", "[xy].filelist 2 layout=vc"))
    assert items == [Source(parts / f"{name}.filelist", weight=2.0, layout="vc") for name in "xy"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_can_be_named_by_line_or_for_all(parts, name):
    lists = write(parts / "l.list", f"x.filelist layout={name}\ny.filelist\n")
    assert [source.layout for source in read_sources(lists)] == [name, "default"]
    assert [source.layout for source in read_sources(lists, "yfcc_en_zh")] == [name, "yfcc_en_zh"]
    assert [source.layout for source in read_sources(parts / "x.filelist", name)] == [name]


def test_an_unknown_layout_for_all_is_refused(parts):
    with pytest.raises(ConfigError, match="unknown layout 'vcc'; did you mean vc. known: default, "):
        read_sources(parts / "x.filelist", "vcc")


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text("ab*?[]~$ =.\n#\\\x00é0-1{}"), st.sampled_from(["f", "f.list"]))
def test_any_text_is_a_filelist_or_a_filelist_error(parts, text, name):
    try:
        for source in read_sources(write(parts / name, text)):
            assert all(part.is_file() for part in source.parts) and source.parts
    except FilelistError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("t", None, "no filelist "),
        ("t", "", "empty"),
        ("t", "# nothing\n\n", "empty"),
        ("t", b"\xff\xfe", "UTF-8"),
        ("t", "a\nmissing\n", "line 2: no such part file"),
        ("t", "a\nmissing-*\n", "line 2: nothing is named .*missing-"),
        ("t", "*\n[a]\n", "line 2: .*/a is named a second time, first in .* line 1"),
        ("t.list", "missing-*.filelist\n", "line 1: nothing is named .*missing-"),
        ("t", "a\nb\n./a\n", "line 3: .* a second time, first in .* line 1"),
        ("t.list", "x.filelist\nmissing.filelist", "line 2: no such filelist"),
        ("t.list", "x.filelist 1\n\ny.filelist\n", "line 3: .* no weight"),
        ("t.list", "x.filelist 0\ny.filelist 0\n", "all weights are 0"),
        ("t.list", "x.filelist -1\n", "line 1: the weight -1"),
        ("t.list", "x.filelist nan\n", "line 1: the weight nan"),
        ("t.list", "x.filelist inf\n", "line 1: the weight inf"),
        ("t.list", "x.filelist form=tar\n", "line 1: unknown option 'form'; known: layout, format, latents"),
        ("t.list", "x.filelist format=tar\n", "line 1: unknown format 'tar'; known: part, webdataset"),
        ("t.list", "x.filelist idx_to_prompt=x\n", "line 1: idx_to_prompt has a meaning only with format=webdataset"),
        ("t.list", "x.filelist layout=odd\n", "line 1: unknown layout 'odd'; known: default"),
        (
            "t.list",
            "x.filelist\nagain.filelist\n",
            "again.filelist line 1: .* a second time, first in .*x.filelist line",
        ),
    ],
)
def test_a_bad_filelist_is_one_line_with_file_and_line(parts, name, text, message):
    write(parts / "again.filelist", "b\n")
    if text is not None:
        (parts / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FilelistError, match=message) as caught:
        read_sources(parts / name)
    assert str(parts) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_is_no_filelist(tmp_path):
    with pytest.raises(FilelistError, match="folder"):
        read_sources(tmp_path)


def test_parts_of_a_folder_are_listed_without_their_indexes(tmp_path):
    for name in ("part-1.gz", "part-0.gz", "part-0.gz.idx", "notes.txt"):
        (tmp_path / name).touch()
    assert list_parts(tmp_path) == [str(tmp_path / "part-0.gz"), str(tmp_path / "part-1.gz")]
    for folder in (tmp_path / "none", ROOT / "data"):
        with pytest.raises(FilelistError):
            list_parts(folder)


@pytest.mark.parametrize("pattern", ["part", "part-{", "part-{name}", "part-{} {}"])
def test_a_pattern_that_cannot_number_is_refused(tmp_path, pattern):
    script = ROOT / "data/filelist/write_filelist.py"
    run = run_script(tmp_path, script, "--num-parts=2", f"--pattern={pattern}", f"--output={tmp_path / 'f'}")
    assert run.returncode == 1 and "part-{:05}" in run.stderr and not (tmp_path / "f").exists()


def test_the_shipped_lists_are_the_published_ones(monkeypatch):
    monkeypatch.chdir(ROOT)
    (item,) = read_filelist_list("data/filelist/train.filelist.list")
    assert item.weight is None and os.path.samefile(item.path, "data/filelist/laion400m_en.filelist")
    assert read_filelist(item.path) == [Path(f"/data/laion400m/part-0000{i}.gz") for i in range(10)]
    (item,) = read_filelist_list("data/filelist/laion_aes.filelist.list")
    assert item.layout == "laion_aes" and item.weight is None
    assert read_filelist(item.path) == [Path(f"/root/laion_aes/part-{i:05}") for i in range(50)]


def run_script(cwd, script, *flags):
    return subprocess.run([sys.executable, str(script), *flags], cwd=cwd, capture_output=True, text=True)


def test_the_script_writes_60000_lines_by_default(tmp_path):
    assert run_script(tmp_path, ROOT / "data/filelist/write_filelist.py").returncode == 0
    lines = (tmp_path / "laion400m_en.filelist").read_text().splitlines()
    assert len(lines) == 60_000
    assert (lines[0], lines[-1]) == ("/data/laion400m/part-00000.gz", "/data/laion400m/part-59999.gz")


def test_the_script_runs_in_its_own_folder_and_takes_flags(tmp_path):
    folder, output = ROOT / "data/filelist", tmp_path / "out"
    run = run_script(folder, "write_filelist.py", "--num-parts=2", "--pattern=p{}", f"--output={output}")
    assert run.returncode == 0 and output.read_text() == "p0\np1\n"
    assert "--num-parts" in run_script(folder, "write_filelist.py", "--help").stdout
    (tmp_path / "part-7").touch()
    assert run_script(folder, "write_filelist.py", "--dir", str(tmp_path), "--output", str(output)).returncode == 0
    assert output.read_text() == f"{tmp_path / 'part-7'}\n"
    run = run_script(folder, "write_filelist.py", "--dir", str(tmp_path / "no"), "--output", str(output))
    assert run.returncode == 1 and run.stderr.startswith("error: no such folder") and run.stderr.count("\n") == 1


@pytest.mark.parametrize("again", ["x/../a", "./a", "y/x/../../a", "x//../a"])
def test_another_spelling_of_a_path_is_the_same_part(tmp_path, again):
    (tmp_path / "y" / "x").mkdir(parents=True)
    (tmp_path / "x").mkdir()
    (tmp_path / "a").write_text("x")
    (tmp_path / "p.filelist").write_text(f"a\n{again}\n")
    with pytest.raises(FilelistError, match="a"):
        read_sources(tmp_path / "p.filelist")


def test_a_folder_stands_for_what_it_holds(tmp_path):
    def sources():
        return [(source.format, source.parts) for source in read_sources(tmp_path)]

    def refusal() -> str:
        with pytest.raises(FilelistError) as caught:
            read_sources(tmp_path)
        return str(caught.value)

    assert "holds neither parts nor pictures" in refusal()
    for name in ("b.png", "c/a.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert "pictures cannot be read" in refusal()
    (tmp_path / "b.txt").touch()
    assert sources() == [("folder", (tmp_path, tmp_path / "c"))]
    # What comes later is what one would rather train on.
    for name, format in (
        ("metadata.csv", "csv"),
        ("x.parquet", "parquet"),
        ("1.tar", "webdataset"),
        ("part-0.gz", "part"),
    ):
        (tmp_path / name).touch()
        assert sources() == [(format, (tmp_path / name,))]
    (tmp_path / "part-0.gz.idx").touch()
    (tmp_path / "own.filelist").write_text("1.tar\n")
    (tmp_path / "own.filelist.list").write_text("own.filelist format=webdataset\n")
    assert sources() == [("webdataset", (tmp_path / "1.tar",))]
    (tmp_path / "data").mkdir()
    (tmp_path / "own.filelist.list").rename(tmp_path / "data/own.filelist.list")
    (tmp_path / "data/own.filelist").write_text("../1.tar\n")
    assert [Path(os.path.normpath(part)) for _, (part,) in sources()] == [tmp_path / "1.tar"]
    (tmp_path / "own.filelist.list").touch()
    (tmp_path / "two.filelist.list").touch()
    assert "holds 2 lists, own.filelist.list and two.filelist.list" in refusal()


def test_captions_of_a_folder_may_be_in_another_table_or_in_names(tmp_path):
    for name in ("red car.png", "c/IMG_2.png", "blue_dog_03.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("RGB", (64, 64)).save(tmp_path / name)

    def captions() -> list[str]:
        (source,) = read_sources(tmp_path)
        (table,) = read_filelist(tmp_path)
        assert (source.format, source.parts) == ("csv", (table,)) and tmp_path not in table.parents[:1]
        with closing(open_part(table, source)) as rows:
            return [rows.read(row).caption for row in range(len(rows))]

    before = sorted(os.listdir(tmp_path))
    assert captions() == captions() == ["blue dog", "red car"]
    lines = [{"file_name": "c/IMG_2.png", "text": 'one, "two"'}, {"file_name": "red car.png", "text": "three"}]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert captions() == ['one, "two"', "three"]
    assert sorted(os.listdir(tmp_path)) == sorted([*before, "cache", "metadata.jsonl"])
    (tmp_path / "red car.png").rename(tmp_path / "IMG_4.png")
    (tmp_path / "blue_dog_03.png").rename(tmp_path / "IMG_5.png")
    (tmp_path / "metadata.jsonl").unlink()
    with pytest.raises(FilelistError, match="have no caption"):
        read_sources(tmp_path)
