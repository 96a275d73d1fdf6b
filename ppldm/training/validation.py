"""Looking at a model while it trains, without a trace in the training.

A validation loss is a function of (weights, seed) alone: fixed rows, cut at the centre (or where `--smart_crop` says),
each with its caption and the draws of (seed, row), in fixed batches. Ranks share the batches, and the mean is taken
over all of them in their order, so that the same weights give the same bits on any number of ranks."""

import stat
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import paddle

from ..config.data import DataOptions
from ..config.training import TrainingOptions
from ..data.dataset import TextImageDataset
from ..data.filelist import Source, find_same_part
from ..data.loader import first_epoch
from ..inference.prompts import read_requests
from ..utils.errors import ConfigError
from ..utils.log import get_logger
from ..utils.machine.devices import release_device_memory
from ..utils.processes.ranks import World, gather_objects, shard
from .checkpoint import TrainingState
from .optimizer import autocast
from .rows import open_sources, select_training_rows
from .run_folder import CONTROL_DIR, MOST_BYTES, MOST_PROMPTS, PROMPTS_FILE

_REMEDY = "take it out of one of them, for a loss on rows that were trained on says nothing"


@contextmanager
def undisturbed(state: TrainingState, averaged: bool = True):
    """Evaluation mode and, where there are some, averaged weights inside; afterwards weights, modes and generators as
    before, to the bit."""
    modes = [(layer, layer.training) for layer in state.model.sublayers(include_self=True)]
    generators = paddle.get_rng_state()
    state.model.eval()
    try:
        with (
            state.ema.applied() if state.ema and averaged else nullcontext(),
            state.whole_parameters(),
            paddle.no_grad(),
        ):
            yield
    finally:
        for layer, training in modes:
            layer.training = training
        paddle.set_rng_state(generators)
        release_device_memory()


class HeldOut:
    """At most `num_rows` rows of a data set, spread evenly, in batches of one shape and at most `batch_size`."""

    def __init__(self, dataset: TextImageDataset, num_rows: int, batch_size: int):
        self.dataset = dataset
        self.places = dataset.split(dataset.spread(num_rows), batch_size)

    def batches(self, world: World):
        """(number, batch of tensors) of the batches that are this rank's."""
        for number in shard(len(self.places), world):
            yield number, first_epoch(self.dataset, self.places[number])


def validation_loss(state: TrainingState, held_out: HeldOut, world: World, make_autocast=nullcontext) -> dict:
    """{"validation_loss": mean over the held-out samples, and the same of what else the model measures}, the same on
    all ranks. A collective call."""
    found = []
    with undisturbed(state):
        for number, batch in held_out.batches(world):
            with make_autocast():
                loss = state.model.loss(batch)
            measured = {"loss": loss.value, **(loss.measures or {})}
            found.append((number, len(batch["row_ids"]), {name: float(one) for name, one in measured.items()}))
    _, counts, measured = zip(*sorted(sum(gather_objects(found, world), [])), strict=True)
    means = {name: float(np.average([one[name] for one in measured], weights=counts)) for name in measured[0]}
    return {f"validation_{name}": mean for name, mean in means.items()}


def open_held_out_sources(arguments: DataOptions, training: list[Source]) -> list[Source]:
    """The lists of parts behind `--validation_file_list`. Raises FilelistError, and ConfigError for a part that is
    trained on as well."""
    sources = open_sources(arguments, "validation_file_list")
    trained_on = {path.resolve() for source in training for path in source.parts}
    for path in (path for source in sources for path in source.parts if path.resolve() in trained_on):
        raise ConfigError(f"{path} is in --validation_file_list and in --file_list; {_REMEDY}")
    # Of held-out rows none are kept: they are cut at the centre, and looked at in evaluation mode.
    return [replace(source, latents="off") if source.latents == "ondemand" else source for source in sources]


def make_validation(
    sources: list[Source],
    state: TrainingState,
    training: TextImageDataset,
    make_dataset: Callable[..., TextImageDataset],
    data: DataOptions,
    arguments: TrainingOptions,
    world: World,
) -> Callable[[], dict]:
    """`validation_loss` on the rows of `sources`, chosen by `--where` as those that are trained on. Raises ConfigError
    where a part has the content of one that is trained on, whatever their names."""
    shapes = training.selection.buckets and training.selection.buckets.shapes
    selection = select_training_rows(sources, data, arguments, world, shapes)
    crops = replace(training.crops, random=False, flip=False)
    dataset = make_dataset(sources, captions=training.captions.fixed(), crops=crops, selection=selection)
    if same := find_same_part(training.fingerprint, dataset.fingerprint):
        text = f"{same[1]} in --validation_file_list has the content of {same[0]} in --file_list"
        raise ConfigError(f"{text}; {_REMEDY}")
    held_out = HeldOut(dataset, data.validation_rows, arguments.per_device_train_batch_size)
    return partial(validation_loss, state, held_out, world, autocast(arguments))


def current_prompts(output_dir: Path, world: World) -> list[str]:
    """The prompts of control/prompts.txt, the same on all ranks; none without a sound file. A collective call."""
    return gather_objects(_read_prompts(Path(output_dir, CONTROL_DIR, PROMPTS_FILE)) if world.is_main else [], world)[0]


def _read_prompts(path: Path) -> list[str]:
    try:
        state = path.stat()
        if not stat.S_ISREG(state.st_mode):
            raise ConfigError(f"{path} is not a plain file")
        if state.st_size > MOST_BYTES:
            raise ConfigError(f"{path} has {state.st_size:,} bytes; {MOST_BYTES:,} are read at most")
        prompts = [request.prompt for request in read_requests(path)]
        if len(prompts) > MOST_PROMPTS:
            raise ConfigError(f"{path} has {len(prompts)} prompts; {MOST_PROMPTS} are drawn at most")
        return prompts
    except FileNotFoundError:
        return []
    except OSError as error:
        get_logger().warning("%s cannot be read (%s); --validation_prompts are drawn", path, error.strerror or error)
    except ConfigError as error:
        get_logger().warning("%s; --validation_prompts are drawn", error)
    return []
