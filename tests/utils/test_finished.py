"""Law: the same key means the same settings and the same bytes, whatever the times of files say, and nothing else."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest

from ppldm.utils import checksums, finished
from ppldm.utils.errors import ConfigError, OutputError
from ppldm.utils.files import lock_folder
from ppldm.utils.finished import JobFolder, Piece, find_finished, finish, list_pieces, make_key, take_fingerprint


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in/sub").mkdir(parents=True)
    for name, text in (("a", "one"), ("b", "two"), ("sub/c", "three")):
        (tmp_path / "in" / name).write_text(text)
    return tmp_path / "in"


def keep_time(path, change):
    """Change a file so that its size and time stay."""
    before = path.stat()
    change()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def swap(folder):
    one, two = (folder / "a").read_text(), (folder / "b").read_text()
    (folder / "a").write_text(two)
    (folder / "b").write_text(one)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: keep_time(folder / "a", lambda: (folder / "a").write_text("eno")),
        lambda folder: keep_time(folder / "b", lambda: (folder / "b").write_text("twO")),
        lambda folder: (folder / "b").unlink(),
        lambda folder: (folder / "b").rename(folder / "d"),
        lambda folder: (folder / "new").touch(),
        lambda folder: (folder / "sub/c").chmod(0) if os.getuid() else (folder / "sub/c").write_text("other"),
        swap,
    ],
    ids=["content", "last byte", "removal", "name", "addition", "access", "order"],
)
def test_any_change_of_content_is_another_content(folder, change):
    before = take_fingerprint(list_pieces(folder))
    assert take_fingerprint(list_pieces(folder), before) == before
    change(folder)
    after = take_fingerprint(list_pieces(folder), before)
    assert after["content"] != before["content"] and after["state"] != before["state"]


@pytest.mark.parametrize("name", [".hidden", "sub/.hidden", ".git/a"])
def test_hidden_files_are_no_content(folder, name):
    before = take_fingerprint(list_pieces(folder))
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("four")
    assert take_fingerprint(list_pieces(folder), before) == before


def test_touched_files_are_read_again_and_are_the_same(folder, monkeypatch):
    before = take_fingerprint(list_pieces(folder))
    os.utime(folder / "a", (1, 1))
    after = take_fingerprint(list_pieces(folder), before)
    assert after["state"] != before["state"] and after["content"] == before["content"]
    monkeypatch.setattr(finished, "_read_checksum", lambda piece: pytest.fail("read again"))
    assert take_fingerprint(list_pieces(folder), after) == after


def test_content_is_that_of_all_blocks(folder, monkeypatch):
    before = take_fingerprint(list_pieces(folder))
    monkeypatch.setattr(checksums, "_BLOCK_BYTES", 2)
    assert take_fingerprint(list_pieces(folder)) == before


def test_a_piece_is_the_bytes_it_names(folder):
    content = lambda start, stop: take_fingerprint([Piece(folder / "sub/c", "c", start, stop)])["content"]  # noqa: E731
    before = [content(0, 2), content(2, None), content(2, 4), content(2, 99)]
    (folder / "sub/c").write_text("thREe and more")
    after = [content(0, 2), content(2, None), content(2, 4), content(2, 99)]
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, False, False]
    assert take_fingerprint([Piece(folder / "nul\0", "x")]) == take_fingerprint([Piece(folder / "none", "x")])


def test_a_key_is_settings_and_content(tmp_path):
    def has_key(record, key) -> bool:
        (tmp_path / "record").write_text(json.dumps(record))
        return find_finished(tmp_path / "record", key, lambda _: True) is not None

    key = {"settings": {"size": 1, "names": ("a",)}, "input": {"state": "s", "content": "c"}}
    record = {"key": {"settings": {"size": 1, "names": ["a"]}, "input": {"state": "t", "content": "c"}}}
    assert has_key(record, key)
    for other in (None, {}, {"key": None}, {"stamp": "of an older version"}):
        assert not has_key(other, key)
    assert not has_key(record, key | {"settings": {"size": 2, "names": ["a"]}})
    assert not has_key(record, key | {"input": {"state": "t", "content": "d"}})


SETTINGS = {"size": 1, "name": "a"}
CONTENT, OTHER = {"state": "s", "content": "c"}, {"state": "t", "content": "d"}


def test_a_folder_takes_one_plan_unless_it_is_made_again(tmp_path):
    job, cleared = JobFolder(tmp_path / "out", ".job", "thing", "parts"), []
    clear = lambda: cleared.append(job.plan["name"])  # noqa: E731
    with job.claimed(SETTINGS, source=CONTENT, clear=clear):
        (tmp_path / "out/parts/x").touch()
    with job.claimed(SETTINGS, source=CONTENT | {"state": "touched"}, clear=clear):
        assert not cleared and job.plan["input"]["state"] == "touched"
    for settings, source, words in (
        (SETTINGS | {"name": "b"}, CONTENT, "name was 'a' and is 'b'"),
        (SETTINGS | {"more": 0}, CONTENT, "more was None and is 0"),
        ({"size": 1}, CONTENT, "name was 'a' and is None"),
        (SETTINGS, OTHER, "other content"),
    ):
        before = job.plan
        with pytest.raises(ConfigError, match=words), job.claimed(settings, source=source, clear=clear):
            pass
        assert job.plan == before and not cleared
    # What is there goes before the plan that it was made by.
    with job.claimed(SETTINGS | {"name": "b"}, True, OTHER, clear):
        assert cleared == ["a"] and job.plan == SETTINGS | {"name": "b", "input": OTHER}


def test_a_plan_of_an_older_version_is_taken_for_todays_content_once_and_says_so(tmp_path, caplog):
    job = JobFolder(tmp_path, ".job", "thing")
    with job.claimed({"size": 1}):
        pass
    with pytest.raises(ConfigError, match="size was 1"):
        job.check(SETTINGS | {"size": 2}, source=CONTENT)
    for _ in range(2):
        with job.claimed(SETTINGS, source=CONTENT):
            pass
    assert caplog.text.count("taken for today's") == 1
    with pytest.raises(ConfigError, match="other content"):
        job.check(SETTINGS, source=OTHER)


def test_files_without_a_plan_are_somebody_elses(tmp_path):
    job = JobFolder(tmp_path, ".job", "thing", "parts")
    (tmp_path / "parts").mkdir()
    assert job.check(SETTINGS) == []
    (tmp_path / "parts/mine").touch()
    with pytest.raises(OutputError, match="unknown origin"):
        job.check(SETTINGS, redo=True)
    (tmp_path / ".job").mkdir()
    (tmp_path / ".job/plan.json").write_text("{")
    with pytest.raises(OutputError, match="plan.json is damaged"):
        job.check(SETTINGS)


def test_a_unit_is_made_once_and_again_where_key_or_result_differ(tmp_path):
    source, result, record_path = tmp_path / "in", tmp_path / "out", tmp_path / "record.json"
    source.write_text("a")

    def run(**settings):
        def make():
            assert not record_path.exists(), "what is being made is not finished"
            result.write_text(source.read_text())
            return {"rows": 1}

        key = make_key(settings, list_pieces(source), record_path)
        is_whole = lambda record: result.exists()  # noqa: E731
        planned = find_finished(record_path, key, is_whole) is not None
        record, kept = finish(record_path, key, is_whole, make)
        assert record["rows"] == 1 and json.loads(record_path.read_text()) == record and kept == planned
        return kept

    assert [run(size=1), run(size=1), run(size=2), run(size=2)] == [False, True, False, True]
    os.utime(source, (1, 1))
    assert run(size=2), "the content is the same"
    source.write_text("b")
    assert [run(size=2), result.read_text()] == [False, "b"]
    result.unlink()
    assert [run(size=2), run(size=2)] == [False, True]


def test_a_job_waits_for_whoever_holds_its_folder(tmp_path, monkeypatch):
    """`ppldm forget` holds the folder that `ppldm convert` writes."""
    code = "import sys; from ppldm.utils.files import lock_folder; f = lock_folder(sys.argv[1]); print(1, flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; sys.stdin.read()", tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    monkeypatch.setattr(finished, "lock_folder", partial(lock_folder, wait_seconds=0.2))
    job = JobFolder(tmp_path, ".convert", "conversion", "parts")
    with pytest.raises(OutputError, match="another process"), job.claimed({}):
        pass
    process.communicate()
    with job.claimed({}):
        assert job.plan == {}
