"""What a change of recipe brings and costs in the shapes world:  python benchmarks/recipes.py STUDY --out DIR

STUDY is a YAML file of benchmarks/recipes/: a preset, flags of `ppldm train` for all, and variants with flags of their
own (and a preset, where it is another), of which the first is what the others are compared with. Run where the preset
finds its data and autoencoder (docs/evaluation.md). Each variant is trained from each seed, and draws the prompts of
the world, seen and held out, which `--metrics composition` grades. A variant and seed with its result is not trained
again; one that was interrupted begins anew, so that its cost is that of all of it.

A share of right pictures comes with a 95 % interval: the wider of that of all pictures (Wilson) and that of the seeds'
means (Student's t). Two of one seed are told apart where these do not overlap; of several seeds, where the interval of
their difference leaves out 0 (Dunnett's, which holds for all variants together). Each folder DIR/VARIANT/seed-N holds
the run and its evaluations, which `ppldm compare` takes too.

A study may have: `score`, for a table of that score with a row for each variant; `against`, variants to compare others
with; `comparable_losses`, variants whose held-out loss is of the same kind as that of the first; `splits`, seen or
held_out; `averages`, variants of which an average after the fact is graded (`ppldm ema`), with its --std.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml
from commands import measure_command
from results import add_result_flags, save_results
from scipy import stats

from ppldm.evaluation.compare import NO_DIFFERENCE, judge
from ppldm.evaluation.composition import wilson_interval
from ppldm.utils.files import write_json

SPLITS = {"seen": "prompts-seen.txt", "held_out": "prompts-heldout.txt"}
STUDIES = Path(__file__).resolve().parent / "recipes"
PILOT_UPDATES = 30


@dataclass(frozen=True)
class Run:
    """A variant from a seed. `flags`: of `ppldm train`, the preset among them. `drawing`: flags of `ppldm evaluate`.
    `average`: the --std of the average after the fact that is graded (`ppldm ema`), where one is."""

    variant: str
    seed: int
    flags: dict
    drawing: dict
    splits: list
    folder: Path
    average: float | None = None

    def describe(self) -> dict:
        """All but where it lies."""
        return {name: value for name, value in vars(self).items() if name != "folder" and value is not None}

    @property
    def model(self) -> Path:
        """What is graded."""
        return self.folder / ("run/pipeline" if self.average is None else "averaged")

    def finished(self) -> dict | None:
        """Its result, where it is there. Exits where that is one of other flags."""
        path = self.folder / "result.json"
        if not path.exists():
            return None
        found = json.loads(path.read_text())
        if found["run"] != self.describe():
            sys.exit(f"{path} is of other flags; take another --out, or remove {self.folder}")
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="YAML file of variants")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--world", type=Path, default="shapes_world/data", help="what `ppldm demo-data` wrote")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--variants", nargs="+", help="only these; by default all")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run, and how long it would take")
    parser.add_argument("--finished", action="store_true", help="train nothing, show what is there")
    add_result_flags(parser, "recipes")
    arguments = parser.parse_args()
    study = yaml.safe_load(arguments.study.read_text())
    runs = plan(study, arguments.seeds, arguments.variants, arguments.out)
    if arguments.dry_run:
        return print(project(runs, arguments.world))
    if arguments.finished:
        runs = [run for run in runs if run.finished()]
    results = [run.finished() or carry_out(run, arguments.world) for run in runs]
    summary = summarize(results, study)
    print(ablation_table(summary, study["score"]) if "score" in study else table(summary))
    save_results(arguments, {"summary": summary, "runs": results})


def plan(study: dict, seeds: list[int], variants: list[str] | None, out: Path) -> list[Run]:
    """All runs, seed by seed, so that what is there after a while can be compared. Exits for an unknown variant."""
    if unknown := set(variants or ()) - set(study["variants"]):
        sys.exit(f"no variant {', '.join(sorted(unknown))} in the study; it has {', '.join(study['variants'])}")
    common, splits = {"preset": study["preset"], **study.get("flags", {})}, study.get("splits", list(SPLITS))
    averages = study.get("averages", {})
    return [
        Run(name, seed, {**common, **(flags or {})}, study["drawing"], splits, out / name / f"seed-{seed}",
            averages.get(name))
        for seed in seeds
        for name, flags in study["variants"].items()
        if not variants or name in variants
    ]  # fmt: skip


def train(flags: dict, **others):
    """What training with these flags costs."""
    words = []
    for name, value in {**flags, **others}.items():
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}={value}".replace("{studies}", str(STUDIES)) if value != "" else f"--{name}")
    return measure_command("ppldm", ["train", "--loop", "hand", *words])


def carry_out(run: Run, world: Path) -> dict:
    """Train, draw, grade: the result, which is written last."""
    print(f"{run.variant}, seed {run.seed}", file=sys.stderr, flush=True)
    shutil.rmtree(run.folder, ignore_errors=True)
    cost = train(run.flags, output_dir=run.folder / "run", seed=run.seed)
    if run.average is not None:
        measure_command("ppldm", ["ema", run.folder / "run", "--std", run.average, "--out", run.model])
    costs = {name: getattr(cost, name) for name in ("seconds", "cpu_seconds", "peak_gb")}
    last = json.loads((run.folder / "run/metrics.jsonl").read_text().splitlines()[-1])
    losses = {name: last[name] for name in ("loss", "validation_loss") if name in last}
    result = {"run": run.describe(), "cost": costs, "losses": losses, "scores": evaluate(run, world)}
    write_json(run.folder / "result.json", result)
    return result


def evaluate(run: Run, world: Path) -> list[dict]:
    """The scores of a trained model: {"name", "value", "low", "high", "chance", "pictures"} each."""
    scores = []
    for split in run.splits:
        words = [f"--{flag}={value}" for flag, value in run.drawing.items()]
        measure_command("ppldm", [
            "evaluate", run.model, "--against", world / "demo.filelist.list",
            "--prompts", world / SPLITS[split], "--metrics", "composition", *words, "--out", run.folder / split,
        ])  # fmt: skip
        (path,) = (run.folder / split).glob("g*.json")
        metrics = json.loads(path.read_text())["metrics"]
        scores += [{"name": name, **{key: found[key] for key in ("value", "low", "high")}, **found["details"]}
                   for name, found in metrics.items()]  # fmt: skip
    return scores


def summarize(results: list[dict], study: dict) -> list[dict]:
    """For each variant its cost, mean losses and, of each score, {"value", "low", "high", "chance", "verdict"}.

    The verdict is against the variant that the study's `against` names, by default the first. With several seeds a
    score has its "difference" from it too, {"value", "low", "high"}, which decides; and so has the held-out loss of the
    variants in `comparable_losses`, as "loss_difference".
    """
    by_variant = {}
    for result in results:
        by_variant.setdefault(result["run"]["variant"], []).append(result)
    scores = {name: {score: pool(found) for score, found in collect(own).items()} for name, own in by_variant.items()}
    first = next(iter(by_variant))
    controls = {variant: study.get("against", {}).get(variant, first) for variant in list(by_variant)[1:]}
    for control in set(controls.values()):
        others = [variant for variant in controls if controls[variant] == control]
        compare(scores, {variant: collect(by_variant[variant]) for variant in [control, *others]})
    comparable = [first, *(variant for variant in study.get("comparable_losses", ()) if variant in by_variant)]
    losses = {name: [one["losses"].get("validation_loss") for one in by_variant[name]] for name in comparable}
    loss_differences = differences(losses) if len(losses) > 1 else {}
    return [
        {"variant": variant, "against": controls.get(variant), "seeds": len(own), "cost": average(own, "cost"),
         "losses": average(own, "losses"), "loss_difference": loss_differences.get(variant), "scores": scores[variant]}
        for variant, own in by_variant.items()
    ]  # fmt: skip


def collect(results: list[dict]) -> dict[str, list[dict]]:
    """Scores by name, one of each result."""
    by_name = {}
    for score in (score for one in results for score in one["scores"]):
        by_name.setdefault(score["name"], []).append(score)
    return by_name


def average(results: list[dict], group: str) -> dict[str, float]:
    return {name: statistics.mean(one[group][name] for one in results) for name in results[0][group]}


def compare(pooled: dict[str, dict], collected: dict[str, dict[str, list[dict]]]) -> None:
    """Put verdicts and differences into `pooled`. `collected` has the control first."""
    control, *others = collected
    for name in collected[control]:
        for variant in others:
            pooled[variant][name]["verdict"] = judge(pooled[control][name], pooled[variant][name])["verdict"]
        samples = {variant: [score["value"] for score in collected[variant][name]] for variant in collected}
        for variant, found in differences(samples).items():
            better = "b" if found["low"] > 0 else "a" if found["high"] < 0 else None
            verdict = f"{better} is better" if better else NO_DIFFERENCE
            pooled[variant][name].update(difference=found, verdict=verdict)


def differences(samples: dict[str, list[float]]) -> dict[str, dict]:
    """{"value", "low", "high"} of each variant's mean minus that of the control, which comes first: Dunnett's 95 %.

    The intervals hold for all variants together, and take all to vary alike from seed to seed. Those of one seed have
    none; nobody has one where the control has one seed, or where nothing varies.
    """
    control, *others = samples
    others = [variant for variant in others if len(samples[variant]) > 1]
    values = [samples[variant] for variant in others]
    if not others or len(samples[control]) == 1 or not any(map(statistics.pvariance, [samples[control], *values])):
        return {}
    interval = stats.dunnett(*values, control=samples[control], random_state=0).confidence_interval()
    mean = statistics.mean(samples[control])
    return {
        variant: {"value": statistics.mean(samples[variant]) - mean, "low": low, "high": high}
        for variant, low, high in zip(others, interval.low, interval.high, strict=True)
    }


def pool(scores: list[dict]) -> dict:
    """One score of several seeds."""
    values, pictures = [score["value"] for score in scores], sum(score["pictures"] for score in scores)
    right = sum(score["value"] * score["pictures"] for score in scores)
    low, high = wilson_interval(right, pictures)
    if len(values) > 1:
        reach = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
        low, high = min(low, max(right / pictures - reach, 0)), max(high, min(right / pictures + reach, 1))
    return {"value": right / pictures, "low": low, "high": high, "pictures": pictures, "higher_is_better": True,
            "chance": statistics.mean(score["chance"] for score in scores)}  # fmt: skip


def table(summary: list[dict]) -> str:
    """Markdown: a row for each score, a column for each variant; in bold what is told apart from the first."""
    base = summary[0]["cost"]["cpu_seconds"]
    lines = [
        ["", *(found["variant"] for found in summary)],
        ["---"] * (len(summary) + 1),
        ["CPU minutes", *(f"{found['cost']['cpu_seconds'] / 60:.1f} ({found['cost']['cpu_seconds'] / base - 1:+.0%})"
                          for found in summary)],
        ["memory, GB", *(f"{found['cost']['peak_gb']:.1f}" for found in summary)],
    ]  # fmt: skip
    for name in summary[0]["scores"]:
        shown = [show(found["scores"].get(name)) for found in summary]
        lines.append([f"`{name.removeprefix('composition.')}`", *shown])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def ablation_table(summary: list[dict], name: str) -> str:
    """Markdown: a row for each variant, with one score; in bold the differences that are told apart from 0."""
    head = ["variant", "against", "seeds", "CPU minutes", "right", "difference", "held-out loss", "difference"]
    lines = [head, ["---"] * len(head)]
    by_variant = {found["variant"]: found for found in summary}
    for found in summary:
        minutes, score = found["cost"]["cpu_seconds"] / 60, found["scores"][name]
        cost, against = f"{minutes:.2f}", found["against"] or ""
        if against:
            cost += f" ({minutes * 60 / by_variant[against]['cost']['cpu_seconds'] - 1:+.0%})"
            against = f"`{against}`"
        lines.append([f"`{found['variant']}`", against, str(found["seeds"]), cost, show({**score, "verdict": ""}),
                      show_difference(score.get("difference"), 100, 0), f"{found['losses']['validation_loss']:.4f}",
                      show_difference(found["loss_difference"], 1, 4)])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show_difference(found: dict | None, factor: int, digits: int) -> str:
    if not found:
        return ""
    value, low, high = (f"{factor * found[key]:+.{digits}f}" for key in ("value", "low", "high"))
    words = f"{value} ({low} .. {high})"
    return words if found["low"] <= 0 <= found["high"] else f"**{words}**"


def show(score: dict | None) -> str:
    if score is None:
        return ""
    words = f"{score['value']:.0%} ({score['low']:.0%} .. {score['high']:.0%})"
    return f"**{words}**" if "better" in score.get("verdict", "") else words


def project(runs: list[Run], world: Path) -> str:
    """What would be run and for how long, by finished runs of a variant, or a few updates where there is none."""
    seconds, lines = {}, []
    for run in runs:
        if found := run.finished():
            seconds[run.variant] = found["cost"]["seconds"]
    for run in runs:
        if run.variant not in seconds:
            seconds[run.variant] = pilot(run)
        words = "done" if run.finished() else f"about {seconds[run.variant] / 60:.0f} min"
        lines.append(f"{run.variant}, seed {run.seed}: {words}")
    left = sum(seconds[run.variant] for run in runs if not run.finished())
    return "\n".join([*lines, f"about {left / 60:.0f} min of training left, and the pictures"])


def pilot(run: Run) -> float:
    """Seconds that training is going to take, by its rate over the second half of a few updates."""
    settings = yaml.safe_load(train(run.flags, output_dir=run.folder / "run", print_config="").printed)["run"]
    with tempfile.TemporaryDirectory() as folder:
        train(run.flags, output_dir=folder, seed=run.seed, max_steps=PILOT_UPDATES, logging_steps=PILOT_UPDATES // 2)
        rate = json.loads((Path(folder) / "metrics.jsonl").read_text().splitlines()[-1])["images_per_second"]
    batch = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    return settings["max_steps"] * batch / rate


if __name__ == "__main__":
    main()
