"""Variants of a recipe: each is trained once from each seed, and told apart where seeds and pictures allow it."""

import importlib
import json
import re
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import make
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


def test_an_average_after_the_fact_is_what_is_graded(recipes, commands, tmp_path, monkeypatch):
    monkeypatch.setitem(STUDY, "averages", {"longer": 0.1})
    run_main(recipes, monkeypatch, tmp_path, "--seeds", "1")
    ((made, graded),) = [
        (words, after) for words, after in zip(commands, commands[1:], strict=False) if words[0] == "ema"
    ]
    assert made[made.index("--std") + 1] == "0.1" and graded[1] == made[made.index("--out") + 1]
    assert sum(words[0] == "evaluate" and words[1] == graded[1] for words in commands) == 2


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


def summarize(recipes, values: dict[str, tuple], **study) -> list[dict]:
    """Of runs whose only score is x; those of `base` take a minute, all others 66 s."""

    def result(variant, seed):
        cost = {"seconds": 1.0, "cpu_seconds": 60.0 if variant == "base" else 66.0, "peak_gb": 1.0}
        losses = {"validation_loss": values[variant][seed] / 2}
        run = {"variant": variant, "seed": seed}
        return {"run": run, "cost": cost, "losses": losses, "scores": [score(values[variant][seed])]}

    results = [result(name, seed) for seed in range(3) for name in values if seed < len(values[name])]
    return recipes.summarize(results, study)


def verdicts(summary: list[dict]) -> list[str | None]:
    return [found["scores"]["x"].get("verdict") for found in summary]


def test_one_seed_is_told_apart_where_intervals_do_not_overlap(recipes):
    summary = summarize(recipes, {"base": (0.5,), "better": (0.8,), "same": (0.6,), "worse": (0.2,)})
    assert verdicts(summary) == [None, "b is better", "no difference", "a is better"]
    lines = recipes.table(summary).splitlines()
    assert "1.1 (+10%)" in lines[2] and lines[4].count("**") == 4


SEEDS = {"base": (0.5, 0.52, 0.54), "better": (0.7, 0.72, 0.74), "same": (0.5, 0.56, 0.53), "worse": (0.4, 0.41, 0.39)}


def test_several_seeds_are_told_apart_by_their_difference(recipes):
    """With deviations of 0.02 and critical values of Dunnett's table for 3 variants and 8 degrees of freedom."""
    summary = summarize(recipes, SEEDS)
    assert verdicts(summary) == [None, "b is better", "no difference", "a is better"]
    deviation = (sum(statistics.variance(found) for found in SEEDS.values()) / 4) ** 0.5
    reach = 2.88 * deviation * (2 / 3) ** 0.5  # Dunnett 1964, two-sided, 5 %
    for found, value in zip(summary[1:], (0.2, 0.01, -0.12), strict=True):
        difference = found["scores"]["x"]["difference"]
        assert [difference[key] for key in ("value", "low", "high")] == pytest.approx(
            [value, value - reach, value + reach], abs=1e-3
        )


def test_a_variant_may_be_compared_with_another_than_the_first(recipes):
    summary = summarize(recipes, {**SEEDS, "other": (0.68, 0.7, 0.75)}, against={"other": "better"})
    assert [found["against"] for found in summary] == [None, "base", "base", "base", "better"]
    assert verdicts(summary)[-1] == "no difference"
    lines = recipes.ablation_table(summary, "x").splitlines()
    assert [line.count("**") for line in lines] == [0, 0, 0, 2, 0, 2, 0]
    assert lines[3].startswith("| `better` | `base` | 3 | 1.10 (+10%) | 72% (67% .. 77%) | **+20 (+")
    assert lines[6].startswith("| `other` | `better` | 3 | 1.10 (+0%) |") and lines[6].endswith("| 0.3550 |  |")


def test_a_variant_of_one_seed_has_no_difference_and_does_not_hide_those_of_others(recipes):
    summary = summarize(recipes, {**SEEDS, "early": (0.9,)})
    differences = [found["scores"]["x"].get("difference") for found in summary]
    assert differences[4] is None and all(differences[1:4]) and verdicts(summary)[1] == "b is better"


def test_losses_are_compared_where_the_study_says_that_they_can_be(recipes):
    summary = summarize(recipes, SEEDS, comparable_losses=["better", "same", "missing"])
    found = [one["loss_difference"] for one in summary]
    assert found[0] is found[3] is None and 0 < found[1]["low"] < found[1]["value"] < found[1]["high"]
    lines = recipes.ablation_table(summary, "x").splitlines()
    assert lines[3].count("**") == 4 and "**+0.1000 (+0.0" in lines[3]
    assert lines[4].count("**") == 0 and "+0.0050 (-0.0" in lines[4]


def test_a_seed_that_is_not_finished_is_left_out_when_nothing_shall_be_trained(
    recipes, commands, tmp_path, monkeypatch
):
    run_main(recipes, monkeypatch, tmp_path, "--seeds", "1")
    commands.clear()
    run_main(recipes, monkeypatch, tmp_path, "--finished", "--json", str(tmp_path / "a.json"))
    assert not commands
    found = json.loads((tmp_path / "a.json").read_text())["results"]
    assert [one["run"]["seed"] for one in found["runs"]] == [1, 1, 1] and found["summary"][0]["seeds"] == 1


def test_a_study_may_draw_the_prompts_of_one_split_and_name_files_beside_it(recipes, commands, tmp_path, monkeypatch):
    monkeypatch.setitem(STUDY, "splits", ["seen"])
    monkeypatch.setitem(STUDY, "flags", {"unet_config_file": "{studies}/networks/unet_32_64.json"})
    run_main(recipes, monkeypatch, tmp_path, "--seeds", "1", "--variants", "base", "--json", str(tmp_path / "a.json"))
    assert [words[0] for words in commands] == ["train", "evaluate"]
    (path,) = [word.partition("=")[2] for word in commands[0] if word.startswith("--unet_config_file=")]
    assert Path(path).is_file() and str(BENCHMARKS) not in (tmp_path / "a.json").read_text().partition("results")[2]


def test_the_page_of_ablations_has_labels_that_the_study_bears():
    found = json.loads((BENCHMARKS / "results/study.json").read_text())["results"]["rows"]
    page = make.with_tables((BENCHMARKS.parent / "docs/recipes/ablations.md").read_text())
    labels = dict(
        re.findall(r"^\| `(\w+)` \| (\*\*proven here\*\*, \w+|published elsewhere|unproven)", page, re.MULTILINE)
    )
    values = yaml.safe_load((BENCHMARKS / "recipes/ablations.yaml").read_text())["variants"]
    assert set(values) < set(labels)
    proven = {one["variant"]: "better" if one["difference"]["value"] < 0 else "worse" for one in found
              if one["variant"] in labels and one["difference"]["told_apart"]}  # fmt: skip
    assert proven == {name: label.rpartition(" ")[2] for name, label in labels.items() if label.startswith("**")}
