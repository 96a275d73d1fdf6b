"""Laws: at an address lies what lies in a folder; a shard there is finished or absent; a path of an address does what
one of this machine does. `file:` addresses go the way of all others, through Hadoop."""

import contextlib
import json
import pickle
import tarfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import web
from downloads import SETTINGS, SHARD_SETTINGS, read_images, read_rows, write_metadata
from hadoop_here import HadoopHere, at

from ppldm.prepare.download.download import download, put_shard
from ppldm.prepare.download.part import PartDownload, find_columns, find_parts
from ppldm.prepare.download.shard import record_path, stats_path, work_folder
from ppldm.prepare.place import AddressPath, Hadoop, connect, path_of
from ppldm.utils.errors import ConfigError, DataError, OutputError
from ppldm.utils.files import count_free_bytes, make_output_dir, read_json, remove_path, write_json, write_text

ON_SPARK = SETTINGS | {"distributor": "pyspark"}


def count_members(path) -> int:
    with tarfile.open(path) as tar:
        return len(tar.getnames())


@pytest.fixture
def server():
    with web.serve() as running:
        yield running


@pytest.fixture(params=["here", pytest.param("spark", marks=[pytest.mark.slow, pytest.mark.needs("java")])])
def place(tmp_path, request) -> AddressPath:
    """The address of `tmp_path`, by Hadoop and by what stands for it in quick tests."""
    if request.param == "here":
        return at(tmp_path)
    return path_of(tmp_path.as_uri(), request.getfixturevalue("session"))


def names_in(folder: Path) -> list[str]:
    """Of all files; locks are of this machine."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return sorted(str(path.relative_to(folder)) for path in files)


def counts(report: dict) -> dict:
    """Without what depends on the order in which pictures come: times, the bytes of tables, examples."""
    return {name: report[name] for name in ("rows", "success", "failed", "pending", "retried", "shards")}


def rows_by_key(folder: Path) -> list[dict]:
    return sorted(read_rows(folder), key=lambda row: row["key"])


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.slow
@pytest.mark.needs("java")
@pytest.mark.parametrize("output_format", ["files", "webdataset"])
def test_at_an_address_lies_what_lies_in_a_folder(server, tmp_path, session, capsys, output_format):
    urls = [server.url(f"good/{number}.jpg") for number in range(70)] + [server.url("missing.jpg")]
    metadata, at = write_metadata(tmp_path / "part 1% [a]_1.parquet", urls), tmp_path / "at 1% [b]"
    settings = {"output_format": output_format, "preflight": 5}
    here = download(metadata, tmp_path / "here", **SETTINGS | settings)
    download(metadata.as_uri(), at.as_uri(), **ON_SPARK | settings, dry_run=True)
    assert not at.exists()
    there = download(metadata.as_uri(), at.as_uri(), **ON_SPARK | settings)
    assert counts(there) == counts(here)
    assert names_in(at) == names_in(tmp_path / "here")
    assert read_images(at / "part_1", output_format) == read_images(tmp_path / "here/part_1", output_format)
    assert rows_by_key(at / "part_1") == rows_by_key(tmp_path / "here/part_1")
    if output_format == "files":
        texts = [[path.read_text() for path in sorted(out.rglob("*.txt"))] for out in (at, tmp_path / "here")]
        assert texts[0] == texts[1] and len(texts[0]) == 70
    else:
        assert [count_members(path) for path in sorted(at.rglob("*.tar"))] == [150, 60]
    assert json.loads((at / "part_1/.download/report.json").read_text())["success"] == 70


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.slow
@pytest.mark.needs("java")
def test_what_is_finished_stays_and_only_the_rest_is_fetched(server, tmp_path, session, capsys):
    (tmp_path / "metadata").mkdir()
    for part in (1, 2):
        write_metadata(
            tmp_path / f"metadata/part_{part}.parquet", [server.url(f"good/{part}{n:03}.jpg") for n in range(60)]
        )
    out = tmp_path / "out"
    arguments = (tmp_path / "metadata").as_uri(), out.as_uri()
    settings = ON_SPARK | {"output_format": "webdataset"}
    first = download(*arguments, **settings)
    before = {path: (path.stat().st_ino, path.read_bytes()) for path in out.rglob("00*") if path.is_file()}
    assert first["success"] == 120 and len(before) == 4 * 4
    (out / "part_2/00001_stats.json").unlink()  # killed before its last rename
    left = work_folder(out / "part_2")
    (left / "00001-0").mkdir()
    (left / "00001-0/00001.tar").write_bytes(b"half")
    server.hits.clear()
    assert counts(download(*arguments, **settings)) == counts(first)
    assert set(server.hits) == {f"good/2{n:03}.jpg" for n in range(50, 60)}
    assert not any(left.iterdir())
    for path, (inode, content) in before.items():
        if path.parent.name == "part_1" or not path.name.startswith("00001"):
            assert (path.stat().st_ino, path.read_bytes()) == (inode, content)

    (out / "part_2/00001_stats.json").unlink()
    with pytest.raises(ConfigError, match="image_size was 64 and is 32.*--redo"):
        download(*arguments, **settings | {"image_size": 32})
    write_metadata(tmp_path / "metadata/part_1.parquet", [server.url("good/7.jpg")] * 60)
    with pytest.raises(ConfigError, match="part_1 holds another download .*other content"):
        download(*arguments, **settings)
    (tmp_path / "metadata/part_1.parquet").rename(tmp_path / "metadata/part_3.parquet")
    with pytest.raises(ConfigError, match="part_1 was downloaded for a part"):
        download(*arguments, **settings)
    server.hits.clear()
    assert download(*arguments, **settings | {"redo": True})["success"] == 120
    assert server.hits == Counter({"good/7.jpg": 60} | {f"good/2{n:03}.jpg": 1 for n in range(50, 60)})
    assert sorted(path.name for path in out.iterdir()) == ["part_2", "part_3"]
    (tmp_path / "foreign/part_2").mkdir(parents=True)
    (tmp_path / "foreign/part_2/precious.txt").touch()
    with pytest.raises(OutputError, match="unknown origin"):
        download(arguments[0], (tmp_path / "foreign").as_uri(), **settings)


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.slow
@pytest.mark.needs("java")
def test_retries_and_accounts_read_tables_at_the_address(server, tmp_path, session, capsys):
    urls = [server.url(f"late/{number}.jpg" if number % 3 == 0 else f"good/{number}.jpg") for number in range(30)]
    metadata = write_metadata(tmp_path / "part_1.parquet", [*urls, server.url("missing.jpg")]).as_uri()
    out, settings = tmp_path / "out", ON_SPARK | {"output_format": "parquet"}
    assert download(metadata, out.as_uri(), **settings)["failed"] == {"4xx": 1, "5xx": 10}
    server.healed = True
    server.hits.clear()
    report = download(metadata, out.as_uri(), **settings | {"retry_failed": True, "only": "5xx"})
    assert report["failed"] == {"4xx": 1} and report["success"] == 30 and report["rows"] == 31
    assert set(server.hits) == {f"late/{number}.jpg" for number in range(0, 30, 3)}
    assert len(read_images(out / "part_1", "parquet")) == 30
    record_path(out / "part_1", 0).unlink()  # made again from the table
    assert counts(download(metadata, out.as_uri(), **settings)) == counts(report)


def test_a_shard_at_an_address_is_finished_or_absent(tmp_path):
    made = tmp_path / "made"
    record_path(made, 0).parent.mkdir(parents=True)
    (made / "00000").mkdir()
    contents = {"00000/a.jpg": "a", "00000.parquet": "p", ".download/records/00000.json": "r", "00000_stats.json": "s"}
    for name, text in contents.items():
        (made / name).write_text(text)
    there = tmp_path / "out/part_1"
    for steps in range(9):
        part = at(there, HadoopHere(steps))
        make_output_dir(part)
        # What an earlier try has left of it.
        (there / "00000").mkdir(exist_ok=True)
        (there / "00000/old.jpg").touch()
        (there / "00000.tar").touch()
        with contextlib.nullcontext() if steps == 8 else pytest.raises(OutputError):
            put_shard(made, part, 0)
        files = {str(path.relative_to(there)): path.read_text() for path in there.rglob("*") if path.is_file()}
        assert stats_path(there, 0).exists() == (steps == 8)
        assert not stats_path(there, 0).exists() or files == contents
        assert not any(work_folder(there).iterdir())
        if steps < 4:
            assert "00000.tar" in files  # removed only when the new one has arrived


def test_a_path_of_an_address_does_what_one_of_this_machine_does(tmp_path, place):
    (tmp_path / "folder").mkdir()
    for name in ("a_1.parquet", "a_10.parquet", "a_2.parquet", "_b.parquet", ".c.parquet", "d e%20.tar.gz", "{f}[1]"):
        (tmp_path / "folder" / name).write_text(name)
    for name in ("", "folder", "folder/a_1.parquet", "folder/d e%20.tar.gz", "folder/{f}[1]", "none", "none/none"):
        here, there = tmp_path / name, place / name
        assert str(there) == f"file://{here}" and there.name == here.name and there.stem == here.stem
        assert str(there.parent) == f"file://{here.parent}"
        assert there.exists() == here.exists() and there.is_dir() == here.is_dir()
        for pattern in ("*", "[!._]*.parquet", "a_[0-9]*", "*.tar.gz", "none"):
            assert {path.name for path in there.glob(pattern)} == {path.name for path in here.glob(pattern)}
        if here.is_file():
            assert there.count_bytes() == len(here.read_bytes()) and there.read_text() == here.read_text()
        if not here.exists():
            with pytest.raises(FileNotFoundError):
                there.read_text()
            with pytest.raises(FileNotFoundError):
                there.unlink()
            there.unlink(missing_ok=True)
            remove_path(there)
    assert [path.name for path in (place / "folder").glob("a*")] == ["a_1.parquet", "a_2.parquet", "a_10.parquet"]
    assert (place / "folder").count_bytes() == sum(path.stat().st_size for path in (tmp_path / "folder").iterdir())
    assert 0 < count_free_bytes(place) < 10**18
    for text in ("", "ü" * 1000):
        write_text(place / "text", text)
        assert (tmp_path / "text").read_text() == text
    for value in ({"a": ["ü", 1.5, None]}, []):
        write_json(place / "here.json", value)
        write_json(tmp_path / "there.json", value)
        assert (tmp_path / "here.json").read_bytes() == (tmp_path / "there.json").read_bytes()
        assert read_json(place / "here.json") == value == read_json(tmp_path / "there.json")
    write_text(place / "here.json", "{")
    assert read_json(place / "here.json") is None is read_json(place / "none.json")
    remove_path(place / "folder")
    assert not (tmp_path / "folder").exists()
    copy = pickle.loads(pickle.dumps(place / "text"))
    assert copy == place / "text" and copy.hadoop is None and copy.at(place.hadoop).exists()


def test_a_file_is_read_from_any_place_in_it(tmp_path, place):
    content = bytes(range(256)) * 5000
    (tmp_path / "file").write_bytes(content)
    with (place / "file").open() as file:
        for start in (5, len(content) - 3, len(content), len(content) + 7, 1 << 20):
            for size in (0, 1, 1000, -1):
                assert file.seek(start) == start
                assert file.read(size) == content[start:][: size if size >= 0 else None]
        assert file.seek(-4, 2) == len(content) - 4 and file.seek(1, 1) == len(content) - 3
        assert file.read() == content[-3:]


def test_metadata_at_an_address_is_planned_as_in_a_folder(tmp_path, place):
    for number in (2, 10):
        urls = [f"http://a/{number}/{row}.jpg" for row in range(7)]
        write_metadata(tmp_path / f"x_{number}.parquet", urls, punsafe=[0.5] * 7)
    for part_id in (0, 10):
        sides = []
        for metadata in (tmp_path, place):
            parts = find_parts(metadata, part_id)
            tasks = []
            for part in parts:
                columns = find_columns(part.path)
                settings = replace(SHARD_SETTINGS, number_sample_per_shard=3)
                item = PartDownload(part, metadata / f"out/part_{part.number}", columns, settings)
                make_output_dir(work_folder(item.folder))
                write_json(stats_path(item.folder, 1), {})
                for task in item.tasks():
                    with task.rows_file.open("rb") as file:
                        rows = pa.ipc.open_file(file).read_all().to_pylist()
                    tasks.append((columns, task.number, task.num_rows, task.rows_file.name, rows))
            sides.append(([(part.number, part.path.name, part.rows) for part in parts], tasks))
        assert sides[0] == sides[1] and len(sides[0][1]) == (2 if part_id else 4)
    with pytest.raises(ConfigError, match="--part-id 3 is not in file:"):
        find_parts(place, 3)
    with pytest.raises(ConfigError, match="file:.*none does not exist"):
        find_parts(place / "none", 0)
    (tmp_path / "x_2.parquet").write_bytes(b"PAR1 no more PAR1")
    with pytest.raises(DataError, match="x_2.parquet is not a parquet file"):
        find_parts(place, 0)


@pytest.mark.slow
@pytest.mark.needs("java")
def test_an_executor_has_the_drivers_settings(session, tmp_path):
    (tmp_path / "file").write_text("there")
    name, address = "fs.ppldm.secret", (tmp_path / "file").as_uri()
    session.sparkContext._jsc.hadoopConfiguration().set(name, "a<&>ü\n ${user.name}")
    settings = Hadoop.of(session).settings()

    def ask(_):
        hadoop = connect(settings)
        return hadoop.conf.getRaw(name), AddressPath(address, hadoop).open().read()

    assert session.sparkContext.parallelize([0], 1).map(ask).collect() == [("a<&>ü\n ${user.name}", b"there")]


@pytest.mark.slow
@pytest.mark.needs("java")
def test_addresses_that_cannot_be_reached_are_one_line(tmp_path, session):
    metadata = write_metadata(tmp_path / "part_1.parquet", ["http://127.0.0.1:9/x.jpg"])
    for address in ("s3a://bucket/folder", "s3a://bucket", "nosuch://host/folder"):  # whose classes are not here
        for names in ((address, tmp_path / "out"), (metadata, address)):
            with pytest.raises(ConfigError, match=f"{address} is an address, which needs --distributor pyspark"):
                download(*names, **SETTINGS)
            with pytest.raises(DataError, match="Spark failed: .*(S3AFileSystem|nosuch)") as error:
                download(*names, **ON_SPARK)
            assert "\n" not in str(error.value)
