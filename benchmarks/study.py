"""What a method is worth, in pairs:  python benchmarks/study.py --out DIR --minutes 90

A variant is a YAML of flags of `ppldm train` that differ from those of variants/plain.yaml: beside its method in
ppldm/methods, or for a combination in benchmarks/variants. Every variant of a seed starts from the same weights and
sees the same rows, levels and noises. All are measured in one currency (currency.py), on held-out rows of the shapes
world, along the training; at the end 64 prompts are drawn and graded.

Each variant first gets its learning rate from one grid, on seeds of their own. Then seeds are added, a look at a time,
until the interval of its difference from the plain recipe leaves out 0 (paired.py) or the minutes are over. Runs that
are there are not made again, so that the same command goes on; one of other flags is refused. `--dry-run` says what is
left, and how long it takes; `--table` shows what is there. Every run has one thread and computes with AVX2, whatever
the processor has beside it, so that others get the same rows; what prepares the world must too (`--variables`).
"""

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import paired
import yaml
from results import RESULTS, add_result_flags, save_results

from ppldm.utils.files import write_json

VARIANTS = Path(__file__).resolve().parent / "variants"
METHODS = VARIANTS.parents[1] / "ppldm/methods"
PLAIN = "plain"
RATES = (2.0, 4.0)  # multiples of the plain recipe's
TUNING_SEEDS = (101, 102)
MEASUREMENTS = 9
PROMPTS, DRAWING_STEPS, GUIDANCE = 64, 10, 4.0
SCORES = ("colour", "everything")  # right in a picture of one object
SECONDS = 70  # of a run, where none is there to tell
VARIABLES = {"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
             "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A variant from a seed, at a multiple of its learning rate."""

    variant: str
    rate: float
    seed: int

    def path(self, out: Path) -> Path:
        """Of its result."""
        return out / self.variant / f"rate-{self.rate:g}-seed-{self.seed}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default="study", help="folder of the runs")
    parser.add_argument("--world", type=Path, default="shapes_world", help="what docs/recipes/ablations.md makes")
    parser.add_argument("--folder", type=Path, default=VARIANTS, help="of the variants, plain.yaml among them")
    parser.add_argument("--variants", nargs="+", help="only these; by default all")
    parser.add_argument("--rate", type=float, help="of all, a multiple of the plain recipe's; by default each is tuned")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run after so many")
    parser.add_argument("--jobs", type=int, default=2, help="runs at once, each on one core")
    parser.add_argument("--dry-run", action="store_true", help="say what is left to run, and how long it would take")
    parser.add_argument("--table", action="store_true", help="run nothing, show what is there")
    parser.add_argument("--variables", action="store_true", help="show what a shell exports to prepare the world")
    parser.add_argument("--pairing", action="store_true", help="show what pairing alone brings to older runs")
    add_result_flags(parser, "study")
    arguments = parser.parse_args()
    if arguments.pairing:
        return print(pairing_table())
    if arguments.variables:
        return print(*(f"{name}={value}" for name, value in VARIABLES.items()))
    study = Study(arguments.out, read_variants(arguments.variants, arguments.folder), arguments.rate)
    if arguments.dry_run:
        return print(study.forecast(arguments.jobs))
    if not arguments.table:
        study.carry_out(arguments.minutes, arguments.jobs, arguments.world)
    summary = study.summary()
    print(table(summary))
    save_results(arguments, summary)


def variant_files(folder: Path = VARIANTS) -> dict[str, Path]:
    """The file of each variant, by name: of a folder, and with the study's own those beside the methods."""
    methods = METHODS.rglob("*.yaml") if folder == VARIANTS else ()
    return {path.stem: path for path in sorted([*folder.glob("*.yaml"), *methods], key=lambda path: path.stem)}


def read_variants(wanted: list[str] | None = None, folder: Path = VARIANTS) -> dict[str, dict]:
    """The flags of variants by name, the plain recipe first, with its own in all."""
    found = {name: yaml.safe_load(path.read_text()) for name, path in variant_files(folder).items()}
    if unknown := set(wanted or ()) - set(found):
        sys.exit(f"no variant {', '.join(sorted(unknown))}; there are {', '.join(found)}")
    plain = found.pop(PLAIN)["flags"]
    chosen = {name: one for name, one in found.items() if not wanted or name in wanted}
    return {PLAIN: plain, **{name: {**plain, **one["flags"]} for name, one in chosen.items()}}


class Study:
    """Runs that are there, and those that are wanted next."""

    def __init__(self, out: Path, variants: dict[str, dict], rate: float | None = None):
        self.out, self.variants, self.rate, self.found = out, variants, rate, {}

    def result(self, run: Run) -> dict | None:
        """What is there of a run. Exits where it is of other flags."""
        if run not in self.found and (path := run.path(self.out)).exists():
            result = json.loads(path.read_text())
            if result["flags"] != self.variants[run.variant]:
                sys.exit(f"{path} is of other flags; take another --out, or remove it")
            self.found[run] = result
        return self.found.get(run)

    def rate_of(self, variant: str) -> float | None:
        """The multiple of the rate that is given, or else that with the lowest mean loss on the tuning seeds; None
        before all are there."""
        if self.rate:
            return self.rate
        runs = {rate: [self.result(Run(variant, rate, seed)) for seed in TUNING_SEEDS] for rate in RATES}
        if not all(all(own) for own in runs.values()):
            return None
        return min(runs, key=lambda rate: np.mean([one["losses"][-1][1] for one in runs[rate]]))

    def wanted(self) -> list[Run]:
        """The runs to make next, of all variants: to tune, or to the next look."""
        missing = []
        for variant in self.variants:
            rate = self.rate_of(variant)
            if rate is None:
                own = [Run(variant, rate, seed) for rate in RATES for seed in TUNING_SEEDS]
            elif variant == PLAIN:
                own = [Run(variant, rate, seed) for seed in range(1, paired.LOOKS[-1] + 1)]
            else:
                differences = self.differences(variant)
                enough = not paired.needs_more(differences, len(self.variants) - 1)
                looks = [look for look in paired.LOOKS if look > len(differences)]
                own = [] if enough or not looks else [Run(variant, rate, seed) for seed in range(1, looks[0] + 1)]
            missing += [run for run in own if not self.result(run)]
        return sorted(missing, key=lambda run: (run.seed not in TUNING_SEEDS, run.seed))

    def pairs(self, variant: str) -> list[tuple[dict, dict]]:
        """(plain, variant) of the seeds, in order, up to the first that is not there."""
        rates, found = (self.rate_of(PLAIN), self.rate_of(variant)), []
        if None in rates:
            return found
        for seed in range(1, paired.LOOKS[-1] + 1):
            pair = tuple(self.result(Run(*one, seed)) for one in zip((PLAIN, variant), rates, strict=True))
            if None in pair:
                break
            found.append(pair)
        return found

    def differences(self, variant: str) -> list[float]:
        """Of the logarithms of the last losses."""
        return [float(np.log(one["losses"][-1][1] / plain["losses"][-1][1])) for plain, one in self.pairs(variant)]

    def carry_out(self, minutes: float, jobs: int, world: Path) -> None:
        """Make runs until none is wanted, or none may begin any more."""
        deadline, running = time.monotonic() + 60 * minutes, {}
        os.environ |= VARIABLES
        with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
            while True:
                wanted = [run for run in self.wanted() if run not in running.values()]
                while wanted and len(running) < jobs and time.monotonic() < deadline:
                    run = wanted.pop(0)
                    running[pool.submit(train, run, self.variants[run.variant], self.out, world)] = run
                if not running:
                    break
                for done in wait_for(running, return_when="FIRST_COMPLETED").done:
                    run = running.pop(done)
                    print(f"{run.variant}, rate {run.rate:g}, seed {run.seed}: {done.result()}", file=sys.stderr)

    def forecast(self, jobs: int) -> str:
        """What is wanted next, and the most that is left, with their minutes."""
        wanted = self.wanted()
        each = [one["cpu_seconds"] for one in self.found.values()]
        seconds = float(np.mean(each)) if each else SECONDS
        most = len(self.variants) * (len(RATES) * len(TUNING_SEEDS) + paired.LOOKS[-1]) - len(self.found)
        said = [f"{len(number)} runs {what}, about {len(number) * seconds / jobs / 60:.0f} min on {jobs} cores"
                for number, what in ((wanted, "next"), (range(most), "at most"))]  # fmt: skip
        return "\n".join([*(f"{run.variant}, rate {run.rate:g}, seed {run.seed}" for run in wanted), *said])

    def summary(self) -> dict:
        """All that is known: of each variant its rate, differences, ratios of samples, costs and scores."""
        rows, count = [], len(self.variants) - 1
        for variant in self.variants:
            pairs = self.pairs(variant)
            pairs = pairs if variant == PLAIN else pairs[: paired.look(len(pairs))]
            if not pairs:
                continue
            ratios = [paired.samples_ratio(one["losses"], plain["losses"]) for plain, one in pairs]
            row = {"variant": variant, "rate": self.rate_of(variant), "seeds": len(pairs),
                   "loss": float(np.mean([one["losses"][-1][1] for _, one in pairs])),
                   "curve": np.mean([one["curve"] for _, one in pairs], axis=0).tolist(),
                   "cost": float(np.mean([one["cpu_seconds"] / plain["cpu_seconds"] for plain, one in pairs])),
                   "scores": {name: float(np.mean([one["scores"][name] for _, one in pairs]))
                              for name in pairs[0][1]["scores"]}}  # fmt: skip
            if variant != PLAIN:
                noisiest = [one["curve"][0] / plain["curve"][0] for plain, one in pairs]
                row["difference"] = paired.judge(self.differences(variant), count)
                row["noisiest"] = paired.judge(np.log(noisiest).tolist(), count)
                row["samples"] = paired.judge(np.log(ratios).tolist(), count)
            rows.append(row)
        finals = [one["losses"][-1][1] for run, one in self.found.items()
                  if run.variant == PLAIN and run.rate == self.rate_of(PLAIN)]  # fmt: skip
        alarms = {"comparisons": 20, "told_apart": paired.false_alarms(finals, 20)} if len(finals) >= 6 else None
        runs = [{**asdict(run), **{name: one[name] for name in ("losses", "curve", "scores", "cpu_seconds")}}
                for run, one in self.found.items()]  # fmt: skip
        return {"rows": rows, "itself": alarms, "runs": runs}


def train(run: Run, flags: dict, out: Path, world: Path) -> str:
    """One run, measured; its result is written last. Returns what to say of it."""
    from ppldm.utils.machine.cpu import load_paddle

    logging.disable(logging.INFO)
    load_paddle()
    from currency import ROWS, curve_of, held_out_batches, weighted_mean

    from ppldm.training.commands.train import check_early
    from ppldm.training.optimizer import autocast
    from ppldm.training.prepare import prepare
    from ppldm.training.train import UpdateGuard, train_step
    from ppldm.training.validation import HeldOut, undisturbed

    folder = run.path(out).with_suffix("")
    recipe = check_early(words_of(flags, run, folder, world), True, None, "study")
    ready = prepare(recipe.model, recipe.data, recipe.training)
    state, model = ready.state, ready.state.model
    held_out = HeldOut(ready.validate.args[1].dataset, ROWS, ROWS)
    batches, losses, curve = held_out_batches(model, held_out), [], []
    guard = UpdateGuard(state, ready.world, 10, autocast(ready.arguments), seed=ready.arguments.seed)
    spent, every = 0.0, max(1, ready.max_steps // MEASUREMENTS)
    for step, batch in enumerate(ready.batches(), 1):
        before = time.process_time()
        model.train()
        train_step(guard, [batch])
        spent += time.process_time() - before
        if step % every == 0 or step == ready.max_steps:
            with undisturbed(state):
                curve = curve_of(model, batches).tolist()
            losses.append((step * ready.global_batch_size, weighted_mean(np.array(curve))))
    with undisturbed(state):
        scores = graded(model, world, ready.arguments.seed)
    write_json(
        run.path(out), {"flags": flags, "losses": losses, "curve": curve, "scores": scores, "cpu_seconds": spent}
    )
    return f"{losses[-1][1]:.4f} after {losses[-1][0]} samples, {spent:.0f} s"


def words_of(flags: dict, run: Run, folder: Path, world: Path) -> list[str]:
    """Words of `ppldm train`: the files of the world are the preset's, wherever they lie."""
    of_world = {"file_list": "data/demo.filelist.list", "tokenizer_name": "data/tokenizer",
                "vae_name_or_path": "autoencoder/vae"}  # fmt: skip
    of_world = {name: world / place for name, place in of_world.items()}
    others = {"learning_rate": flags["learning_rate"] * run.rate, "seed": run.seed, "output_dir": folder}
    others["validation_file_list"] = world / "data/held_out.filelist.list"
    words = ["--overwrite_output_dir"]
    for name, value in {**of_world, **flags, **others}.items():
        if value is None:  # of the plain recipe, and not for this variant
            continue
        listed = value if isinstance(value, list) else [value]
        words += [f"--{name}", *(str(one).replace("{benchmarks}", str(VARIANTS.parent)) for one in listed)]
    return words


def graded(model, world: Path, seed: int) -> dict:
    """Shares of right pictures of the first prompts of the world, seen and held out, by what the captions say: of the
    short captions, and where the world's are long of these too, as "long." and the name."""
    from ppldm.demo.shapes_world.grammar import shorten
    from ppldm.diffusion.drawing import Drawing
    from ppldm.diffusion.guided import draw
    from ppldm.evaluation.composition import grade_pictures

    drawing, shape = Drawing(DRAWING_STEPS, GUIDANCE), model.inputs["posterior_noise"].shape(32, 32)
    prompts = [line.partition("\t")[0] for split in ("seen", "heldout") for line in
               (world / f"data/prompts-{split}.txt").read_text(encoding="utf-8").splitlines()[:PROMPTS]]  # fmt: skip
    kinds, scores = {"": [*map(shorten, prompts)]}, {}
    kinds |= {"long.": prompts} if prompts != kinds[""] else {}
    for kind, texts in kinds.items():
        drawn, right = draw(model, model.tokenizer, texts, [0] * len(texts), shape, seed, drawing, check=False), {}
        for one in grade_pictures(drawn, texts)["scores"]:  # of one object and of several
            if one["attribute"] in SCORES:
                right.setdefault(f"{kind}{one['split']}.{one['attribute']}", []).extend(one["right"])
        scores |= {name: float(np.mean(found)) for name, found in right.items()}
    return scores


def table(summary: dict) -> str:
    """Markdown: a row for each variant; in bold what is told apart from the plain recipe."""
    names = [*dict.fromkeys(name for row in summary["rows"] for name in row["scores"])]
    lines = [["variant", "rate", "seeds", "loss", "difference", "samples to the plain loss", "at log-SNR -5", "CPU",
              *(name.replace(".", " ").replace("_", "-") for name in names)]]  # fmt: skip
    lines.append(["---"] * len(lines[0]))
    for row in summary["rows"]:
        scores = [f"{row['scores'][name]:.0%}" for name in names]
        lines.append([f"`{row['variant']}`", f"{row['rate']:g}", str(row["seeds"]), f"{row['loss']:.4f}",
                      show(row.get("difference")), show(row.get("samples"), ratio=True), show(row.get("noisiest")),
                      f"{row['cost']:.2f}",
                      *scores])  # fmt: skip
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    if (itself := summary["itself"]) is not None:
        text += f"\n\nthe plain recipe beside itself: {itself['told_apart']} of {itself['comparisons']} told apart"
    return text


def pairing_table() -> str:
    """Markdown: of the committed runs, half the width of the interval of a difference, unpaired and paired by seed."""
    lines = [["variant", "seeds", "figure", "difference", "unpaired ±", "paired ±", "correlation"], ["---"] * 7]
    for name in ("ablations", "confirmation"):
        definition = yaml.safe_load((VARIANTS.parent / "recipes" / f"{name}.yaml").read_text())
        runs = json.loads((RESULTS / f"recipes-{name}.json").read_text())["results"]["runs"]
        figures = {}
        for one in runs:
            scores = {score["name"]: score["value"] for score in one["scores"]}
            figures.setdefault(one["run"]["variant"], {})[one["run"]["seed"]] = {
                "colour": scores[definition["score"]], "held-out loss": one["losses"]["validation_loss"]
            }  # fmt: skip
        first = next(iter(figures))
        for variant, own in [*figures.items()][1:]:
            control = figures[definition.get("against", {}).get(variant, first)]
            for figure in ("colour", *["held-out loss"] * (variant in definition["comparable_losses"])):
                found = paired.unpaired_and_paired(*([by[seed][figure] for seed in own] for by in (control, own)))
                widths = [f"{found[key]:.4f}" for key in ("difference", "unpaired", "paired")]
                lines.append([f"`{variant}`", str(found["seeds"]), figure, *widths, f"{found['correlation']:.2f}"])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def show(found: dict | None, ratio: bool = False) -> str:
    """A difference of logarithms as a percentage, or as a ratio, with its interval."""
    if found is None:
        return ""
    value, low, high = (float(np.exp(found[key])) for key in ("value", "low", "high"))
    words = [f"{one:.2f}" if ratio else f"{one - 1:+.1%}" for one in (value, low, high)]
    text = f"{words[0]} ({words[1]} .. {words[2]})"
    return f"**{text}**" if found["told_apart"] else text


if __name__ == "__main__":
    main()
