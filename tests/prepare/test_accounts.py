"""Law: in every stage, rows in = rows out + rows dropped, by reason; stages are found from the parts on."""

import pytest

from ppldm.prepare.pipeline import read_stages
from ppldm.utils.files import write_json

REPORT = {"retried": 0, "bytes": 9, "shards": 1, "unfinished_shards": 0, "shard_seconds": 1.0, "examples": {}}
PARTS = [{"path": "part_1.parquet", "rows": 60, "bytes": 7}]


def report_of(rows, success, failed, pending) -> dict:
    return REPORT | {"rows": rows, "success": success, "failed": failed, "pending": pending}


@pytest.fixture
def out(tmp_path):
    """What filter, download and convert leave, as a pipeline calls them."""
    dropped = [{"condition": "width >= 512", "rows": 40, "missing": 1}]
    filtered = {"conditions": ["width >= 512"], "rows_in": 100, "rows_out": 60, "dropped": dropped, "parts": PARTS}
    skipped = {"image": 2, "not_downloaded": 15}
    for name, manifest in (
        ("metadata/manifest.json", filtered),
        ("images/part_2/.download/report.json", report_of(20, 15, {"4xx": 5}, 0)),
        ("images/part_10/.download/report.json", report_of(40, 30, {"4xx": 4}, 6)),
        ("data/manifest.json", {"rows_in": 60, "rows_out": 43, "skipped": skipped, "parts": PARTS}),
        ("data/.convert/plan.json", {"source": "../images"}),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_json(tmp_path / name, manifest)
    return tmp_path


def accounts(*folders) -> list[tuple]:
    found = read_stages(folders)
    assert all(result.rows_in == result.rows_out + sum(result.dropped.values()) for *_, result in found)
    return [(name, folder.name, result.rows_in, result.rows_out, result.dropped) for name, folder, result in found]


def test_stages_are_found_in_their_order(out):
    download = ("download", "images", 60, 45, {"4xx": 9, "not tried yet": 6})
    convert = ("convert", "data", 45, 43, {"image": 2})
    filtered = ("filter", "metadata", 100, 60, {"width >= 512": 40})
    assert accounts(out / "data") == [download, convert]
    assert accounts(out / "data", out / "metadata", out / "data") == [filtered, download, convert]
    (out / ".pipeline").mkdir()
    assert accounts(out / "data") == accounts(out) == [filtered, download, convert]
    assert accounts(out / "data/parts/none") == []


def test_what_is_not_a_record_is_left_out(out):
    (out / "metadata/manifest.json").write_text("{")
    (out / "data/manifest.json").write_text("[]")
    assert [name for name, *_ in accounts(out / "metadata", out / "data")] == ["download"]
