"""Laws: a line is a finished shard, with the samples that are there; the check finds whatever is not so."""

import csv
import json
import tarfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import web

from ppldm.prepare.convert.annotate import DAMAGED, annotate, count_samples
from ppldm.utils.errors import ConfigError, DataError

COUNTS = {"part_2": (3, 0, 5), "part_10": (2,)}


@pytest.fixture(params=["webdataset", "files", "parquet"])
def images(request, tmp_path):
    """A download of two parts, in part_2 a shard that is not finished."""
    for part, counts in COUNTS.items():
        for number, count in enumerate((*counts, 4)):
            shard = tmp_path / part / f"{number:05}"
            shard.mkdir(parents=True)
            for row in range(count):
                (shard / f"{row:09}.jpg").write_bytes(web.encode(web.picture(row)))
                (shard / f"{row:09}.json").write_text("{}")
            status = ["success"] * count + ["failed_to_download"] * 2
            pq.write_table(pa.table({"status": status}), shard.with_suffix(".parquet"))
            if request.param == "webdataset":
                with tarfile.open(shard.with_suffix(".tar"), "w") as tar:
                    for path in sorted(shard.iterdir()):
                        tar.add(path, path.name)
            if request.param != "files":
                for path in shard.iterdir():
                    path.unlink()
                shard.rmdir()
            if number < len(counts):
                (tmp_path / part / f"{number:05}_stats.json").write_text(json.dumps({"successes": count}))
    return tmp_path


def read(path) -> list[list[str]]:
    with open(path, newline="") as file:
        return list(csv.reader(file))


def test_a_line_is_a_finished_shard_and_the_check_agrees(images, capsys):
    report = annotate(str(images), "there", stats="write")
    assert [path.rpartition("/")[2] for path in report] == ["part_2_stats.csv", "part_10_stats.csv"]
    for part, counts in COUNTS.items():
        head, *lines = read(images / f"{part}_stats.csv")
        assert head == ["file_path", "num_samples"] and [int(count) for _, count in lines] == [*counts]
        assert [name.partition(".")[0] for name, _ in lines] == [f"there/{part}/{n:05}" for n in range(len(counts))]
    assert "8 samples in 3 shards" in capsys.readouterr().out
    found = annotate(str(images), "there", stats="check")
    assert {path: one | {"wrong": {}} for path, one in report.items()} == found


def test_what_is_lost_is_found(images):
    annotate(str(images), stats="write")
    (name, _), _, (other, _) = read(images / "part_2_stats.csv")[1:]
    if (images / name).is_dir():
        next((images / name).glob("*.json")).unlink()
        next((images / other).glob("*.jpg")).unlink()
        wanted = (2, 4)
    else:
        (images / name).unlink()
        (images / other).write_bytes((images / other).read_bytes()[:300])
        wanted = (DAMAGED, DAMAGED)
    with pytest.raises(DataError, match="2 shard"):
        annotate(str(images), stats="check")
    assert (count_samples(images / name), count_samples(images / other)) == wanted


def test_what_cannot_be_is_refused(tmp_path):
    for stats, words in (("write", "finished shards"), ("check", "--stats write"), ("both", "not known")):
        with pytest.raises(ConfigError, match=words):
            annotate(str(tmp_path), stats=stats)
    (tmp_path / "part_1_stats.csv").write_text("file_path,samples\n")
    with pytest.raises(ConfigError, match="not a table"):
        annotate(str(tmp_path), stats="check")
