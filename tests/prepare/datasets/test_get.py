"""Every set of the registry, played in miniature with its real names: it arrives, counted to the row, and once."""

import io
import json
import os
from contextlib import closing
from dataclasses import replace

import dataset_files
import numpy as np
import pytest
from dataset_files import SETS, SIDES, parquet_of, pictures, tar_of
from PIL import Image
from web import encode

from ppldm.cli.main import run
from ppldm.data.filelist import read_sources
from ppldm.data.formats.part import Part
from ppldm.prepare.datasets import get as getting
from ppldm.prepare.datasets.entry import Source, find_entry
from ppldm.prepare.datasets.get import Request, _describe_projection, get_dataset, map_files, project
from ppldm.utils.errors import ConfigError, DataError, EnvironmentProblem
from ppldm.utils.files import write_json
from ppldm.utils.stages import run_stage

# Of what small is, so many that the tests are quick.
FEWER = {"cc12m": "cc12m-train-{0000..0002}.tar", "diffusiondb": "diffusiondb-large-part-1/part-{000001..000003}.zip"}


# Those of the published recipes; of CC12M as they are, for they are cleaned while training.
CAPTIONS = {
    "coco-val2014": [f"first of {i}" for i in (0, 1, 3, 4, 5)],
    "textcaps": [f"first of {i}" for i in (0, 1, 3, 4)],
    "journeydb": [f"prompt 00{tar}/{tar}-{i}.jpg --v 5" for tar in (0, 1) for i in (0, 1, 3, 4, 5)],
    "cc12m": ["A Cat, Stock Photo"],
}


def over_http(sources: tuple[Source, ...]) -> tuple[Source, ...]:
    """Addresses that a plain proxy can serve."""
    return tuple(replace(one, all=tuple(name.replace("https://", "http://") for name in one.all)) for one in sources)


def ask(name, folder, server, **options) -> Request:
    entry = find_entry(name)
    entry = replace(entry, pictures=over_http(entry.pictures), captions=over_http(entry.captions))
    if entry.pictures[0].links and "links" not in options:
        links = [f"{name}\thttp://links.example/{name}" for host, name in server.files if host == "links.example"]
        (folder / "links.txt").write_text("\n".join(["file_name\tcdn_link", *links]))
        options["links"] = str(folder / "links.txt")
    if name in FEWER:
        entry = replace(entry, pictures=(replace(entry.pictures[0], small=(FEWER[name],)),))
    return Request(entry, "small", folder / "out", num_workers=1, **options)


def read_rows(file_list) -> list:
    rows = []
    for source in read_sources(file_list):
        for path in source.parts:
            with closing(Part(path)) as part:
                rows += [part.read(row) for row in range(len(part))]
    return rows


def content_of(folder) -> dict:
    return {str(path): path.read_bytes() for path in sorted((folder / "data").rglob("*.gz"))}


def _check_bicubic(rows) -> None:
    """Of pictures as smooth as these, filters differ by less than the encoding does: bytes tell."""
    shrunk = next(row for row in rows if row.meta["original_width"] == 900)
    original = Image.open(io.BytesIO(dataset_files.pictures(0)[4])).convert("RGB")
    size = shrunk.meta["width"], shrunk.meta["height"]
    filters = Image.Resampling.BICUBIC, Image.Resampling.LANCZOS
    bicubic, lanczos = (encode(original.resize(size, one), quality=95) for one in filters)
    assert shrunk.image == bicubic != lanczos


@pytest.mark.parametrize("name", SETS)
def test_a_set_arrives_counted_to_the_row_and_once(name, world, tmp_path):
    make, rows_in, rows_out, left_out = SETS[name]
    server = world(make())
    server.gated = {"JourneyDB/JourneyDB"}
    server.busy, server.drops = 1, 1
    request = ask(name, tmp_path, server)
    report = get_dataset(request)
    converted = report["converted"]
    assert converted["rows_out"] == rows_out
    assert converted["rows_in"] == rows_out + sum(converted["skipped"].values())
    if "extracted" in report:
        assert report["extracted"] == {"rows_in": rows_in, "rows_out": converted["rows_in"], "skipped": left_out}
    assert converted["skipped"].keys() <= {"too_small"}
    # No byte was sent twice, whatever broke off.
    wanted = {key for key in server.files if server.sent[key]}
    assert all(server.sent[key] == len(server.files[key]) for key in wanted)
    rows = read_rows(report["file_list"])
    assert len(rows) == rows_out and all(row.caption for row in rows)
    for row in rows:
        assert 256 <= min(row.meta["width"], row.meta["height"]) <= 512
        assert (row.meta["original_width"], row.meta["original_height"]) in SIDES
    if name in CAPTIONS:
        assert sorted({row.caption for row in rows}) == CAPTIONS[name]
    if name == "coco-val2014":
        _check_bicubic(rows)
    # Twice the command is once the data, without the network.
    before, sent = content_of(tmp_path / "out"), server.sent.total()
    server.files.clear()
    assert get_dataset(replace(request, links="")) == report and content_of(tmp_path / "out") == before
    assert server.sent.total() == sent
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and "out" in path.parts)
    assert server.token.encode() not in everything


def test_the_command_says_what_came_and_how_to_train_on_it(world, tmp_path, monkeypatch, capsys):
    request = ask("coco-val2014", tmp_path, world(SETS["coco-val2014"][0]()))
    monkeypatch.setattr(getting, "find_entry", lambda *given: request.entry)
    words = ["dataset", "get", "coco-val2014", "small", "--out", str(request.out), "--num-workers", "1"]
    run([*words, "--dry-run"])
    assert "nothing was written" in capsys.readouterr().out and not request.out.exists()
    run(words)
    told = capsys.readouterr().out
    run([*words, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert f"converted: {report['converted']['rows_out']} of {report['converted']['rows_in']} rows" in told
    assert f"for ppldm train: --file_list {report['file_list']}" in told


def test_a_gate_says_what_to_do_and_the_folder_stays_free(world, tmp_path):
    server = world(SETS["journeydb"][0]())
    server.gated, os.environ["HF_TOKEN"] = {"JourneyDB/JourneyDB"}, "hf_mistaken"
    request = ask("journeydb", tmp_path, server)
    for work in (get_dataset, project):
        with pytest.raises(DataError, match="accept the terms at https://huggingface.co/datasets/JourneyDB.*HF_TOKEN"):
            work(request)
    os.environ["HF_TOKEN"] = server.token
    assert get_dataset(request)["converted"]["rows_out"] == 10


def test_expired_links_are_renewed_by_the_same_command(world, tmp_path):
    server = world(SETS["sa1b"][0]())
    with pytest.raises(ConfigError, match="list of links that expire; get it at https://ai.meta.com.*--links FILE"):
        get_dataset(ask("sa1b", tmp_path, server, links=""))
    server.refused = {"sa_000003.tar"}
    request = ask("sa1b", tmp_path, server)
    with pytest.raises(
        DataError, match=r"link of sa_000003.tar is refused \(403\).*get a new list at .*what has arrived"
    ):
        get_dataset(request)
    stored = json.loads((tmp_path / "out/.dataset/files.json").read_text())
    assert not any(file["url"] for file in stored["pictures"])
    server.refused, sent = set(), server.sent["links.example", "sa_000000.tar"]
    assert get_dataset(request)["converted"]["rows_out"] == 13
    assert server.sent["links.example", "sa_000000.tar"] == sent


def test_a_projection_writes_nothing_and_knows_what_is_left(world, tmp_path):
    server = world(SETS["journeydb"][0]())
    request = ask("journeydb", tmp_path, server)
    plan = project(request)
    names = ["data/train/imgs/000.tgz", "data/train/imgs/001.tgz", "data/train/train_anno_realease_repath.jsonl.tgz"]
    assert plan["bytes_left"] == sum(len(server.files["JourneyDB/JourneyDB", name]) for name in names)
    assert plan["files_left"] == 3 and not request.out.exists()
    # Archives go once their rows are there, and are not fetched again.
    request = replace(request, remove_archives=True)
    report = get_dataset(request)
    assert not list((tmp_path / "out/source").rglob("*.tgz"))
    sent = server.sent.total()
    assert project(request)["bytes_left"] == 0
    assert get_dataset(request) == report and server.sent.total() == sent


def test_a_projection_without_a_network_is_of_what_is_published(world, tmp_path, monkeypatch):
    request = ask("coco-val2014", tmp_path, world({}))
    monkeypatch.setattr("ppldm.prepare.datasets.get.measure_speed", _unreachable)
    plan = project(request)
    # One archive, which is fetched whole for `small` too.
    assert plan["bytes_left"] == 6e9 and "no way" in plan["unreachable"] and not request.out.exists()
    told = _describe_projection(plan)
    assert "about 6.00 GB to fetch, as published, " in told and told.endswith(
        "nothing was written; not asked, no way; wait"
    )
    assert project(replace(request, entry=replace(request.entry, small_rows=0)))["bytes_left"] == 6e7
    with pytest.raises(EnvironmentProblem):
        project(replace(request, entry=replace(request.entry, gigabytes=None)))


def _unreachable(file):
    raise EnvironmentProblem("no way; wait")


@pytest.mark.slow
def test_latents_are_made_at_the_end_where_asked_for(world, tmp_path, tiny, monkeypatch):
    server = world(SETS["coco-val2014"][0]())
    monkeypatch.setattr(getting, "run_stage", run_stage)
    words = ("--vae", str(tiny.vae), "--resolutions", "32", "--num-workers", "1")
    report = get_dataset(ask("coco-val2014", tmp_path, server, precompute=words))
    (latents,) = (tmp_path / "out/data").rglob("*latents*")
    assert latents.stat().st_size > 0 and len(read_rows(report["file_list"])) == report["converted"]["rows_out"]


def hub_files(kind: str) -> dict:
    """Six pictures with captions, as data sets of the hub have them."""
    images = pictures(0)
    content = {
        "parquet": {"d/a.parquet": parquet_of({"photo": [{"bytes": one} for one in images], "alt": ["a cat"] * 6})},
        "tar": {"a.tar": tar_of({f"{i}.{end}": x for i, one in enumerate(images) for end, x in _sample(one)})},
        "csv": {"all.csv": "".join(["file_name,text\n", *(f"im/{i}.jpg,a cat\n" for i in range(6))]).encode()},
    }[kind]
    if kind == "csv":
        content |= {f"im/{i}.jpg": one for i, one in enumerate(images)}
    return {("me/own", name): one for name, one in content.items()}


def _sample(image: bytes) -> list[tuple[str, bytes]]:
    return [("jpg", image), ("txt", b"a cat")]


@pytest.mark.parametrize("kind", ["parquet", "tar", "csv"])
def test_any_data_set_of_the_hub(kind, world, tmp_path):
    server = world(hub_files(kind))
    columns = {"image": "photo", "caption": "alt"} if kind == "parquet" else {}
    entry = find_entry("hf:me/own", ["*.csv", "im/*"] if kind == "csv" else [], columns)
    request = Request(entry, "all", tmp_path / "out", num_workers=1)
    report = get_dataset(request)
    assert report["files"] == len(server.files) and report["converted"]["skipped"] == {"too_small": 1}
    assert [row.caption for row in read_rows(report["file_list"])] == ["a cat"] * 5
    server.files.clear()
    assert get_dataset(request) == report


@pytest.mark.parametrize("least, side", [(0, 0), (300, 280), (None, 64), (260, None)])
def test_sizes_are_those_that_were_asked_for(least, side, world, tmp_path):
    server = world(hub_files("tar"))
    request = Request(find_entry("hf:me/own"), "all", tmp_path / "out", num_workers=1, min_size=least, short_side=side)
    report = get_dataset(request)
    sides = [min(one) for one in SIDES if min(one) >= (256 if least is None else least)]
    rows = read_rows(report["file_list"])
    found = sorted(min(row.meta["width"], row.meta["height"]) for row in rows)
    limit = 512 if side is None else side or max(sides)
    assert found == sorted(min(one, limit) for one in sides) and report["converted"]["rows_in"] == len(SIDES)
    server.files.clear()
    with pytest.raises(ConfigError, match="holds another data set.*short_side"):
        get_dataset(replace(request, short_side=100))


def test_nothing_to_do_starts_nothing():
    assert map_files([], 1, "spark://nowhere:1") == []


def test_another_set_does_not_get_the_folder(world, tmp_path):
    server = world(SETS["journeydb"][0]())
    request = ask("journeydb", tmp_path, server)
    with request.job.claimed(request.settings):
        write_json(request.job.record_path("files"), {"pictures": [], "captions": []})
    with pytest.raises(ConfigError, match="holds another data set .*size was 'small' and is 'all'"):
        get_dataset(replace(request, size="all"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_a_set_is_trained_on(name, world, tmp_path):
    from toy import registered_toy
    from toy_runs import train

    server = world(SETS[name][0]())
    file_list = get_dataset(ask(name, tmp_path, server))["file_list"]
    with registered_toy():
        train(tmp_path / "run", file_list, max_steps=20)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert (tmp_path / "run/model").is_dir() and all(np.isfinite(line["loss"]) for line in lines if "loss" in line)
