"""`ppldm report`: all that a run's folder says, in one file that loads nothing; the sweep of guidance scales."""

import json
import re

import numpy as np
import pytest
from browser import browser
from hypothesis import given, settings
from hypothesis import strategies as st
from legible import OVERFLOWS

from ppldm.evaluation.measure import FORMAT
from ppldm.runs import page
from ppldm.runs.page import facts, read_sweep, read_whole, report, training_hours
from ppldm.runs.read import RunFolder
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


def held_of(html: str) -> dict:
    """What a file holds for its script."""
    return json.loads(re.search(r"const HELD = (.*);$", html, re.MULTILINE)[1])


def test_a_page_of_two_runs_and_a_sweep_loads_nothing_and_shows_words_as_words(runs, results, tmp_path):
    results.append(make_result(tmp_path / "hostile.json", 2, 50, 22, name=HOSTILE))
    report(runs, results, str(tmp_path / "report.html"))
    html = (tmp_path / "report.html").read_text()
    assert not loaded(html) and "default-src 'none'" in html
    assert "<b>" not in html and "first &lt;b&gt;" in html and "&lt;script&gt;" in html
    assert html.count("<script") == html.count("</script") == html.count("nonce-") == 1
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert len(ids) == len(set(ids)) and set(re.findall(r"url\(#([^)]*)\)", html)) <= set(ids)
    assert html.count("<svg") == 1  # the sweep
    assert str(tmp_path) not in html.replace(HOSTILE, "") and "clip score" in html
    held = held_of(html)
    assert [one["name"] for one in held["now"]["runs"]] == ["first <b>", "second"]
    assert [one["recipe"] for one in (held["recipe/0"], held["recipe/1"])] == [f"family: ldm  # {HOSTILE}\n"] * 2
    for run in held["curves"]:
        assert list(run["charts"])[:2] == ["loss", "loss by noise level"]
        names = [line["name"] for lines in run["charts"].values() for line in lines]
        assert {"loss", "held out", "quarter 1 (least noise)", "quarter 4 (most)"} < set(names)
        assert {"frechet:pixels at guidance 1", "frechet:pixels at guidance 3"} < set(names)
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
    run = read_whole(page.Path(runs[0]))
    said, stands = facts(run), page.now(run)
    assert run.name == "first <b>" and said["Samples"] == "160 in batches of 4" and said["Epochs"] == "2"
    assert said["Machine"] == "device a CPU, ranks 2" and said["Cost"] == "0.2 device hours (2 devices)"
    assert said["Trained on"] == HOSTILE and said["Rows"] == "80" and said["Precision"] == "float32"
    assert stands["skipped"] == {"image": 3} and stands["last"]["skipped_updates"] == 1 and stands["family"] == "ldm"
    assert stands["last"]["images_per_second"] == 8.0


@pytest.mark.parametrize("text", ["{", "[]\n{", '{"global_step": 2'])
def test_a_damaged_file_is_refused_by_its_line(runs, text):
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        path = page.Path(runs[0], name)
        before = path.read_text()
        path.write_text(before + text)
        with pytest.raises(DataError, match=f"{name}, line [0-9]+ is not JSON; remove it"):
            report(runs)
        path.write_text(before)


@pytest.mark.parametrize("devices", [1, 8])
def test_pauses_between_starts_cost_nothing(devices):
    speed = {"images_per_second": 8.0 * devices, "images_per_second_per_device": 8.0, "avg_batch_cost": 3.6}
    records = [{"global_step": step, "time": 1e6 * step, **speed} for step in (500, 1000)]
    records.insert(1, {"global_step": 600, "time": 0, "validation_loss": 1.0})
    assert training_hours(records) == (pytest.approx(1.0), devices)


def test_a_run_that_has_just_begun(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"global_step": 1, "time": 1.0, "loss": 2.0, "psnr": 20.0}\n')
    report([str(tmp_path)], (), str(tmp_path / "report.html"))
    held = held_of((tmp_path / "report.html").read_text())
    assert list(held["curves"][0]["charts"]) == ["loss", "PSNR of samples, dB"]


@pytest.mark.parametrize("count", [1, 2, 8, 9, 100])
def test_a_strip_has_the_first_and_the_last_picture_and_none_past_the_last_line(tmp_path, count):
    (tmp_path / "samples").mkdir()
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"global_step": count, "loss": 1.0}) + "\n")
    for step in range(1, count + 2):
        save_png(tmp_path / f"samples/step-{step:06d}-samples.png", np.full((4, 4, 3), step, np.uint8))
    run = RunFolder(tmp_path)
    run.look()
    assert list(page.strips(run)) == ["samples"]
    steps = [one["step"] for one in page.strips(run)["samples"]]
    assert steps == sorted(set(steps)) and steps[0] == 1 and steps[-1] == count
    assert len(steps) == min(count, 8)
    save_png(tmp_path / "buckets.png", np.zeros((4, 4, 3), np.uint8))
    assert list(page.strips(run)) == ["samples", "rows by shape"]


def test_a_large_picture_is_made_smaller(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, size=(600, 1800, 3), dtype=np.uint8)
    save_png(tmp_path / "large.png", noise)
    assert page.picture_url(tmp_path / "large.png").startswith("data:image/jpeg")
    assert len(page.picture_url(tmp_path / "large.png")) < 600_000


def test_settings_that_differ(runs):
    both = [read_whole(page.Path(run)).config() for run in runs]
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
    found = dict(page.differing(configs))
    for name in {name for one in configs for name in one}:
        values = [one.get(name) for one in configs]
        assert (name in found) == any(value != values[0] for value in values)
        assert name not in found or any(value is not None for value in found[name])


def test_a_model_that_draws_is_not_compared_with_an_autoencoder(tmp_path):
    for seed, family in enumerate(("ldm", "uvit", "autoencoder")):
        (tmp_path / family).mkdir()
        write_json(tmp_path / family / "run.json", {"family": family, "seed": seed})
        (tmp_path / family / "metrics.jsonl").write_text('{"global_step": 1, "loss": 1.0}\n')
    *runs, autoencoder = (read_whole(tmp_path / family) for family in ("ldm", "uvit", "autoencoder"))
    assert page.of_one_kind([autoencoder, *runs]) == [[autoencoder], runs]
    assert "<h2>Settings that differ" not in page.make_file([autoencoder, *runs[:1]], [])
    assert "<h2>Settings that differ" in page.make_file([autoencoder, *runs], [])


def test_a_run_that_was_stopped_counts_the_updates_of_its_last_checkpoint(tmp_path):
    assert facts(read_whole(make_run(tmp_path / "one")))["Updates"] == "40"
    stopped = make_run(tmp_path / "two", steps=41)  # whose last line is of 40
    said = facts(read_whole(stopped))
    assert said["Updates"] == "41" and said["Samples"].startswith("164 in")


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


def test_a_folder_whose_only_run_has_no_line_yet_says_so_once(tmp_path, caplog):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/run.json").write_text("{}")
    with pytest.raises(DataError, match="begun/metrics.jsonl"):
        report([str(tmp_path)], (), str(tmp_path / "report.html"))
    assert "passing over" not in caplog.text


def test_a_folder_of_runs_is_those_that_have_a_line(runs, tmp_path, caplog):
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/run.json").write_text("{}")
    out = str(tmp_path / "report.html")
    report([str(tmp_path)], (), out)
    found = (tmp_path / "report.html").read_text()
    assert [one["name"] for one in held_of(found)["now"]["runs"]] in (["first <b>", "second"], ["second", "first <b>"])
    assert caplog.text.count("passing over") == 1
    with pytest.raises(DataError, match="begun/metrics.jsonl"):
        report([str(tmp_path / "begun")], (), out)


def test_what_cannot_be_reported(runs, results, tmp_path):
    with pytest.raises(ConfigError, match="nothing to report"):
        report()
    with pytest.raises(ConfigError, match="only the curve of --sweep"):
        report(runs, results, str(tmp_path / "x.png"))
    with pytest.raises(ConfigError, match="is not there; name a training's --output_dir"):
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
        shown.wait_for('return document.querySelectorAll("#charts svg path").length > 10')
        shown.wait_for('return document.querySelectorAll("#pictures img").length === 16')  # of both runs, side by side
        assert shown.run("return document.documentElement.scrollWidth") == width
        assert shown.run("return performance.getEntriesByType('resource').length") == 0
        assert shown.run("return [...document.images].every(one => one.complete && one.naturalWidth > 0)")
        assert shown.run("return document.querySelectorAll('script, img[src^=http]').length") == 1
        assert shown.run("return document.title") == "ppldm: first <b>, second"
        cells = "[...document.querySelectorAll('table:not(.numbers) :is(th, td)')]"
        places = f"{cells}.map(one => one.getBoundingClientRect())"
        assert not shown.run(f"return {places}.filter(one => one.right > {width} || one.width < 60)")
        assert not shown.run(OVERFLOWS)
        charts = "[...document.querySelectorAll('svg')].filter(one => one.getBoundingClientRect().width)"
        sizes = shown.run(f"return {charts}.map(one => one.getBoundingClientRect().width)")
        assert len(sizes) == 6 and min(sizes) > 250
        said = shown.run("return document.querySelector('.run dl').innerText")
        for words in ("Skipped\n3 rows (image 3), 1 updates", "Cost\n0.2 device hours (2 devices)", "Speed\n8 images"):
            assert words in said
        # one run only, its recipe, rows by shape, and the same in Chinese
        shown.click(".run:nth-of-type(2) input")
        shown.wait_for('return document.querySelectorAll("#pictures img").length === 8')
        shown.click(".run > details > summary")
        recipe = "document.querySelector('.run > details > pre').textContent"
        shown.wait_for(f"return {recipe}.includes({json.dumps(HOSTILE)})")
        assert "rows by shape" in shown.run("return document.getElementById('tag').innerText")
        shown.save_screenshot(tmp_path / f"{width}.png")
        shown.run("localStorage.setItem('language', 'zh'); location.reload()")
        shown.wait_for("return document.querySelector('.run dl')?.innerText.includes('费用')")
        shown.save_screenshot(tmp_path / f"{width}-zh.png")
