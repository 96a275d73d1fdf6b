"""`ppldm finetune PICTURES --base MODEL`: from a folder of pictures to a LoRA, or a model, that draws what they show.

A chain of commands (`stages`) in the folder --out:

    data        the pictures and their captions as parts
    class       with --class_prompt: pictures of it that the base model draws
    class-data  these as parts; the two lists are mixed one to one
    training    LoRA, or with --method full all weights
    pictures    what is drawn of the prompts

Prior preservation (DreamBooth: Ruiz et al. 2022, arXiv:2208.12242, section 3.3) is that mixture: its loss weighs
pictures of the subject and of the class alike. Its learning rate for all weights, 5e-6, is taken too.
"""

import json
import re
import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

from ...utils.errors import ConfigError
from ...utils.files import local_path, write_text
from ...utils.stages import Stage, as_flags, describe, run_stages, tell
from ...weights.folders import share_trained

_VIEWS, _LEAST_UPDATES, _MOST_UPDATES = 200, 400, 4000
_RATES = {"lora": 1e-4, "full": 5e-6}
_SHOWN_CAPTIONS = 4
KEPT = ("prediction_type", "rescale_betas_zero_snr", "model_max_length", "mask_pad_tokens", "empty_caption")
_TOKEN = re.compile(r"<[^\s<>]+>")  # of captions: a new one, which is trained too
_PPLDM = ("python", "-u", "-m", "ppldm")
_Words = Annotated[list[str], {"nargs": "+", "type": str, "metavar": "TEXT"}]


def finetune(
    pictures: str,  # folder of pictures, with captions in text files beside them (cat.jpg and cat.txt)
    base: Annotated[str, {"opt": True, "required": True}],  # model to start from: pipeline's or run's folder, or a name
    caption: str = "",  # one caption for all pictures, such as "a photo of <dog>", in place of text files
    out: str = "finetuned",  # folder for data, training and pictures
    method: Annotated[str, {"opt": True, "choices": ["lora", "full"]}] = "lora",  # train LoRA, or all weights
    rank: int = 16,  # of the LoRA
    steps: int = None,  # updates; by default each picture is seen 200 times, in 400 to 4000 updates
    batch_size: int = 4,  # samples of an update
    learning_rate: float = None,  # by default 1e-4 for LoRA, 5e-6 for all weights
    resolution: int = None,  # side in pixels; by default the model's
    class_prompt: str = "",  # such as "a photo of a dog": also train on what the base model draws of it, to keep that
    num_class_pictures: int = 100,  # drawn for it
    prompt: _Words = (),  # what to draw, while training too; by default captions
    seed: int = 23,  # of training and drawing
    dry_run: bool = False,  # print the commands and run none
):
    """Fine-tune a model on a folder of pictures with one command: LoRA by default."""
    numbers = {"rank": rank, "steps": steps, "batch-size": batch_size, "learning-rate": learning_rate,
               "resolution": resolution, "num-class-pictures": num_class_pictures}  # fmt: skip
    for name, value in numbers.items():
        if value is not None and value <= 0:
            raise ConfigError(f"--{name} {value:g} must be above 0")
    target, own = local_path(out).absolute(), read_pictures(local_path(pictures), caption)
    start = read_start(base)
    samples = len(own.files) * _VIEWS * (2 if class_prompt else 1)
    steps = steps or min(max(samples // batch_size, _LEAST_UPDATES), _MOST_UPDATES)
    rate, resolution = learning_rate or _RATES[method], resolution or start.facts["resolution"]
    prompts = tuple(prompt) or own.captions[:_SHOWN_CAPTIONS]
    drawn = class_prompt, num_class_pictures, prompts, seed
    settings = Settings(target, start, method, rank, steps, batch_size, rate, resolution, *drawn)
    lists, stages = write_lists(settings, own), plan(settings, own)
    if dry_run:
        documents = "".join(f"cat > {shlex.quote(str(path))} <<'END'\n{text}END\n" for path, text in lists.items())
        sys.stdout.write(f"mkdir -p {shlex.quote(str(target))}\n" + documents + describe(stages, target))
        return
    target.mkdir(parents=True, exist_ok=True)
    for path, text in lists.items():
        write_text(path, text)
    run_stages(stages, target)
    model = as_flags(**_drawn_with(settings))
    tell(f"the pictures: {target}/pictures/grid.png; more of them: ppldm generate {shlex.join(model)} --prompt TEXT")


@dataclass(frozen=True)
class Pictures:
    """What is trained on. files: absolute paths. captions: without repetitions, in order of the files. common: the
    caption of all. name: by names, sizes and times of change, captions' files among them."""

    folder: Path
    files: tuple[Path, ...]
    captions: tuple[str, ...]
    common: str
    name: str


class Start(NamedTuple):
    """The model to start from. facts: its noise schedule and what `weights.write.metadata_of` says, to be kept."""

    model: str
    family: str
    facts: dict


@dataclass(frozen=True)
class Settings:
    """Everything that the plan depends on besides the pictures."""

    out: Path
    start: Start
    method: str
    rank: int
    steps: int
    batch_size: int
    learning_rate: float
    resolution: int
    class_prompt: str
    num_class_pictures: int
    prompts: tuple[str, ...]
    seed: int


def read_pictures(folder: Path, caption: str) -> Pictures:
    """What a folder holds, its subfolders too. Raises ConfigError where there are no pictures, or no captions."""
    from ...data.formats.folder import find_caption, list_pictures
    from ...utils.checksums import digest_of

    folder = folder.absolute()
    try:
        files = list_pictures(folder)
    except OSError as error:
        raise ConfigError(f"cannot read the folder {error.filename}: {error.strerror}; name another") from error
    if not files:
        raise ConfigError(f"{folder} holds no pictures; name a folder with .jpg, .png or .webp files")
    texts = [] if caption else [text for file in files if (text := find_caption(file))]
    if not caption and not texts:
        raise ConfigError(
            f"no picture in {folder} has a caption; write cat.txt beside cat.jpg, or give one for all: --caption TEXT"
        )
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in (*files, *texts)]
    captions = (caption,) if caption else tuple(path.read_text(encoding="utf-8").strip() for path in texts)
    name = f"pictures-{digest_of([caption, stats])[:8]}"
    return Pictures(folder, tuple(files), tuple(dict.fromkeys(captions)), caption, name)


def read_start(model: str) -> Start:
    """The base model's family and settings, by its configs. Raises ConfigError, ModelError."""
    from ...utils.files import read_json
    from ...weights.components import ComponentWeights, Weights
    from ...weights.configs import PUBLISHED_SCHEDULE, read_scheduler
    from ...weights.folders import COMPONENT_FOLDERS
    from ...weights.model_file import family_of
    from ...weights.source import open_model
    from ...weights.write import metadata_of

    source = open_model(model)
    folder = source.path
    scheduler = folder / "scheduler" / "scheduler_config.json"
    configs = {kind: source.config(kind) for kind in COMPONENT_FOLDERS}
    if not all(configs.values()) or not scheduler.is_file():
        raise ConfigError(f"--base {model} is not a whole pipeline; make one of it with `ppldm export`")
    components = {kind: ComponentWeights(config, {}, str(folder)) for kind, config in configs.items()}
    known = read_json(folder / "ppldm.json") or {}
    schedule = {"rescale_betas_zero_snr": False, **PUBLISHED_SCHEDULE, **read_scheduler(scheduler)}
    facts = schedule | metadata_of(Weights(components, schedule, metadata=known))
    family = family_of(components).name
    for name in ("mask_pad_tokens", "empty_caption") if family == "sdxl" else ():
        del facts[name]  # which it has not, and which its pipeline says
    return Start(str(folder.absolute()) if Path(model).exists() else model, family, facts)


def write_lists(settings: Settings, own: Pictures) -> dict[Path, str]:
    """The files that commands read besides folders of pictures: path to content."""
    found = {}
    if own.common:
        found[_source(settings, own)] = _json_lines(own.files, own.common)
    if settings.class_prompt:
        drawn = [settings.out / "class" / f"000-{number:02d}.png" for number in range(settings.num_class_pictures)]
        found[settings.out / "class.jsonl"] = _json_lines(drawn, settings.class_prompt)
        lists = (f"data/{own.name}.filelist", "class-data/class.filelist")
        found[settings.out / "mixed.filelist.list"] = "".join(f"{path} 1\n" for path in lists)
    return found


def plan(settings: Settings, own: Pictures) -> list[Stage]:
    """The commands. They depend on the pictures: with others, everything starts anew."""
    out, model = settings.out, settings.start.model
    data = (*_PPLDM, "convert", str(_source(settings, own)), *as_flags(out=out / "data", name=own.name))
    stages = [Stage("data", "reading the pictures", data, 5)]
    if settings.class_prompt:
        count = settings.num_class_pictures
        drawn = as_flags(model=model, prompt=settings.class_prompt, num_samples=count, seed=settings.seed)
        drawn += as_flags(resolution=settings.resolution, out=out / "class")
        converted = as_flags(out=out / "class-data", name="class")
        stages += [
            Stage("class", f"drawing {count} pictures of the class", (*_PPLDM, "generate", *drawn), 3 * count),
            Stage("class-data", "reading them", (*_PPLDM, "convert", str(out / "class.jsonl"), *converted), 5),
        ]
    pictures = as_flags(**_drawn_with(settings), seed=settings.seed, resolution=settings.resolution)
    pictures += [*as_flags(out=out / "pictures"), "--prompt", *settings.prompts]
    return [
        *stages,
        Stage(
            "training", f"training, {settings.steps} updates", train_command(settings, own), 20 + 3 * settings.steps,
            partial(share_trained, out / "training", settings.steps),
        ),
        Stage("pictures", "drawing pictures of the prompts", (*_PPLDM, "generate", *pictures), 60),
    ]  # fmt: skip


def train_command(settings: Settings, own: Pictures) -> tuple[str, ...]:
    """The training: what the base model was trained with stays as it was."""
    facts, out = settings.start.facts, settings.out
    lists = "mixed.filelist.list" if settings.class_prompt else f"data/{own.name}.filelist.list"
    is_lora = settings.method == "lora"
    tokens = dict.fromkeys(_TOKEN.findall(" ".join(own.captions))) if is_lora else ()
    words = ["--train_tokens", *tokens] if tokens else []
    words += as_flags(model_name_or_path=settings.start.model, file_list=out / lists, output_dir=out / "training")
    words += as_flags(resolution=settings.resolution, max_steps=settings.steps)
    words += as_flags(per_device_train_batch_size=settings.batch_size, gradient_accumulation_steps=1)
    words += as_flags(learning_rate=settings.learning_rate, seed=settings.seed)
    words += as_flags(save_steps=max(settings.steps // 10, 1), save_total_limit=2)
    words += as_flags(image_logging_steps=max(settings.steps // 4, 1), num_inference_steps=50)
    words += as_flags(**{name: facts[name] for name in KEPT if name in facts})
    words += as_flags(size_conditioning=True) if facts.get("size_conditioning") else []
    words += as_flags(lora_rank=settings.rank) if is_lora else []
    return (*_PPLDM, "train", f"family={settings.start.family}", *words, "--validation_prompts", *settings.prompts)


def _drawn_with(settings: Settings) -> dict:
    training = settings.out / "training"
    is_full = settings.method == "full"
    return {"model": training / "pipeline"} if is_full else {"model": settings.start.model, "lora": training / "lora"}


def _source(settings: Settings, own: Pictures) -> Path:
    """What is converted: the folder, or where all pictures have one caption a table of them."""
    return settings.out / f"{own.name}.jsonl" if own.common else own.folder


def _json_lines(files, caption: str) -> str:
    records = ({"file_name": str(path), "caption": caption} for path in files)
    return "".join(f"{json.dumps(record, ensure_ascii=False)}\n" for record in records)
