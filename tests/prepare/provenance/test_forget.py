"""Laws: what is forgotten is gone from parts, indexes, filelists and manifest, and stays gone; the rest stays."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from filelists import read_filelist

from ppldm.data.formats.part import Part
from ppldm.prepare.convert.convert import convert_source, describe
from ppldm.prepare.provenance.forget import forget, forget_rows
from ppldm.prepare.provenance.forgotten import Forgotten, host_of, read_entries
from ppldm.prepare.provenance.lineage import lineage, trace_rows
from ppldm.utils.errors import ConfigError, DataError, OutputError
from ppldm.utils.pictures import save_png

URLS = [
    "http://a.example.com/0.png",
    "https://example.com:8080/1.png",
    "http://notexample.com/2.png",
    "http://b.org/3.png?x=1",
    "http://b.org/4.png",
    "http://user@B.ORG/5.png",
    "http://c.net/6.png",
]


@pytest.fixture
def data(tmp_path) -> Path:
    folder = tmp_path / "in"
    folder.mkdir()
    for row, url in enumerate(URLS):
        save_png(folder / f"{row:04}.png", np.full((8, 8, 3), row * 20, np.uint8))
        (folder / f"{row:04}.txt").write_text(f"picture {row}")
        (folder / f"{row:04}.json").write_text(json.dumps({"url": url}))
    convert(tmp_path)
    return tmp_path / "out"


def convert(tmp_path) -> dict:
    return convert_source(tmp_path / "in", tmp_path / "out", num_workers=1, rows_per_part=2)


def keys(data) -> list[str]:
    parts = [Part(path) for path in read_filelist(data / "custom.filelist")]
    return [part.read(row).meta["key"] for part in parts for row in range(len(part))]


def contents(data) -> dict[str, bytes]:
    files = (path for path in data.rglob("*") if path.is_file() and ".convert" not in path.parts)
    return {str(path.relative_to(data)): path.read_bytes() for path in files if path.name != ".lock"}


@pytest.mark.parametrize(
    ("wanted", "gone"),
    [
        (Forgotten(urls=frozenset([URLS[3], "http://nowhere"])), [3]),
        (Forgotten(domains=frozenset(["example.com"])), [0, 1]),
        (Forgotten(domains=frozenset(["b.org", "a.example.com"])), [0, 3, 4, 5]),
        (Forgotten(domains=frozenset(["org"]), keys=frozenset(["0006"])), [3, 4, 5, 6]),
        (Forgotten(keys=frozenset(["9999"])), []),
    ],
)
def test_rows_are_gone_the_others_untouched_and_everything_agrees(tmp_path, data, wanted, gone):
    before = contents(data)
    report = forget_rows(data, wanted)
    assert report["rows_found"] == len(gone) and [row["key"] for row in report["rows"]] == [f"{i:04}" for i in gone]
    assert set(report["entries"]) | set(report["not_found"]) == set(wanted.entries)
    left = [f"{row:04}" for row in range(7) if row not in gone]
    assert keys(data) == left
    manifest = json.loads((data / "manifest.json").read_text())
    assert manifest["rows_out"] == len(left) and manifest["skipped"].get("forgotten", 0) == len(gone)
    assert sum(part["rows"] for part in manifest["parts"]) == len(left)
    after = contents(data)
    touched = {f"parts/part-{row // 2:05}.gz" for row in gone}
    untouched = [name for name in before if name.startswith("parts") and name[:19] not in touched]
    assert [after[name] for name in untouched] == [before[name] for name in untouched]
    assert "forgotten" in describe(manifest) or not gone
    # The same conversion keeps what was left, and one from the beginning comes to the same bytes.
    assert convert(tmp_path) == manifest and contents(data) == after
    for path in (data / "parts").iterdir():
        path.unlink()
    assert convert(tmp_path) == manifest and contents(data) == after
    assert forget_rows(data, wanted)["rows_found"] == 0 and contents(data) == after


def test_a_dry_run_changes_nothing(data):
    before = contents(data)
    assert forget_rows(data, Forgotten(keys=frozenset(["0001"])), dry_run=True)["rows_found"] == 1
    assert contents(data) == before


def forget_and_die(data, wanted, stop: int) -> list[dict]:
    """Forget up to the renaming of file number `stop`; the reports that were given until then.

    By an error where the kill would be: of ours, nothing but the end of a lock runs after it.
    """
    calls, replace, told = iter(range(1000)), os.replace, []

    def dying(*arguments):
        if next(calls) >= stop:
            raise KeyboardInterrupt
        replace(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with contextlib.suppress(KeyboardInterrupt):
            forget_rows(data, wanted, tell=told.append)
    return told


def copy_folder(source, target) -> None:
    subprocess.run(["rm", "-rf", target], check=True)
    subprocess.run(["cp", "-a", source, target], check=True)


def test_killed_at_any_point_the_same_command_finishes_and_reports_every_row(tmp_path, data):
    wanted = Forgotten(domains=frozenset(["example.com", "b.org"]))
    copy_folder(data, tmp_path / "copy")
    report = forget_rows(data, wanted)
    assert report["entries"] == {"b.org": 3, "example.com": 2}
    whole, stop, finished = contents(data), 0, False
    while not finished:
        copy_folder(tmp_path / "copy", tmp_path / "again")
        told = forget_and_die(tmp_path / "again", wanted, stop)
        # Once more, at another place, before it is left to finish.
        told += told or forget_and_die(tmp_path / "again", wanted, stop // 2)
        finished = bool(told)
        assert (told[0] if finished else forget_rows(tmp_path / "again", wanted)) == report
        # Columns are made again where they are asked for; what must not be is old ones.
        left = contents(tmp_path / "again")
        assert left.items() <= whole.items()
        assert {name for name in whole.keys() - left.keys() if not name.endswith(".columns")} == set()
        stop += 1
    assert stop > 12


def test_a_report_that_nobody_got_is_given_again(data):
    def dying(report):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        forget_rows(data, Forgotten(keys=frozenset(["0001", "0002"])), tell=dying)
    assert forget_rows(data, Forgotten(keys=frozenset(["0001", "0002"])))["rows_found"] == 2
    assert forget_rows(data, Forgotten(keys=frozenset(["0001", "0002"])))["rows_found"] == 0


@pytest.mark.parametrize("stop", range(2, 14, 3))
def test_other_entries_finish_an_interrupted_command_and_report_its_rows_too(tmp_path, data, stop):
    copy_folder(data, tmp_path / "copy")
    forget_rows(data, Forgotten(keys=frozenset(["0000", "0003", "0006"])))
    forget_rows(data, Forgotten(keys=frozenset(["0001", "0002"])))
    again = tmp_path / "copy"
    assert not forget_and_die(again, Forgotten(keys=frozenset(["0000", "0003", "0006"])), stop)
    report = forget_rows(again, Forgotten(keys=frozenset(["0001", "0002"])))
    assert sorted(row["key"] for row in report["rows"]) == ["0000", "0001", "0002", "0003", "0006"]
    assert contents(again) == contents(data)


def test_a_key_of_several_parts_is_named_by_its_folder(tmp_path):
    """Keys are numbers of shard and row, and begin anew in each part of a download."""
    for part in ("part_1", "part_2"):
        shard = tmp_path / "in" / part / "00000"
        shard.mkdir(parents=True)
        for row in range(2):
            save_png(shard / f"{row:04}.png", np.full((8, 8, 3), row * 20, np.uint8))
            (shard / f"{row:04}.txt").write_text(f"{part} {row}")
    convert(tmp_path)
    data = tmp_path / "out"
    before = contents(data)
    with pytest.raises(ConfigError, match="key 0001 is in 2 places.*such as part_1/00000/0001"):
        forget_rows(data, Forgotten(keys=frozenset(["0001"])))
    assert contents(data) == before
    rows = trace_rows(data, ["part_2/0001", "0000"])
    assert [(row["key"], row["source"]) for row in rows] == [
        ("0000", "part_1/00000"), ("0000", "part_2/00000"), ("0001", "part_2/00000"),
    ]  # fmt: skip
    report = forget_rows(data, Forgotten(keys=frozenset(["part_2/0001", "part_1/00000/0000", "part_3/0001"])))
    assert report["entries"] == {"part_1/00000/0000": 1, "part_2/0001": 1} and report["not_found"] == ["part_3/0001"]
    captions = [Part(path).read(0).caption for path in read_filelist(data / "custom.filelist")]
    assert captions == ["part_1 1", "part_2 0"]
    after = contents(data)
    for path in (data / "parts").iterdir():
        path.unlink()
    convert(tmp_path)
    assert contents(data) == after


def test_a_damaged_journal_is_named(data):
    (data / ".forget.json").write_text("{}")
    with pytest.raises(OutputError, match="forget.json is damaged.*delete it"):
        forget_rows(data, Forgotten(keys=frozenset(["0001"])))


def test_where_no_row_is_left_the_report_comes_before_the_error(data, capsys):
    (data / "keys").write_text("\n".join(f"{row:04}" for row in range(7)))
    with pytest.raises(DataError, match="no row .* is left"):
        forget(str(data), key=str(data / "keys"), num_workers=1)
    assert "7 row(s) taken out" in capsys.readouterr().out


def test_entries_are_read_from_files_and_the_command_reports(tmp_path, data, capsys):
    (tmp_path / "domains").write_text("# asked for on Monday\nExample.COM.\n\nnowhere.org\n")
    (tmp_path / "keys").write_text("0006\n")
    entries = read_entries(None, str(tmp_path / "domains"), str(tmp_path / "keys"))
    assert entries == Forgotten(domains=frozenset(["example.com", "nowhere.org"]), keys=frozenset(["0006"]))
    forget(str(data), domain=str(tmp_path / "domains"), key=str(tmp_path / "keys"), num_workers=1)
    text = capsys.readouterr().out
    assert "3 row(s) taken out" in text and "example.com: 2" in text and "nowhere.org: not there" in text
    assert Forgotten.read(data) == entries
    with pytest.raises(ConfigError, match="nothing to forget"):
        read_entries(None, None, None)
    with pytest.raises(ConfigError, match="--url: cannot read"):
        read_entries(str(tmp_path / "no"), None, None)
    with pytest.raises(ConfigError, match="has finished"):
        forget_rows(tmp_path, entries)
    with pytest.raises(DataError, match="no row .* is left"):
        forget_rows(data, Forgotten(domains=frozenset(["com", "org", "net"])))


@pytest.mark.parametrize(
    ("entry", "remedy"),
    [
        ("https://Example.com/a.jpg", "write example.com,"),
        ("example.com/", "write example.com,"),
        ("example.com:8080", "write example.com,"),
        ("me@example.com", "write example.com,"),
        ("*.example.com", "write example.com,"),
        ("two words", "write example.com,"),
        ("http:///", "write example.com,"),
        ("...", "write example.com,"),
    ],
)
def test_what_is_no_domain_is_an_error_with_the_remedy(tmp_path, entry, remedy):
    (tmp_path / "domains").write_text(f"good.org\n{entry}\n")
    with pytest.raises(ConfigError, match=f"--domain: .* is not a domain; {remedy}"):
        read_entries(None, str(tmp_path / "domains"), None)
    (tmp_path / "entries").write_text(json.dumps({"domain": entry}))
    with pytest.raises(ConfigError, match="is not a domain"):
        read_entries(None, None, None, str(tmp_path / "entries"))


HARD = ["a\nb", "a\rb", "a\u2028b", "a\x85b", "a\x0cb", " a ", "#a", "a\0b", '"', "图"]


def test_any_text_can_be_named(tmp_path):
    (tmp_path / "entries").write_text("\n".join(json.dumps({"key": text}) for text in HARD) + "\n\n")
    assert read_entries(None, None, None, str(tmp_path / "entries")) == Forgotten(keys=frozenset(HARD))
    easy = [text for text in HARD if text.strip() == text and "\n" not in text and text[0] != "#"]
    (tmp_path / "keys").write_bytes("\r\n".join(easy).encode())
    assert read_entries(None, None, str(tmp_path / "keys")) == Forgotten(keys=frozenset(easy))
    lines = ({"url": "http://a/\n"}, {"domain": "A.org."}, {"key": "k"})
    (tmp_path / "entries").write_text("\n".join(map(json.dumps, lines)))
    assert read_entries(None, None, None, str(tmp_path / "entries")) == Forgotten(
        frozenset(["http://a/\n"]), frozenset(["a.org"]), frozenset(["k"])
    )


@pytest.mark.parametrize("line", ["x", "{}", '{"urls": "a"}', '{"url": 1}', '["url", "a"]', '{"url": "a", "key": "b"}'])
def test_a_line_that_is_no_entry_is_named(tmp_path, line):
    (tmp_path / "entries").write_text('{"key": "a"}\n' + line)
    with pytest.raises(ConfigError, match="--entries: line 2 of .* is not like"):
        read_entries(None, None, None, str(tmp_path / "entries"))


def test_a_url_with_a_line_break_is_forgotten(tmp_path, data, capsys):
    url = "http://evil.org/a\nb\u2028"
    (tmp_path / "in" / "0006.json").write_text(json.dumps({"url": url}))
    convert(tmp_path)
    (tmp_path / "entries").write_text(json.dumps({"url": url}))
    forget(str(data), entries=str(tmp_path / "entries"), num_workers=1)
    assert keys(data) == [f"{row:04}" for row in range(6)]
    assert capsys.readouterr().out == "1 row(s) taken out\n  http://evil.org/a b : 1\n"


@pytest.mark.parametrize(
    ("url", "host"),
    [("http://A.b./x", "a.b"), ("https://u:p@h:1/", "h"), ("no url", ""), ("http://[::1/", ""), ("//x.y/z", "x.y")],
)
def test_the_host_of_a_url(url, host):
    assert host_of(url) == host


def test_a_key_leads_back_to_url_and_metadata(tmp_path, data, capsys):
    table = pa.table({"URL": URLS, "TEXT": ["t"] * 7, "hash": list(range(7))})
    pq.write_table(table.slice(0, 4), tmp_path / "part_1.parquet")
    pq.write_table(table.slice(4), tmp_path / "part_2.parquet")
    metadata = [str(tmp_path / "part_1.parquet"), str(tmp_path / "part_2.parquet")]
    first, second = trace_rows(data, ["0005", "0002"], metadata)
    assert (first["key"], first["part"], first["row"]) == ("0002", "parts/part-00001.gz", 0)
    assert second["meta"]["url"] == URLS[5] and second["source"] == "."
    assert second["tables"] == [
        {"file": metadata[1], "row": 1, "values": {"URL": URLS[5], "TEXT": "t", "hash": 5}},
    ]
    lineage(str(data), key=["0002"], metadata=metadata, num_workers=1)
    assert f"url: {URLS[2]}" in capsys.readouterr().out
    with pytest.raises(DataError, match="has the key nokey"):
        trace_rows(data, ["nokey"])


def test_the_commands_are_there():
    for command in ("forget", "lineage", "filter", "convert"):
        done = subprocess.run([sys.executable, "-m", "ppldm", command, "--help"], capture_output=True, text=True)
        assert done.returncode == 0 and "usage" in done.stdout
