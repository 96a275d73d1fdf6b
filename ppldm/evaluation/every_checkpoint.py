"""`ppldm evaluate --watch RUN`: every checkpoint of a run, once, by a process of its own beside the training.

A checkpoint has its name only when it is whole, and its files are checked against its manifest as they are read. One
that rotation removes meanwhile is passed over with a line. Results are in OUT/checkpoint-<step>/; what is there for a
checkpoint of this manifest is not computed again, so a watcher can be stopped, and a run that starts anew is evaluated
anew. RUN/evaluation.jsonl is made of them, a line for each checkpoint and guidance scale, and shown in VisualDL.

The watcher ends when the run has come to its end, as start.json says, and all is evaluated. It runs at low priority.
"""

import json
import os
import time
from pathlib import Path

from ..inference.pictures.plan import SCALE, short
from ..training.checkpoint.checkpoint import read_manifest
from ..training.monitor.metrics import EVALUATION_DIR, EVALUATION_FILE
from ..training.monitor.sinks import VisualDLSink
from ..training.start import has_finished
from ..utils.errors import CheckpointError, ConfigError, PpldmError
from ..utils.files import make_output_dir, read_json, write_text
from ..utils.jobs import JobFolder
from ..utils.log import get_logger
from ..utils.processes.world import World
from ..weights.folders import list_checkpoints, step_of
from ..weights.runs import RUN_FILE
from .job import Job, has_average, settings_at_any_scale
from .measure import names_of
from .result import Result, read_result

_NICENESS = 10


def watch_run(job: Job, run: Path, out: Path, every: int, poll_seconds: float | None) -> dict[Path, Result]:
    """Evaluate the checkpoints of `run` after multiples of `every` updates, in order, until the run has ended; with
    `poll_seconds` None only those that are there. The results of this call by their files.

    Raises OutputError for other files in `out`.
    """
    if World.detect().size > 1:
        raise ConfigError("--watch runs in one process; start it without paddle.distributed.launch")
    os.nice(_NICENESS)
    job.redo = True  # of each checkpoint's folder; what differs from an earlier watcher is refused here
    drawn = {"guidance_scales": job.scales, **settings_at_any_scale(job.drawn), "batch_size": job.batch_size}
    asked = {"against": str(job.against), "prompts": job.prompts, "num_samples": job.num_samples,
             "num_real": job.num_real, "negative_prompt": job.negative_prompt, **drawn, **job.loras}  # fmt: skip
    results, passed = {}, set()
    with JobFolder(out, ".watch", "evaluation of a run").claimed(asked):
        while True:
            ended = has_finished(run)  # asked before the look at the folder: what is there then is all
            for checkpoint in reversed(list_checkpoints(run)):
                if step_of(checkpoint) % every == 0 and checkpoint not in passed:
                    found = _evaluate_once(job, checkpoint, out)
                    passed |= {checkpoint} if found is None else set()
                    results |= found or {}
                    if found:
                        publish(run, out)
            if ended or poll_seconds is None:
                return results
            time.sleep(poll_seconds)


def _evaluate_once(job: Job, checkpoint: Path, out: Path) -> dict[Path, Result] | None:
    """What is new of a checkpoint; None for one that cannot be evaluated, with a line that says why."""
    folder = out / checkpoint.name
    try:
        if _is_done(job, checkpoint, folder):
            return {}
        get_logger().info("evaluating %s", checkpoint)
        return job.of_model(checkpoint, folder, has_average(checkpoint), World(), out / "features")
    except (PpldmError, OSError) as error:
        if checkpoint.is_dir() and not isinstance(error, CheckpointError):
            raise
        get_logger().warning("%s is passed over: it was removed meanwhile", checkpoint)
        return None


def _is_done(job: Job, checkpoint: Path, folder: Path) -> bool:
    """Whether the results of all guidance scales are there, of these weights and with these metrics."""
    manifest, wanted = read_manifest(checkpoint).get("crc32"), {one.name for one in job.wanted}
    for scale in job.scales:
        found = read_json(folder / f"g{short(scale)}.json")
        if not isinstance(found, dict) or found["of"]["weights"].get("manifest") != manifest:
            return False
        if not wanted <= names_of(found["metrics"]) | found["left_out"].keys():
            return False
    return True


def publish(run: Path, out: Path) -> None:
    """Write RUN/evaluation.jsonl from all results in `out`, and show them in VisualDL where the run does."""
    records = []
    for path in (path for one in reversed(list_checkpoints(out)) for path in sorted(one.glob("g*.json"))):
        result = read_result(path)
        record = {
            "global_step": step_of(path.parent),
            "time": round(path.stat().st_mtime, 3),
            "guidance_scale": result.settings["drawn"]["guidance_scale"],
        }
        for name, found in result.metrics.items():
            record |= {name: found["value"], f"{name}_low": found["low"], f"{name}_high": found["high"]}
        records.append(record)
    write_text(run / EVALUATION_FILE, "".join(json.dumps(record) + "\n" for record in records))
    logging = (read_json(run / RUN_FILE) or {}).get("logging", {})
    if "visualdl" in logging.get("report_to", ()):
        folder = Path(run, logging.get("logging_dir") or "logs", EVALUATION_DIR)
        # A curve for each metric at each guidance scale.
        curves = [
            {
                name if name in ("global_step", "time") else f"{name} at guidance {short(record[SCALE])}": value
                for name, value in record.items()
                if name != SCALE
            }
            for record in records
        ]
        VisualDLSink(make_output_dir(folder), curves, [], EVALUATION_DIR).close()
