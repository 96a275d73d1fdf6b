"""One evaluation, whatever it is of: real pictures, prompts, drawing, metrics; each result written once it is whole.

A result of the same pictures and settings is not computed again, so that the same command goes on. Pictures of a model
are a plan of `ppldm generate` for each guidance scale: shared out over ranks, and resumed. Which prompts of many are
drawn is the same for every seed.

`ppldm evaluate --watch RUN` evaluates every checkpoint of a run once, beside the training, at low priority. Files are
checked against the checkpoint's manifest as they are read; one that rotation removes meanwhile is passed over with a
line. Results are in OUT/checkpoint-<step>/ and not computed again for the same manifest, so a run that starts anew is
evaluated anew. RUN/evaluation.jsonl, a line for each checkpoint and guidance scale, is made of them, and shown in
VisualDL. The watcher ends when the run has ended, as start.json says, and all is evaluated.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import paddle

from ..diffusion.guided import to_pictures
from ..inference.pictures.draw import SETTINGS_CHUNK, draw_plan, read_settings
from ..inference.pictures.plan import SCALE, Plan, short
from ..inference.prompts import Request, read_licence, read_requests
from ..networks.autoencoder import reconstruct
from ..training.checkpoint import read_manifest
from ..training.metrics import EVALUATION_DIR, EVALUATION_FILE
from ..training.run_folder import has_finished
from ..utils.checksums import checksum_arrays, checksum_json
from ..utils.errors import CheckpointError, ConfigError, DataError, PpldmError
from ..utils.files import make_output_dir, read_json, remove_path, write_text
from ..utils.finished import JobFolder
from ..utils.log import get_logger, progress
from ..utils.pictures import save_png
from ..utils.processes.ranks import World, barrier, shard
from ..utils.rng import Stream, make_rng
from ..utils.text import as_json
from ..weights import folders
from ..weights.fill import fill_component
from ..weights.lora.merge import identify_loras
from ..weights.source import read_component
from .measure import SEED, Networks, Result, begin_result, check, measure, names_of, read_result
from .metrics.base import Metric
from .pictures import WEIGHTS, PictureSet, Statistics, open_pictures, open_statistics

_FEATURES, _RECONSTRUCTIONS = "features", "reconstructions"
MODEL, AUTOENCODER, PICTURES = "model", "autoencoder", "pictures"
USUAL_SAMPLES = 1000  # where nobody says how many, and there are as many prompts
_NICENESS = 10


@dataclass
class Job:
    """What is asked for but for the model. prompts: a file; None: the captions of the real pictures. drawn: how
    pictures are drawn at each guidance scale, still without requests. loading: arguments of `inference.load.load`."""

    against: Path
    num_real: int | None
    wanted: list[Metric]
    left_out: dict[str, str]
    make_networks: Callable[[Path], Networks]
    prompts: str | None
    num_samples: int | None
    negative_prompt: str
    drawn: Plan
    batch_size: int
    loading: dict
    redo: bool
    _real: dict[int | None, PictureSet | Statistics] = field(default_factory=dict)

    @property
    def resolution(self) -> int | None:
        return self.drawn.height

    @property
    def scales(self) -> list[float]:
        return self.drawn.axes[SCALE]

    @property
    def loras(self) -> dict:
        """What tells LoRAs apart that are drawn with, `lora`; empty without any. Raises ConfigError."""
        words = self.loading.get("lora")
        return {"lora": identify_loras(words)} if words else {}

    @property
    def guide(self) -> dict:
        """The model that guides, `guide_model`; empty without one."""
        path = self.loading.get("guide_model")
        return {"guide_model": str(path)} if path else {}

    def real(self, resolution: int | None) -> PictureSet | Statistics:
        """The real pictures, looked at once, or statistics of them. Raises DataError, ConfigError."""
        of_file = str(self.against).endswith(".npz")
        if of_file and self.num_real:
            raise ConfigError(f"--num-real chooses pictures, and --against {self.against} has none; omit it")
        if resolution not in self._real:
            opened = open_statistics(self.against) if of_file else None
            self._real[resolution] = opened or open_pictures(self.against, resolution, self.num_real)
        return self._real[resolution]

    def plan_drawing(self, resolution: int | None) -> Plan:
        """What a model of this resolution is to draw, of the prompts or of the captions of the real pictures. Raises
        ConfigError for numbers that do not go together, DataError where captions are missing."""
        if self.prompts:
            requests = read_requests(self.prompts)
        else:
            captions = self.real(resolution).captions
            if missing := sum(not caption for caption in captions):
                raise DataError(
                    f"{missing} of {len(captions)} pictures of {self.against} have no caption to draw from; give "
                    "--prompts FILE"
                )
            requests = [Request(caption) for caption in captions]
        wanted = min(len(requests), USUAL_SAMPLES) if self.num_samples is None else self.num_samples
        if wanted > len(requests) and wanted % len(requests):
            raise ConfigError(
                f"--num-samples {wanted} is not a multiple of the {len(requests)} prompts; give "
                f"{wanted // len(requests) * len(requests)}, or at most {len(requests)}"
            )
        if wanted < len(requests):
            chosen = make_rng(0, Stream.ORDER).permutation(len(requests))[:wanted]
            requests = [requests[number] for number in sorted(chosen.tolist())]
        requests = [replace(one, negative_prompt=one.negative_prompt or self.negative_prompt) for one in requests]
        return replace(self.drawn, requests=requests, num_samples=wanted // len(requests))

    def of_pictures(self, folder: Path, out: Path) -> dict[Path, Result]:
        """The result of a folder of pictures by its file."""
        generated = open_pictures(folder, self.resolution, self.num_samples)
        width, _, height = generated.facts["size"].partition("x")
        real = self.real(self.resolution or (int(width) if width == height else None))
        claim = {"of": "pictures", "digest": generated.digest, "against": real.digest}
        with self._claimed(out, claim, World()):
            path = out / "pictures.json"
            return {path: self._measure(path, str(folder), generated, real, {}, self.make_networks(out / _FEATURES))}

    def of_model(
        self, model: Path, out: Path, ema: bool, world: World, features: Path | None = None
    ) -> dict[Path, Result]:
        """The results by their files, on the main rank. features: folder of the real pictures'. All ranks call it."""
        from ..inference.generate import warn_of_prompts
        from ..inference.load import load

        pipeline = load(model, ema=ema, **self.loading)
        resolution = self.resolution or pipeline.resolution
        plan = self.plan_drawing(resolution).fit(pipeline.model)
        claim = {
            "of": pipeline.fingerprint,
            "against": self.real(resolution).digest,
            **self.loras,
            "requests": f"{checksum_json([[one.prompt, one.negative_prompt, one.seed] for one in plan.requests]):08x}",
            "per_prompt": plan.num_samples,
            **settings_at_any_scale(plan),
        }
        with self._claimed(out, claim, world):
            if world.is_main:
                warn_of_prompts(pipeline, (one for r in plan.requests for one in (r.prompt, r.negative_prompt)))
            scales = plan.axes[SCALE]
            places = [out / f"g{short(scale)}" for scale in scales]
            for scale, folder in zip(scales, places, strict=True):
                own = replace(plan, axes={SCALE: [scale]})
                draw_plan(pipeline, own, own.records(pipeline), folder, batch_size=self.batch_size, world=world)
            barrier(world)
            facts, results = weight_facts(model, ema) | self.loras | self.guide, {}
            networks = self.make_networks(features or out / _FEATURES)
            for folder in places if world.is_main else ():
                generated, count = open_pictures(folder, resolution), len(plan.requests) * plan.num_samples
                if len(generated) != count:
                    raise DataError(f"{folder} holds {len(generated)} pictures and not {count}; use --redo")
                path = out / f"{folder.name}.json"
                results[path] = self._measure(path, str(model), generated, self.real(resolution), facts, networks)
        barrier(world)
        return results

    def of_autoencoder(self, folder: Path, out: Path, world: World) -> dict[Path, Result]:
        """Reconstruct the real pictures, and on the main rank the result by its file. All ranks call it together."""
        found = read_component("vae", folder, offline=self.loading["offline"])
        fingerprint, vae = checksum_arrays(found.arrays.items()), fill_component("vae", found)
        vae.eval()
        real, results = self.real(self.resolution or found.config["sample_size"]), {}
        if not isinstance(real, PictureSet):
            raise ConfigError(f"--against {self.against} has no pictures to reconstruct; give a filelist or a folder")
        with self._claimed(out, {"of": fingerprint, "against": real.digest}, world):
            _reconstruct(vae, real, out / _RECONSTRUCTIONS, fingerprint, self.batch_size, world)
            barrier(world)
            if world.is_main:
                generated = open_pictures(out / _RECONSTRUCTIONS)
                path, networks = out / f"{_RECONSTRUCTIONS}.json", self.make_networks(out / _FEATURES)
                results[path] = self._measure(path, str(folder), generated, real, {}, networks)
        barrier(world)
        return results

    @contextmanager
    def _claimed(self, out: Path, claim: dict, world: World) -> Iterator[None]:
        """Hold the folder for all ranks: none writes into it before the main one has it, and has cleared it."""

        def clear() -> None:  # the results of other settings
            for path in {*out.glob("g*"), *out.glob(_RECONSTRUCTIONS), *out.glob("*.json"), *out.glob("*.terms.npz")}:
                remove_path(path)

        job = JobFolder(out, ".evaluation", "evaluation")
        with job.claimed(claim, self.redo, clear=clear) if world.is_main else nullcontext():
            barrier(world)
            yield

    def _measure(self, path: Path, name: str, generated, real, weights: dict, networks: Networks) -> Result:
        result = begin_result(name, generated, real, weights)
        reasons = {one.name: why for one in self.wanted if (why := check(one, generated, real))}
        if refused := next((one.name for one in self.wanted if one.asked and one.name in reasons), None):
            raise DataError(f"--metrics {refused} {reasons[refused]}")
        result.left_out = self.left_out | reasons
        usable = [one for one in self.wanted if one.name not in reasons]
        if licence := self.prompts and read_licence(self.prompts):
            result.remarks["prompts"] = licence
        for one in usable:  # what the metrics will depend on
            if one.features is not None:
                result.settings[f"features.{one.features}"] = networks.settings(one.features)
            result.settings[f"metrics.{one.name}"] = {**one.settings, "network": one.features, "seed": SEED}
        if earlier := _find_same(path, result, usable):
            return earlier
        measure(result, usable, generated, real, networks)
        result.write(path, keep_terms=None not in generated.captions)
        get_logger().info("%s", path)
        return result

    def plan(self, what: Path, kind: str) -> dict:
        """What would be done, JSON-ready; reads the real pictures and no network."""
        plan = {"metrics": [one.name for one in self.wanted], "left_out": self.left_out}
        if kind == AUTOENCODER:
            return {**plan, "pictures": len(self.real(None))}
        if kind == PICTURES:
            return {**plan, "pictures": len(open_pictures(what, None, self.num_samples))}
        drawn = self.plan_drawing(None)
        counts = {"pictures": len(drawn.jobs()), "prompts": len(drawn.requests)}
        return {**plan, **counts, "guidance_scale": self.scales}


def settings_at_any_scale(plan: Plan) -> dict:
    """All that decides pictures besides weights, requests and guidance scale, JSON-ready."""
    drawing = {name: value for name, value in plan.drawing.as_dict().items() if name != SCALE}
    return {**drawing, "seed": plan.seed, "resolution": plan.height, "exact": plan.exact}


def weight_facts(model: Path, ema: bool) -> dict:
    """What is known of a model's weights besides their checksum."""
    records = [read_json(model / name) for name in ("manifest.json", "ppldm.json")] if model.is_dir() else []
    found = next((one for one in records if isinstance(one, dict)), {})
    averaged = ema or found.get("ema", False)
    known = {"averaged": averaged, "step": found.get("global_step"), "manifest": found.get("crc32")}
    return {name: value for name, value in known.items() if value is not None}


def kind_of(path: Path) -> str:
    """What is evaluated: MODEL; AUTOENCODER, a folder with one network, as `vae` that training one leaves behind;
    PICTURES, a folder that holds nothing of a model."""
    if (path / "config.json").is_file():
        return AUTOENCODER
    is_model = bool(
        not path.is_dir()
        or folders.is_checkpoint(path)
        or folders.exported_file(path)
        or folders.is_run(path)
        or any(folders.find_component(path, kind) for kind in folders.COMPONENT_FOLDERS)
    )
    return MODEL if is_model else PICTURES


def _find_same(path: Path, result: Result, wanted: list[Metric]) -> Result | None:
    """The result in a file, where it is the one that is to be computed."""
    earlier = read_json(path)
    same = ("of", "settings", "left_out", "format", "remarks")
    expected = as_json(result.as_json())
    if not isinstance(earlier, dict) or any(earlier.get(name) != expected[name] for name in same):
        return None
    if names_of(earlier.get("metrics", {})) != {one.name for one in wanted}:
        return None
    return Result(**earlier)


def _reconstruct(vae, real: PictureSet, folder: Path, fingerprint: str, batch_size: int, world: World) -> None:
    """This rank's share of the pictures that are not there yet, each with what it is made of; latents are the
    posterior's mean. Batches are those of all pictures, so that bits do not depend on what is there."""
    make_output_dir(folder)
    digits = len(str(len(real) - 1))
    files = [folder / f"{number:0{digits}d}.png" for number in range(len(real))]
    records = [
        {"prompt": caption or "", "reconstruction_of": one, WEIGHTS: fingerprint}
        for one, caption in zip(real.ids, real.captions, strict=True)
    ]
    batches = [range(start, min(start + batch_size, len(real))) for start in range(0, len(real), batch_size)]
    with progress(total=len(real), desc="reconstructing", unit="picture") as bar:
        for batch in (batches[number] for number in shard(len(batches), world)):
            bar.update(len(batch))
            todo = [number for number in batch if read_settings(files[number]) != records[number]]
            if todo:
                pixels = np.stack([real[number] for number in batch]).transpose(0, 3, 1, 2)
                made = to_pictures(reconstruct(vae, paddle.to_tensor(np.ascontiguousarray(pixels))))
                for number in todo:
                    save_png(files[number], made[number - batch[0]], {SETTINGS_CHUNK: json.dumps(records[number])})


def watch_run(job: Job, run: Path, out: Path, every: int, poll_seconds: float | None) -> dict[Path, Result]:
    """Evaluate the checkpoints of `run` after multiples of `every` updates, in order, until the run has ended; with
    `poll_seconds` None those that are there. The new results by their files. Raises OutputError for other files."""
    if World.detect().size > 1:
        raise ConfigError("--watch runs in one process; start it without paddle.distributed.launch")
    os.nice(_NICENESS)
    job.redo = True  # of each checkpoint's folder; what differs from an earlier watcher is refused here
    drawn = {"guidance_scales": job.scales, **settings_at_any_scale(job.drawn), "batch_size": job.batch_size}
    asked = {"against": str(job.against), "prompts": job.prompts, "num_samples": job.num_samples,
             "num_real": job.num_real, "negative_prompt": job.negative_prompt, **drawn, **job.loras,
             **job.guide}  # fmt: skip
    results, passed = {}, set()
    with JobFolder(out, ".watch", "evaluation of a run").claimed(asked):
        while True:
            ended = has_finished(run)  # asked before the look at the folder: what is there then is all
            for checkpoint in reversed(folders.list_checkpoints(run)):
                if folders.step_of(checkpoint) % every == 0 and checkpoint not in passed:
                    found = _evaluate_once(job, checkpoint, out)
                    passed |= {checkpoint} if found is None else set()
                    results |= found or {}
                    if found:
                        publish(run, out)
            if ended or poll_seconds is None:
                return results
            time.sleep(poll_seconds)


def _evaluate_once(job: Job, checkpoint: Path, out: Path) -> dict[Path, Result] | None:
    """What is new of a checkpoint; None for one that cannot be evaluated, with a line that says why."""
    folder = out / checkpoint.name
    try:
        if _is_done(job, checkpoint, folder):
            return {}
        get_logger().info("evaluating %s", checkpoint)
        has_average = (checkpoint / folders.CHECKPOINT_AVERAGE).is_file()  # its run exports that
        return job.of_model(checkpoint, folder, has_average, World(), out / "features")
    except (PpldmError, OSError) as error:
        if checkpoint.is_dir() and not isinstance(error, CheckpointError):
            raise
        get_logger().warning("%s is passed over: it was removed meanwhile", checkpoint)
        return None


def _is_done(job: Job, checkpoint: Path, folder: Path) -> bool:
    """Whether the results of all guidance scales are there, of these weights and with these metrics."""
    manifest, wanted = read_manifest(checkpoint).get("crc32"), {one.name for one in job.wanted}
    files = folder.glob("g*.json") if job.scales == [None] else (folder / f"g{short(one)}.json" for one in job.scales)
    results = [read_json(path) for path in files]
    for found in results:
        if not isinstance(found, dict) or found["of"]["weights"].get("manifest") != manifest:
            return False
        if not wanted <= names_of(found["metrics"]) | found["left_out"].keys():
            return False
    return bool(results)


def publish(run: Path, out: Path) -> None:
    """Write RUN/evaluation.jsonl from all results in `out`, and show them in VisualDL where the run does."""
    records = []
    for path in (path for one in reversed(folders.list_checkpoints(out)) for path in sorted(one.glob("g*.json"))):
        result = read_result(path)
        record = {"global_step": folders.step_of(path.parent), "time": round(path.stat().st_mtime, 3)}
        record[SCALE] = result.settings["drawn"][SCALE]
        for name, found in result.metrics.items():
            record |= {name: found["value"], f"{name}_low": found["low"], f"{name}_high": found["high"]}
        records.append(record)
    write_text(run / EVALUATION_FILE, "".join(json.dumps(record) + "\n" for record in records))
    logging = (read_json(run / folders.RUN_FILE) or {}).get("logging", {})
    if "visualdl" in logging.get("report_to", ()):
        from ..training.report import VisualDLSink

        folder, curves = Path(run, logging.get("logging_dir") or "logs", EVALUATION_DIR), []
        for record in records:  # a curve for each metric at each guidance scale
            at = f" at guidance {short(record.pop(SCALE))}"
            curves.append({name if name in ("global_step", "time") else name + at: record[name] for name in record})
        VisualDLSink(make_output_dir(folder), curves, [], EVALUATION_DIR).close()
