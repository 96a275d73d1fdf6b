"""A shard of which rows were lost on the way is not kept."""

import subprocess
import sys
import urllib.request
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import web

from ppldm.prepare.download.fetch import Bounds
from ppldm.prepare.download.part import PartDownload
from ppldm.prepare.download.resize import Resizer
from ppldm.prepare.download.shard import (
    ShardSettings,
    ShardTask,
    _correct_stats,
    _stamp,
    download_shard,
    fetch_samples,
    make_record,
    record_path,
    stats_path,
)
from ppldm.prepare.download.shard_rows import MetadataPart, write_rows
from ppldm.utils.errors import ConfigError, OutputError
from ppldm.utils.files import read_json, write_json

SETTINGS = ShardSettings(
    resizer=Resizer(), output_format="files", columns=("hash",), samples_per_shard=10, thread_count=4, timeout=5,
    retries=0, bounds=Bounds(10, 10**6), shard_seconds=60, user_agent_token=None, disallowed_header_directives=(),
    refuse_private=False,
)  # fmt: skip


@pytest.fixture
def task(tmp_path):
    with web.serve() as server:
        urls = [server.url(f"good/{number}.jpg") for number in range(10)]
        table = pa.table({"hash": range(10), "caption": [f"picture {n}" for n in range(10)], "url": urls})
        write_rows(table, tmp_path / "0.arrow")
        yield ShardTask(tmp_path / "part_1", 0, tmp_path / "0.arrow", 10)
    urllib.request.install_opener(None)


@pytest.mark.slow
def test_a_shard_is_whole_or_absent(task, monkeypatch):
    assert fetch_samples([], SETTINGS, 1) == []  # which imports img2dataset without what it does not need
    from img2dataset import writer

    write = writer.FilesSampleWriter.write

    def full_disk(self, image, key, caption, meta):
        if key.endswith("3"):
            raise OSError(28, "No space left on device")
        write(self, image, key, caption, meta)

    with monkeypatch.context() as patch:
        patch.setattr(writer.FilesSampleWriter, "write", full_disk)
        with pytest.raises(OutputError, match="cannot write shard 0 .*No space left on device; make room"):
            download_shard(task, SETTINGS)
    assert not stats_path(task.part_folder, 0).exists() and not (task.part_folder / "00000").exists()

    record = download_shard(task, SETTINGS)  # its rows are still there
    assert record["rows"] == record["success"] == 10 and not record["failed"]
    assert stats_path(task.part_folder, 0).exists() and record_path(task.part_folder, 0).exists()
    assert make_record(task.part_folder, 0) == record
    assert not task.rows_file.exists()


def write_outcomes(folder, rows):
    """The table of shard 0: (url, status, message) of each row."""
    urls, statuses, messages = zip(*rows, strict=True)
    table = {"url": urls, "status": statuses, "error_message": messages}
    pq.write_table(
        pa.table({name: pa.array(values, pa.string()) for name, values in table.items()}), folder / "00000.parquet"
    )


def test_a_shards_process_loads_nothing_large_that_it_does_not_use():
    names = ("wandb", "albumentations", "torch")
    code = (
        "import sys; from ppldm.prepare.download.shard import _import_downloader; _import_downloader()\n"
        f"from img2dataset import writer; print([name for name in {names} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_account_shows_nothing_that_a_terminal_obeys_and_no_password(tmp_path):
    rows = [("http://me:secret@a/\x1b[2J", "failed_to_download", "HTTP Error 404: \x1b]0;x\x07" + "y" * 10**4)]
    rows += [(None, "failed_to_download", "'NoneType'"), ("http://a/", "success", None)]
    write_outcomes(tmp_path, rows)
    record = make_record(tmp_path, 0)
    assert record["failed"] == {"4xx": 1, "bad_url": 1} and record["success"] == 1
    example = record["examples"]["4xx"]
    assert "\x1b" not in example and "secret" not in example and len(example) < 450
    assert example.startswith("HTTP Error 404: \\u001b]0;x") and example.endswith("(http://a/\\u001b[2J)")


def test_the_journal_of_a_shard_is_of_its_rows_and_of_what_decides_on_them(tmp_path):
    table = pa.table({"hash": range(3), "caption": ["a"] * 3, "url": ["u"] * 3})
    write_rows(table, tmp_path / "a")
    write_rows(table.slice(0, 2), tmp_path / "b")
    a, b = (ShardTask(tmp_path, 0, tmp_path / name, 3) for name in "ab")
    decisive = {
        "resizer": Resizer(image_size=8), "bounds": Bounds(10, 7), "refuse_private": True, "check_certificates": False,
        "user_agent_token": "me", "disallowed_header_directives": ("noai",),
    }  # fmt: skip
    stamps = {_stamp(a, SETTINGS), _stamp(b, SETTINGS)}
    stamps |= {_stamp(a, replace(SETTINGS, **{name: value})) for name, value in decisive.items()}
    assert len(stamps) == 2 + len(decisive)
    for same in ({"thread_count": 9}, {"timeout": 9}, {"bounds": Bounds(99, 10**6)}, {"requests_per_host": 3}):
        assert _stamp(a, replace(SETTINGS, **same)) == _stamp(a, SETTINGS)


def test_stats_of_a_shard_that_went_on_count_all_its_rows(tmp_path):
    rows = [("u", "success", None)] * 3 + [("u", "failed_to_download", "x")] * 2 + [("u", "failed_to_resize", "y")]
    write_outcomes(tmp_path, rows)
    write_json(stats_path(tmp_path, 0), {"count": 1, "successes": 1, "duration": 2.5, "status_dict": {"success": 1}})
    _correct_stats(tmp_path, 0)
    assert read_json(stats_path(tmp_path, 0)) == {
        "count": 6, "successes": 3, "failed_to_download": 2, "failed_to_resize": 1, "duration": 2.5,
        "status_dict": {"success": 3, "x": 2, "y": 1},
    }  # fmt: skip


def test_a_limit_below_zero_is_refused():
    with pytest.raises(ConfigError, match="--requests-per-host is -1"):
        replace(SETTINGS, requests_per_host=-1)


def test_an_account_of_older_classes_is_made_again(tmp_path):
    write_outcomes(tmp_path, [("http://a/", "failed_to_download", "HTTP Error 429: x"), ("http://b/", "success", None)])
    write_json(stats_path(tmp_path, 0), {"duration": 9.0})
    record_path(tmp_path, 0).parent.mkdir(parents=True)
    write_json(record_path(tmp_path, 0), {"rows": 2, "success": 1, "failed": {"4xx": 1}, "retried": {}, "seconds": 2.5})
    item = PartDownload(MetadataPart(1, tmp_path / "part_1.parquet", 2), tmp_path, None, 10)
    report = item.report()
    assert report["failed"] == {"limited": 1} and report["success"] == 1 and report["shard_seconds"] == 2.5
    record_path(tmp_path, 0).unlink()
    assert item.report() == report | {"shard_seconds": 9.0}
