"""What both loops do after an update: log, draw sample pictures, validate, measure the wait for data.

`IntervalMetrics` is what happened between two log lines, on all ranks, as means that are means. Its `state` is part of
the checkpoint: an interval that a stop cut in two is one again, and the curve too.

The sinks show the lines of metrics.jsonl elsewhere, each as one curve over any number of resumes. VisualDL shows one
file of a folder, which is written again when a run resumes; the others are in `sinks.py`.
"""

import json
import math
import socket
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from paddlenlp.utils.profiler import add_profiler_step
from PIL import Image

from ..networks.model import Loss
from ..utils.errors import DataError
from ..utils.files import naming_full_disk
from ..utils.log import get_logger, leave_out_next_step, progress
from ..utils.machine.devices import current_kind, peak_device_memory_bytes
from ..utils.machine.resources import process_memory_bytes
from ..utils.processes.ranks import World, gather_objects
from . import metrics
from .run_folder import NOTHING, Order

WINDOW_SAMPLES = 1000
LEAST_SAMPLES = 100  # a share of fewer says nothing
NUM_QUARTERS = 4  # of the timesteps, by each of which the loss is logged; the first has the least noise


@dataclass(frozen=True)
class Update:
    """What came of an update, the same on all ranks but for `losses`."""

    loss: float  # mean over micro-batches and ranks
    grad_norm: float  # global norm of the ranks' mean gradient, before clipping
    stop: bool = False  # some rank asked to stop, or the user did
    skipped_rows: int = 0  # bad rows passed over to make its samples, on all ranks
    losses: Sequence[Loss] = ()  # this rank's, one of each micro-batch
    orders: Order = NOTHING  # what the user asks for after it

    @property
    def applied(self) -> bool:
        """False where the update was skipped."""
        return bool(np.isfinite(self.loss) and np.isfinite(self.grad_norm))


class SkippedShare:
    """`limit`: the share of skipped rows, of all rows read, above which the run ends. `state`: what `state` gave."""

    def __init__(self, limit: float, state: list | None = None):
        self.limit = limit
        self._updates = deque(map(tuple, state or []))

    def add(self, samples: int, skipped: int) -> None:
        """One update: its samples, and the rows that were skipped to find them, over all ranks."""
        self._updates.append((samples, skipped))
        total = sum(count for count, _ in self._updates)
        while total - self._updates[0][0] >= WINDOW_SAMPLES:
            total -= self._updates.popleft()[0]

    def state(self) -> list:
        """What a checkpoint keeps, ready for JSON."""
        return [list(update) for update in self._updates]

    @property
    def is_too_large(self) -> bool:
        """Whether the run has to end. False before there are `LEAST_SAMPLES` samples."""
        samples, skipped = map(sum, zip(*self._updates, strict=True)) if self._updates else (0, 0)
        return samples >= LEAST_SAMPLES and skipped > self.limit * (samples + skipped)

    def error(self, reasons: Counter) -> DataError:
        """What ends the run. `reasons`: rows skipped since its first update, by reason, on all ranks."""
        samples, skipped = map(sum, zip(*self._updates, strict=True))
        counts = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common(5))
        return DataError(
            f"of the {samples + skipped} rows read for the last {samples} samples, {skipped} could not be used, more "
            f"than the share of {self.limit:g} that --max_skipped_share allows (since the first update: {counts}); "
            "look at the data with ppldm verify, or go on with a larger share and --accept_changes max_skipped_share"
        )


class IntervalMetrics:
    """What happened since the last log line: losses, samples, seconds, seconds spent waiting for data.

    `add` is told of each update what all ranks agree on and what only this rank has seen, `see` more of the latter.
    `gather`, a collective call as `summary` and `state`, makes that known to all. `skipped` counts rows by reason over
    the whole run, `skipped_updates` updates; the rest starts anew with each `summary`."""

    def __init__(self, world: World, by_level: bool = False, state: dict | None = None, max_skipped_share: float = 1.0):
        """`by_level`: whether samples have a noise level. `state`: what `state` gave before a stop.
        `max_skipped_share`: of the rows read lately (`SkippedShare`), above which `check_skipped` raises."""
        self.skipped_share = SkippedShare(max_skipped_share, (state or {}).get("skipped_share"))
        self.world, self.by_level, self._device_has_memory = world, by_level, current_kind().own_memory
        self.skipped, self.skipped_updates = Counter(), 0
        self._observed, self._skipped_here, self._checksum_here = [], Counter(), 0
        self._start()
        if state:
            self.checksum = state.get("checksum", 0)
            self.losses, self.grad_norms = list(state["losses"]), list(state["grad_norms"])
            self.quarters = np.reshape(state["quarters"], (-1, 2, NUM_QUARTERS)).tolist()
            self.skipped.update(state["skipped"])
            self.skipped_updates = state["skipped_updates"]

    def _start(self):
        self.losses, self.grad_norms = [], []
        self.quarters = []  # of each update, so that stops change no digit: sums of squared errors, numbers of samples
        self.checksum = 0  # the sum of its samples' CRC-32, which any order and any number of ranks gives
        self.restart_clock()

    def restart_clock(self) -> None:
        """Time and samples count from here on: training begins, or goes on after a log line."""
        self.updates, self.samples, self.wait_seconds, self.started = 0, 0, 0.0, time.perf_counter()

    @contextmanager
    def paused(self):
        """What is done inside the block takes no time: drawing and saving are no training."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.started += time.perf_counter() - began

    def add(self, update: Update, samples: int) -> None:
        """One update, and its samples over all ranks. The numbers of one that was skipped enter no mean."""
        self.skipped_share.add(samples, update.skipped_rows)
        self.updates += 1
        self.samples += samples
        self.skipped_updates += not update.applied
        if update.applied:
            self.losses.append(update.loss)
            self.grad_norms.append(update.grad_norm)
            observed = [one for one in update.losses if one.noise_level is not None]
            self._observed.append([(one.noise_level, one.per_sample) for one in observed])

    def see(self, batch: dict) -> None:
        """What this rank has read: the samples of a batch, and rows that it could not use."""
        self._skipped_here.update(batch.get("skipped", ()))
        self._checksum_here += int(np.sum(np.asarray(batch.get("checksums", 0))))

    def check_skipped(self) -> None:
        """Raises DataError, on all ranks alike, where too many of the rows read lately could not be used."""
        if self.skipped_share.is_too_large:
            self.gather()
            raise self.skipped_share.error(self.skipped)

    def gather(self) -> None:
        """Add to `quarters`, `skipped` and `checksum` what each rank has seen since the last time."""
        mine = np.zeros((len(self._observed), 2, NUM_QUARTERS))
        for (errors_sum, count), update in zip(mine, self._observed, strict=True):
            for levels, errors in update:
                places = (levels.numpy() * NUM_QUARTERS).astype(np.int64)
                np.add.at(errors_sum, places, errors.numpy().astype(np.float64))
                np.add.at(count, places, 1.0)
        seen = gather_objects((mine, dict(self._skipped_here), self._checksum_here), self.world)
        self.quarters += sum(quarters for quarters, _, _ in seen).tolist()
        for _, skipped, checksum in seen:
            self.skipped.update(skipped)
            self.checksum = (self.checksum + checksum) % 2**32
        self._observed, self._checksum_here = [], 0
        self._skipped_here.clear()

    def state(self) -> dict:
        """What a checkpoint keeps, ready for JSON, so that a resumed run logs what one without a stop does."""
        self.gather()
        kept = {"losses": self.losses, "grad_norms": self.grad_norms, "quarters": self.quarters}
        kept |= {"checksum": self.checksum, "skipped": dict(self.skipped), "skipped_updates": self.skipped_updates}
        return {**kept, "skipped_share": self.skipped_share.state()}

    def summary(self) -> dict:
        """The interval's numbers, and its end. Seconds waited and memory are those of the rank that has most."""
        seconds = time.perf_counter() - self.started
        self.gather()
        on_device = peak_device_memory_bytes() if self._device_has_memory else 0
        seen = gather_objects((self.wait_seconds, process_memory_bytes("VmHWM"), on_device), self.world)
        wait_seconds, memory, device_memory = np.max(seen, axis=0)
        rate = self.samples / seconds
        values = {"loss": float(np.mean(self.losses)) if self.losses else float("nan")}
        if self.by_level:
            with np.errstate(invalid="ignore"):
                means = np.divide(*np.reshape(self.quarters, (-1, 2, NUM_QUARTERS)).sum(axis=0))
            values |= {f"loss_quarter_{number}": float(mean) for number, mean in enumerate(means, 1)}
        if self.grad_norms:
            values["grad_norm"] = float(np.mean(self.grad_norms))
        updates = max(1, self.updates)
        values |= {"data_crc32": self.checksum, "images_per_second": rate}
        values |= {"images_per_second_per_device": rate / self.world.size, "data_wait_share": wait_seconds / seconds}
        values |= {"avg_reader_cost": wait_seconds / updates, "avg_batch_cost": seconds / updates}
        values |= {"skipped_updates": self.skipped_updates, "skipped_rows": self.skipped.total()}
        values |= {f"skipped_rows_{reason}": count for reason, count in sorted(self.skipped.items())}
        values["peak_memory_gb"] = memory / 1e9
        if device_memory:
            values["peak_device_memory_gb"] = device_memory / 1e9
        self._start()
        return values


class Reporter:
    """Logs every `logging_steps` updates, draws every `image_logging_steps`, validates, and shows the progress of the
    run. All ranks count, draw and validate; the main one writes. A context manager: what it writes to is opened at the
    start of the block, and closed at its end. run: a TrainingRun."""

    def __init__(self, run):
        self.run, self.interval, self.sinks = run, run.interval, []
        self.path: Path | None = None  # of metrics.jsonl, on the main rank inside the block
        self.timer = self.slow_ranks = None  # of several ranks

    def __enter__(self):
        run, arguments = self.run, self.run.arguments
        if run.world.is_main:
            folder, self.path = run.output_dir, run.output_dir / metrics.METRICS_FILE
            past = metrics.drop_after(self.path, run.start_step, run.curve_ends)
            first = {}
            if run.dataset.selection.buckets:
                from ..data.shapes import BUCKETS_FILE

                first["buckets"] = np.asarray(Image.open(folder / BUCKETS_FILE).convert("RGB"))
            self.sinks = open_sinks(arguments.report_to, folder, arguments.log_folder, past, run.config, first)
        if run.world.size > 1:
            from .distributed.rank_checks import SLOW, SLOW_ON_CPU, ForwardTimer, SlowRanks

            self.timer = ForwardTimer(run.state.model)
            self.slow_ranks = SlowRanks(SLOW_ON_CPU if current_kind().is_cpu else SLOW)
            self._time_forward(run.start_step + 1)
        is_hidden = arguments.disable_tqdm or not run.world.is_main
        counts = {"total": run.max_steps, "initial": run.start_step, "unit": "update"}
        self.bar = progress(desc="training", disable=is_hidden, **counts)
        return self

    def after_update(self, step: int, update: Update, batches: list[dict]) -> None:
        """`step` counts finished updates; `batches` are this rank's micro-batches of it. All ranks call it together.
        Raises DataError, on all alike, where `--max_skipped_share` is exceeded."""
        run, arguments = self.run, self.run.arguments
        self.interval.add(update, run.global_batch_size)
        for batch in batches:
            self.interval.see(batch)
        self.interval.check_skipped()
        if arguments.profiler_options:
            # PaddleNLP would end the process, with status 0 and without a checkpoint.
            add_profiler_step(f"{arguments.profiler_options};exit_on_finished=false")
        self.bar.set_postfix(loss=f"{update.loss:.4f}", refresh=False)
        if step == run.start_step + 1:
            leave_out_next_step(self.bar)  # which compiles and allocates
        self.bar.update()
        numbers = self._look(step, batches[-1], Order.SAMPLE_NOW in update.orders)
        if self._is_logged(step):
            if self.timer and self.timer.is_on:
                own = self.timer.take() + self.interval.wait_seconds / max(1, self.interval.updates)
                for words in self.slow_ranks.find(gather_objects((own, socket.gethostname()), run.world)):
                    if self.path:
                        get_logger().warning("%s", words)
            numbers |= self._interval_values()
        self._time_forward(step + 1)
        if numbers and self.path:
            log_metrics(self.path, step, numbers, self.sinks)

    def _is_logged(self, step: int) -> bool:
        return step % self.run.arguments.logging_steps == 0 or step == self.run.max_steps

    def _time_forward(self, step: int) -> None:
        """Only in an update that is logged, and not in the first, which compiles and allocates."""
        if self.timer:
            self.timer.is_on = self._is_logged(step) and step > self.run.start_step + 1

    def _look(self, step: int, batch: dict, asked: bool) -> dict:
        """Draw when it is due or asked for, and validate; the numbers of that. Training stands still meanwhile."""
        run, numbers = self.run, {}
        with self.interval.paused():
            if asked or self._due(step, getattr(run.model_settings, "image_logging_steps", 0)):
                pictures, numbers = run.draw(batch)
                if self.path:
                    self._keep(step, pictures)
            if run.validate and self._due(step, run.arguments.validation_steps):
                numbers |= run.validate()
        return numbers

    def _due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.run.max_steps)

    def _interval_values(self) -> dict:
        rate = self.run.state.optimizer.get_lr()
        values = self.interval.summary() | {"lr_abs": rate}
        values |= {f"lr_abs_{group}": rate * ratio for group, ratio in self.run.rate_ratios.items()}
        if self.run.arguments.benchmark:
            values["ips"] = values["images_per_second"]
            if self.path:
                get_logger().info("%s", describe_costs(values, self.run.global_batch_size))
        return values

    def _keep(self, step: int, pictures: dict) -> None:
        from ..utils.pictures import TITLE_HEIGHT, cells_as_text, save_png, with_title

        folder = self.run.output_dir / metrics.SAMPLES_DIR
        folder.mkdir(exist_ok=True)
        titled = {}
        for tag, picture in pictures.items():
            titled[tag] = with_title(np.asarray(picture), f"{tag}, step {step:,}")
            path = folder / f"step-{step:06d}-{tag}.png"  # metrics.PICTURE
            save_png(path, titled[tag], cells_as_text(picture, TITLE_HEIGHT))
            get_logger().info("sample pictures: %s", path)
        for sink in self.sinks:
            sink.add_pictures(step, titled)

    def __exit__(self, *_error) -> None:
        """Finish the writers and say how many rows were skipped."""
        if self.timer:
            self.timer.close()
        self.bar.close()
        if not self.path:
            return
        for sink in self.sinks:
            sink.close()
        for reason, count in sorted(self.interval.skipped.items()):
            get_logger().warning("skipped %d rows: %s", count, reason)


def log_metrics(path: Path, step: int, values: dict, sinks: Iterable = ()) -> None:
    """Append {"global_step": step, "time": seconds since 1970, **values} to the file, and show it in the log and in
    each sink. NaN is written as null."""
    record = {name: value if math.isfinite(value) else None for name, value in values.items()}
    record = {"global_step": step, "time": round(time.time(), 3), **record}
    with naming_full_disk(path), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    for sink in sinks:
        sink.add_numbers(*points_of(record))
    get_logger().info("%s", describe(step, values))


def describe(step: int, values: dict) -> str:
    """The numbers as a line for people; those that are not there are left out."""
    words = [f"step {step}"]
    if "loss" in values:
        words.append(f"loss {values['loss']:.4f}")
    quarters = [values[name] for number in range(NUM_QUARTERS) if (name := f"loss_quarter_{number + 1}") in values]
    if quarters:
        words.append(f"by timestep {' '.join('-' if math.isnan(q) else f'{q:.3f}' for q in quarters)}")
    shown = {
        "validation_loss": "validation loss {:.4f}",
        "psnr": "psnr {:.2f} dB",
        "grad_norm": "gradient {:.3g}",
        "lr_abs": "lr {:.3g}",
        "images_per_second": "{:.3g} images/s",
        "data_wait_share": "waited for data {:.1%}",
        "peak_memory_gb": "memory {:.1f} GB",
        "peak_device_memory_gb": "device {:.1f} GB",
    }
    per_device = values.get("images_per_second_per_device")
    if per_device not in (None, values.get("images_per_second")):
        shown["images_per_second"] += f" ({per_device:.3g} a device)"
    words += [form.format(values[name]) for name, form in shown.items() if name in values]
    for what in ("rows", "updates"):
        if values.get(f"skipped_{what}"):
            words.append(f"skipped {values[f'skipped_{what}']:.0f} {what}")
    return "  ".join(words)


def describe_costs(values: dict, samples_per_update: int) -> str:
    """The line of `--benchmark`, whose words scripts look for: costs in seconds an update, ips in images a second."""
    return (
        f"avg_reader_cost: {values['avg_reader_cost']:.5f} sec, avg_batch_cost: {values['avg_batch_cost']:.5f} sec, "
        f"avg_samples: {samples_per_update}, ips: {values['images_per_second']:.5f} images/sec"
    )


def open_sinks(
    names: list[str], output_dir: Path, logging_dir: Path, past: list[dict], config: dict, first: dict | None = None
) -> list:
    """The sinks of `--report_to`. `past`: the records of `metrics.jsonl` before this start. `config`: the settings.
    `first`: pictures by tag, [H, W, 3] uint8, of the run and not of an update: shown at step 0, once."""
    start_step, found = past[-1]["global_step"] if past else 0, []
    for name in dict.fromkeys(names):
        if name == "visualdl":
            found.append(VisualDLSink(logging_dir, past, metrics.old_pictures(output_dir, start_step)))
        elif name == "tensorboard":
            from .sinks import TensorBoardSink

            found.append(TensorBoardSink(logging_dir, start_step))
        elif name == "wandb":
            from .sinks import WandbSink

            found.append(WandbSink(output_dir, start_step, config))
        elif name == "comet_ml":
            from .sinks import CometSink

            found.append(CometSink(output_dir, start_step, config))
    for sink in found:
        if first and (start_step == 0 or sink.begins_anew):
            sink.add_pictures(0, first)
    return found


class VisualDLSink:
    """VisualDL's record file, from the first step of the run on. prefix: of the names of numbers."""

    begins_anew = True  # at every start

    def __init__(self, folder: Path, past: list[dict], pictures: list[tuple[int, str, Path]], prefix: str = "train"):
        from visualdl import LogWriter

        Path(folder, metrics.VISUALDL_FILE).unlink(missing_ok=True)
        self.writer = LogWriter(logdir=str(folder), file_name=metrics.VISUALDL_FILE, flush_secs=10)
        for record in past:
            self.add_numbers(*points_of(record, prefix))
        for step, tag, path in pictures:
            self.writer.add_image(tag, np.asarray(Image.open(path)), step)

    def add_numbers(self, step: int, seconds: float, numbers: dict[str, float]) -> None:
        for tag, value in numbers.items():
            self.writer.add_scalar(tag, value, step, walltime=round(seconds * 1000))

    def add_pictures(self, step: int, pictures: dict) -> None:
        """[H, W, 3] uint8 by tag."""
        for tag, picture in pictures.items():
            self.writer.add_image(tag, picture, step)

    def close(self) -> None:
        """Write what is left."""
        self.writer.close()


def points_of(record: dict, prefix: str = "train") -> tuple[int, float, dict[str, float]]:
    """(step, seconds since 1970, numbers by <prefix>/<name>) of a line of metrics.jsonl."""
    values = {name: value for name, value in record.items() if value is not None}
    step, seconds, _ = values.pop("global_step"), values.pop("time"), values.pop("data_crc32", None)
    return step, seconds, {f"{prefix}/{name}": value for name, value in values.items()}
