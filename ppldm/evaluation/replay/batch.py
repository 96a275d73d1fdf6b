"""The samples of one update, for people: which row each is, what it says, what came of it, and a sheet of the crops."""

from bisect import bisect_left
from functools import partial
from pathlib import Path

import numpy as np

from ...data.inputs import Pixels
from ...data.order.step_sampler import StepSampler
from ...training.run import TrainingRun
from ...utils.errors import ConfigError
from ...utils.grid import pad_alike, prompt_grid
from ...utils.pictures import save_png
from ...utils.processes.world import World
from ...utils.rng import Generators
from .remake import Made


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
    """The update that asks for a row in an epoch of its list and shape; None for a row that is not selected or drawn
    from."""
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
    """The crops of the chosen samples over their captions, as a PNG in `folder`. Raises ConfigError where the batch
    has latents instead of pixels."""
    name = next((name for name, one in again.dataset.inputs.items() if isinstance(one, Pixels)), None)
    if name is None or again.dataset.latents:
        raise ConfigError("--pictures: the run was trained on cached latents, which are no pictures; omit it")
    crops = [one for batch in made.micro_batches for one in np.asarray(batch[name]).transpose(0, 2, 3, 1)]
    shown = [(crop, sample) for crop, sample in zip(crops, samples, strict=True) if sample in chosen]
    titles = [f"row {one['row']}" + (f", loss {one['loss']:.3g}" if "loss" in one else "") +
              (f": {one['caption'] or '(no caption)'}" if "caption" in one else "") for _, one in shown]  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"update-{made.step:06d}.png"
    save_png(path, prompt_grid(titles, [[crop] for crop in pad_alike([crop for crop, _ in shown])], columns=4))
    return path
