"""Which updates of a run a row was in, at which noise levels, and which of its checkpoints have never seen it.

That is a function of the run's settings, its data and the number of updates: it is computed from the folder of a run
and the parts, without a network or paddle, and nothing was logged for it. The data must be as they were: so rows are
looked up before they are taken out. A row is seen where an update read it, whatever became of the update, and also in
place of a bad row: what is bad is found by reading the rows just before it in the order. Of a list of which only cached
latents are here no picture can be read, so it is not known which rows replaced bad ones (`stand_ins` is false)."""

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..config.recipe import RECIPE_FILE
from ..data.control import make_filter
from ..data.dataset import TextImageDataset
from ..data.filelist import Fingerprint, Source, find_difference
from ..data.formats.open import build_indexes
from ..data.inputs import Control, Level, Pixels, Strata
from ..data.order import Mix, Successors, Use, first_use, uses_of
from ..data.text.tokenizer import load_tokenizer
from ..diffusion.process import Process, log_snr
from ..families.base import saved_recipe
from ..training.rows import dataset_maker, open_sources, select_training_rows
from ..utils.errors import CheckpointError, ConfigError
from ..utils.files import in_working_folder, local_path, read_json_object
from ..utils.processes.ranks import World
from ..utils.rng import Generators
from ..utils.text import count_of, reveal
from ..weights.folders import checkpoint_name, find_runs, list_checkpoints
from ..weights.model_file import TOKENIZER_FOLDER, read_model_file

# Settings that decide which rows an update reads, and at which noise levels. Of a run that changed one on the way
# (--accept_changes), the newest ones do not tell what it read before.
_DECIDING = (
    *("seed", "where", "data", "rows", "weights", "buckets", "bucket_group_size", "global_batch_size", "captions"),
    *("timestep_sampling", "logit_mean", "logit_std", "stratified_timesteps"),
    *(f"timestep_bias_{name}" for name in ("from", "to", "multiplier")),
)


@dataclass(frozen=True)
class Past:
    """What a run has read until its newest checkpoint. Rows have the numbers that training counts them by. checkpoints:
    the updates after which it has one, rising. batch: samples of an update. level: how a noise level is drawn, of
    families that draw one of a number of levels, and log-SNR of each."""

    folder: Path
    checkpoints: list[int]
    batch: int
    dataset: TextImageDataset
    order: Mix
    stand_ins: bool  # whether uses in place of bad rows are found
    level: Level | None = None
    log_snr: list[float] | None = None

    def see(self, rows: list[int]) -> dict:
        """When any of the rows was read, JSON-ready: {run, updates, times, seen: [{update, row, epoch, in_place_of,
        timestep, noise_level, log_snr}], stand_ins, checkpoints, never_seen}."""
        found = sorted(
            (use, row) for row in rows for place in self._places([row]) for use in uses_of(place, *self._lookup)
        )
        seen = [self._describe(use, row) for use, row in found]
        return self._report(seen[0]["update"] if seen else None) | {"times": len(seen), "seen": seen}

    def start_again(self, rows: list[int]) -> dict:
        """Which checkpoints have seen none of the rows, JSON-ready: {run, updates, first_update, stand_ins,
        checkpoints, never_seen, train_again_from}; the last is the newest of these, None: from the beginning."""
        order, successors, stop, used = self._lookup
        first = first_use(self._places(rows), order, successors, stop, used)
        report = self._report(None if first == stop else first // self.batch + 1)
        never = report["never_seen"]
        return report | {"train_again_from": checkpoint_name(never[-1]) if never else None}

    def rows_of(self, part: Path, rows: list[int]) -> list[int]:
        """The numbers here of some rows of a part, wherever it lies: of the same bytes. None: the run has no such
        part. Raises CheckpointError where it has another one of that name."""
        parts = [one for known in self.dataset.fingerprint.lists for one in known.parts]
        (summary,) = build_indexes([part], Source(part, (part,)))
        same = [number for number, one in enumerate(parts) if one.content == (summary.rows, *summary.content)]
        if not same and any(one.name == part.name for one in parts):
            text = f"{self.folder} was trained on another {part.name} than {part}: what it has seen of it is not known"
            fix = "give the part that it was trained on, or leave out a run that was trained on other data"
            raise CheckpointError(f"{text}; {fix}")
        starts = self.dataset.selection.starts
        return [int(starts[number]) + row for number in same for row in rows]

    @cached_property
    def _lookup(self) -> tuple:
        dataset = self.dataset
        can_be_bad = self.stand_ins and dataset.bad_rows.on_error == "count"
        successors = Successors(dataset.list_sizes, dataset.weights, dataset.seed, dataset.buckets)
        return self.order, successors, self.checkpoints[-1] * self.batch, self._used if can_be_bad else None

    def _used(self, epoch: int, place: int) -> int:
        return self._places([int(self.dataset[epoch, place]["row_ids"])])[0]

    def _places(self, rows: list[int]) -> list[int]:
        """Where rows are among those selected; one that is not has none. Raises ConfigError."""
        selection, places = self.dataset.selection, []
        for row in rows:
            if not 0 <= row < selection.num_rows:
                raise ConfigError(f"{self.folder} has rows 0 to {selection.num_rows - 1}, no row {row}")
            place = bisect_left(selection, row)
            places += [place] if place < len(selection) and selection[place] == row else []
        return places

    def _report(self, first: int | None) -> dict:
        never = [step for step in self.checkpoints if first is None or step < first]
        facts = {"run": str(self.folder), "updates": self.checkpoints[-1], "first_update": first}
        return facts | {"stand_ins": self.stand_ins, "checkpoints": self.checkpoints, "never_seen": never}

    def _describe(self, use: Use, row: int) -> dict:
        update, number = divmod(use.position, self.batch)
        asked = self.dataset.selection[use.asked]
        report: dict[str, Any] = {"update": update + 1, "row": row, "epoch": use.epoch}
        if asked != row:
            report["in_place_of"] = asked
        if self.level:
            place, generators = Strata(update, number, self.batch), Generators(self.dataset.seed)
            timestep = int(self.level.draw([(use.epoch, asked)], (0, 0), generators, {}, place)[0])
            report |= {"timestep": timestep, "noise_level": timestep / self.level.below}
            report |= {"log_snr": self.log_snr[timestep]}
        return report


def runs_with_checkpoints(places) -> list:
    """Each run in these folders, or below, that has saved a checkpoint; a place without one stands for itself."""
    found = {place: find_runs(local_path(place)) for place in places}
    return [run for place in places for run in [*filter(list_checkpoints, found[place])] or [place]]


@contextmanager
def opened_past(run) -> Iterator[Past]:
    """The past of the run in a folder; inside the block paths are those of the folder where it was started. Raises
    CheckpointError, or another PpldmError, for what is gone or has changed since, such as its data."""
    folder = local_path(run).resolve()
    paths = [path for one in list_checkpoints(folder) if (path := one / "manifest.json").is_file()]
    found = [read_json_object(path, CheckpointError, "restore the checkpoint, or remove it") for path in paths]
    if not found:
        raise CheckpointError(f"{folder} has no checkpoint; give the --output_dir of a run that has saved one")
    manifests = {manifest["global_step"]: manifest for manifest in sorted(found, key=lambda one: one["global_step"])}
    newest = max(manifests)
    _refuse_changes(folder, manifests)
    with in_working_folder(manifests[newest]):
        yield _make(folder, list(manifests), manifests[newest]["identity"])


def _make(folder: Path, checkpoints: list[int], identity: dict) -> Past:
    checkpoint = folder / checkpoint_name(checkpoints[-1])
    recipe, _ = saved_recipe(checkpoint / RECIPE_FILE)
    model, data, training = recipe.model, recipe.data, recipe.training
    sources, description = open_sources(data), read_model_file(checkpoint)
    tokenizer, control = description.tokenizer, getattr(model, "control", None)
    inputs = {"pixels": Pixels()} | ({"control": Control(make_filter(control))} if control else {})
    tokenizer = tokenizer and load_tokenizer(checkpoint / TOKENIZER_FOLDER, tokenizer["max_length"])
    selection = select_training_rows(sources, data, training, World())
    make_dataset = dataset_maker(data, training.seed, inputs=inputs, tokenizer=tokenizer)
    dataset = make_dataset([replace(source, latents="off") for source in sources], selection=selection)
    if not (record := checkpoint / "data.json.gz").is_file():
        raise CheckpointError(f"{checkpoint} does not record its data; train with this version of ppldm")
    if difference := find_difference(Fingerprint.from_record(record.read_bytes()), dataset.fingerprint):
        raise CheckpointError(f"{folder} was trained on other data: {difference}; restore them")
    group_size = identity["bucket_group_size"] or 1
    order = Mix(dataset.list_sizes, dataset.weights, training.seed, dataset.buckets, group_size)
    stand_ins = not any(source.latents == "cached" for source in sources)
    past = Past(folder, checkpoints, identity["global_batch_size"], dataset, order, stand_ins)
    if not hasattr(model, "level_input"):
        return past
    process = Process.of(description.process)
    levels = [None if np.isinf(one) else float(one) for one in log_snr(*process.powers())]
    return replace(past, level=model.level_input(process.num_levels), log_snr=levels)


def _refuse_changes(folder: Path, manifests: dict[int, dict]) -> None:
    """Raises CheckpointError where what decides the order differs between checkpoints, or from that which the run was
    told to go on from."""
    origin = manifests[max(manifests)].get("resumed_from")
    origin = origin and Path(reveal(origin), "manifest.json")
    earlier = [read_json_object(origin, CheckpointError, "restore it")] if origin and origin.is_file() else []
    identities = [manifest["identity"] for manifest in (*earlier, *manifests.values())]
    for one, other in zip(identities, identities[1:], strict=False):
        for name in _DECIDING:
            if name in one and name in other and one[name] != other[name]:
                text = f"{folder} has changed {name} on its way, from {one[name]} to {other[name]} (--accept_changes)"
                raise CheckpointError(f"{text}: what it read before the change does not follow from its settings now")


def describe_past(report: dict) -> list[str]:
    """A report of `Past.see` or `Past.start_again` for people, line by line."""
    start = f"{report['run']}, {count_of(report['updates'], 'update')}"
    never = ", ".join(map(checkpoint_name, report["never_seen"])) or "none"
    if "times" in report:
        lines = [f"{start}: seen {count_of(report['times'], 'time')}", *map(_describe_use, report["seen"])]
        lines.append(f"  checkpoints that have never seen it: {never}")
    elif (first := report["first_update"]) is None:
        lines = [f"{start}: has seen none of these rows"]
    else:
        lines = [f"{start}: saw the first of these rows in update {first}"]
        lines.append(f"  checkpoints that have seen none: {never}")
        lines.append(f"  train again from {report['train_again_from'] or 'the beginning'}")
    if not report["stand_ins"]:
        lines.append("  of cached latents: uses in place of bad rows are not known")
    return lines


def _describe_use(one: dict) -> str:
    words = [f"  update {one['update']}", f"epoch {one['epoch']}"]
    if "timestep" in one:
        snr = "no signal" if one["log_snr"] is None else f"log-SNR {one['log_snr']:.3g}"
        words.append(f"timestep {one['timestep']} ({snr})")
    words += [f"in place of row {one['in_place_of']}"] if "in_place_of" in one else []
    return ", ".join(words)
