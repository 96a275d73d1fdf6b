"""A plan is drawn: what is not there yet, in batches over prompts, shared out over processes; then pictures.jsonl and
sheets of pictures are written beside them.

AUTOMATIC1111's stable-diffusion-webui, and all that reads its PNG files, find in ours the text `parameters`: the
prompt, `Negative prompt: …`, and fields `Name: value` (modules/processing.py, create_infotext, of version 1.10).
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from ...utils.checksums import digest_of, hash_file
from ...utils.errors import ConfigError, OutputError
from ...utils.files import cache_dir, local_path, make_output_dir, read_json, write_json, write_text
from ...utils.log import get_logger, progress
from ...utils.text import count_of
from ..prompt_weights import batches_alike, chunks_of
from .plan import SCALE, Job, Plan, short

INFOTEXT_CHUNK = "parameters"  # the keyword of the PNG file's text
_HASH_DIGITS = 10  # of the SHA-256 of a model's file, that are shown
# Our samplers by its names (modules/sd_samplers_kdiffusion.py, sd_samplers_timesteps.py); others go by our own.
_WEBUI_SAMPLERS = {
    "ddim": "DDIM",
    "ddpm": "DDPM",
    "pndm": "PLMS",
    "lms": "LMS",
    "heun": "Heun",
    "euler": "Euler",
    "flow-euler": "Euler",
    "euler-ancestral": "Euler a",
    "dpm-solver++": "DPM++ 2M",
    "dpm-solver++-sde": "DPM++ 2M SDE",
    "unipc": "UniPC",
}
FOLDER = "drawn"  # where pictures go if no folder is named
SETTINGS_CHUNK = "ppldm"  # keyword of the text in a PNG that holds a picture's record
SOURCE = "source"  # within it, and no part of the record: where the model came from, and the batch
_SHOWN_LETTERS = 60
_WEIGHTS = (".safetensors", ".pdparams", ".bin", ".ckpt", ".pt", ".pth")
GRID_PROMPTS = 64  # at most, in a sheet of prompts, or of as many sheets


def infotext(record: Mapping, model: str, sha256: str) -> str:
    """The text of a picture, by its record (`plan.Plan.record`). model: its name; sha256: hexadecimal digits."""
    schedule, strength, interval = (record.get(name) for name in ("sigma_schedule", "strength", "guidance_interval"))
    fields = {
        "Steps": record["num_inference_steps"],
        "Sampler": _WEBUI_SAMPLERS.get(record["sampler"], record["sampler"]),
        "Schedule type": schedule and schedule.capitalize(),
        "CFG scale": f"{record['guidance_scale']:g}",
        "Seed": record["seed"],
        "Size": f"{record['width']}x{record['height']}",
        "Model hash": sha256[:_HASH_DIGITS],
        "Model": model,
        "Denoising strength": strength,
        "Eta": record.get("eta") or None,
        "CFG rescale": record.get("guidance_rescale") or None,
        "CFG interval": interval and "{}..{}".format(*interval),
        "CFG-Zero": record.get("cfg_zero") or None,
        "Picture": record["index"] or None,
    }
    lines = [record["prompt"]]
    if record["negative_prompt"]:
        lines.append(f"Negative prompt: {record['negative_prompt']}")
    said = {name: str(value) for name, value in fields.items() if value not in (None, "")}
    quoted = {
        name: json.dumps(value, ensure_ascii=False) if any(mark in value for mark in ',:\n"') else value
        for name, value in said.items()
    }
    return "\n".join([*lines, ", ".join(f"{name}: {value}" for name, value in quoted.items())])


def read_settings(path: Path, whole: bool = True) -> dict | None:
    """What a picture's file, whole or by its head, says of how it was drawn; None where it is not one of ours."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            if whole:
                picture.load()
            return settings_of(picture)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None


def settings_of(picture) -> dict | None:
    """What an open picture says of how it was drawn; None where that is nothing that we have written."""
    try:
        found = json.loads(picture.info[SETTINGS_CHUNK])
    except (KeyError, TypeError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def check_folder(plan: Plan, out: str) -> Path:
    """`out`. Pictures of the same prompt and other settings are replaced there. Raises ConfigError where it holds a
    picture of another prompt, or that was not drawn here, in place of the plan's."""
    from PIL import Image

    folder = local_path(out)
    for job in plan.jobs():
        path, prompt = folder / plan.file(*job), plan.requests[job[1]].prompt
        try:
            with Image.open(path) as picture:
                found = settings_of(picture) or {}
                drawn = found.get("template", found.get("prompt"))
        except Image.DecompressionBombError:
            drawn = None
        except (OSError, ValueError, SyntaxError):
            continue  # not there, or not a whole picture
        if drawn != prompt:
            what = f"of the prompt {drawn[:_SHOWN_LETTERS]!r}" if isinstance(drawn, str) else "that ppldm did not draw"
            raise ConfigError(f"--out {out} holds {path.name}, a picture {what}; name another folder, or omit --out")
    return folder


def free_folder(plan: Plan, records: dict[Job, dict]) -> Path:
    """The first of drawn, drawn-2, drawn-3 … that holds no other pictures than some of the plan's."""
    files = {plan.file(*job): record for job, record in records.items()}

    def is_free(folder: Path) -> bool:
        found = [path.relative_to(folder).as_posix() for path in folder.rglob(plan.pattern)]
        return all(name in files and _is_drawn(folder / name, files[name], False) for name in found)

    return next(filter(is_free, (Path(FOLDER if number == 1 else f"{FOLDER}-{number}") for number in count(1))))


def _is_drawn(path: Path, record: dict, whole: bool = True) -> bool:
    """Whether the picture in a file is the one of a record. whole: and is not damaged."""
    return (read_settings(path, whole) or {}) | {SOURCE: None} == record | {SOURCE: None}


def draw_plan(pipeline, plan: Plan, records: dict[Job, dict], out: Path, *, batch_size: int, world) -> None:
    """Draw this rank's share of the pictures that are not there yet. Raises OutputError, ConfigError."""
    from ...utils.pictures import save_png

    for folder in {(out / plan.file(*job)).parent for job in records}:
        make_output_dir(folder)
    records = dict([*records.items()][world.rank :: world.size])
    todo = {job for job, record in records.items() if not _is_drawn(out / plan.file(*job), record)}
    if len(todo) < len(records):
        get_logger().info("%d of %d pictures are there already", len(records) - len(todo), len(records))
    # The batches of all pictures and not of those to do: its batch may change the last bit of a picture.
    batches = [one for one in batches_of(plan, records, batch_size) if not todo.isdisjoint(one)]
    total = sum(len(one) * plan.drawing_at(one[0][0]).num_passes() for one in batches)
    with progress(total=total, desc="drawing", unit="step") as bar:
        for job, picture, texts in draw_batches(pipeline, plan, records, batches, lambda count, *_: bar.update(count)):
            if job in todo:
                save_png(out / plan.file(*job), picture, texts)


def draw_batches(
    pipeline, plan: Plan, records: dict[Job, dict], batches: Iterable[list[Job]], on_step: Callable
) -> Iterator[tuple[Job, np.ndarray, dict[str, str]]]:
    """Each picture of batches, uint8 [H, W, 3], with its job before it and behind it what its file says in words."""
    for batch in batches:
        pictures = _draw_batch(pipeline, plan, [records[job] for job in batch], batch[0][0], on_step)
        for place, (job, picture) in enumerate(zip(batch, pictures, strict=True)):
            source = {**plan.source, "batch": list(plan.place or (len(batch), place))}
            yield job, picture, texts_of(records[job], source)


def _draw_batch(pipeline, plan: Plan, records: list[dict], values: tuple, on_step: Callable | None = None):
    """Pictures [B, H, W, 3] uint8 of records that share their values on the plan's axes, but for the seed."""
    size, place = plan.place or (len(records), slice(None))
    drawn = records * (size if plan.place else 1)
    pictures = pipeline.draw(
        [record["prompt"] for record in drawn],
        [record["index"] for record in drawn],
        [record["seed"] for record in drawn],
        negative_prompts=[record["negative_prompt"] for record in drawn],
        drawing=plan.drawing_at(values),
        size=plan.size(pipeline.resolution),
        control=plan.control,
        control_scale=plan.control_scale,
        weighted=plan.weighted,
        image=plan.image,
        mask=plan.mask,
        callback=on_step and partial(on_step, len(records)),
    )
    return pictures[place][None] if plan.place else pictures


def batches_of(plan: Plan, records: dict[Job, dict], batch_size: int) -> Iterator[list[Job]]:
    """Runs of jobs, at most `batch_size` long, that are drawn alike, in order of the jobs."""

    def alike(job: Job):
        texts = [records[job][name] for name in ("prompt", "negative_prompt")]
        return plan.drawing_at(job[0]), chunks_of(texts, plan.weighted)

    return batches_alike(records, alike, 1 if plan.place else batch_size)


def estimate(pipeline, plan: Plan, records: dict[Job, dict], batch_size: int) -> str:
    """How long all pictures take on this machine, in words, from a first batch; an unguided pass has half the work."""
    from ...diffusion.guided import guided_passes
    from ...diffusion.samplers import make_sampler

    batches = list(batches_of(plan, records, batch_size))
    began = time.perf_counter()
    _draw_batch(pipeline, plan, [records[job] for job in batches[0]], batches[0][0][0])
    first = time.perf_counter() - began

    def work(batch: list[Job]) -> float:
        drawing = plan.drawing_at(batch[0][0])
        guided = guided_passes(drawing, make_sampler(pipeline.model.process, drawing, pipeline.model.sampling))
        return len(batch) * (len(guided) + sum(guided))

    seconds = first * sum(map(work, batches)) / work(batches[0])
    return (
        f"{count_of(len(records), 'picture')}, {len(batches):,} batch{'' if len(batches) == 1 else 'es'}: about "
        f"{seconds:,.0f} s on this machine, by a first batch of {first:.1f} s; nothing is written"
    )


def texts_of(record: dict, source: dict) -> dict[str, str]:
    """What a picture's file says in words, by keyword."""
    own = json.dumps({**record, SOURCE: source}, ensure_ascii=False)
    name, sha256 = Path(str(source.get("model", ""))).name, source.get("sha256", "")
    return {SETTINGS_CHUNK: own, INFOTEXT_CHUNK: infotext(record, name, sha256)}


def write_summary(plan: Plan, records: dict[Job, dict], out: Path, columns: int) -> None:
    """pictures.jsonl, and sheets of the first prompts: one for each guidance scale, or one for each prompt."""
    lines = [json.dumps({"file": plan.file(*job), **one}, ensure_ascii=False) for job, one in records.items()]
    write_text(out / "pictures.jsonl", "".join(line + "\n" for line in lines))
    if plan.layout:
        written = _write_geneval(plan, out)
    else:
        written = _write_grids(plan, out) if plan.labelled else _write_prompt_sheets(plan, out, columns)
    known = {out / plan.file(*job) for job in records}
    folders = {path.parent for path in known}
    if others := [path for folder in folders for path in folder.glob(plan.pattern) if path not in known]:
        get_logger().warning("%d pictures of other commands are in %s too, and not in pictures.jsonl", len(others), out)
    get_logger().info("%s and %s in %s", count_of(len(lines), "picture"), written, out)


def _write_prompt_sheets(plan: Plan, out: Path, columns: int) -> str:
    from ...utils.pictures import prompt_grid, save_png

    shown = plan.requests[:GRID_PROMPTS]
    for values in ((scale,) for scale in plan.axes[SCALE]):
        rows = [_pictures(plan, out, values, number) for number in range(len(shown))]
        captions = [f"{r.prompt}  ({r.remark})" if r.remark else r.prompt for r in shown]
        save_png(out / plan.folder(values) / "grid.png", prompt_grid(captions, rows, columns=columns))
    return "grid.png"


def _write_geneval(plan: Plan, out: Path) -> str:
    """Beside the samples of each prompt what its line of evaluation_metadata.jsonl says, and a sheet of them."""
    from ...utils.pictures import labelled_grid, save_png

    for values, number in {job[:2]: None for job in plan.jobs()}:
        request, folder = plan.requests[number], (out / plan.file(values, number, 0)).parents[1]
        write_text(folder / "metadata.jsonl", (request.line or json.dumps({"prompt": request.prompt})) + "\n")
        pictures = _pictures(plan, out, values, number)
        save_png(folder / "grid.png", labelled_grid(request.prompt, [""], [""], [[pictures]]))
    return "metadata.jsonl and grid.png of each prompt"


def _write_grids(plan: Plan, out: Path) -> str:
    from ...utils.pictures import labelled_grid, save_png

    (down, rows), (across, columns) = [("", [None])] * (2 - len(plan.axes)) + list(plan.axes.items())
    names = [f"{down} {short(value)}" if down else "" for value in rows]
    heads = [f"{across} {short(value)}" for value in columns]
    for number, request in enumerate(plan.requests[:GRID_PROMPTS]):
        cells = [
            [_pictures(plan, out, (row, column)[2 - len(plan.axes) :], number) for column in columns] for row in rows
        ]
        save_png(out / f"grid-{plan.number(number)}.png", labelled_grid(request.prompt, names, heads, cells))
    return "grid-*.png"


def _pictures(plan: Plan, out: Path, values: tuple, number: int) -> list[np.ndarray]:
    from PIL import Image

    jobs: list[Job] = [(values, number, plan.first + index) for index in range(plan.num_samples)]
    return [np.asarray(Image.open(out / plan.file(*job))) for job in jobs]


def describe_source(model: str, offline: bool, **told) -> dict:
    """Where a model comes from, as its pictures say it, and the SHA-256 of its weights, by which others know it."""
    from ...weights.source import open_model

    sha256 = model_sha256(open_model(model, offline).path)
    return {"model": model, "sha256": sha256, **{name: value for name, value in told.items() if value}}


def model_sha256(path: Path) -> str:
    """Of a file as `sha256sum` prints it; of a folder that of what `sha256sum` prints of its weights' files, by their
    paths in the folder, in order; "" of one without weights. Raises OSError."""
    if path.is_file():
        return _kept_sha256(path)
    files = sorted(one for one in path.rglob("*") if one.suffix in _WEIGHTS and one.is_file())
    lines = [f"{_kept_sha256(one)}  {one.relative_to(path).as_posix()}\n" for one in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""


def _kept_sha256(path: Path) -> str:
    """A file's, computed again only where it has changed; kept in the cache folder, where that can be written."""
    stat = path.stat()
    state = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    kept = cache_dir() / "sha256" / f"{digest_of(state[0])}.json"
    known = read_json(kept, optional=True)
    if isinstance(known, list) and known[:-1] == state:
        return known[-1]
    found = hash_file(path)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, [*state, found])
    except (OSError, OutputError):
        get_logger().debug("%s cannot be written; the next run computes the hash of %s again", kept, path)
    return found
