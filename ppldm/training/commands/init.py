"""`ppldm init`: a commented recipe for one's own data, machine and goal, by a few questions or as many flags.

A recipe builds on a preset (`base:`), and shows with their help the settings that one changes first. What is asked is
in `QUESTIONS`; on a terminal every question that no flag answers is asked, elsewhere it takes its default. What
Enter alone gives fits this machine.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ...config.network_files import DEFAULT_TOKENIZER
from ...config.recipe import preset_recipe
from ...data.filelist import list_parts
from ...families.base import get_family
from ...utils.errors import ConfigError
from ...utils.files import local_path, meant_path, write_text
from ...utils.machine.devices import CPU, launch_kind, list_cards

DATA, GOALS, MACHINES = (
    ("pictures", "parts", "laion"),
    ("scratch", "finetune", "lora"),
    (CPU.name, "16gb", "24gb", "8x80gb"),
)
DEFAULT_BASE = "stable-diffusion-v1-5/stable-diffusion-v1-5"


@dataclass(frozen=True)
class Question:
    """What is asked where the flag `name` is not given. default: by the answers so far, which fits them and this
    machine. choices: each with what it means; () for any text."""

    name: str
    text: str
    default: Callable[[dict[str, str]], str]
    choices: tuple[tuple[str, str], ...] = ()


QUESTIONS = (
    Question("data", "What do you have?", lambda _: "pictures", (
        ("pictures", "a folder of pictures, with captions in a table, in text files beside them, or in their names"),
        ("parts", "part files, or a filelist of them"),
        ("laion", "LAION metadata (parquet), of which the pictures are yet to be downloaded"))),
    Question("path", "Where is it? (folder or file)", lambda _: "."),
    Question("machine", "On what?", lambda _: this_machine(), (
        (CPU.name, "no card"), ("16gb", "one card of 16 GB, or a little more"), ("24gb", "one card of 24 GB or more"),
        ("8x80gb", "eight cards of 80 GB"))),
    Question("goal", "What do you want?", lambda said: "scratch" if said["machine"] == CPU.name else "lora", (
        ("scratch", "train a text-to-image model from the beginning; on a CPU a tiny one"),
        ("finetune", "train all of a model's UNet further"),
        ("lora", "train a small file beside a model, the usual thing for few pictures"))),
)  # fmt: skip
_LEAST_GIB = {"8x80gb": 75, "24gb": 22}  # of each card
_SCRATCH = {CPU.name: "ldm-tiny-cpu", "16gb": "ldm-1x16gb", "24gb": "ldm-1x24gb", "8x80gb": "ldm-8x80gb"}
_FROM_MODEL = {"finetune": "sd15-finetune", "lora": "sd15-lora"}
# What a machine changes in presets that were made for one card of 24 GB; batch, batches an update.
_BATCHES = {CPU.name: (1, 4), "16gb": (1, 8), "24gb": (2, 8), "8x80gb": (16, 1)}
_PRECISION = {CPU.name: (False, False), "16gb": (True, False), "24gb": (False, True), "8x80gb": (False, True)}
# Of parts and of metadata whose pictures are yet to come, for the tokenizer, which knows only the quickstart's words.
_TINY = {"model.tokenizer_name": DEFAULT_TOKENIZER, "model.model_max_length": 77, "run.max_steps": 6000,
         "run.save_steps": 500, "validation.validation_prompts": None}  # fmt: skip
_SHORT = {"run.max_steps": 400, "run.save_steps": 100, "optimizer.warmup_steps": 50}
_SHORT_RESOLUTION = 256
# Shown in every recipe, whatever they are.
_SHOWN = (
    "data.file_list", "data.resolution", "optimizer.learning_rate", "compute.bf16", "compute.fp16",
    "compute.recompute", "compute.dataloader_num_workers", "run.output_dir", "run.per_device_train_batch_size",
    "run.gradient_accumulation_steps", "run.max_steps", "run.save_steps", "run.save_total_limit", "run.seed",
    "logging.logging_steps",
)  # fmt: skip
_LAION_STEPS = """\
# The pictures come first; docs/laion.md explains the three steps:
#   ppldm filter {path} --out {name}-data/metadata
#   ppldm download {name}-data/metadata --out {name}-data/images
#   ppldm convert {name}-data/images --out {name}-data/parts
"""
_Data = Annotated[str, {"opt": True, "choices": [*DATA]}]
_Goal = Annotated[str, {"opt": True, "choices": [*GOALS]}]
_Machine = Annotated[str, {"opt": True, "choices": [*MACHINES]}]


def init(
    out: str = "recipe.yaml",  # recipe to write; filelists go beside it
    data: _Data = None,  # what you have
    path: str = None,  # where it is: a folder of pictures, a filelist or a folder of parts, or metadata
    goal: _Goal = None,  # what you want
    machine: _Machine = None,  # on what it is trained
    base: str = "",  # model to start from, for finetune and lora: a pipeline's folder, or a name
    doctor: bool = True,  # do not look at the recipe with `ppldm doctor` at the end
):
    """Ask what you have and want, and write a commented recipe for `ppldm train`."""
    target = Path(out)
    if target.exists():
        raise ConfigError(f"--out {target} is there already; name another file, or remove it")
    given = {"data": data, "path": path, "goal": goal, "machine": machine}
    answers: dict[str, str] = {}
    for one in QUESTIONS:
        answers[one.name] = given[one.name] or _ask(one, answers)
    if (answers["data"], answers["goal"], answers["machine"]) == ("pictures", "scratch", CPU.name):
        files = _first_training(target, local_path(answers["path"]))
    else:
        files, head = _filelists(target, answers["data"], local_path(answers["path"]))
        files[target] = recipe_text(target, answers["goal"], answers["machine"], base or DEFAULT_BASE, head)
    for name, content in files.items():
        write_text(name, content)
    recipes = [str(name) for name in sorted(files) if name.suffix == target.suffix]
    commands = ", then ".join(f"ppldm train --config {name}" for name in recipes)
    sys.stdout.write(f"written: {' and '.join(recipes)}; look at it, then: {commands}\n")
    if doctor:
        from ..doctor.command import show

        sys.stdout.write(f"`ppldm doctor` now looks at {recipes[0]}, and at the data (--no-doctor skips that):\n")
        sys.stdout.flush()
        show(["--config", recipes[0]])


def this_machine() -> str:
    """Which of MACHINES is most like this one. Where nothing tells a card's memory before Paddle is loaded, it is taken
    for the smallest card."""
    kind = launch_kind()
    if kind.is_cpu:
        return CPU.name
    cards = list_cards(kind)
    least = min((card.memory_gib for card in cards), default=0)
    if least < _LEAST_GIB["24gb"] or not all(card.has_bfloat16 for card in cards):
        return "16gb"
    return "8x80gb" if len(cards) >= 8 and least >= _LEAST_GIB["8x80gb"] else "24gb"


def recipe_text(target: Path, goal: str, machine: str, base: str, head: str) -> str:
    """The recipe's YAML. Raises ConfigError, ModelError for a `base` that is a folder without a pipeline."""
    preset = _SCRATCH[machine] if goal == "scratch" else _FROM_MODEL[goal]
    changes: dict[str, Any] = {"run.output_dir": str(target.with_suffix(""))}
    changes["data.file_list"] = _list_of(target).name if target.parent == Path() else str(_list_of(target))
    family = "ldm" if goal == "scratch" else "stable_diffusion"  # and what a model is that is not here
    fp16, bf16 = _PRECISION[machine]
    changes |= {"compute.fp16": fp16, "compute.bf16": bf16}
    batch, accumulated = _BATCHES[machine]
    if goal != "scratch":
        changes |= {"model.model_name_or_path": base, "run.per_device_train_batch_size": batch}
        changes["run.gradient_accumulation_steps"] = accumulated
    if goal != "scratch" and Path(base).expanduser().exists():
        from .finetune import KEPT, read_start

        start = read_start(base)
        family, changes["model.model_name_or_path"] = start.family, start.model
        changes["data.resolution"] = start.facts["resolution"]
        changes |= {f"model.{name}": start.facts[name] for name in KEPT}
    if machine == CPU.name:
        changes |= {"compute.dataloader_num_workers": 1} | (_TINY if goal == "scratch" else _SHORT)
        if goal != "scratch":
            changes["data.resolution"] = min(_SHORT_RESOLUTION, changes.get("data.resolution", _SHORT_RESOLUTION))
    first = f"# Made by `ppldm init`: {goal}, for {machine}. It builds on the preset {preset}.\n"
    first += f"# `ppldm train --help` explains all settings. Train with: ppldm train --config {target}\n{head}"
    return first + preset_recipe(preset, get_family(family).Config, changes, _SHOWN)


def _first_training(target: Path, path: Path) -> dict[Path, str]:
    """The files of a tiny model on pictures, as `ppldm quickstart --pictures` trains it: its recipe, one for
    the autoencoder where it is trained, and lists; the tokenizer is there. Raises ConfigError, DataError."""
    from ...data.text.survey import survey
    from ...data.text.vocabulary import learn_tokenizer
    from ...families.first_training import FirstTraining

    chosen = FirstTraining.choose(survey(path, "--path"))
    found, stem = chosen.found, str(target.with_suffix(""))
    data, whole = target.with_suffix(".filelist"), _list_of(target)
    table, first = Path(f"{stem}-captions.csv"), Path(f"{stem}-autoencoder{target.suffix}")
    _refuse_existing(data, whole, table, first, Path(f"{stem}-tokenizer"))
    files = {table: found.table_text(), data: f"{table.name}\n", whole: f"{data.name} format=csv\n"}
    head, vae = f"# Made by `ppldm init`: scratch, for {CPU.name}. Train with: ppldm train --config {{}}\n", None
    if chosen.trains_autoencoder:
        vae = f"{stem}-autoencoder/vae"
        files[first] = chosen.autoencoder_recipe(head.format(first), str(whole), f"{stem}-autoencoder")
    own = str(whole), stem, f"{stem}-tokenizer", vae, chosen.prompts()
    after = f"# Train the autoencoder before: ppldm train --config {first}\n" if vae else ""
    learn_tokenizer(list(found.captions.values())).save(f"{stem}-tokenizer")
    sys.stdout.write("".join(f"{line}\n" for line in chosen.describe()))
    return files | {target: chosen.diffusion_recipe(head.format(target) + after, *own)}


def _refuse_existing(*places: Path) -> None:
    for place in places:
        if place.exists():
            raise ConfigError(f"{place} is there already; remove it, or name another --out")


def _filelists(target: Path, data: str, path: Path) -> tuple[dict[Path, str], str]:
    """(filelists to write, what else the recipe's head says). Raises ConfigError, FilelistError."""
    filelist, whole = target.with_suffix(".filelist"), _list_of(target)
    _refuse_existing(filelist, whole)
    if data == "laion":
        parts = f"{target.stem}-data/parts/part-*\n"
        return {filelist: parts, whole: f"{filelist.name}\n"}, _LAION_STEPS.format(path=path, name=target.stem)
    if not path.exists():
        fix = meant_path(path, f"name the {'folder' if data == 'pictures' else 'filelist'}")
        raise ConfigError(f"--path {path} is not there; {fix}")
    if data == "pictures":
        if not path.is_dir():
            raise ConfigError(f"--path {path} is not a folder; name the one that holds the pictures")
        return {filelist: f"{path.absolute()}\n", whole: f"{filelist.name} format=folder\n"}, ""
    if path.is_dir():
        return {filelist: "".join(f"{part}\n" for part in list_parts(path)), whole: f"{filelist.name}\n"}, ""
    if path.suffix == ".list":
        return {whole: _absolute(path)}, ""
    return {whole: f"{path.absolute()}\n"}, ""


def _absolute(path: Path) -> str:
    """The lines of a list of filelists as they read from another folder."""
    lines = path.read_text(encoding="utf-8").splitlines()
    made = (f"{path.absolute().parent / line}" if (path.parent / line.split()[0]).exists() else line
            for line in lines if line.strip() and not line.startswith("#"))  # fmt: skip
    return "".join(f"{line}\n" for line in made)


def _list_of(target: Path) -> Path:
    return target.with_suffix(".filelist.list")


def _ask(question: Question, answers: dict[str, str]) -> str:
    """An answer on the terminal; the default elsewhere, but for a path, which must be given."""
    default = question.default(answers)
    if not sys.stdin.isatty():
        if question.choices:
            return default
        raise ConfigError(f"--{question.name} is missing, and there is no terminal to ask on; add it")
    sys.stderr.write(f"{question.text}\n" + "".join(f"  {name:<9} {what}\n" for name, what in question.choices))
    known = [name for name, _ in question.choices]
    while True:
        sys.stderr.write(f"[{default}] ")
        sys.stderr.flush()
        answer = sys.stdin.readline().strip() or default
        if not known or answer in known:
            return answer
        sys.stderr.write(f"{answer} is not one of {', '.join(known)}\n")
