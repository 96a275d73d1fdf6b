"""Sets of URLs, with columns and names as published: the filter counts as the entry says, and pictures arrive."""

from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest
from dataset_files import SIDES, parquet_of, pictures

from ppldm.prepare import pipeline as pipelines
from ppldm.prepare.datasets import get as getting
from ppldm.prepare.datasets.entry import find_entry
from ppldm.prepare.datasets.get import Request, _describe_report, get_dataset
from ppldm.prepare.pipeline import make_stages, read_config
from ppldm.utils.files import write_json

COUNT = 240
_SAFE = (
    "laion/relaion2B-en-research-safe",
    "laion/relaion2B-multi-research-safe",
    "laion/relaion1B-nolang-research-safe",
)
_RESEARCH = tuple(name.removesuffix("-safe") for name in _SAFE)
# Name of the set -> its tables, as the entry lists them for `small`.
TABLES = {
    "laion-art": [("laion/laion-art", "laion-art.parquet")],
    "laion2b-en-aesthetic": [("ChristophSchuhmann/improved_aesthetics_4.5plus", "2B-en-4.5_1.parquet")],
    "coyo-700m": [("kakaobrain/coyo-700m", "data/part-00000.parquet")],
    "relaion-5b-research-safe": [(name, "part-00000.parquet") for name in _SAFE],
    "relaion-5b-research": [(name, "part-00000.parquet") for name in _RESEARCH],
    "hf:me/own": [("me/own", "data/a.parquet")],
}


def draw_rows(server_url: str, seed: int = 0) -> dict:
    """Values at and around each bound; one URL in seven leads nowhere."""
    rng = np.random.default_rng(seed)
    width, height = np.array([SIDES[i % 6] for i in range(COUNT)]).T
    width = np.where(np.arange(COUNT) % 12 == 11, rng.integers(510, 514, COUNT), width)
    return {
        "url": [f"{server_url}/p/{i % 7}.jpg" for i in range(COUNT)],
        "text": [f"caption {i}" for i in range(COUNT)],
        "width": width,
        "height": height,
        "similarity": rng.random(COUNT),
        "language": rng.choice(["en", "de"], COUNT, p=[0.8, 0.2]),
        "unsafe": rng.choice([0.97, 0.98, 0.99], COUNT),
        "aesthetic": rng.choice([4.4, 4.5, 8.1], COUNT),
    }


def columns_of(name: str, rows: dict) -> dict:
    """The rows under the names that the set's columns have."""
    if name.startswith("relaion"):
        return {"url": rows["url"], "caption": rows["text"]}
    if name == "hf:me/own":
        return {"link": rows["url"], "alt": rows["text"]}
    if name == "coyo-700m":
        scores = {"clip_similarity_vitb32": rows["similarity"], "aesthetic_score_laion_v2": rows["aesthetic"]}
        return {"id": range(COUNT)} | {key: rows[key] for key in ("url", "text", "width", "height")} | scores
    columns = {key.upper(): rows[key] for key in ("url", "text", "width", "height")}
    columns |= {"similarity": rows["similarity"], "hash": range(COUNT), "pwatermark": [0.1] * COUNT}
    columns |= {"punsafe": rows["unsafe"]}
    if name == "laion-art":
        return columns | {"LANGUAGE": rows["language"], "aesthetic": rows["aesthetic"]}
    return columns | {"AESTHETIC_SCORE": rows["aesthetic"]}


def wanted_of(name: str, rows: dict) -> np.ndarray:
    """Which rows the entry's filter is to keep, said once more."""
    large = np.minimum(rows["width"], rows["height"]) >= 512
    conditions = {
        "laion-art": large & (rows["language"] == "en"),
        "laion2b-en-aesthetic": large & (rows["unsafe"] <= 0.98) & (rows["aesthetic"] >= 4.5),
        "coyo-700m": large & (rows["aesthetic"] >= 4.5),
    }
    return conditions.get(name, np.ones(COUNT, bool))


def ask(name: str, world, folder, *overrides) -> tuple[Request, np.ndarray]:
    """(the request of a set that a server has, which of a table's rows pass the filter)."""
    server = world({("", f"p/{number}.jpg"): image for number, image in enumerate(pictures(0))})
    server.gated = {*_SAFE, *_RESEARCH}
    rows = draw_rows(server.url)
    server.files |= dict.fromkeys(TABLES[name], parquet_of(columns_of(name, rows)))
    overrides = ("download.refuse_private=false", *overrides)
    entry = find_entry(name, columns={"url": "link", "caption": "alt"} if name == "hf:me/own" else {})
    return Request(entry, "small", folder / "out", num_workers=1, overrides=overrides), wanted_of(name, rows)


@pytest.mark.parametrize("name", TABLES)
def test_the_plan_of_a_set(name, world, tmp_path, monkeypatch):
    """Its pipeline can be run, and its filter keeps the rows of the published conditions."""
    planned = {}

    def plan(file, overrides):
        stages = make_stages(read_config(file, overrides))
        planned.update({stage.name: stage.arguments for stage in stages}, counts=stages[0].finish())
        pipelines.check_stages(stages)
        report = {"stages": {}, "file_list": str(tmp_path / "none.list")}
        write_json(tmp_path / "out/pipeline/report.json", report)

    monkeypatch.setattr(pipelines, "pipeline", plan)
    monkeypatch.setattr("ppldm.prepare.datasets.get._verify", lambda *_: None)
    request, wanted = ask(name, world, tmp_path)
    get_dataset(request)
    counts, tables = planned["counts"], len(TABLES[name])
    assert (counts.rows_in, counts.rows_out) == (COUNT * tables, wanted.sum() * tables)
    assert len(planned["filter"]["input"]) == tables and planned["convert"]["name"] == request.name
    assert planned["download"].get("part_id", 0) == (1 if name == "laion-art" else 0)


@pytest.mark.parametrize("name", ["laion-art", "coyo-700m", "relaion-5b-research-safe", "hf:me/own"])
def test_rows_under_the_least_size_are_not_downloaded(name, world, tmp_path, monkeypatch):
    planned = {}
    monkeypatch.setattr(pipelines, "pipeline", lambda file, words: planned.update(read_config(file, words).stages))
    monkeypatch.setattr(getting, "read_json", lambda path: {"stages": {}, "file_list": "x"})
    request, _ = ask(name, world, tmp_path)
    table = request.out / "a.parquet"
    table.parent.mkdir()
    table.touch()
    getting._run_pipeline(replace(request, min_size=700, short_side=640), [table])
    filters = {name: planned["filter"].get(name) for name in ("min_width", "min_height")}
    assert filters == dict.fromkeys(filters, None if name.startswith(("relaion", "hf:")) else 700)
    assert (planned["download"]["min_image_size"], planned["download"]["image_size"]) == (700, 640)
    assert planned["convert"]["min_size"] == 700


@pytest.mark.turn("pictures of addresses become a data set", 1)
@pytest.mark.slow
def test_pictures_of_urls_arrive_and_are_trained_on(world, tmp_path, pytestconfig):
    """Of one set, chosen by --seed."""
    from toy import registered_toy
    from toy_runs import train

    name = list(TABLES)[pytestconfig.getoption("--seed") % len(TABLES)]
    two_parts = ("filter.num_partitions=2",) if name == "laion-art" else ()
    request, wanted = ask(name, world, tmp_path, "download.processes_count=1", "download.preflight=0", *two_parts)
    report = get_dataset(request)
    stages, tables = report["stages"], [*(tmp_path / "out/pipeline/metadata").glob("part_*.parquet")]
    assert stages["filter"]["rows_out"] == wanted.sum() * len(TABLES[name])
    assert report.get("parts") == ([[1], 2] if two_parts else None)
    column = "link" if name == "hf:me/own" else "URL"
    taken = [path for path in tables if not two_parts or path.stem == "part_1"]
    numbers = [int(url.as_py()[-5]) for path in taken for url in pq.read_table(path)[column]]
    there = [number for number in numbers if number < 6]
    assert (stages["download"]["rows_in"], stages["download"]["rows_out"]) == (len(numbers), len(there))
    # What is small the filter leaves out where the metadata has sizes, and convert where it has none.
    least = 256 if name.startswith(("relaion", "hf:")) else 0
    large = [number for number in there if min(SIDES[number]) >= least]
    assert stages["convert"]["rows_out"] == len(large) > 0
    assert get_dataset(request) == report
    with registered_toy():
        train(tmp_path / "run", report["file_list"], max_steps=20)
    assert (tmp_path / "run/model").is_dir()


def test_a_part_of_a_set_is_named_as_such():
    report = {"name": "laion-art", "size": "small", "files": 1, "bytes": 0, "file_list": "x"}
    told = [
        _describe_report(report | {"parts": parts}, find_entry("laion-art")) for parts in ([[1, 3], 3], [[1, 2], 2])
    ]
    assert "part 1, 3 of 3 is there; the same command with download.part_id=2 adds another" in told[0]
    assert "part 1, 2 of 2 is there\n" in told[1]


@pytest.mark.turn("pictures of addresses become a data set", 1)
@pytest.mark.slow
def test_a_second_part_is_added_to_the_first(world, tmp_path):
    quick = "download.processes_count=1", "download.preflight=0", "filter.num_partitions=2"
    request, _ = ask("laion-art", world, tmp_path, *quick)
    one = get_dataset(request)
    both = get_dataset(replace(request, overrides=(*request.overrides, "download.part_id=2")))
    assert (one["parts"], both["parts"]) == ([[1], 2], [[1, 2], 2])
    stages = both["stages"]
    assert stages["download"]["rows_in"] == stages["filter"]["rows_out"] > one["stages"]["download"]["rows_in"]
    assert stages["convert"]["rows_in"] == stages["download"]["rows_out"]
