"""What both loops do after an update: log, draw sample pictures, validate, measure the wait for data.

All ranks wait for the slowest, so the pace of a run does not tell which one is slow. In its forward passes and its data
a rank waits for nobody. The former are timed in the last update before a
log line, and the device waited for before and after each: no other update loses anything by it. A rank that takes
SLOW times the median rank's seconds, in two log lines in a row, is named once, and again when it was better meanwhile.
"""

import socket
import time
from collections.abc import Sequence
from statistics import median

import numpy as np
import paddle
from paddlenlp.utils.profiler import add_profiler_step
from PIL import Image

from ...utils.log import get_logger, leave_out_next_step, progress
from ...utils.machine.devices import wait_for_device
from ...utils.processes.rank_watch import gather_objects
from ..run import TrainingRun
from .control import Order
from .interval_metrics import IntervalMetrics, Update
from .metrics import METRICS_FILE, MetricsWriter, describe_costs, drop_after
from .sinks import SAMPLES_DIR, open_sinks, picture_name

SLOW = 1.2


class ForwardTimer:
    """Adds up the seconds of a model's forward passes in training while `is_on`. `close` leaves it alone again."""

    def __init__(self, model: paddle.nn.Layer):
        self.is_on, self.seconds, self._began = False, 0.0, None
        self._hooks = [model.register_forward_pre_hook(self._begin), model.register_forward_post_hook(self._end)]

    def _begin(self, layer, _inputs) -> None:
        if self.is_on and layer.training:
            wait_for_device()
            self._began = time.perf_counter()

    def _end(self, _layer, _inputs, _outputs) -> None:
        if self._began is not None:
            wait_for_device()
            self.seconds, self._began = self.seconds + time.perf_counter() - self._began, None

    def take(self) -> float:
        """The seconds since the last time."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def close(self) -> None:
        """Time nothing more."""
        for hook in self._hooks:
            hook.remove()


class SlowRanks:
    """Finds those that the others wait for, from the seconds of all ranks at each log line."""

    def __init__(self):
        self._slow: dict[int, int] = {}  # rank -> log lines in a row

    def find(self, seconds: Sequence[tuple[float, str]]) -> list[str]:
        """What to say of ranks that are newly known to be slow. seconds: (own seconds of an update, host) by rank."""
        usual = median(one for one, _ in seconds)
        ratios = {rank: one / usual for rank, (one, _) in enumerate(seconds)} if usual else {}
        self._slow = {rank: self._slow.get(rank, 0) + 1 for rank, ratio in ratios.items() if ratio >= SLOW}
        return [
            f"rank {rank} on {seconds[rank][1]} takes {ratios[rank]:.2f} times as long as the median rank for its "
            "forward pass and its data, and the others wait for it; see what else that machine or device does"
            for rank, lines in self._slow.items()
            if lines == 2
        ]


class TimedBatches:
    """An iterable of batches that adds up the seconds its reader waited for them. The clock starts with the first."""

    def __init__(self, batches, interval: IntervalMetrics):
        self.batches, self.interval = batches, interval

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        self.interval.restart_clock()
        source = iter(self.batches)
        while True:
            started = time.perf_counter()
            batch = next(source, None)
            if batch is None:
                return
            self.interval.wait_seconds += time.perf_counter() - started
            yield batch


class Reporter:
    """Logs every `logging_steps` updates, draws every `draw_every`, validates, and shows the progress of the run.

    All ranks count, draw and validate; the main one writes. A context manager: what it writes to is opened at the start
    of the block, and closed at its end.
    """

    def __init__(self, run: TrainingRun):
        self.run, self.interval, self.writer = run, run.interval, None
        self.timer, self.slow_ranks = None, SlowRanks()

    def __enter__(self):
        run, arguments = self.run, self.run.arguments
        if run.world.is_main:
            path = run.output_dir / METRICS_FILE
            past = drop_after(path, run.start_step, run.curve_ends)
            first = {}
            if run.dataset.selection.buckets:
                from ...data.shape_chart import BUCKETS_FILE

                first["buckets"] = np.asarray(Image.open(run.output_dir / BUCKETS_FILE).convert("RGB"))
            sinks = open_sinks(arguments.report_to, run.output_dir, arguments.log_folder, past, run.config, first)
            self.writer = MetricsWriter(path, sinks)
        if run.world.size > 1:
            self.timer = ForwardTimer(run.state.model)
            self._time_forward(run.start_step + 1)
        self.bar = progress(
            total=run.max_steps,
            initial=run.start_step,
            desc="training",
            unit="update",
            disable=arguments.disable_tqdm or not run.world.is_main,
        )
        return self

    def after_update(self, step: int, update: Update, batches: list[dict]) -> None:
        """`step` counts finished updates; `batches` are this rank's micro-batches of it. All ranks call it together.

        Raises DataError, on all alike, where `--max_skipped_share` is exceeded.
        """
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
            self._look_at_ranks()
            numbers |= self._interval_values()
        self._time_forward(step + 1)
        if numbers and self.writer:
            self.writer.log(step, numbers)

    def _is_logged(self, step: int) -> bool:
        return step % self.run.arguments.logging_steps == 0 or step == self.run.max_steps

    def _time_forward(self, step: int) -> None:
        """Only in an update that is logged, and not in the first, which compiles and allocates."""
        if self.timer:
            self.timer.is_on = self._is_logged(step) and step > self.run.start_step + 1

    def _look_at_ranks(self) -> None:
        if self.timer and self.timer.is_on:
            own = self.timer.take() + self.interval.wait_seconds / max(1, self.interval.updates)
            for words in self.slow_ranks.find(gather_objects((own, socket.gethostname()), self.run.world)):
                if self.run.world.is_main:
                    get_logger().warning("%s", words)

    def _look(self, step: int, batch: dict, asked: bool) -> dict:
        """Draw where it is time to, or the user has asked for it, and validate; the numbers of that. Training stands
        still meanwhile."""
        run, numbers = self.run, {}
        with self.interval.paused():
            if asked or self._due(step, run.draw_every):
                pictures, numbers = run.draw(batch)
                if self.writer:
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
            if self.writer:
                get_logger().info("%s", describe_costs(values, self.run.global_batch_size))
        return values

    def _keep(self, step: int, pictures: dict) -> None:
        from ...utils.grid import cells_as_text
        from ...utils.pictures import TITLE_HEIGHT, save_png, with_title

        folder = self.run.output_dir / SAMPLES_DIR
        folder.mkdir(exist_ok=True)
        titled = {}
        for tag, picture in pictures.items():
            titled[tag] = with_title(np.asarray(picture), f"{tag}, step {step:,}")
            path = folder / picture_name(step, tag)
            save_png(path, titled[tag], cells_as_text(picture, TITLE_HEIGHT))
            get_logger().info("sample pictures: %s", path)
        self.writer.add_pictures(step, titled)

    def __exit__(self, *_error) -> None:
        """Finish the writers and say how many rows were skipped."""
        if self.timer:
            self.timer.close()
        self.bar.close()
        if not self.writer:
            return
        self.writer.close()
        for reason, count in sorted(self.interval.skipped.items()):
            get_logger().warning("skipped %d rows: %s", count, reason)
