"""Laws: every row has its picture or a reason; a shard is finished or absent; retries touch nothing that is good; a
broken network stops the command before anything is marked complete."""

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import web
from downloads import SETTINGS, read_images, read_rows, write_metadata

from ppldm.prepare.download.download import download
from ppldm.prepare.download.failures import classify
from ppldm.utils.errors import ConfigError, EnvironmentProblem, OutputError

ROOT = Path(__file__).resolve().parents[3]
# What the server does not decide, by URL.
ELSEWHERE = {
    "http://nowhere.invalid/a.jpg": "dns",
    "http://127.0.0.1:9/closed.jpg": "refused",
    "file:///etc/hostname": "bad_url",
    "nonsense": "bad_url",
    "http://127.0.0.1:99999/a.jpg": "bad_url",
    None: "bad_url",
}

pytestmark = pytest.mark.slow


@pytest.fixture
def server():
    with web.serve() as running:
        yield running


def command(metadata, out, **changes) -> list[str]:
    flags = SETTINGS | changes
    special = {True: "--{}", False: "--no-{}"}
    words = [
        special[value].format(name) if isinstance(value, bool) else f"--{name}={value}" for name, value in flags.items()
    ]
    return [sys.executable, "-m", "ppldm", "download", str(metadata), "--out", str(out), *words]


def environment(**changes) -> dict:
    path = f"{ROOT / 'tests/helpers/resolver'}{os.pathsep}{ROOT}"
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **changes}


def run(metadata, out, env=None, **changes) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(metadata, out, **changes), env=environment(**(env or {})), capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize("output_format", ["files", "webdataset", "parquet"])
def test_every_row_has_its_picture_or_its_reason(server, tmp_path, output_format):
    good = [server.url(f"good/{number}.jpg") for number in range(25)]
    good += [server.url(path) for path in web.PICTURES] + [server.url("redirect")]
    bad = {server.url(path): name for path, name in web.FAILURES.items()} | ELSEWHERE
    bad[f"https://127.0.0.1:{server.server_port}/good/1.jpg"] = "tls"
    bad[server.url("limited.jpg", "limited.test")] = "limited"
    good += [server.url("secret/1.jpg").replace("//", "//me:p%40ss@"), server.url("busy/1.jpg", "busy.test")]
    urls = [url for pair in zip(good, bad, strict=False) for url in pair] + good[len(bad) :]
    metadata = write_metadata(tmp_path / "part_3.parquet", urls)
    # Time for the host that asks to be left alone for a second, also where processors are busy.
    done = run(metadata, tmp_path / "out", output_format=output_format, url_seconds=4)
    assert done.returncode == 0, done.stderr
    assert web.ESCAPES[:1].decode() not in done.stdout + done.stderr and "p%40ss" not in done.stdout + done.stderr
    report = json.loads(done.stdout)
    folder = tmp_path / "out/part_3"
    rows = read_rows(folder)
    assert [row["url"] for row in rows] == urls  # and not in the order of arrival
    assert list(images := read_images(folder, output_format)) == sorted(images) or output_format == "files"
    assert [int(row["key"]) % 100 for row in sorted(rows, key=lambda row: row["hash"])] == [
        number % 50 for number in range(len(urls))
    ]
    assert {row["url"]: classify(row["status"], row["error_message"]) for row in rows} == {
        url: bad.get(url, "success") for url in urls
    }
    assert report["rows"] == len(urls) == report["success"] + sum(report["failed"].values())
    assert report["success"] == len(good) and report["failed"] == Counter(bad.values())
    assert images.keys() == {row["key"] for row in rows if row["status"] == "success"}
    by_url = {row["url"]: images.get(row["key"]) for row in rows}
    for url in good[:25]:  # small JPEG files come through untouched
        assert by_url[url] == web.encode(web.picture(int(Path(url).stem)))
    stats = [json.loads(path.read_text()) for path in sorted(folder.glob("*_stats.json"))]
    assert sum(one["count"] for one in stats) == len(urls)
    assert sum(one["successes"] for one in stats) == len(good)
    assert not list((folder / ".download/work").iterdir())


def test_a_list_from_the_web_reaches_no_private_host_unless_asked(server, tmp_path, capsys):
    metadata = write_metadata(tmp_path / "part_1.parquet", [server.url("good/1.jpg")] * 10)
    settings = {name: value for name, value in SETTINGS.items() if name != "refuse_private"}
    assert download(metadata, tmp_path / "out", **settings)["failed"] == {"private": 10} and not server.hits
    assert download(metadata, tmp_path / "all", **settings, refuse_private=False)["success"] == 10


@pytest.mark.parametrize("kind", ["csv.gz", "tsv", "json", "jsonl", "txt"])
def test_tables_of_text_are_downloaded_as_parquet_is(server, tmp_path, monkeypatch, kind):
    monkeypatch.setenv("PPLDM_CACHE_DIR", str(tmp_path / "cache"))
    urls = [server.url(f"good/{number}.jpg") for number in range(70)] + [server.url("missing.jpg")]
    captions = [None if kind == "txt" else f"caption {number}" for number in range(71)]
    rows = [{"URL": url, "hash": number, "TEXT": captions[number]} for number, url in enumerate(urls)]
    mark = "\t" if kind == "tsv" else ","
    delimited = [mark.join(rows[0]), *(mark.join(map(str, row.values())) for row in rows)]
    lines = {"json": [json.dumps(rows)], "jsonl": map(json.dumps, rows), "txt": urls}.get(kind, delimited)
    text = "".join(f"{line}\n" for line in lines).encode()
    (tmp_path / f"part_3.{kind}").write_bytes(gzip.compress(text) if kind.endswith(".gz") else text)
    for _ in range(2):  # the second time nothing is left to fetch
        found = run(tmp_path / f"part_3.{kind}", tmp_path / "out")
        assert found.returncode == 0, found.stderr
        report = json.loads(found.stdout)
        assert (report["rows"], report["success"], report["failed"]) == (71, 70, {"4xx": 1})
        assert sum(server.hits.values()) == 71
    kept = read_rows(tmp_path / "out/part_3")
    assert [row["url"] for row in kept] == urls and [row["caption"] for row in kept] == captions
    assert kind == "txt" or [row["hash"] for row in kept] == list(range(71))
    changed = text.replace(b"good/3.jpg", b"good/4.jpg")
    (tmp_path / f"part_3.{kind}").write_bytes(gzip.compress(changed) if kind.endswith(".gz") else changed)
    assert run(tmp_path / f"part_3.{kind}", tmp_path / "out").returncode == 2  # other content under the same name


@pytest.mark.needs("wandb")
def test_wandb_gets_the_counts_of_each_shard(server, tmp_path, monkeypatch):
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    urls = [server.url(f"good/{number}.jpg") for number in range(70)] + [server.url("missing.jpg")]
    metadata = write_metadata(tmp_path / "part_1.parquet", urls)
    told = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": str(tmp_path)}
    done = run(metadata, tmp_path / "out", told, enable_wandb=True, wandb_project="mine", processes_count=1)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["success"] == 70  # and nothing else goes to stdout
    store, found, projects = DataStore(), {}, []
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    store.open_for_scan(str(file))
    while (data := store.scan_data()) is not None:
        record = Record()
        record.ParseFromString(data)
        projects += [record.run.project] if record.HasField("run") else []
        for item in record.history.item:
            found.setdefault(item.key or "/".join(item.nested_key), []).append(json.loads(item.value_json))
    assert projects[0] == "mine" and found["worker/count"] == [50, 21] and found["total/count"] == [50, 71]
    assert found["total/success"][-1] == pytest.approx(70 / 71)
    assert found["total/failed_to_download"][-1] == pytest.approx(1 / 71)
    assert any(name.startswith("status") for name in found)


def test_without_wandb_its_flag_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    metadata = write_metadata(tmp_path / "part_1.parquet", ["http://a.test/1.jpg"])
    with pytest.raises(EnvironmentProblem, match="--enable-wandb needs wandb, .*pip install"):
        download(metadata, tmp_path / "out", **SETTINGS, enable_wandb=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.needs("ray")
def test_ray_does_the_same(server, tmp_path, capsys):
    urls = [server.url(f"good/{number}.jpg") for number in range(70)] + [server.url("missing.jpg")]
    metadata = write_metadata(tmp_path / "part_1.parquet", urls)
    report = download(metadata, tmp_path / "out", **SETTINGS, distributor="ray")
    assert report["success"] == 70 and report["failed"] == {"4xx": 1} and report["shards"] == 2
    assert len(read_images(tmp_path / "out/part_1", "files")) == 70


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.needs("java")
def test_spark_does_the_same(server, tmp_path, session, capsys):
    urls = [server.url(f"good/{number}.jpg") for number in range(70)] + [server.url("missing.jpg")]
    metadata = write_metadata(tmp_path / "part_1.parquet", urls)
    report = download(metadata, tmp_path / "out", **SETTINGS, distributor="pyspark")
    assert report["success"] == 70 and report["failed"] == {"4xx": 1} and report["shards"] == 2
    assert len(read_images(tmp_path / "out/part_1", "files")) == 70


def test_the_script_of_the_published_recipe(server, tmp_path):
    write_metadata(tmp_path / "part_3.parquet", [server.url("good/1.jpg")] * 3)
    script = ["bash", str(ROOT / "run_scripts/laion_download_imgs.sh")]
    settings = {"PYTHON": sys.executable, "METADATA_DIR": str(tmp_path), "SAVE_DIR": str(tmp_path / "out")}
    done = subprocess.run(script, env=environment(**settings), capture_output=True, text=True)
    assert done.returncode == 2 and "which part?" in done.stderr
    command = [*script, "3", "--preflight", "0", "--no-refuse-private"]
    done = subprocess.run(command, env=environment(**settings), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "out/part_3/00000").glob("*.jpg"))) == 3


def test_the_same_command_again_fetches_nothing(server, tmp_path, capsys):
    metadata = write_metadata(tmp_path / "part_1.parquet", [server.url(f"good/{number}.jpg") for number in range(60)])
    first = download(metadata, tmp_path / "out", **SETTINGS)
    hits = server.hits.total()
    assert download(metadata, tmp_path / "out", **SETTINGS) == first
    assert server.hits.total() == hits
    with pytest.raises(ConfigError, match="image_size was 64 and is 32"):
        pq.write_table(pq.read_table(metadata), metadata)
        (tmp_path / "out/part_1/00001_stats.json").unlink()
        download(metadata, tmp_path / "out", **SETTINGS | {"image_size": 32})
    (tmp_path / "foreign/part_1").mkdir(parents=True)
    (tmp_path / "foreign/part_1/precious.txt").touch()
    with pytest.raises(OutputError, match="unknown origin"):
        download(metadata, tmp_path / "foreign", **SETTINGS)


def test_retries_go_to_new_shards_and_fetch_only_what_failed(server, tmp_path, capsys):
    urls = [server.url(f"late/{number}.jpg" if number % 3 == 0 else f"good/{number}.jpg") for number in range(30)]
    urls += [server.url("missing.jpg"), server.url("hung-up.jpg")]
    metadata = write_metadata(tmp_path / "part_1.parquet", urls)
    folder = tmp_path / "out/part_1"
    first = download(metadata, tmp_path / "out", **SETTINGS)
    assert first["failed"] == {"4xx": 1, "5xx": 10, "reset": 1}
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    server.hits.clear()

    again = SETTINGS | {"retry_failed": True, "only": "5xx"}
    assert download(metadata, tmp_path / "out", **again)["failed"] == first["failed"]  # still broken
    assert server.hits == Counter({f"late/{number}.jpg": 1 for number in range(0, 30, 3)})
    server.healed = True
    report = download(metadata, tmp_path / "out", **again)
    assert report["failed"] == {"4xx": 1, "reset": 1} and report["success"] == 30
    assert report["rows"] == 32 and report["retried"] == 20
    assert set(server.hits) == {f"late/{number}.jpg" for number in range(0, 30, 3)}
    hits = server.hits.total()
    assert download(metadata, tmp_path / "out", **again) == report  # nothing is left to try
    assert server.hits.total() == hits

    unchanged = {path for path, content in before.items() if path.read_bytes() == content}
    assert {path.name for path in before.keys() - unchanged} == {"report.json"}
    rows = read_rows(folder)
    got = [row["url"] for row in rows if row["status"] == "success"]
    assert len(got) == len(set(got)) == 30
    keys = [row["key"] for row in rows]
    assert len(keys) == len(set(keys)) == 32 + 20
    first_try = {row["key"]: row["url"] for row in rows if "retry_of" not in row}
    for row in rows:
        if "retry_of" in row:
            assert first_try[row["retry_of"]] == row["url"] and row["retried_after"] == "5xx"


@pytest.mark.turn("a killed command goes on", 1)
@pytest.mark.parametrize("output_format", ["files", "webdataset", "parquet"])
def test_a_killed_download_goes_on(server, tmp_path, capsys, output_format):
    """Two kills in the middle of the only shard: nothing that was fetched is fetched again."""
    urls = [server.url(f"slow/{number}.jpg") for number in range(100)] + [server.url("missing.jpg")] * 2
    urls += [server.url("silent.jpg")] * 4
    metadata = write_metadata(tmp_path / "part_1.parquet", urls, similarity=[number / 3 for number in range(106)])
    flags = {"number_sample_per_shard": 200, "thread_count": 4, "output_format": output_format}
    for wanted in (30, 70):  # fetched URLs at the time of the kill
        process = subprocess.Popen(
            command(metadata, tmp_path / "killed", **flags), env=environment(), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        web.wait_for(lambda wanted=wanted: len(server.hits) >= wanted)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = run(metadata, tmp_path / "killed", **flags)
    assert done.returncode == 0, done.stderr
    # At each kill as many are lost as were on their way: fetched, and not yet given to the writer.
    assert max(server.hits[f"slow/{number}.jpg"] for number in range(100)) <= 3
    again = sum(server.hits[f"slow/{number}.jpg"] - 1 for number in range(100))
    assert again <= 2 * 3 * 4, again
    whole = download(metadata, tmp_path / "whole", **SETTINGS | flags)
    assert json.loads(done.stdout)["success"] == 100 and json.loads(done.stdout)["failed"] == {"4xx": 2, "timeout": 4}
    killed, expected = (tmp_path / name / "part_1" for name in ("killed", "whole"))
    assert whole["examples"].keys() == json.loads(done.stdout)["examples"].keys()
    assert sorted(read_rows(killed), key=lambda row: row["key"]) == sorted(
        read_rows(expected), key=lambda row: row["key"]
    )
    assert read_images(killed, output_format) == read_images(expected, output_format)
    names = sorted(path.name for path in killed.iterdir())
    assert names == sorted(path.name for path in expected.iterdir()) and len(names) == 5 - (output_format == "parquet")
    counted = [json.loads((folder / "00000_stats.json").read_text()) for folder in (killed, expected)]
    for stats in counted:
        del stats["duration"], stats["start_time"], stats["end_time"]
    assert counted[0] == counted[1] and counted[0]["count"] == 106
    for left in ("work", "journals"):
        assert not list((killed / ".download" / left).iterdir())


@pytest.mark.parametrize("code", ["-3", "-2"])
def test_a_failing_resolver_stops_the_download_and_marks_nothing_complete(server, tmp_path, code):
    urls = [server.url(f"good/{number}.jpg", f"host{number}.test") for number in range(100)]
    metadata = write_metadata(tmp_path / "part_1.parquet", urls)
    # Of 20 hosts that are looked at first, 8 must fail: at 0.6 one play in fifty had fewer.
    broken = {"FAIL_LOOKUPS": "0.95", "FAIL_CODE": code}
    done = run(metadata, tmp_path / "out", broken, preflight=60)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: DNS: ") and "resolv" in last and "nothing was marked complete" in last
    assert not (tmp_path / "out").exists()
    # The same while it runs: what was fetched meanwhile is not taken for the data.
    server.hits.clear()
    done = run(metadata, tmp_path / "out", broken, number_sample_per_shard=100)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: DNS: ")
    assert not list((tmp_path / "out/part_1").glob("*_stats.json"))
    # And with a resolver that works, the same command does all of it, and fetches nothing again.
    done = run(metadata, tmp_path / "out", number_sample_per_shard=100)
    assert done.returncode == 0 and json.loads(done.stdout)["success"] == 100
    assert server.hits == Counter({f"good/{number}.jpg": 1 for number in range(100)})


def test_dead_links_do_not_stop_it(server, tmp_path, capsys):
    urls = [server.url(f"gone/{number}.jpg") for number in range(60)] + [server.url("good/1.jpg")]
    metadata = write_metadata(tmp_path / "part_1.parquet", urls)
    report = download(metadata, tmp_path / "out", **SETTINGS | {"preflight": 30, "number_sample_per_shard": 100})
    assert report["failed"] == {"4xx": 60}


def test_a_shard_over_its_time_is_closed_with_the_rest_as_deadline(server, tmp_path, capsys):
    urls = [server.url("good/1.jpg")] + [server.url("silent.jpg")] * 18
    metadata = write_metadata(tmp_path / "part_1.parquet", urls)
    report = download(
        metadata, tmp_path / "out", **SETTINGS | {"thread_count": 1, "timeout": 0.5, "shard_seconds": 2.5}
    )
    assert report["success"] == 1 and report["failed"]["deadline"] >= 10
    assert report["success"] + sum(report["failed"].values()) == 19


def test_opting_out_is_honoured_unless_asked_otherwise(server, tmp_path, capsys):
    metadata = write_metadata(tmp_path / "part_1.parquet", [server.url("opted-out.jpg")] * 3)
    assert download(metadata, tmp_path / "out", **SETTINGS)["failed"] == {"opt_out": 3}
    report = download(metadata, tmp_path / "all", **SETTINGS | {"disallowed_header_directives": "none"})
    assert report["success"] == 3


def test_all_parts_or_one(server, tmp_path, capsys):
    folder = tmp_path / "metadata"
    folder.mkdir()
    for number in (2, 10):
        write_metadata(folder / f"part_{number}.parquet", [server.url(f"good/{number}.jpg")] * number)
    one = download(folder, tmp_path / "out", **SETTINGS | {"part_id": 2})
    assert [part["part"] for part in one["parts"]] == [2] and one["rows"] == 2
    report = download(folder, tmp_path / "out", **SETTINGS)
    assert [part["part"] for part in report["parts"]] == [2, 10]
    assert report["success"] == report["rows"] == 12
    assert server.hits["good/2.jpg"] == 2


def test_columns_may_have_another_name_in_each_part(server, tmp_path, capsys):
    folder = tmp_path / "metadata"
    folder.mkdir()

    def write(part, **columns):
        write_metadata(folder / f"part_{part}.parquet", [server.url(f"good/{part}.jpg")], **columns)

    def check(out, name, **changes):
        report = download(folder, tmp_path / out, **SETTINGS | changes)
        for part in range(1, report["success"] + 1):
            [row] = read_rows(tmp_path / out / f"part_{part}")
            assert row[name] == float(part) and row["similarity"] == 0.5
        return report["success"]

    write(1, similarity=[0.5], AESTHETIC_SCORE=[1.0])
    write(2, aesthetic=[2.0], similarity=[0.5])
    assert check("two", "AESTHETIC_SCORE") == 2
    write(3, Aesthetic_Score=[3.0], SIMILARITY=[0.5])
    assert check("three", "aesthetic", save_additional_columns="similarity,aesthetic") == 3
    write(4, similarity=[0.5], punsafe=[0.1])
    with pytest.raises(ConfigError, match="name those that all have"):
        download(folder, tmp_path / "four", **SETTINGS)


def test_a_disk_that_is_too_small_is_known_before(server, tmp_path, capsys, monkeypatch):
    metadata = write_metadata(tmp_path / "part_1.parquet", [server.url("good/1.jpg")] * 30)
    monkeypatch.setattr("ppldm.utils.files.shutil.disk_usage", lambda path: Disk())
    settings = SETTINGS | {"preflight": 20}
    with pytest.raises(OutputError, match="--ignore-disk-space"):
        download(metadata, tmp_path / "out", **settings)
    with pytest.raises(OutputError, match="nearly full"):
        download(metadata, tmp_path / "out", **settings | {"ignore_disk_space": True})


class Disk:
    free = 1000


def test_dry_run_writes_nothing(server, tmp_path, capsys):
    metadata = write_metadata(tmp_path / "part_1.parquet", [server.url("good/1.jpg")] * 30)
    download(metadata, tmp_path / "out", **SETTINGS | {"dry_run": True, "json": False})
    assert capsys.readouterr().out == "30 of 30 rows would be fetched; nothing was written\n"
    assert not (tmp_path / "out").exists() and not server.hits


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"output_format": "tfrecord"}, "--output-format 'tfrecord' is unknown"),
        ({"distributor": "dask"}, "--distributor 'dask' is unknown"),
        ({"master": "spark://x"}, "--master is only for"),
        ({"processes_count": 0}, "--processes-count is 0"),
        ({"thread_count": 0}, "--thread-count is 0"),
        ({"timeout": 0}, "--timeout is 0"),
        ({"preflight": -1}, "--preflight is -1"),
        ({"retry_failed": True, "only": "dsn"}, "--only 'dsn' names no class"),
        ({"retry_failed": True, "redo": True}, "--redo and --retry-failed are two steps"),
    ],
)
def test_bad_flags_are_one_line(tmp_path, changes, message):
    metadata = write_metadata(tmp_path / "part_1.parquet", ["http://127.0.0.1:9/x.jpg"])
    with pytest.raises(ConfigError, match=message):
        download(metadata, tmp_path / "out", **SETTINGS | changes)


def test_what_is_not_the_file_that_the_metadata_names_is_left_out(server, tmp_path, capsys):
    """And a retry verifies too; the hash that is recorded is the one that is asked for."""
    pictures = [web.encode(web.picture(number)) for number in range(12)]
    hashes = [hashlib.md5(one).hexdigest() for one in pictures[:10]] + ["0" * 32, None]
    hashes[1] = hashes[1].upper()
    urls = [server.url(f"{'late' if number == 2 else 'good'}/{number}.jpg") for number in range(12)]
    metadata = write_metadata(tmp_path / "part_1.parquet", urls, digest=hashes)
    settings = SETTINGS | {"verify_hash": '["digest","md5"]', "compute_hash": "sha512"}
    report = download(metadata, tmp_path / "out", **settings)
    assert report["success"] == 9 and report["failed"] == {"5xx": 1, "hash": 2}, report["examples"]
    for row in read_rows(tmp_path / "out/part_1"):
        number = row["hash"]
        assert row["expected_md5"] == hashes[number] and "sha256" not in row
        kept = hashlib.sha512(pictures[number]).hexdigest() if number not in (2, 10, 11) else None
        assert row["sha512"] == kept
    with pytest.raises(ConfigError, match="compute_hash"):
        download(metadata, tmp_path / "out", **settings | {"compute_hash": "sha256"})
    download(metadata, tmp_path / "new", **SETTINGS, compute_hash="none")
    assert not any({"md5", "sha256", "sha512"} & row.keys() for row in read_rows(tmp_path / "new/part_1"))


def test_a_retried_row_is_verified_too(server, tmp_path, capsys):
    hashes = [hashlib.md5(web.encode(web.picture(number % 2))).hexdigest() for number in range(4)]
    urls = [server.url(f"late/{number}.jpg") for number in range(4)]
    metadata = write_metadata(tmp_path / "part_1.parquet", urls, md5=hashes)
    settings = SETTINGS | {"verify_hash": "md5"}
    assert download(metadata, tmp_path / "out", **settings)["failed"] == {"5xx": 4}
    server.healed = True
    report = download(metadata, tmp_path / "out", **settings, retry_failed=True)
    assert report["success"] == 2 and report["failed"] == {"hash": 2}


@pytest.mark.parametrize(
    "given, words", [("hash,md5", "no text of a hash"), ("digest", "which hash"), ("none,md5", "no column 'none'")]
)
def test_hashes_that_cannot_be_verified_are_refused(tmp_path, given, words):
    metadata = write_metadata(tmp_path / "part_1.parquet", ["http://x/1.jpg"], digest=["0" * 32])
    with pytest.raises(ConfigError, match=words):
        download(metadata, tmp_path / "out", **SETTINGS, verify_hash=given)


def test_lists_are_taken_as_img2dataset_takes_them(server, tmp_path, capsys):
    metadata = write_metadata(tmp_path / "part_1.parquet", [server.url("opted-out.jpg")], similarity=[0.5], x=["a"])
    json_list, settings = '["similarity", "hash"]', SETTINGS | {"disallowed_header_directives": "[]"}
    assert download(metadata, tmp_path / "out", **settings, save_additional_columns=json_list)["success"] == 1
    (row,) = read_rows(tmp_path / "out/part_1")
    assert row["similarity"] == 0.5 and row["hash"] == 0 and "x" not in row
