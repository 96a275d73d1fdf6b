"""Training from a store: the same rows in the same order as from disk, whatever the store does meanwhile."""

import json
from pathlib import Path

import pytest
from toy import registered_toy
from toy_runs import train
from web import encode, picture

from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats import mds
from ppldm.data.formats.open import open_part
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.data.select.selection import select_rows
from ppldm.utils.errors import ConfigError, DataError, FilelistError, PartError
from ppldm.utils.store import client
from ppldm.utils.store.cache import in_store


def upload(folder: Path, url: str, pattern: str = "*") -> str:
    for path in sorted(folder.glob(pattern)):
        if path.is_file():
            client.put(path, f"{url}/{path.name}")
    return url


@pytest.mark.parametrize("pattern", ["*", "*[!x]"], ids=["with indexes", "without"])
def test_a_run_in_a_store_is_the_run_on_disk(tiny, store, pattern):
    own = read_sources(tiny.file_list)
    there = read_sources(f"{upload(tiny.folder, 's3://bucket/set', pattern)}/tiny.filelist.list")
    assert [path.name for path in there[0].parts] == [path.name for path in own[0].parts]
    assert all(in_store(path) and not path.exists() for path in there[0].parts)
    assert select_rows(there).contents == select_rows(own).contents
    # Where the store has the indexes, no part was asked for.
    assert any(path.exists() for path in there[0].parts) == (pattern != "*")
    for path, local in zip(there[0].parts, own[0].parts, strict=True):
        rows, expected = open_part(path, there[0]), open_part(local, own[0])
        assert len(rows) == len(expected) and rows.identity == expected.identity
        assert all(rows.read(number) == expected.read(number) for number in range(len(rows)))
        rows.close()


@pytest.mark.parametrize("suffix", ["", ".zstd"])
def test_shards_of_mosaicml_come_from_a_store(make_rows, store, tmp_path, monkeypatch, suffix):
    """Each checked by the one index.json beside them, which is fetched once; without it, too."""
    monkeypatch.setattr(mds, "SHARD_BYTES", 3000)
    (folder := tmp_path / "set").mkdir()
    shards = mds.write_shards(folder, ".", make_rows(0, 12), suffix)
    stated = [shard["zip_data"] or shard["raw_data"] for shard in shards]
    for file in stated:
        file["basename"] = file["basename"].removeprefix("./")
    write_filelist(folder / "all.filelist", [file["basename"] for file in stated])
    write_filelist(folder / "all.filelist.list", ["all.filelist format=mds"])
    (own,) = read_sources(folder / "all.filelist.list")
    (bare,) = read_sources(f"{upload(folder, 's3://bucket/bare')}/all.filelist.list")
    (folder / "index.json").write_text(json.dumps({"shards": shards}))
    (there,) = read_sources(f"{upload(folder, 's3://bucket/set')}/all.filelist.list")
    contents = [select_rows([source]).contents for source in (own, there, bare)]
    assert len(stated) > 1 and contents[0] == contents[1] == contents[2]
    for local, *parts in zip(own.parts, there.parts, bare.parts, strict=True):
        expected = open_part(local, own)
        for path in parts:
            rows = open_part(path, there)
            assert in_store(path) and [*map(rows.read, range(len(rows)))] == [*map(expected.read, range(len(rows)))]
            rows.close()
    stated[1]["bytes"] += 1
    (folder / "index.json").write_text(json.dumps({"shards": shards}))
    (wrong,) = read_sources(f"{upload(folder, 's3://bucket/wrong', '*[!x]')}/all.filelist.list")
    with pytest.raises(PartError, match="index.json says"):
        select_rows([wrong])
    assert len([*(tmp_path / "cache/stores").rglob("wrong/index.json@*/index.json")]) == 1


def test_what_a_filelist_names(tiny, store, tmp_path):
    upload(tiny.folder, "s3://bucket/set", "part-*.gz")
    expected = [path.name for path in read_sources(tiny.file_list)[0].parts]
    for number, lines in enumerate((["s3://bucket/set/part-*.gz"], [f"S3A://bucket/set/{name}" for name in expected])):
        write_filelist(tmp_path / f"{number}.filelist", lines)
        assert [path.name for path in read_sources(tmp_path / f"{number}.filelist")[0].parts] == expected
    client.put(tmp_path / "1.filelist", "s3://bucket/lists/a.filelist")
    write_filelist(tmp_path / "two.list", ["s3://bucket/lists/a.filelist 2", f"{tiny.folder}/tiny.filelist 1"])
    assert [source.weight for source in read_sources(tmp_path / "two.list")] == [2, 1]


@pytest.mark.parametrize(
    "line, message",
    [
        ("s3://bucket/set/none.gz", "line 1: there is no s3://bucket/set/none.gz; correct"),
        ("s3://bucket/none-*.gz", "line 1: there is no s3://bucket/none-"),
        ("s3://nobucket/part.gz", "line 1: there is no s3://nobucket"),
        ("https://me:secret@host/part.gz", "https://host/part.gz: an address with a password or a query"),
        ("https://host/part.gz?X-Amz-Signature=secret", "https://host/part.gz: an address with a password or a query"),
        ("s3://bucket/a/../part.gz", "is not a plain address"),
    ],
)
def test_lines_that_cannot_be(store, tmp_path, line, message):
    write_filelist(tmp_path / "a.filelist", [line])
    with pytest.raises((FilelistError, DataError, ConfigError), match=message) as raised:
        read_sources(tmp_path / "a.filelist")
    assert "secret" not in str(raised.value) and "\n" not in str(raised.value)


def test_a_part_that_changes_is_not_trained_on(tiny, store):
    url = upload(tiny.folder, "s3://bucket/set")
    (source,) = read_sources(f"{url}/tiny.filelist.list")
    client.put(tiny.folder / "part-00001.gz", f"{url}/part-00000.gz")
    with pytest.raises(DataError, match="s3://bucket/set/part-00000.gz has changed since this command began"):
        open_part(source.parts[0], source)


def make_parts(folder: Path, num_parts: int, rows: int, side: int = 8) -> Path:
    folder.mkdir()
    for part in range(num_parts):
        pictures = [encode(picture(part * rows + row, (side, side)), "PNG") for row in range(rows)]
        write_part(folder / f"part-{part:05}.gz", [Row(f"{part} {row}", one, {}) for row, one in enumerate(pictures)])
    write_filelist(folder / "all.filelist", [f"part-{part:05}.gz" for part in range(num_parts)])
    return folder / "all.filelist"


@pytest.mark.turn("a killed training loses nothing", 1)
@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_while_the_server_is_slow_and_killed(store, tmp_path, num_workers):
    file_list = make_parts(tmp_path / "set", 24, 140)
    url = upload(file_list.parent, "s3://bucket/set")
    options = {"max_steps": 200, "per_device_train_batch_size": 16, "logging_steps": 1, "save_steps": 1000}
    with registered_toy():
        train(tmp_path / "disk", file_list, **options)
        store.tell(latency=0.1, faults=["kill" if number in (30, 45) else "" for number in range(46)])
        train(tmp_path / "store", f"{url}/all.filelist", dataloader_num_workers=num_workers, **options)
    assert not store.faults_left()
    one, other = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").open()] for name in ("disk", "store")
    )
    names = ("loss", "data_crc32", "skipped_rows")
    assert len(one) == 200 and [[line[name] for name in names] for line in one] == [
        [line[name] for name in names] for line in other
    ]
