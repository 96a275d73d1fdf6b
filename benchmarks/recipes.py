"""What a change of recipe brings and costs in the shapes world:  python benchmarks/recipes.py STUDY --out DIR

STUDY is a YAML file of benchmarks/recipes/: a preset, flags of `ppldm train` for all, and variants with flags of their
own (and a preset, where it is another), of which the first is what the others are compared with. Run where the preset
finds its data and autoencoder (docs/evaluation.md). Each variant is trained from each seed, and draws the prompts of
the world, seen and held out, which `--metrics composition` grades. A variant and seed with its result is not trained
again; one that was interrupted begins anew, so that its cost is that of all of it.

A share of right pictures comes with a 95 % interval: the wider of that of all pictures (Wilson) and that of the seeds'
means (Student's t). Two are told apart where these do not overlap. Each folder DIR/VARIANT/seed-N holds the run and its
evaluations, which `ppldm compare` takes too.
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

from ppldm.evaluation.compare import judge
from ppldm.evaluation.composition.grade import wilson_interval
from ppldm.utils.files import write_json

SPLITS = {"seen": "prompts-seen.txt", "held_out": "prompts-heldout.txt"}
PILOT_UPDATES = 30


@dataclass(frozen=True)
class Run:
    """A variant from a seed. `flags`: of `ppldm train`, the preset among them. `drawing`: flags of `ppldm evaluate`."""

    variant: str
    seed: int
    flags: dict
    drawing: dict
    folder: Path

    def describe(self) -> dict:
        """All but where it lies."""
        return {name: value for name, value in vars(self).items() if name != "folder"}

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
    add_result_flags(parser, "recipes")
    arguments = parser.parse_args()
    runs = plan(yaml.safe_load(arguments.study.read_text()), arguments.seeds, arguments.variants, arguments.out)
    if arguments.dry_run:
        return print(project(runs, arguments.world))
    results = [run.finished() or carry_out(run, arguments.world) for run in runs]
    summary = summarize(results)
    print(table(summary))
    save_results(arguments, {"summary": summary, "runs": results})


def plan(study: dict, seeds: list[int], variants: list[str] | None, out: Path) -> list[Run]:
    """All runs, seed by seed, so that what is there after a while can be compared. Exits for an unknown variant."""
    if unknown := set(variants or ()) - set(study["variants"]):
        sys.exit(f"no variant {', '.join(sorted(unknown))} in the study; it has {', '.join(study['variants'])}")
    common = {"preset": study["preset"], **study.get("flags", {})}
    return [
        Run(name, seed, {**common, **(flags or {})}, study["drawing"], out / name / f"seed-{seed}")
        for seed in seeds
        for name, flags in study["variants"].items()
        if not variants or name in variants
    ]


def train(flags: dict, **others):
    """What training with these flags costs."""
    words = [f"--{name}={value}" if value != "" else f"--{name}" for name, value in {**flags, **others}.items()]
    return measure_command("ppldm", ["train", "--loop", "hand", *words])


def carry_out(run: Run, world: Path) -> dict:
    """Train, draw, grade: the result, which is written last."""
    print(f"{run.variant}, seed {run.seed}", file=sys.stderr, flush=True)
    shutil.rmtree(run.folder, ignore_errors=True)
    cost = train(run.flags, output_dir=run.folder / "run", seed=run.seed)
    costs = {name: getattr(cost, name) for name in ("seconds", "cpu_seconds", "peak_gb")}
    result = {"run": run.describe(), "cost": costs, "scores": evaluate(run, world)}
    write_json(run.folder / "result.json", result)
    return result


def evaluate(run: Run, world: Path) -> list[dict]:
    """The scores of a trained model: {"name", "value", "low", "high", "chance", "pictures"} each."""
    scores = []
    for split, prompts in SPLITS.items():
        words = [f"--{flag}={value}" for flag, value in run.drawing.items()]
        measure_command("ppldm", [
            "evaluate", run.folder / "run/pipeline", "--against", world / "demo.filelist.list",
            "--prompts", world / prompts, "--metrics", "composition", *words, "--out", run.folder / split,
        ])  # fmt: skip
        (path,) = (run.folder / split).glob("g*.json")
        metrics = json.loads(path.read_text())["metrics"]
        scores += [{"name": name, **{key: found[key] for key in ("value", "low", "high")}, **found["details"]}
                   for name, found in metrics.items()]  # fmt: skip
    return scores


def summarize(results: list[dict]) -> list[dict]:
    """For each variant its cost and, of each score, {"value", "low", "high", "chance", "verdict" against the first}."""
    summary = []
    for variant in dict.fromkeys(result["run"]["variant"] for result in results):
        own = [result for result in results if result["run"]["variant"] == variant]
        cost = {name: statistics.mean(one["cost"][name] for one in own) for name in own[0]["cost"]}
        by_name = {}
        for score in (score for one in own for score in one["scores"]):
            by_name.setdefault(score["name"], []).append(score)
        scores = {name: pool(found) for name, found in by_name.items()}
        for name, score in scores.items():
            if summary and name in summary[0]["scores"]:
                score["verdict"] = judge(summary[0]["scores"][name], score)["verdict"]
        summary.append({"variant": variant, "seeds": len(own), "cost": cost, "scores": scores})
    return summary


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
