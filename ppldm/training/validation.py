"""Looking at a model while it trains, without a trace in the training.

A validation loss is a function of (weights, seed) alone: fixed rows, cut at the centre (or where `--smart_crop` says),
each with its caption and the draws of (seed, row), in fixed batches. Ranks share the batches, and the mean is taken
over all of them in their order, so that the same weights give the same bits on any number of ranks."""

from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import numpy as np
import paddle

from ..config.data import DataOptions
from ..config.training import TrainingOptions
from ..data.dataset import TextImageDataset
from ..data.filelist import Source, find_same_part
from ..data.loader import first_epoch
from ..utils.errors import ConfigError
from ..utils.machine.devices import release_device_memory
from ..utils.processes.ranks import World, gather_objects, shard
from .adamw import autocast
from .checkpoint import TrainingState
from .rows import open_sources, select_training_rows

_REMEDY = "take it out of one of them, for a loss on rows that were trained on says nothing"


@contextmanager
def undisturbed(state: TrainingState):
    """Evaluation mode and averaged weights inside; afterwards weights, modes and generators as before, to the bit."""
    modes = [(layer, layer.training) for layer in state.model.sublayers(include_self=True)]
    generators = paddle.get_rng_state()
    state.model.eval()
    try:
        with state.ema.applied() if state.ema else nullcontext(), paddle.no_grad():
            yield
    finally:
        for layer, training in modes:
            layer.training = training
        paddle.set_rng_state(generators)
        release_device_memory()


class HeldOut:
    """`num_rows` rows of a data set, at most, spread evenly over it, in batches of `batch_size`, at most, and
    of one shape each."""

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
