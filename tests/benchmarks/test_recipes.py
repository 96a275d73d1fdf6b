"""Variants of a recipe: each is trained once from each seed, and told apart where seeds and pictures allow it."""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
STUDY = {
    "preset": "shapes-world",
    "flags": {"max_steps": 100},
    "drawing": {"guidance-scale": 3},
    "variants": {"base": None, "longer": {"max_steps": 200}, "other": {"preset": "another"}},
}


@pytest.fixture
def recipes(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("recipes")


@pytest.fixture
def commands(recipes, monkeypatch) -> list[list[str]]:
    """What is run in place of ppldm: training costs 60 s, and the drawn pictures score by the seed."""
    seen = []

    def run(module, words):
        words = [str(word) for word in words]
        seen.append(words)
        if "--print_config" in words:
            settings = {"max_steps": 500, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
            return SimpleNamespace(printed=yaml.safe_dump({"run": settings}))
        if words[0] == "train":
            folder = Path(next(word for word in words if word.startswith("--output_dir=")).partition("=")[2])
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "metrics.jsonl").write_text('{"images_per_second": 1}\n{"images_per_second": 40}\n')
        else:
            out = Path(words[-1])
            out.mkdir()
            metric = {"value": 0.5, "low": 0.4, "high": 0.6, "details": {"chance": 0.2, "pictures": 100}}
            (out / "g3.json").write_text(json.dumps({"metrics": {f"composition.{out.name}.single.shape": metric}}))
        return SimpleNamespace(seconds=90.0, cpu_seconds=60.0, peak_gb=1.0, printed="")

    monkeypatch.setattr(recipes, "measure_command", run)
    return seen


def run_main(recipes, monkeypatch, folder: Path, *words) -> dict:
    (folder / "study.yaml").write_text(yaml.safe_dump(STUDY))
    monkeypatch.setattr(sys, "argv", ["recipes.py", str(folder / "study.yaml"), "--out", str(folder / "out"), *words])
    recipes.main()


def test_variants_are_flags_over_those_of_the_study(recipes):
    runs = recipes.plan(STUDY, [1, 2], None, Path("out"))
    assert [(run.variant, run.seed) for run in runs] == [(name, seed) for seed in (1, 2) for name in STUDY["variants"]]
    assert [run.flags for run in runs[:3]] == [
        {"preset": "shapes-world", "max_steps": 100},
        {"preset": "shapes-world", "max_steps": 200},
        {"preset": "another", "max_steps": 100},
    ]
    assert [run.variant for run in recipes.plan(STUDY, [1], ["other"], Path("out"))] == ["other"]
    with pytest.raises(SystemExit, match="no variant mine"):
        recipes.plan(STUDY, [1], ["mine"], Path("out"))


def test_what_is_finished_is_not_run_again(recipes, commands, tmp_path, monkeypatch, capsys):
    run_main(recipes, monkeypatch, tmp_path, "--seeds", "1", "2", "--json", str(tmp_path / "a.json"))
    assert len(commands) == 6 * 3 and commands[0][:3] == ["train", "--loop", "hand"]
    assert {"--preset=shapes-world", "--max_steps=100", "--seed=1"} < set(commands[0])
    assert {"--guidance-scale=3", "composition"} < set(commands[1])
    first = capsys.readouterr().out
    assert "| CPU minutes | 1.0 (+0%) |" in first and "`held_out.single.shape`" in first
    (tmp_path / "out/longer/seed-2/result.json").unlink()  # interrupted
    (tmp_path / "out/longer/seed-2/run/old").touch()
    commands.clear()
    run_main(recipes, monkeypatch, tmp_path, "--seeds", "1", "2", "--json", str(tmp_path / "b.json"))
    assert len(commands) == 3 and "--max_steps=200" in commands[0] and capsys.readouterr().out == first
    assert not (tmp_path / "out/longer/seed-2/run/old").exists()
    found = [json.loads((tmp_path / name).read_text())["results"] for name in ("a.json", "b.json")]
    assert found[0] == found[1] and len(found[0]["runs"]) == 6


def test_a_result_of_other_flags_is_refused(recipes, commands, tmp_path, monkeypatch):
    run_main(recipes, monkeypatch, tmp_path, "--seeds", "1")
    monkeypatch.setitem(STUDY, "flags", {"max_steps": 101})
    with pytest.raises(SystemExit, match="is of other flags"):
        run_main(recipes, monkeypatch, tmp_path, "--seeds", "1")


def test_a_dry_run_projects_from_a_few_updates_and_from_what_is_finished(
    recipes, commands, tmp_path, monkeypatch, capsys
):
    run_main(recipes, monkeypatch, tmp_path, "--seeds", "1", "2", "--dry-run", "--variants", "base")
    assert [words[0] for words in commands] == ["train", "train"] and not (tmp_path / "out").exists()
    assert "about 3 min of training" in capsys.readouterr().out  # 2 x 500 updates of 8, 40 a second
    run_main(recipes, monkeypatch, tmp_path, "--seeds", "1", "--variants", "base")
    commands.clear()
    capsys.readouterr()
    run_main(recipes, monkeypatch, tmp_path, "--seeds", "1", "2", "--dry-run", "--variants", "base")
    shown = capsys.readouterr().out
    assert not commands and "base, seed 1: done\nbase, seed 2: about 2 min\n" in shown


def score(value: float, pictures: int = 100) -> dict:
    return {"name": "x", "value": value, "pictures": pictures, "chance": 0.2}


def test_the_interval_covers_both_pictures_and_seeds(recipes):
    alike = recipes.pool([score(0.5)] * 3)
    assert (alike["low"], alike["high"]) == pytest.approx((0.4438, 0.5562), abs=1e-4)  # Wilson, 150 of 300
    apart = recipes.pool([score(0.3), score(0.5), score(0.7)])
    assert (apart["low"], apart["high"]) == pytest.approx((0.5 - 0.4968, 0.5 + 0.4968), abs=1e-4)  # 4.3027 x 0.2 / √3
    full = recipes.pool([score(1.0)] * 3)
    assert full["low"] == pytest.approx(0.9874, abs=1e-4) and full["high"] <= 1
    assert recipes.pool([score(1.0, 10), score(0.0, 30)])["value"] == 0.25


def test_variants_are_told_apart_where_intervals_do_not_overlap(recipes):
    def result(variant, seed, value):
        cost = {"seconds": 1.0, "cpu_seconds": 60.0 if variant == "base" else 66.0, "peak_gb": 1.0}
        return {"run": {"variant": variant, "seed": seed}, "cost": cost, "scores": [score(value)]}

    values = {"base": (0.5, 0.52, 0.54), "better": (0.8, 0.82, 0.84), "same": (0.5, 0.55, 0.6)}
    summary = recipes.summarize([result(name, seed, values[name][seed]) for seed in range(3) for name in values])
    assert [found["scores"]["x"].get("verdict") for found in summary] == [None, "b is better", "no difference"]
    lines = recipes.table(summary).splitlines()
    assert "1.1 (+10%)" in lines[2] and lines[4].count("**") == 2
