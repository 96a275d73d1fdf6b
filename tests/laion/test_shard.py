"""A shard of which rows were lost on the way is not kept."""

import urllib.request

import pyarrow as pa
import pytest
import web

from ppldm.laion.fetch import Bounds
from ppldm.laion.fit import Fitter
from ppldm.laion.shard import (
    ShardSettings,
    ShardTask,
    download_shard,
    fetch_samples,
    make_record,
    record_path,
    stats_path,
)
from ppldm.laion.shard_rows import write_rows
from ppldm.utils.errors import OutputError

SETTINGS = ShardSettings(
    fitter=Fitter(), output_format="files", columns=("hash",), samples_per_shard=10, thread_count=4, timeout=5,
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
        with pytest.raises(OutputError, match="9 of the 10 rows of shard 0"):
            download_shard(task, SETTINGS)
    assert not stats_path(task.part_folder, 0).exists() and not (task.part_folder / "00000").exists()

    record = download_shard(task, SETTINGS)  # its rows are still there
    assert record["rows"] == record["success"] == 10 and not record["failed"]
    assert stats_path(task.part_folder, 0).exists() and record_path(task.part_folder, 0).exists()
    assert make_record(task.part_folder, 0) == record
    assert not task.rows_file.exists()
