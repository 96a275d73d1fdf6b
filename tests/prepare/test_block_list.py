"""Laws: rows in = rows kept + rows by reason; the same list leaves the same rows at whatever stage it is given; the
same command again changes nothing, and another list is another job."""

import gzip
import hashlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import web
from downloads import SETTINGS, write_metadata
from filelists import read_filelist
from hypothesis import given
from hypothesis import strategies as st

from ppldm.data.formats.part import Part
from ppldm.prepare.block_list import BlockList, read_block_list
from ppldm.prepare.convert.convert import convert, convert_source
from ppldm.prepare.convert.reencode import Treatment
from ppldm.prepare.download.download import download
from ppldm.prepare.download.failures import classify
from ppldm.prepare.download.fetch import Fetcher, FetchSettings
from ppldm.prepare.filter.filter import filter
from ppldm.prepare.provenance.forget import forget
from ppldm.utils.errors import ConfigError
from ppldm.utils.pictures import save_png

HEX = hashlib.sha256(b"").hexdigest()


def metas(data) -> list[dict]:
    parts = [Part(path) for path in read_filelist(data / "custom.filelist")]
    return [part.read(row).meta for part in parts for row in range(len(part))]


def test_lines_are_urls_and_hashes_and_nothing_else(tmp_path):
    path, packed = tmp_path / "list.txt", tmp_path / "list.gz"
    path.write_text(f"\ufeff# illegal\n\nhttp://a/1.jpg\r\n  HTTPS://b/?x=1#2 \nsha256:{HEX.upper()}\n", "utf-8")
    packed.write_bytes(gzip.compress(b"http://a/2.jpg\nhttp://a/1.jpg"))
    one = read_block_list(str(path))
    assert one == BlockList(frozenset(["http://a/1.jpg", "HTTPS://b/?x=1#2"]), frozenset([HEX]))
    both = read_block_list([str(path), str(packed)])
    assert both.urls == one.urls | {"http://a/2.jpg"} and both.settings != one.settings
    assert read_block_list(None).settings == {} and not read_block_list(None).names("http://a/1.jpg", HEX)
    for line in ("example.com", "sha256:12", f"md5:{HEX}", HEX, "http://"):
        path.write_text(f"http://a/1.jpg\n{line}\n")
        with pytest.raises(ConfigError, match="line 2 of"):
            read_block_list(str(path))
    path.write_text("# nothing\n")
    for name in (str(path), str(tmp_path / "absent"), str(tmp_path)):
        with pytest.raises(ConfigError, match="block-list"):
            read_block_list(name)


@given(st.permutations(["http://a", "http://b", "http://c"]), st.permutations([HEX, "0" * 64]))
def test_the_key_is_of_the_entries_and_not_of_their_order(urls, hashes):
    assert (
        BlockList(frozenset(urls), frozenset(hashes)).settings
        == BlockList(frozenset(sorted(urls)), frozenset(sorted(hashes))).settings
    )
    assert BlockList(frozenset(urls[:2])).settings != BlockList(frozenset(urls)).settings


@pytest.mark.parametrize("options", [{}, {"no_shuffle": True, "where": "TEXT != 't3'"}, {"dedup": "url"}], ids=str)
def test_the_filter_leaves_out_what_is_on_the_list_and_nothing_else(tmp_path, options, capsys):
    urls = [None if row % 7 == 0 else f"http://x/{row % 20}.jpg?a='ü'" for row in range(60)]
    table = pa.table({"URL": pa.array(urls, pa.string()), "TEXT": [f"t{row % 5}" for row in range(60)]})
    pq.write_table(table, tmp_path / "part_1.parquet")
    blocked = {"http://x/3.jpg?a='ü'", "http://x/8.jpg?a='ü'", "http://elsewhere/"}
    (tmp_path / "list").write_text("\n".join([*blocked, f"sha256:{HEX}"]), "utf-8")
    places = {name: str(tmp_path / name) for name in ("with", "without")}
    source = [str(tmp_path / "part_1.parquet")]
    filter(source, places["without"], json=True, **options)
    filter(source, places["with"], block_list=[str(tmp_path / "list")], json=True, **options)
    capsys.readouterr()
    rows = {name: pq.read_table(f"{place}/part_1.parquet").to_pylist() for name, place in places.items()}
    assert rows["with"] == [row for row in rows["without"] if row["URL"] not in blocked]
    manifest = json.loads((tmp_path / "with/manifest.json").read_text())
    first = manifest["dropped"][0]
    assert first["condition"].startswith("not on block list") and first["missing"] == 0
    assert first["rows"] == sum(url in blocked for url in urls) > 0
    assert manifest["rows_in"] == manifest["rows_out"] + sum(entry["rows"] for entry in manifest["dropped"])
    filter(source, places["with"], block_list=[str(tmp_path / "list")], json=True, **options)
    assert json.loads((tmp_path / "with/manifest.json").read_text()) == manifest
    (tmp_path / "list").write_text("http://x/4.jpg?a='ü'", "utf-8")
    with pytest.raises(ConfigError.__mro__[1], match="--redo"):
        filter(source, places["with"], block_list=[str(tmp_path / "list")], **options)


def test_a_blocked_url_is_not_fetched_and_a_blocked_file_not_kept():
    with web.serve() as server:
        urls = [server.url(f"good/{number}.jpg") for number in range(3)]
        body = web.encode(web.picture(1))
        blocked = BlockList(frozenset(urls[:1]), frozenset([hashlib.sha256(body).hexdigest()]))
        settings = FetchSettings(5, 0, 30, 10**6, refuse_private=False, blocked=blocked)
        fetched = dict(Fetcher(settings).fetch_all(dict(enumerate(urls)), 1))
        found = [
            one == web.encode(web.picture(2)) or classify("failed_to_download", str(one)) for one in fetched.values()
        ]
        assert found == ["blocked", "blocked", True]
        assert not any(path.endswith("/0.jpg") for path in server.hits) and len(server.hits) == 2


def test_convert_with_a_list_is_convert_and_then_forget(tmp_path, capsys):
    source = tmp_path / "in"
    source.mkdir()
    for row in range(9):
        save_png(source / f"{row:04}.png", np.full((8, 8, 3), row * 20, np.uint8))
        (source / f"{row:04}.txt").write_text(f"picture {row}")
        (source / f"{row:04}.json").write_text(json.dumps({"url": f"http://a/{row}.png", "sha256": f"{row:064}"}))
    (source / "0008.png").write_bytes(b"no picture")
    digest = hashlib.sha256((source / "0005.png").read_bytes()).hexdigest()
    lines = ["http://a/1.png", "http://a/8.png", f"sha256:{digest}", "http://a/none"]
    (tmp_path / "list").write_text("\n".join(lines))
    options = {"rows_per_part": 2, "num_workers": 1}
    convert(str(source), str(tmp_path / "one"), block_list=[str(tmp_path / "list")], **options)
    convert_source(source, tmp_path / "two", **options)
    forget(str(tmp_path / "two"), block_list=[str(tmp_path / "list")], num_workers=1)
    kept = metas(tmp_path / "one")
    assert kept == metas(tmp_path / "two") and [meta["key"] for meta in kept] == [
        f"000{row}" for row in (0, 2, 3, 4, 6, 7)
    ]
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("one", "two")]
    # A row on the list is counted as such, whether or not its picture can be read.
    assert manifests[0]["skipped"] == {"blocked": 3} and manifests[1]["skipped"] == {"forgotten": 2, "image": 1}
    assert all(one["rows_in"] == one["rows_out"] + sum(one["skipped"].values()) == 9 for one in manifests)
    # Nothing comes back, and another list is another job.
    convert_source(source, tmp_path / "two", **options)
    assert metas(tmp_path / "two") == kept
    with pytest.raises(ConfigError, match="block_list"):
        convert_source(source, tmp_path / "one", **options)
    convert_source(source, tmp_path / "one", redo=True, **options)
    assert len(metas(tmp_path / "one")) == 8
    # Where pictures are encoded anew, what came, what its download says and what would be written are all compared.
    smaller = convert_source(source, tmp_path / "small", treatment=Treatment(size=4), **options)
    small = metas(tmp_path / "small")
    for name, entry in (("came", digest), ("said", f"{2:064}"), ("written", small[5]["sha256"])):
        blocked = BlockList(hashes=frozenset([entry]))
        made = convert_source(source, tmp_path / name, treatment=Treatment(size=4), blocked=blocked, **options)
        assert made["skipped"]["blocked"] == 1 and made["rows_out"] == smaller["rows_out"] - 1
        assert (small[2 if name == "said" else 5]) not in metas(tmp_path / name)
    capsys.readouterr()


@pytest.mark.slow
def test_the_same_list_leaves_the_same_rows_at_every_stage(tmp_path, capsys):
    with web.serve() as server:
        urls = [server.url(f"good/{number}.jpg") for number in range(24)]
        metadata = write_metadata(tmp_path / "part_1.parquet", urls)
        lists = {"urls": urls[3:7] + ["http://elsewhere/"]}
        lists["files"] = [f"sha256:{hashlib.sha256(web.encode(web.picture(n))).hexdigest()}" for n in (1, 9)]
        for kind, lines in lists.items():
            (tmp_path / kind).write_text("\n".join(lines))
            gone = set(urls[3:7]) if kind == "urls" else {urls[1], urls[9]}
            left, named = set(), [str(tmp_path / kind)]
            for stage in ("filter", "download", "convert", "forget")[kind == "files" :]:
                out = tmp_path / f"{kind}-{stage}"
                flags = {
                    name: {"block_list": named} if stage == name else {} for name in ("filter", "download", "convert")
                }
                for _ in range(2):  # the second time, nothing changes
                    filter([str(metadata)], f"{out}/m", **flags["filter"])
                    capsys.readouterr()
                    download(f"{out}/m", f"{out}/i", **SETTINGS, **flags["download"])
                    report = json.loads(capsys.readouterr().out)
                    convert(f"{out}/i", f"{out}/d", num_workers=1, **flags["convert"])
                    assert report["rows"] == report["success"] + sum(report["failed"].values())
                    assert report["failed"] == ({"blocked": len(gone)} if stage == "download" else {})
                if stage == "forget":
                    forget(f"{out}/d", block_list=named, num_workers=1)
                left.add(frozenset((meta["url"], meta["sha256"]) for meta in metas(out / "d")))
            assert len(left) == 1 and {url for url, _ in left.pop()} == set(urls) - gone
