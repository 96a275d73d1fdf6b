"""Law: from an address, or to one, comes what comes from folder to folder, to the byte, and the rule of keys holds.
`file:` addresses go the way of all others, through Hadoop."""

import contextlib
import io
import json
import os
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import web
from hadoop_here import HadoopHere, at

from ppldm.prepare.convert.convert import convert, convert_source
from ppldm.prepare.convert.part_task import PartTask
from ppldm.prepare.convert.reencode import Treatment
from ppldm.prepare.convert.units import Span, find_units
from ppldm.utils.errors import ConfigError, DataError, OutputError


def write_tar(path: Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for row in rows:
            image = b"no picture" if row % 7 == 3 else web.encode(web.picture(row))
            meta = json.dumps({"key": f"{row:09}", "url": f"http://x/{row}.jpg"}).encode()
            for suffix, data in (("jpg", image), ("txt", f"caption {row}".encode()), ("json", meta)):
                info = tarfile.TarInfo(f"{row:09}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def write_table(path: Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"jpg": web.encode(web.picture(row)), "txt": f"caption {row}", "key": f"{row:09}"} for row in rows]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)


def write_tars(folder: Path) -> Path:
    """What a download leaves: tars with tables beside them."""
    for part, shards in ((2, (5, 4)), (10, (3,)), (1, (1,))):
        for shard, rows in enumerate(shards):
            first = 100 * part + 10 * shard
            write_tar(folder / f"part_{part}/{shard:05}.tar", range(first, first + rows))
            write_table(folder / f"part_{part}/{shard:05}.parquet", range(2))
        (folder / f"part_{part}/.download").mkdir()
    return folder


def write_tables(folder: Path) -> Path:
    for shard, rows in enumerate((5, 2)):
        write_table(folder / f"{shard:05}.parquet", range(10 * shard, 10 * shard + rows))
    return folder


def write_one(folder: Path) -> Path:
    write_tar(folder / "rows 1% [a].tar", range(4, 9))
    return folder / "rows 1% [a].tar"


def contents(out: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(out)): path for path in out.rglob("*") if path.is_file() and path.name != ".lock"}
    return {name: path.read_bytes() for name, path in files.items() if not name.startswith(".convert")}


def inodes(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in (out / "parts").iterdir()}


def run(source, out, **options) -> None:
    convert(str(source), str(out), **{"rows_per_part": 3, "master": "local[2]", "num_workers": 1} | options)


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.slow
@pytest.mark.needs("java")
@pytest.mark.parametrize("write", [write_tars, write_tables, write_one])
def test_an_address_gives_and_takes_what_a_folder_does(tmp_path, session, capsys, write):
    source = write(tmp_path / "in")
    forgotten = {"urls": ["http://x/201.jpg"], "domains": [], "keys": ["000000011"]}
    ways = {"here": (False, False), "from": (True, False), "to": (False, True), "both": (True, True)}
    for name, (is_from, is_to) in ways.items():
        out = tmp_path / name
        (out / ".convert").mkdir(parents=True)
        (out / "forgotten.json").write_text(json.dumps(forgotten))
        if name == "here":
            convert_source(source, out, rows_per_part=3, num_workers=1)
        else:
            run(source.as_uri() if is_from else source, out.as_uri() if is_to else out)
    found = {name: contents(tmp_path / name) for name in ways}
    assert found["here"] == found["from"] == found["to"] == found["both"]
    assert len(json.loads(found["both"]["manifest.json"])["parts"]) >= 2
    assert not [*(tmp_path / "both").rglob("*.tmp")]


@pytest.mark.turn("Spark does what one process does", 2)
@pytest.mark.slow
@pytest.mark.needs("java")
def test_what_is_finished_stays_and_only_what_differs_is_made_again(tmp_path, session, capsys):
    source, out = write_tars(tmp_path / "in"), tmp_path / "out"
    places = source.as_uri(), out.as_uri()
    run(*places, dry_run=True)
    assert "13 rows, 6 parts, 0 of them finished" in capsys.readouterr().out and not out.exists()
    run(*places)
    whole, before = contents(out), inodes(out)
    run(*places)
    assert contents(out) == whole and inodes(out) == before
    run(*places, dry_run=True)
    assert "6 parts, 6 of them finished" in capsys.readouterr().out

    (out / "parts/part-00002.gz").write_bytes(b"other")
    (out / ".convert/part-00003.gz.json").unlink()
    (out / "manifest.json").unlink()  # killed before the end
    (out / ".convert/.0123.tmp").mkdir()
    (out / ".convert/.0123.tmp/part-00001.gz").touch()
    run(*places)
    after = inodes(out)
    assert contents(out) == whole and not (out / ".convert/.0123.tmp").exists()
    again = {name for name in before if after[name] != before[name]}
    assert {name.split(".")[0] for name in again} == {"part-00002", "part-00003"}

    for changes in ({"min_size": 1}, {"rows_per_part": 4}, {"name": "other"}):
        with pytest.raises(ConfigError, match="holds another conversion.*--redo"):
            run(*places, **changes)
    assert contents(out) == whole
    write_tar(source / "part_10/00000.tar", range(501, 502))  # other rows of the last part
    run(*places)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["rows_in"] == 11 and {name for name in before if inodes(out)[name] != after[name]} == {
        name for name in before if name.startswith("part-00005")
    }
    (source / "part_10/00000.tar").unlink()
    (source / "part_10/00000.parquet").unlink()
    run(*places)
    assert not [name for name in inodes(out) if name.startswith("part-00005")]
    run(*places, rows_per_part=100, name="other", redo=True)
    there = convert_source(source, tmp_path / "there", name="other", rows_per_part=100, num_workers=1)
    assert json.loads((out / "manifest.json").read_text()) == there
    assert contents(out) == contents(tmp_path / "there")


@pytest.mark.slow
@pytest.mark.needs("java")
def test_what_cannot_be_is_said_in_one_line(tmp_path, session, capsys):
    source = write_tars(tmp_path / "in")
    for names in (("s3a://bucket/in", "out"), (source, "hdfs://host/out")):
        with pytest.raises(ConfigError, match="is an address, which needs Spark; add --master"):
            run(*names, master=None)
    with pytest.raises(DataError, match="Spark failed: .*S3AFileSystem"):
        run("s3a://bucket/folder", tmp_path / "out")
    with pytest.raises(ConfigError, match="--pack-folders"):
        run(source.as_uri(), tmp_path / "out", pack_folders=True)
    with pytest.raises(DataError, match="none"):
        run((tmp_path / "none").as_uri(), tmp_path / "out")
    for name in ("a.jpg", "a.csv", "a.jsonl"):
        (source / "part_2" / name).write_bytes(b"")
        with pytest.raises(ConfigError, match=f"part_2/{name} is not read at an address"):
            run(source.as_uri(), tmp_path / "out")
        (source / "part_2" / name).unlink()
    tables = write_tables(tmp_path / "tables")
    (tables / "00001.parquet").write_bytes(b"PAR1 no more PAR1")
    with pytest.raises(DataError, match=f"file://{tables}/00001.parquet"):
        run(tables.as_uri(), tmp_path / "out")
    (tmp_path / "foreign/parts").mkdir(parents=True)
    (tmp_path / "foreign/parts/precious").touch()
    with pytest.raises(OutputError, match="unknown origin"):
        run(source, (tmp_path / "foreign").as_uri())
    for path in source.rglob("*.tar"):
        path.write_bytes(os.urandom(2000))
    with pytest.raises(DataError, match="rows of file:.* cannot be used: tar"):
        run(source.as_uri(), tmp_path / "damaged")


def test_a_part_at_an_address_is_finished_or_absent(tmp_path):
    source = write_tars(tmp_path / "in")
    convert_source(source, tmp_path / "here", rows_per_part=3, num_workers=1)
    whole, out = contents(tmp_path / "here"), tmp_path / "out"
    for steps in (0, 1, 3, 4, 5, 6, 11, None):
        with contextlib.nullcontext() if steps is None else pytest.raises(OutputError, match="network"):
            convert_source(source, at(out, HadoopHere(steps)), rows_per_part=3, num_workers=1)
        for record in (out / ".convert").glob("part-*.json"):
            name = f"parts/{record.stem}"
            assert (out / name).exists() == (name in whole)
        assert all(whole[name] == data for name, data in contents(out).items())
        assert not [*(out / ".convert").glob(".*.tmp")]
    assert contents(out) == whole
    before = inodes(out)
    (out / "parts/part-00002.gz").write_bytes(b"other")
    (out / ".convert/.0123.tmp").mkdir()
    convert_source(source, at(out), rows_per_part=3, num_workers=1)
    assert contents(out) == whole and not (out / ".convert/.0123.tmp").exists()
    assert {name for name in before if not name.startswith("part-00002") and inodes(out)[name] != before[name]} == set()


def test_a_source_at_an_address_has_the_units_of_a_folder(tmp_path):
    for write in (write_tars, write_tables, write_one):
        source = write(tmp_path / write.__name__)
        for path in (source, source.parent):
            here, there = find_units(path), find_units(at(path))
            assert [(type(unit), f"file://{unit.path}") for unit in here] == [
                (type(unit), str(unit.path)) for unit in there
            ]
    folder = tmp_path / "write_tars"
    for name in ("a.jpg", "a.csv", "a.jsonl"):
        (folder / "part_2" / name).touch()
        with pytest.raises(ConfigError, match=f"part_2/{name} is not read at an address"):
            find_units(at(folder))
        (folder / "part_2" / name).unlink()
    for path in (tmp_path / "none", tmp_path / "write_tables/.none"):
        with pytest.raises(DataError, match="no images in file:"):
            find_units(at(path))


def test_the_key_of_a_part_from_an_address_follows_its_content(tmp_path):
    write_tar(tmp_path / "in.tar", range(4))
    (unit,) = find_units(at(tmp_path / "in.tar"))

    def key(start: int = 0, **changes) -> dict:
        task = PartTask(tmp_path / "parts/part-00000.gz", ".", unit, Span(start, 9, 3), Treatment(**changes))
        return {"settings": task.key()["settings"], "content": task.key()["input"]["content"]}

    first = key()
    assert key() == first != key(512) and first != key(size=64)
    os.utime(tmp_path / "in.tar", (1, 1))
    assert key()["settings"] == first["settings"] and key()["content"] != first["content"]
