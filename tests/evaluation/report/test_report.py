"""`ppldm report`: all that a run's folder says, in one file that loads nothing; the sweep of guidance scales."""

import json
import re

import numpy as np
import pytest
from browser import browser
from hypothesis import given, settings
from hypothesis import strategies as st
from legible import OVERFLOWS

from ppldm.evaluation.report import page
from ppldm.evaluation.report.read_run import Run, read_run, training_hours
from ppldm.evaluation.report.report import report
from ppldm.evaluation.report.sweep import read_sweep
from ppldm.evaluation.result import FORMAT
from ppldm.utils.errors import ConfigError, DataError
from ppldm.utils.files import write_json
from ppldm.utils.pictures import save_png

HOSTILE = "</pre><script>alert('x')</script>&<img src=http://example.com/x.png>"


def make_run(folder, caption_drop=0.1, steps=40):
    """What training leaves in a run's folder, its words hostile."""
    checkpoint, samples = folder / f"checkpoint-{steps}", folder / "samples"
    checkpoint.mkdir(parents=True)
    samples.mkdir()
    write_json(folder / "run.json", {"family": "ldm", "data": {"file_list": HOSTILE, "caption_drop": caption_drop}})
    identity = {"rows": 80, "global_batch_size": 4, "precision": "float32"}
    write_json(checkpoint / "manifest.json", {"identity": identity, "machine": {"device": "a CPU", "ranks": 2}})
    (folder / "recipe.yaml").write_text(f"family: ldm  # {HOSTILE}\n")
    quarters = {f"loss_quarter_{number}": 1 / number for number in range(1, 5)}
    speed = {"images_per_second": 8.0, "images_per_second_per_device": 4.0, "avg_batch_cost": 9.0}
    records = [
        {"global_step": step, "time": 1e9 + 1000 * step, "loss": None if step == 2 else 1 / step, **quarters, **speed,
         "skipped_rows": 3, "skipped_rows_image": 3, "skipped_updates": 1}
        for step in range(2, steps + 1, 2)
    ]  # fmt: skip
    records[4]["validation_loss"] = records[-1]["validation_loss"] = 0.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    evaluations = [
        {"global_step": step, "guidance_scale": scale, "frechet:pixels": 3 / step, "frechet:pixels_low": 2 / step,
         "frechet:pixels_high": 4 / step}
        for step in (20, 40) for scale in (1.0, 3.0)
    ]  # fmt: skip
    (folder / "evaluation.jsonl").write_text("".join(json.dumps(record) + "\n" for record in evaluations))
    for step in range(1, 21):
        picture = np.full((20, 30, 3), 12 * step, np.uint8)
        save_png(samples / f"step-{2 * step:06d}-samples <7.5>.png", picture)
    save_png(folder / "buckets.png", np.zeros((400, 1200, 3), np.uint8))
    return folder


def make_result(path, scale, distance, score=None, name="a model"):
    metrics = {"fid": {"value": distance, "low": distance - 1, "high": distance + 1, "details": {}}}
    if score:
        metrics["clip_score"] = {"value": score, "low": score - 0.5, "high": score + 0.5, "details": {}}
    drawn = {} if scale is None else {"guidance_scale": scale}
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"format": FORMAT, "of": {"name": name}, "settings": {"drawn": drawn}, "metrics": metrics})
    return str(path)


@pytest.fixture
def runs(tmp_path):
    return [str(make_run(tmp_path / "first <b>")), str(make_run(tmp_path / "second", caption_drop=0.0))]


@pytest.fixture
def results(tmp_path):
    points = {8: (30, 27.8), 1.5: (75, 20), 3: (61, 26.4)}
    return [make_result(tmp_path / "results" / f"g{scale:g}.json", scale, *point) for scale, point in points.items()]


def loaded(html: str) -> list[str]:
    """Whatever a browser would fetch for it."""
    found = re.findall(r"""(?:src|href|srcset|poster|action|data)\s*=\s*["']([^"']*)""", html)
    found += re.findall(r"""url\(\s*["']?([^"')]*)""", html) + re.findall(r"@import[^;]*", html)
    return [one for one in found if not one.startswith(("data:", "#"))]


def test_a_page_of_two_runs_and_a_sweep_loads_nothing_and_shows_words_as_words(runs, results, tmp_path):
    report(runs, results, str(tmp_path / "report.html"))
    html = (tmp_path / "report.html").read_text()
    assert not loaded(html) and "default-src 'none'" in html
    assert "<script" not in html and "<b>" not in html and "first &lt;b&gt;" in html
    assert "&lt;script&gt;" in html
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(ids) == len(set(ids)) and html.count("<svg") == 5  # losses, a metric, quarters of both runs, the sweep
    assert {one for one in re.findall(r"url\(#([^)]*)\)", html)} <= set(ids)
    for words in ("held out", "frechet:pixels", "guidance 3", "quarter 4 (most)", "clip score"):
        assert words in html
    again = tmp_path / "again.html"
    report(runs, results, str(again))
    assert again.read_text() == html


def test_a_report_lies_with_its_first_run_and_a_sweep_where_one_is(runs, results, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    report(runs)
    assert [run for run in runs if page.Path(run, "report.html").is_file()] == runs[:1]
    assert not list((tmp_path / "here").iterdir())
    report((), results)
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["report.html"]


def test_what_would_be_loaded_is_found():
    assert loaded('<img src="http://a/b.png"><style>p{background:url(x.png)}</style><a href="#b">') == [
        "http://a/b.png",
        "x.png",
    ]


def test_what_a_run_says_of_itself(runs):
    run = read_run(page.Path(runs[0]))
    assert run.name == "first <b>" and run.settings["data.caption_drop"] == 0.1
    assert run.facts["Samples"] == "160 in batches of 4" and run.facts["Epochs"] == "2"
    assert run.facts["Skipped"] == "3 rows, 1 updates (image 3)"
    assert run.facts["Machine"] == "device a CPU, ranks 2"
    assert run.facts["Cost"] == "0.2 device hours (2 devices)"
    assert [step for step, _ in run.samples["samples <7.5>"]] == list(range(2, 41, 2))


@pytest.mark.parametrize("devices", [1, 8])
def test_pauses_between_starts_cost_nothing(devices):
    speed = {"images_per_second": 8.0 * devices, "images_per_second_per_device": 8.0, "avg_batch_cost": 3.6}
    records = [{"global_step": step, "time": 1e6 * step, **speed} for step in (500, 1000)]
    records.insert(1, {"global_step": 600, "time": 0, "validation_loss": 1.0})
    assert training_hours(records) == (pytest.approx(1.0), devices)


def test_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"global_step": 1, "time": 1.0, "loss": 2.0, "psnr": 20.0}\n')
    report([str(tmp_path)], (), str(tmp_path / "report.html"))
    assert (tmp_path / "report.html").read_text().count("<svg") == 2  # loss and PSNR


@pytest.mark.parametrize("count", [1, 2, 8, 9, 100])
def test_a_strip_has_the_first_and_the_last_picture(tmp_path, count):
    save_png(tmp_path / "one.png", np.zeros((4, 4, 3), np.uint8))
    steps = [step for step, _ in page.strip([(number, tmp_path / "one.png") for number in range(count)])]
    assert steps == sorted(set(steps)) and steps[0] == 0 and steps[-1] == count - 1
    assert len(steps) == min(count, 8)


def test_a_large_picture_is_made_smaller(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, size=(600, 1800, 3), dtype=np.uint8)
    save_png(tmp_path / "large.png", noise)
    assert page.data_url(tmp_path / "large.png").startswith("data:image/jpeg")
    assert len(page.data_url(tmp_path / "large.png")) < 600_000


def test_settings_that_differ(runs):
    both = [read_run(page.Path(run)) for run in runs]
    assert page.differing(both) == [("data.caption_drop", [0.1, 0.0])] and not page.differing(both[:1])


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([None, 0, 0.5, "x", False]), max_size=6),
        min_size=2, max_size=4,
    )
)  # fmt: skip
def test_a_setting_differs_where_a_run_sets_it_and_another_sets_it_otherwise_or_not_at_all(configs):
    """What no run sets is no difference, whether a family has the setting or not."""
    found = dict(page.differing([Run("", [], settings=one) for one in configs]))
    for name in {name for one in configs for name in one}:
        values = [one.get(name) for one in configs]
        assert (name in found) == any(value != values[0] for value in values)
        assert name not in found or any(value is not None for value in found[name])


def test_a_model_that_draws_is_not_compared_with_an_autoencoder(tmp_path):
    runs = [Run(name, [], settings={"family": name, "seed": number}) for number, name in enumerate("ldm uvit".split())]
    autoencoder = Run("vae", [], settings={"family": "autoencoder", "seed": 7})
    assert page.of_one_kind([autoencoder, *runs]) == [[autoencoder], runs]
    assert "Settings that differ" not in page.make_page([autoencoder, *runs[:1]], [])
    assert "Settings that differ" in page.make_page([autoencoder, *runs], [])


def test_a_run_that_was_stopped_counts_the_updates_of_its_last_checkpoint(tmp_path):
    assert read_run(make_run(tmp_path / "one")).facts["Updates"] == "40"
    stopped = make_run(tmp_path / "two", steps=41)  # whose last line is of 40
    facts = read_run(stopped).facts
    assert facts["Updates"] == "41" and facts["Samples"].startswith("164 in")


def test_a_sweep_is_in_the_order_of_its_scales(results, tmp_path):
    other = make_result(tmp_path / "other.json", 2, 50, 25, name="another model")
    first, second = read_sweep([page.Path(results[0]).parent, page.Path(other)])
    assert (first.name, first.x, first.y, second.name) == ("a model", "clip_score", "fid", "another model")
    assert [scale for scale, _, _ in first.points] == [1.5, 3, 8]
    assert first.points[0][1:] == ((20, 19.5, 20.5), (75, 74, 76))
    report((), [str(tmp_path / "results")], str(tmp_path / "sweep.png"))
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")


def test_a_sweep_without_texts_is_over_the_scales(tmp_path):
    paths = [make_result(tmp_path / f"{scale}.json", scale, 40 - scale) for scale in (1, 3)]
    (curve,) = read_sweep([page.Path(path) for path in paths])
    assert curve.x == "guidance_scale" and [x[0] for _, x, _ in curve.points] == [1, 3]


def test_a_folder_of_runs_is_those_that_have_a_line(runs, tmp_path):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/run.json").write_text("{}")
    out = str(tmp_path / "report.html")
    report([str(tmp_path)], (), out)
    found = (tmp_path / "report.html").read_text()
    assert "first &lt;b&gt;" in found and "second" in found and "begun" not in found
    with pytest.raises(DataError, match="begun/metrics.jsonl"):
        report([str(tmp_path / "begun")], (), out)


def test_what_cannot_be_reported(runs, results, tmp_path):
    with pytest.raises(ConfigError, match="nothing to report"):
        report()
    with pytest.raises(ConfigError, match="only the curve of --sweep"):
        report(runs, results, str(tmp_path / "x.png"))
    with pytest.raises(ConfigError, match="is not a run's folder, nor holds one"):
        report([str(tmp_path / "missing")])
    with pytest.raises(DataError, match="not drawn"):
        read_sweep([page.Path(make_result(tmp_path / "folder.json", None, 3))])
    with pytest.raises(DataError, match="holds no results"):
        read_sweep([page.Path(runs[0]) / "samples"])


@pytest.mark.slow
@pytest.mark.needs("browser")
@pytest.mark.parametrize("width", [1280, 375])
def test_a_browser_shows_all_of_it_and_asks_nobody(runs, results, tmp_path, width):
    for number, run in enumerate(runs):
        settings = {"gradient_checkpointing_of_the_text_encoder": bool(number), "file_list": "/data/" * 20}
        write_json(
            page.Path(run, "run.json"), {"family": "ldm", "data": settings, f"other_{number}": {"depth": number}}
        )
    report(runs, results, str(tmp_path / "report.html"))
    with browser(width, 900, tmp_path / "profile") as shown:
        shown.open((tmp_path / "report.html").as_uri())
        assert shown.run("return document.documentElement.scrollWidth") == width
        assert shown.run("return performance.getEntriesByType('resource').length") == 0
        assert shown.run("return [...document.images].every(one => one.complete && one.naturalWidth > 0)")
        cells = "[...document.querySelectorAll('table:not(.numbers) :is(th, td)')]"
        places = f"{cells}.map(one => one.getBoundingClientRect())"
        assert not shown.run(f"return {places}.filter(one => one.right > {width} || one.width < 60)")
        assert not shown.run(OVERFLOWS)
        sizes = shown.run("return [...document.querySelectorAll('svg')].map(one => one.getBoundingClientRect().width)")
        assert len(sizes) == 5 and min(sizes) > 300
