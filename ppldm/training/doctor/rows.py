"""The data of a run: parts and indexes, how many rows, epochs and updates, and how captions fit the text encoder."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ...config.recipe import Recipe
from ...data.dataset import TextImageDataset
from ...data.filelist import Source
from ...data.formats.index.entries import IndexSummary
from ...data.formats.open import build_indexes, find_summary
from ...data.images.crop import CropRule
from ...data.inputs import Tokens
from ...data.select.selection import Selection
from ...data.text.captions import CaptionRule
from ...data.text.tokenizer import load_tokenizer
from ...utils.machine.resources import count_usable_cores
from ...utils.processes.world import World
from ...utils.store.cache import size_of
from ...utils.text import count_of
from ..monitor.captions import measure_captions, remedies_for
from ..rows import bad_row_policy, count_steps, describe_large, select_training_rows
from .machine import Finding, good, judged

_INDEXED_BYTES = 1 << 30  # of parts without an index, for which it is made here; more take minutes
_INDEX_BYTES_A_SECOND = 5e7
_MANY_EPOCHS = 1000
_ENDLESS = 10**9  # updates, of presets that are to be stopped by hand
_MANY_BAD = 0.01  # share of the rows looked at


def look_at_parts(sources: list[Source]) -> Iterator[Finding]:
    """That all parts are there, opened where they have no index. Raises PartError for those that cannot be read."""
    paths = [(path, source) for source in sources for path in source.parts]
    missing = [(path, source) for path, source in paths if find_summary(path, source) is None]
    stale = [path for path, source in missing if Path(f"{path}.idx").exists()]
    num_bytes = sum(size_of(path) for path, _ in missing)
    if stale:
        yield Finding("indexes", "warning", f"{stale[0]}.idx, {len(stale)} in all, cannot be used: "
                      "stale, damaged or of another format", "ppldm index, or the run makes them again")  # fmt: skip
    elif num_bytes > _INDEXED_BYTES:
        cores = count_usable_cores()
        yield Finding(
            "indexes", "warning", f"{len(missing)} of {count_of(len(paths), 'part')} have no index, which takes about "
            f"{num_bytes / _INDEX_BYTES_A_SECOND / cores / 60:.0f} minutes here", "ppldm index, once, before the run",
        )  # fmt: skip
    if num_bytes <= _INDEXED_BYTES:
        for source in sources:
            build_indexes(source.parts, source, count_usable_cores())
    yield good("parts", f"{count_of(len(paths), 'part')} in {count_of(len(sources), 'list')}")


def all_indexed(sources: list[Source]) -> bool:
    """Whether rows can be counted at once."""
    return all(isinstance(find_summary(path, one), IndexSummary) for one in sources for path in one.parts)


def select(recipe: Recipe, sources: list[Source]) -> Selection:
    """The rows that the run would train on. Raises DataError."""
    return select_training_rows(sources, recipe.data, recipe.training, World())


def judge_rows(num_rows: int, global_batch_size: int, max_steps: int, num_devices: int = 1) -> Finding:
    """Rows beside a batch and beside all samples of a run."""
    epochs = max_steps * global_batch_size / num_rows
    until = "no end" if max_steps >= _ENDLESS else f"{epochs:,.2f} epochs"
    text = (
        f"{num_rows:,} rows, {math.ceil(num_rows / global_batch_size):,} updates an epoch, {until} in "
        f"{max_steps:,} updates of {global_batch_size:,} samples, {num_rows // num_devices:,} rows a device"
    )
    if global_batch_size > num_rows:
        return Finding("rows", "warning", text + "; a batch is larger than the data, so that it holds rows twice",
                       "lower --per_device_train_batch_size or --gradient_accumulation_steps")  # fmt: skip
    fix = "lower --max_steps, or check --file_list" if epochs > _MANY_EPOCHS else ""
    return judged("rows", text, warning=fix)


def look_at_rows(recipe: Recipe, selection: Selection, num_devices: int) -> Iterator[Finding]:
    """How many, and how often a run sees them."""
    batch = recipe.training.samples_of_update(num_devices)
    steps = count_steps(recipe.training, len(selection), batch)
    left = ", ".join(f"{count} {reason}" for reason, count in selection.skipped.most_common(3))
    if left:
        yield judged("selection", f"{len(selection):,} of {selection.num_rows:,} rows are used ({left})",
                     "" if 2 * len(selection) > selection.num_rows else "check --where and --resolution")  # fmt: skip
    yield judge_rows(len(selection), batch, steps, num_devices)


def look_at_sizes(recipe: Recipe, sources: list[Source]) -> Iterator[Finding]:
    """Pictures so large that decoding them holds up the training."""
    text, fix = describe_large(sources, recipe.data)
    if text:
        yield Finding("pictures", "warning", text, fix)


def look_at_captions(recipe: Recipe, sources: list[Source], selection: Selection, source, max_length: int):
    """How the tokenizer `source` fits the captions of some rows. Raises ConfigError."""
    tokenizer = load_tokenizer(source, max_length, getattr(recipe.model, "offline", False))
    sources = [replace(one, latents="off") for one in sources]  # captions are read, and no latents
    dataset = TextImageDataset(
        sources, inputs={"input_ids": Tokens(max_length)}, tokenizer=tokenizer, captions=CaptionRule.of(recipe.data),
        crops=CropRule(), resolution=recipe.data.resolution, seed=recipe.training.seed, selection=selection,
        bad_rows=bad_row_policy(recipe.data),
    )  # fmt: skip
    found, bad = measure_captions(dataset)
    looked_at = found.captions + bad.total()
    fixes = remedies_for(found, max_length)
    reasons = ", ".join(f"{count} {reason}" for reason, count in bad.most_common(3))
    if bad.total() > _MANY_BAD * looked_at:
        fixes.append("`ppldm verify` names the bad rows")
    text = f"of {found.captions}, {found.describe(max_length)}"
    text += f"; {bad.total()} of {count_of(looked_at, 'row')} looked at cannot be used ({reasons})" if bad else ""
    yield judged("captions", text, warning=", and ".join(fixes))
