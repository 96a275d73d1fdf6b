"""Updates of a run made again in this process, from its folder only, to which nothing is written; and the samples of
one for people: which row each is, what it says, what came of it, and a sheet of the crops.

A batch is a function of (settings, seed, step), whatever the number of ranks: rank r's micro-batches follow those of
rank r - 1 in the global batch. So one process that accumulates all of them makes the same update; of several ranks the
sums may differ in last bits, for they are added up in another order.
"""

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import paddle

from ..config.load import Layer, file_layers, last_value
from ..config.recipe import RECIPE_FILE, Recipe, merge_settings, recipe_of, schema_of
from ..data.filelist import find_difference
from ..data.inputs import Pixels
from ..data.order import StepSampler
from ..families.base import get_family
from ..training.checkpoint import POSTHOC_STATE, read_manifest, verify
from ..training.commands.train import check_recipe
from ..training.optimizer import autocast
from ..training.prepare import prepare
from ..training.resume import load_optimizer
from ..training.run import TrainingRun
from ..training.train import Update, UpdateGuard, train_step
from ..utils.errors import CheckpointError, ConfigError
from ..utils.files import in_working_folder
from ..utils.log import get_logger
from ..utils.machine.devices import DEFAULT_DEVICE
from ..utils.pictures import pad_alike, prompt_grid, save_png
from ..utils.processes.ranks import World
from ..utils.rng import Generators
from ..utils.text import count_of, reveal
from .read import RunFolder, flatten


@dataclass(frozen=True)
class Made:
    """Update `step`, made again. `values`: the line of metrics.jsonl that ends with it, None where none does."""

    step: int
    update: Update
    micro_batches: list[dict]
    values: dict | None


class _GuardOfRanks(UpdateGuard):
    """Of all ranks' micro-batches, one rank's after the other's: layers drop what they dropped on each."""

    num_ranks, per_rank = 1, 1

    def seed_dropout(self, number: int) -> None:
        """As on the rank whose micro-batch it was."""
        rank, own_number = divmod(number, self.per_rank)
        super().seed_dropout(own_number * self.num_ranks + rank)


def start_before(run: RunFolder, step: int) -> Path | None:
    """The checkpoint nearest before update `step`; None: the run's beginning. Raises CheckpointError if it is gone."""
    if not 1 <= step <= run.num_updates:
        raise CheckpointError(f"{run.folder} has no update {step}; choose from 1 to {run.num_updates}")
    if before := [path for at, path in run.checkpoints.items() if at < step]:
        return before[-1]
    origin = run.manifest(step).get("resumed_from")
    if origin is None:
        return None
    origin = reveal(origin)
    if not Path(origin).is_dir() or verify(origin) or read_manifest(origin)["global_step"] >= step:
        raise CheckpointError(f"update {step} needs {origin}, where the run began, and it is not there; restore it")
    return Path(origin)


def recipe_for(run: RunFolder, step: int, start: Path | None, scratch: str) -> Recipe:
    """The settings by which the run made update `step`, for one process that writes to `scratch`."""
    saved = next((path for at, path in run.checkpoints.items() if at >= step), run.folder)
    layers = file_layers(saved / RECIPE_FILE)
    config = get_family(last_value(layers, "family")).Config
    keys = {one.name: key for key, one in schema_of(config).items()}
    own_steps = merge_settings(layers, True, config)[keys["gradient_accumulation_steps"]].value
    changes = {
        "output_dir": scratch,
        "resume_from_checkpoint": str(start) if start else "none",
        "device": DEFAULT_DEVICE,  # of this machine
        "gradient_accumulation_steps": own_steps * run.num_ranks(step),
        "report_to": ["none"],
        "disable_tqdm": True,
        "profiler_options": None,
        "validation_prompts": None,
        "validation_file_list": None,
    }
    changed = Layer("replay", {keys[name]: value for name, value in changes.items()}, is_literal=True)
    recipe = recipe_of(merge_settings([*layers, changed], True, config), config)
    check_recipe(recipe)
    return recipe


@contextmanager
def remade(run: RunFolder, step: int) -> Iterator[TrainingRun]:
    """The run as it stood at its last checkpoint before update `step`, in the folder where it was started. Raises
    PpldmError for what is gone or has changed since, such as its data."""
    start = start_before(run, step)
    with TemporaryDirectory(prefix="ppldm-replay-") as scratch, in_working_folder(run.manifest(step)):
        recipe = recipe_for(run, step, start, scratch)
        again = prepare(recipe.model, recipe.data, recipe.training)
        if again.checkpoint:
            load_optimizer(again.checkpoint, again.state)
        if difference := find_difference(run.data(step), again.dataset.fingerprint):
            raise CheckpointError(f"{run.folder} was trained on other data: {difference}; restore them")
        yield again


def make_updates(run: RunFolder, again: TrainingRun, until: int) -> Iterator[Made]:
    """The updates from `again`'s first one to `until`; its state is that after the last one taken."""
    ends = {line.last for line in run.lines}
    arguments, num_ranks = again.arguments, run.num_ranks(until)
    most, seed, start = arguments.max_skipped_updates, arguments.seed, again.start_step
    guard = _GuardOfRanks(again.state, World(), most, autocast(arguments), seed=seed, step=start)
    guard.num_ranks, guard.per_rank = num_ranks, arguments.gradient_accumulation_steps // num_ranks
    get_logger().info("%s are made again, to update %d", count_of(until - start, "update"), until)
    with paddle.utils.unique_name.guard(), closing(iter(again.batches())) as batches:
        for step in range(start + 1, until + 1):
            again.state.model.train()
            micro_batches = [next(batches) for _ in range(arguments.gradient_accumulation_steps)]
            update = train_step(guard, micro_batches)
            again.interval.add(update, again.global_batch_size)
            for batch in micro_batches:
                again.interval.see(batch)
            yield Made(step, update, micro_batches, again.interval.summary() if step in ends else None)


def state_of(again: TrainingRun) -> dict[str, dict]:
    """The weights and their average as a checkpoint would hold them, by the name of its file."""
    states = {"model_state.pdparams": again.state.model.state_dict()}
    if again.state.ema:
        states["ema_state.pdparams"] = again.state.ema.state_dict()
    if again.state.posthoc:
        states[POSTHOC_STATE] = flatten(again.state.posthoc_state())
    return {
        file: {name: one.numpy() for name, one in state.items() if isinstance(one, paddle.Tensor)}
        for file, state in states.items()
    }


def places_of(again: TrainingRun, step: int) -> list[list[tuple[int, int]]]:
    """The (epoch, place) of the samples of update `step`, micro-batch by micro-batch."""
    size = again.arguments.per_device_train_batch_size
    return list(StepSampler(again.mix, again.global_batch_size, size, World(), step - 1, step))


def describe_samples(again: TrainingRun, made: Made) -> list[dict]:
    """Of each sample of an update: its row, among all and in its part, its epoch and caption as they were drawn, where
    there are noise levels its level (the share of levels with less noise) and loss, and the CRC-32 of what was read."""
    dataset, found = again.dataset, []
    generators = Generators(dataset.seed)
    for places, batch, loss in zip(places_of(again, made.step), made.micro_batches, made.update.losses, strict=True):
        numbers = {"row": batch["row_ids"], "timestep": batch.get("timesteps"), "noise_level": loss.noise_level,
                   "loss": loss.per_sample, "crc32": batch["checksums"]}  # fmt: skip
        numbers = {name: np.asarray(value).tolist() for name, value in numbers.items() if value is not None}
        for number, (epoch, place) in enumerate(places):
            sample = {name: values[number] for name, values in numbers.items()}
            part, row_in_part = dataset.find_row(sample["row"])
            asked = dataset.selection[place]
            sample |= {"epoch": epoch, "part": str(part), "row_in_part": row_in_part}
            if asked != sample["row"]:
                sample["in_place_of"] = asked
            if dataset.tokenizer:
                row = dataset.read_row(sample["row"])
                sample["caption"] = dataset.captions.draw(row, partial(generators, key=(epoch, asked)))
            found.append(sample)
    return found


def update_of(again: TrainingRun, epoch: int, row: int) -> int | None:
    """The update that asks for a row in an epoch of its list and shape; None for one that is not selected or drawn."""
    selection = again.dataset.selection
    place = bisect_left(selection, row)
    if place == len(selection) or selection[place] != row:
        return None
    position = again.mix.position(epoch, place)
    return None if position is None else position // again.global_batch_size + 1


def pick_row(again: TrainingRun, samples: list[dict], step: int, row: int) -> list[dict]:
    """The samples of a row. Raises ConfigError where update `step` has none, which says what it has."""
    chosen = [sample for sample in samples if sample["row"] == row]
    if not chosen:
        epoch = samples[-1]["epoch"]
        used = update_of(again, epoch, row)
        raise ConfigError(
            f"--row {row} is not in update {step}, whose rows are {', '.join(str(one['row']) for one in samples)}"
            + (f"; in epoch {epoch} update {used} has it" if used else "")
        )
    return chosen


def draw_samples(again: TrainingRun, made: Made, samples: list[dict], folder: Path, chosen: list[dict]) -> Path:
    """The crops of the chosen samples over their captions, a PNG in `folder`. Raises ConfigError for latents."""
    name = next((name for name, one in again.dataset.inputs.items() if isinstance(one, Pixels)), None)
    if name is None or again.dataset.latents:
        raise ConfigError("--pictures: the run was trained on cached latents, which are not pictures; omit it")
    crops = [one for batch in made.micro_batches for one in np.asarray(batch[name]).transpose(0, 2, 3, 1)]
    shown = [(crop, sample) for crop, sample in zip(crops, samples, strict=True) if sample in chosen]
    titles = [f"row {one['row']}" + (f", loss {one['loss']:.3g}" if "loss" in one else "") +
              (f": {one['caption'] or '(no caption)'}" if "caption" in one else "") for _, one in shown]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"update-{made.step:06d}.png"
    save_png(path, prompt_grid(titles, [[crop] for crop in pad_alike([crop for crop, _ in shown])], columns=4))
    return path
