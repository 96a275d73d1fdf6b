"""`ppldm generate`: pictures from prompts, in one process or several, resumed where it stopped.

Every picture carries its settings and the model's fingerprint in a text chunk of its PNG file. A picture that is there
with the same settings is not drawn again; so the same command goes on. Other settings replace it; other prompts are
refused.
"""

import json
import math
import re
import zlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from ..utils.errors import ConfigError
from ..utils.files import local_path
from ..utils.machine.devices import use_device
from ..utils.rng import MAX_SEED
from ..weights.fetch import check_name
from ..weights.lora.flag import Loras, check_loras
from .prompts import Request, check_prompt, read_requests

SAMPLER_NAMES = ("ddim", "ddpm", "pndm", "lms", "euler", "euler-ancestral", "dpm-solver++", "flow-euler")
SETTINGS_CHUNK = "ppldm"
GRID_PROMPTS = 64  # at most, in a grid
_SHOWN_WORDS, _SHOWN_LETTERS = 20, 60
_Scales = Annotated[list[float], {"nargs": "+", "type": float, "metavar": "S"}]


def generate(
    model: Annotated[str, {"opt": True, "required": True}],  # pipeline folder, checkpoint, CompVis' .ckpt, or a name
    prompts: str = None,  # file of prompts: text (one a line; after a tab, a remark), .tsv, .csv or .jsonl
    prompt: Annotated[list[str], {"nargs": "+", "type": str, "metavar": "TEXT"}] = (),  # prompts on the command line
    negative_prompt: str = "",  # what the pictures should not show, for prompts without one of their own
    out: str = "pictures",  # folder to write: NNN-II.png, grid.png, pictures.jsonl
    num_samples: int = 4,  # pictures for each prompt
    guidance_scale: _Scales = (7.5,),  # how strongly to follow the prompt; 1: not guided. Several: a folder gN for each
    num_inference_steps: int = 50,  # sampler's steps
    sampler: str = None,  # ddim (default), ddpm, pndm, lms, euler, euler-ancestral, dpm-solver++; flow-euler for flow
    resolution: int = None,  # side in pixels; by default the one trained at
    height: int = None,  # in pixels, where it is not the side
    width: int = None,  # in pixels, where it is not the side
    size: str = None,  # the same as --width and --height, as 640x448
    control: str = None,  # picture that leads the drawing, for models with a ControlNet
    control_filter: str = None,  # filter to make the control image of that picture first, as canny (docs/controlnet.md)
    control_scale: float = 1.0,  # how much of what the ControlNet adds
    seed: int = 23,  # the same seed and prompt give the same pictures; -1 chooses one
    batch_size: int = 8,  # pictures at a time; changes at most the last bit of a pixel
    exact: bool = False,  # the same bits for any number of processes: one picture at a time, and one thread of a CPU
    columns: int = 2,  # prompts beside one another in the grid
    ema: bool = False,  # the averaged weights of a checkpoint, or of a .ckpt
    original_config_file: str = None,  # YAML of a .ckpt (default: beside it); VAE's config.json of an old checkpoint
    decoder: str = None,  # stage B of Stable Cascade, checkpoint or pipeline, where the model is its stage C
    lora: Loras = None,  # LoRA files to draw with, each with its weight: FILE:0.8; their changes add up
    tokenizer: str = None,  # tokenizer folder, where the model brings none
    device: str = None,  # what to compute on, as --device of train: cpu, gpu, npu …, gpu:1
    offline: bool = False,  # never touch the network
):  # fmt: skip
    """Draw pictures of prompts with a trained model, and a grid of them."""
    from ..utils.entry import entry

    folder = local_path(out)
    wanted = read_wanted(prompts, list(prompt), negative_prompt)
    counts = {"num_samples": num_samples, "num_inference_steps": num_inference_steps}
    require_positive(**counts, batch_size=batch_size, columns=columns)
    sampler = {"euler-ancest": "euler-ancestral"}.get(sampler, sampler)
    check_settings(scales := list(dict.fromkeys(guidance_scale)), sampler, seed)
    check_control(control, control_filter, control_scale)
    sides = read_size(size, resolution, height, width)
    plan = Plan(wanted, num_samples, scales, num_inference_steps, sampler, seed, *sides, exact, None, control_scale)
    refuse_other_prompts(plan, folder)
    check_name(model)
    lora = check_loras(lora)
    with entry(threads=1 if exact else None):
        from ..diffusion.samplers import choose_sampler
        from ..utils.log import quiet_libraries
        from .load import load

        use_device(device)
        world = join_world()
        quiet_libraries()
        pipeline = load(model, ema=ema, original_config_file=original_config_file, tokenizer=tokenizer,
                        lora=lora, offline=offline, decoder=decoder)  # fmt: skip
        seed = _choose_seed(world) if seed == -1 else seed
        plan = replace(plan, seed=seed, sampler=choose_sampler(sampler, pipeline.model.process))
        if control:
            size = plan.size(pipeline.resolution)
            plan = replace(plan, control=pipeline.read_control(control, size, control_filter, seed))
        _draw_all(pipeline, plan, folder, 1 if exact else batch_size, columns, world)


# The flags of the published generate_images.py, as ours.
generate.aliases = {
    "--model-name-or-path": "--model",
    "--file": "--prompts",
    "--save-path": "--out",
    "--guidance-scales": "--guidance-scale",
    "--scheduler-type": "--sampler",
}


def _draw_all(pipeline, plan: "Plan", folder: Path, batch_size: int, columns: int, world) -> None:
    from ..utils.processes.rank_watch import barrier

    if world.is_main:
        warn_of_unknown_words(pipeline, plan.requests)
    draw_plan(pipeline, plan, folder, batch_size=batch_size, world=world)
    barrier(world)
    if world.is_main:
        write_summary(pipeline, plan, folder, columns)


@dataclass(frozen=True)
class Plan:
    """What is to be drawn: `num_samples` pictures of each request at each guidance scale."""

    requests: list[Request]
    num_samples: int
    guidance_scales: list[float]
    num_inference_steps: int
    sampler: str | None  # None: the model's own
    seed: int
    height: int | None  # None: as trained
    width: int | None
    exact: bool
    control: Any = None  # uint8 [K, H, W]; None: none
    control_scale: float = 1.0

    def jobs(self) -> list[tuple[float, int, int]]:
        """(guidance scale, number of the request, index) of every picture."""
        return [
            (scale, number, index)
            for scale in self.guidance_scales
            for number in range(len(self.requests))
            for index in range(self.num_samples)
        ]

    def file(self, scale: float, number: int, index: int) -> str:
        """A picture's path in the output folder."""
        folder = "" if len(self.guidance_scales) == 1 else f"g{short(scale)}/"
        digits = max(3, len(str(len(self.requests) - 1)))
        return f"{folder}{number:0{digits}d}-{index:02d}.png"

    def size(self, resolution: int) -> tuple[int, int]:
        """(height, width) for a model that was trained at `resolution`."""
        height, width = (resolution if side is None else side for side in (self.height, self.width))
        return height, width

    def record(self, pipeline, scale: float, number: int, index: int) -> dict:
        """Everything that decides a picture."""
        request = self.requests[number]
        height, width = self.size(pipeline.resolution)
        led = {}
        if self.control is not None:
            led = {"control": f"{zlib.crc32(self.control.tobytes()):08x}", "control_scale": self.control_scale}
        return led | {
            "prompt": request.prompt,
            "negative_prompt": request.negative_prompt,
            "index": index,
            "seed": self.seed if request.seed is None else request.seed,
            "guidance_scale": scale,
            "num_inference_steps": self.num_inference_steps,
            "sampler": self.sampler,
            "height": height,
            "width": width,
            "weights": pipeline.fingerprint,
            "exact": self.exact,
            **({"lora": pipeline.lora} if pipeline.lora else {}),
        }


def check_settings(scales: list[float], sampler: str | None, seed: int) -> None:
    """Raises ConfigError for what no model can be drawn with."""
    if odd := [scale for scale in scales if not math.isfinite(scale)]:
        raise ConfigError(f"--guidance-scale {odd[0]} is not a number; 7.5 is usual")
    if sampler not in (None, *SAMPLER_NAMES):
        raise ConfigError(f"--sampler {sampler} is not one of {', '.join(SAMPLER_NAMES)}")
    if not -1 <= seed <= MAX_SEED:
        raise ConfigError(f"--seed {seed} must be from 0 to {MAX_SEED}, or -1 to have one chosen")


def check_control(control: str | None, made_by: str | None, scale: float) -> None:
    """Raises ConfigError for settings of a control image that are wrong, or are given without one."""
    if control is None and (made_by or scale != 1.0):
        raise ConfigError("--control_filter and --control_scale are for a control image; give --control PICTURE")
    if not math.isfinite(scale):
        raise ConfigError(f"--control_scale {scale} is not a number; 1 is usual")
    if control is not None and not Path(control).is_file():
        raise ConfigError(f"--control {control}: there is no such file")
    if made_by:
        from ..data.control.spec import make_filter

        make_filter(made_by)


def short(scale: float) -> str:
    """A guidance scale as a person writes it; two that differ have different texts."""
    return f"{scale:g}" if float(f"{scale:g}") == scale else repr(scale)


def read_wanted(prompts_file: str | None, prompts: list[str], negative_prompt: str = "") -> list[Request]:
    """Requests from the command line and from a file. Raises ConfigError where there are none."""
    for text, flag in (*((prompt, "--prompt") for prompt in prompts), (negative_prompt, "--negative-prompt")):
        check_prompt(text, flag)
    wanted = [Request(prompt) for prompt in prompts]
    if prompts_file:
        wanted += read_requests(prompts_file)
    if not wanted:
        raise ConfigError("no prompts; give --prompt TEXT … or --prompts FILE")
    return [Request(r.prompt, r.negative_prompt or negative_prompt, r.seed, r.remark) for r in wanted]


def read_prompts(path) -> list[tuple[str, str]]:
    """(prompt, remark) pairs of a file of prompts. Raises ConfigError."""
    return [(request.prompt, request.remark) for request in read_requests(path)]


def refuse_other_prompts(plan: Plan, out: Path) -> None:
    """Raises ConfigError where a picture would be replaced that is of another prompt, or that was not drawn here.

    Those of the same prompt and other settings are replaced.
    """
    from PIL import Image

    for job in plan.jobs():
        path, prompt = out / plan.file(*job), plan.requests[job[1]].prompt
        try:
            with Image.open(path) as picture:
                drawn = json.loads(picture.info[SETTINGS_CHUNK])["prompt"]
        except (KeyError, TypeError, ValueError):
            drawn = None
        except (OSError, SyntaxError):
            continue  # not there, or not a whole picture
        if drawn != prompt:
            what = f"of the prompt {drawn[:_SHOWN_LETTERS]!r}" if isinstance(drawn, str) else "that ppldm did not draw"
            raise ConfigError(f"--out {out} holds {path.name}, a picture {what}; choose another folder, or remove it")


def draw_plan(pipeline, plan: Plan, out: Path, *, batch_size: int, world) -> None:
    """Draw this rank's share of the pictures that are not there yet. Raises OutputError, ConfigError."""
    from ..utils.files import make_output_dir
    from ..utils.log import get_logger, progress
    from ..utils.pictures import save_png

    size = plan.size(pipeline.resolution)
    pipeline.latent_shape(*size)
    for scale in plan.guidance_scales:
        make_output_dir((out / plan.file(scale, 0, 0)).parent)
    jobs = plan.jobs()[world.rank :: world.size]
    todo = {job for job in jobs if read_settings(out / plan.file(*job)) != plan.record(pipeline, *job)}
    if len(todo) < len(jobs):
        get_logger().info("%d of %d pictures are there already", len(jobs) - len(todo), len(jobs))
    # The batches of all pictures and not of those to do: its batch may change the last bit of a picture.
    batches = [batch for batch in _batches(jobs, batch_size) if not todo.isdisjoint(batch)]
    with progress(total=sum(map(len, batches)) * plan.num_inference_steps, desc="drawing", unit="step") as bar:
        for batch in batches:
            records = [plan.record(pipeline, *job) for job in batch]
            pictures = pipeline.draw(
                [record["prompt"] for record in records],
                [record["index"] for record in records],
                [record["seed"] for record in records],
                negative_prompts=[record["negative_prompt"] for record in records],
                guidance_scale=batch[0][0],
                num_inference_steps=plan.num_inference_steps,
                sampler=plan.sampler,
                size=size,
                control=plan.control,
                control_scale=plan.control_scale,
                on_step=partial(bar.update, len(batch)),
            )
            for job, record, picture in zip(batch, records, pictures, strict=True):
                if job not in todo:
                    continue
                save_png(out / plan.file(*job), picture, {SETTINGS_CHUNK: json.dumps(record, ensure_ascii=False)})


def _batches(jobs: list[tuple], batch_size: int):
    """Runs of jobs of one guidance scale, at most `batch_size` long."""
    start = 0
    while start < len(jobs):
        end = start + 1
        while end < min(len(jobs), start + batch_size) and jobs[end][0] == jobs[start][0]:
            end += 1
        yield jobs[start:end]
        start = end


def warn_of_unknown_words(pipeline, requests: list[Request]) -> None:
    """Name the words that the model's vocabulary lacks: in their place it sees one and the same unknown word."""
    from ..utils.log import get_logger

    said = describe_unknown_words(
        pipeline, [text for request in requests for text in (request.prompt, request.negative_prompt)]
    )
    if said:
        get_logger().warning("%s", said)


def describe_unknown_words(pipeline, texts: list[str]) -> str:
    """The words that the model's vocabulary lacks, as a sentence; "" where it knows all."""
    words = pipeline.tokenizer.unknown_words([text for text in texts if text])
    more = ", …" if len(words) > _SHOWN_WORDS else ""
    return f"words that the model does not know: {', '.join(words[:_SHOWN_WORDS])}{more}" if words else ""


def write_summary(pipeline, plan: Plan, out: Path, columns: int) -> None:
    """pictures.jsonl, a line for each picture, and for each guidance scale a grid of its first prompts."""
    import numpy as np
    from PIL import Image

    from ..utils.files import write_text
    from ..utils.grid import prompt_grid
    from ..utils.log import get_logger
    from ..utils.pictures import save_png

    lines = [
        json.dumps({"file": plan.file(*job), **plan.record(pipeline, *job)}, ensure_ascii=False) for job in plan.jobs()
    ]
    write_text(out / "pictures.jsonl", "".join(line + "\n" for line in lines))
    shown = plan.requests[:GRID_PROMPTS]
    for scale in plan.guidance_scales:
        rows = [
            [np.asarray(Image.open(out / plan.file(scale, number, index))) for index in range(plan.num_samples)]
            for number in range(len(shown))
        ]
        captions = [f"{r.prompt}  ({r.remark})" if r.remark else r.prompt for r in shown]
        save_png((out / plan.file(scale, 0, 0)).parent / "grid.png", prompt_grid(captions, rows, columns=columns))
    known = {out / plan.file(*job) for job in plan.jobs()}
    folders = {path.parent for path in known}
    if others := [path for folder in folders for path in folder.glob("*-[0-9][0-9].png") if path not in known]:
        get_logger().warning("%d pictures of other commands are in %s too, and not in pictures.jsonl", len(others), out)
    get_logger().info("%d pictures and grid.png in %s", len(lines), out)


def read_settings(path: Path) -> dict | None:
    """The settings that a picture was drawn with; None where it is not there, or is not a whole picture of ours."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            picture.load()
            return json.loads(picture.text[SETTINGS_CHUNK])
    except (OSError, ValueError, KeyError, AttributeError, SyntaxError):
        return None


def join_world():
    """This process's place among those that a launcher started, which can talk to one another from here on."""
    import paddle

    from ..utils.machine.cpu import quiet_paddle
    from ..utils.processes.world import World

    world = World.detect()
    if world.size > 1:
        with quiet_paddle():
            paddle.distributed.init_parallel_env()
    return world


def _choose_seed(world) -> int:
    """One for all ranks."""
    import secrets

    import paddle

    chosen = [secrets.randbelow(2**31)]
    if world.size > 1:
        paddle.distributed.broadcast_object_list(chosen, src=0)
    return chosen[0]


def read_size(
    size: str | None, resolution: int | None, height: int | None, width: int | None
) -> tuple[int | None, int | None]:
    """(height, width) in pixels from what is given of the flags; None: as trained. Raises ConfigError where `size` is
    not width x height, or another says a size too."""
    sides = {"resolution": resolution, "height": height, "width": width}
    given = {name: side for name, side in sides.items() if side is not None}
    if size is not None:
        if not (found := re.fullmatch(r"(\d+)x(\d+)", size)):
            raise ConfigError(f"--size {size} is not width x height; write it as 640x448")
        if name := next(iter(given), None):
            raise ConfigError(f"--size {size} says all that --{name} {given[name]} does; omit one of them")
        given = {"height": int(found[2]), "width": int(found[1])}
    require_positive(**given)
    return tuple(given.get(name, given.get("resolution")) for name in ("height", "width"))


def require_positive(**values) -> None:
    for name, value in values.items():
        if value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} {value} must be above 0")
