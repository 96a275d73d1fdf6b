"""A shard is whole or absent, and the same whether it was made in one run or in several."""

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import web
from downloads import SHARD_SETTINGS as SETTINGS
from downloads import read_images, read_rows

from ppldm.prepare.block_list import BlockList
from ppldm.prepare.convert.reencode import Resizer
from ppldm.prepare.download.part import PartDownload, write_rows
from ppldm.prepare.download.shard import (
    ShardTask,
    _stamp,
    download_shard,
    fetch_samples,
    import_img2dataset,
    journal_path,
    make_record,
    record_path,
    stats_path,
)
from ppldm.prepare.metadata import Table
from ppldm.utils.errors import ConfigError, OutputError
from ppldm.utils.files import read_json, write_json


@pytest.fixture
def task(tmp_path):
    with web.serve() as server:
        urls = [server.url(f"good/{number}.jpg") for number in range(10)]
        table = pa.table({"hash": range(10), "caption": [f"picture {n}" for n in range(10)], "url": urls})
        write_rows(table, tmp_path / "0.arrow")
        yield ShardTask(tmp_path / "part_1", 0, tmp_path / "0.arrow", 10)


@pytest.mark.slow
def test_a_shard_is_whole_or_absent(task, monkeypatch):
    writer = import_img2dataset().writer
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
        "import sys; from ppldm.prepare.download.shard import import_img2dataset; import_img2dataset()\n"
        f"print([name for name in {names} if name in sys.modules])"
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
    fetch = SETTINGS.fetch
    decisive = {"max_bytes": 7, "refuse_private": True, "check_certificates": False, "user_agent_token": "me"}
    decisive |= {"disallowed_header_directives": ("noai",), "blocked": BlockList(frozenset(["u"]))}
    stamps = {_stamp(a, SETTINGS), _stamp(b, SETTINGS), _stamp(a, replace(SETTINGS, resizer=Resizer(image_size=8)))}
    stamps |= {_stamp(a, replace(SETTINGS, fetch=replace(fetch, **{name: new}))) for name, new in decisive.items()}
    assert len(stamps) == 3 + len(decisive)
    same = [replace(SETTINGS, fetch=replace(fetch, **{name: 9})) for name in ("timeout", "url_seconds", "retries")]
    for settings in (*same, replace(SETTINGS, thread_count=9), replace(SETTINGS, shard_seconds=9)):
        assert _stamp(a, settings) == _stamp(a, SETTINGS)


@pytest.mark.parametrize("output_format", ["files", "webdataset", "parquet"])
def test_a_shard_that_goes_on_is_that_of_one_run(tmp_path, output_format):
    settings, known = replace(SETTINGS, output_format=output_format), []
    names = ["good/0.jpg", "hung-up.jpg", "missing.jpg", "good/3.jpg", "page.jpg", "good/5.jpg", "good/6.jpg"]
    for kills in ((), (2, 5)):
        folder = tmp_path / str(len(kills))
        with web.serve() as server:
            urls = [server.url(name) for name in names]
            rows = pa.table({"hash": [2**62, *range(6)], "caption": [None, *["a\n图"] * 6], "url": urls})
            write_rows(rows, tmp_path / "0.arrow")
            task, called = ShardTask(folder, 7, tmp_path / "0.arrow", 7), []
            for kill in kills:

                def die(calls=[], kill=kill):  # noqa: B006 - of this run
                    calls.append(0)
                    if len(calls) == kill:
                        raise KeyboardInterrupt

                with pytest.raises(KeyboardInterrupt):
                    download_shard(task, settings, die)
                assert not stats_path(folder, 7).exists() and journal_path(folder, 7).exists()
            record = download_shard(task, settings, partial(called.append, 0))
            assert len(called) == 7 and max(server.hits.values()) <= 3
            table = [row | {"url": row["url"].replace(str(server.server_port), "")} for row in read_rows(folder)]
            stats = read_json(stats_path(folder, 7))
            spent = [stats.pop(name) for name in ("duration", "start_time", "end_time")]
            assert min(spent) > 0 and [row["key"] for row in table] == [f"00007{row}" for row in range(7)]
            schema = pq.read_schema(folder / "00007.parquet")
            known.append((table, schema, stats, read_images(folder, output_format), record["failed"]))
    assert known[0] == known[1]
    assert known[0][-1] == {"4xx": 1, "decode": 1, "reset": 1} and known[0][2]["count"] == 7
    assert [known[0][2][name] for name in ("successes", "failed_to_download", "failed_to_resize")] == [4, 2, 1]
    assert sum(known[0][2]["status_dict"].values()) == 7 and known[0][2]["status_dict"]["success"] == 4
    assert [row["status"] for row in known[0][0]][1] == "failed_to_download" and len(known[0][3]) == 4


def test_a_sample_is_fetched_as_a_shard_is():
    with web.serve() as server:
        urls = [server.url(name) for name in ("good/1.jpg", "missing.jpg", "page.jpg")]
        samples = {outcome.url: (outcome.name, size) for outcome, size in fetch_samples(urls, SETTINGS, 60)}
    size = len(web.encode(web.picture(1)))
    assert samples == dict(zip(urls, (("success", size), ("4xx", 0), ("decode", 0)), strict=True))


def test_a_limit_below_zero_is_refused():
    with pytest.raises(ConfigError, match="--requests-per-host is -1"):
        replace(SETTINGS.fetch, requests_per_host=-1)


def test_an_account_of_older_classes_is_made_again(tmp_path):
    write_outcomes(tmp_path, [("http://a/", "failed_to_download", "HTTP Error 429: x"), ("http://b/", "success", None)])
    write_json(stats_path(tmp_path, 0), {"duration": 9.0})
    record_path(tmp_path, 0).parent.mkdir(parents=True)
    write_json(record_path(tmp_path, 0), {"rows": 2, "success": 1, "failed": {"4xx": 1}, "retried": {}, "seconds": 2.5})
    item = PartDownload(Table(tmp_path / "part_1.parquet", 2, number=1), tmp_path, None, SETTINGS)
    report = item.report()
    assert report["failed"] == {"limited": 1} and report["success"] == 1 and report["shard_seconds"] == 2.5
    record_path(tmp_path, 0).unlink()
    assert item.report() == report | {"shard_seconds": 9.0}
