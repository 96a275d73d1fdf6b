"""What both loops do after an update: log, draw sample pictures, measure the wait for data."""

import time

from paddlenlp.utils.profiler import add_profiler_step

from ..utils.log import get_logger, progress
from ..utils.pictures import save_png
from .metrics import Interval, MetricsWriter
from .run import TrainingRun
from .step import Update


class TimedBatches:
    """An iterable of batches that adds up the seconds its reader waited for them."""

    def __init__(self, batches, interval: Interval):
        self.batches, self.interval = batches, interval

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        source = iter(self.batches)
        while True:
            started = time.perf_counter()
            batch = next(source, None)
            if batch is None:
                return
            self.interval.wait_seconds += time.perf_counter() - started
            yield batch


class Reporter:
    """Logs every `logging_steps` updates, draws every `draw_every`, and shows the progress of the run.

    Silent on all but the main process. A context manager: the end closes what it wrote to.
    """

    def __init__(self, run: TrainingRun):
        self.run = run
        self.interval = Interval(run.unlogged_losses)
        self.skipped: dict[str, int] = {}
        self.skipped_updates = 0
        self.writer = None
        arguments = run.arguments
        self.bar = progress(
            total=run.max_steps,
            initial=run.start_step,
            desc="training",
            unit="update",
            disable=arguments.disable_tqdm or not run.world.is_main,
        )
        if run.world.is_main:
            self.writer = MetricsWriter(run.output_dir, arguments.reporters, arguments.logging_dir, run.start_step)

    def after_update(self, step: int, update: Update, batches: list[dict]) -> None:
        """`step` counts finished updates; `batches` are this rank's micro-batches of it."""
        run, arguments = self.run, self.run.arguments
        self.interval.add(update.loss, run.global_batch_size, update.applied)
        self.skipped_updates += not update.applied
        for batch in batches:
            for reason in batch.get("skipped", ()):
                self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if arguments.profiler_options:
            add_profiler_step(arguments.profiler_options)
        self.bar.set_postfix(loss=f"{update.loss:.4f}", refresh=False)
        self.bar.update()
        if not self.writer:
            return
        numbers = {}
        if run.draw_every > 0 and (step % run.draw_every == 0 or step == run.max_steps):
            pictures, numbers = run.draw(batches[-1])
            self._keep(step, pictures)
        if numbers or step % arguments.logging_steps == 0 or step == run.max_steps:
            self.writer.log(step, self._interval_values() | numbers)

    def _interval_values(self) -> dict:
        run, samples = self.run, self.interval.samples
        updates = samples / self.run.global_batch_size
        values = self.interval.summary(run.world.size)
        values["lr_abs"] = run.state.optimizer.get_lr()
        values["skipped_rows"] = sum(self.skipped.values())
        values["skipped_updates"] = self.skipped_updates
        if run.arguments.benchmark:
            seconds = samples / values["images_per_second"]
            values["avg_reader_cost"] = values["data_wait_share"] * seconds / updates
            values["avg_batch_cost"] = seconds / updates
            values["ips"] = values["images_per_second"]
        return values

    def _keep(self, step: int, pictures: dict) -> None:
        folder = self.run.output_dir / "samples"
        folder.mkdir(exist_ok=True)
        for tag, picture in pictures.items():
            save_png(folder / f"step-{step:06d}-{tag}.png", picture)
        self.writer.pictures(step, pictures)

    def __enter__(self):
        return self

    def __exit__(self, *_error) -> None:
        """Finish the writers and say how many rows were skipped."""
        self.bar.close()
        if self.writer:
            self.writer.close()
        for reason, count in sorted(self.skipped.items()):
            get_logger().warning("skipped %d rows: %s", count, reason)
