"""`ppldm precompute`: latents of all rows of filelists, and embeddings of their captions, computed once, for training
with `--latents cached` and `--text_embeddings cached`.

Beside each part, or in `--latents-dir`, lie a file for each resolution and one of embeddings (`data.cached`), made
under a temporary name until all wanted rows are there. In a finished one what is missing is filled in: rows that
another `--where` selects or that training did not come to, and what is damaged. Several processes share the parts out,
or the executors of Spark, a task for each part; parts, networks and latents then lie at the same paths on all machines.
Only the last bits of a result depend on who makes it, by the number of threads: `spark.task.cpus`.
"""

import json
import os
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np

from ..config.data import EAGER, LATENTS_DTYPES, DataOptions
from ..data.cached.file import CachedFile, count_bytes, create_file, unfinished_path
from ..data.cached.key import CacheKey
from ..data.filelist import read_sources
from ..data.formats.index import build_lock
from ..data.formats.layouts import DEFAULT_LAYOUT
from ..data.formats.open import open_part
from ..data.images import CropRule
from ..data.select.expression import parse_where
from ..data.shapes import ShapeRule, shape_rule
from ..data.text.captions import CaptionRule
from ..families.settings import TextToImageSettings
from ..networks.engine import EXACT_ENGINES, Engine
from ..utils.entry import entry
from ..utils.errors import FULL_DISK, ConfigError, DiskFullError, ModelError, PartError, RowError
from ..utils.files import finish_file, local_path, make_output_dir
from ..utils.log import get_logger, progress
from ..utils.machine.cpu import load_paddle
from ..utils.machine.devices import use_device
from ..utils.machine.spark import DRIVER_MEMORY_GB, is_submitted, run_tasks, spark_session_if
from ..utils.processes.ranks import World, barrier, gather_objects, join_world, shard
from ..utils.processes.workers import check_workers
from ..utils.text import print_report
from ..weights.fetch import check_name
from .plan import (
    Cell,
    Contents,
    EmbeddingsRequest,
    Encoder,
    LatentsRequest,
    Plan,
    Projection,
    Request,
    Task,
    Wanted,
    check_disks,
    choose_rows,
    make_plan,
    project,
)

MOST_CROPS = 64
_PASSING = "unreadable"  # of a row in a file of its own, which may be there the next time
_Names = Annotated[list[str], {"nargs": "+", "metavar": "NAME"}]
_Sides = Annotated[list[int], {"nargs": "+", "type": int, "metavar": "PIXELS"}]


def precompute(
    filelists: Annotated[str, {"nargs": "+", "metavar": "FILELIST"}],  # filelists, lists of filelists, or folders
    vae: str = None,  # as --vae_name_or_path, or an EfficientNet's folder; without one no latents are made
    resolutions: _Sides = (DataOptions.resolution,),  # sides of the square crops, a file of latents for each
    buckets: str = "off",  # as in training: off, ratios, steps, or a list of width x height (docs/data.md)
    bucket_group_size: int = 0,  # as in training; 0: of every --per_device_train_batch_size up to 64
    bucket_upscale: bool = False,  # as in training
    crops: str = "center",  # center, smart (as --smart_crop), or how many random crops, as --num_crops of training
    flips: bool = False,  # each crop also mirrored, for --random_flip
    dtype: str = "float16",  # float16, bfloat16 or float32: how latents are stored; they are computed in float32
    text_encoder: str = None,  # folder, pipeline, checkpoint or name of the one that makes embeddings of captions
    tokenizer: str = None,  # as --tokenizer_name; by default the one in or beside the text encoder
    model_max_length: int = TextToImageSettings.model_max_length,  # as in training: tokens of a caption
    mask_pad_tokens: bool = False,  # as in training
    text_projection: bool = False,  # for Stable Cascade: the projected caption too, and the states before the last norm
    omitted_text_encoders: _Names = (),  # as in training, of a Stable Diffusion 3, which is told of all text encoders
    text_encoder_3_max_length: int = EmbeddingsRequest.text_encoder_3_max_length,  # as in training, of the same
    text_dtype: str = "float16",  # float16, bfloat16 or float32: how embeddings are stored; as --text_embeddings_dtype
    captions: str = "",  # embed these texts of a row, as --captions of training: caption:0.5,caption_blip:0.5
    caption_choice: str = "random",  # as in training: all of several captions under one name, or the first
    clean_captions: bool = False,  # embed captions cleaned, as training with --clean_captions sees them
    latents_dir: str = None,  # folder for the files; by default each lies beside its part
    crop_fraction: float = DataOptions.crop_fraction,  # as in training
    interpolation: str = DataOptions.interpolation,  # as in training
    where: str = None,  # only the rows for which this holds, as in training
    layout: str = DEFAULT_LAYOUT,  # column order of the parts of lists that name none (docs/data.md)
    batch_size: int = 16,  # pictures, or captions, encoded at a time; changes at most the last bits
    engine: Engine = None,
    num_workers: int = 0,  # threads that decode pictures; 0 means one per core, on Spark one a task
    device: str = None,  # what to compute on, as --device of train: cpu, gpu, npu …, gpu:1
    master: str = None,  # a Spark cluster, such as spark://host:7077, whose nodes share the folders: on its CPUs
    offline: bool = False,  # never touch the network
    dry_run: bool = False,  # say how much it would be, and end
    json: bool = False,  # print the account as JSON
):  # fmt: skip
    """Encode pictures once, or captions, or both, so that training needs no autoencoder's or text encoder's time.

    Train on the latents with --latents cached and the same resolution, crops and VAE, on the embeddings with
    --text_embeddings cached and the same text encoder and captions (docs/latents.md). The same command goes on where it
    stopped and mends what is damaged. A process a GPU: python -m paddle.distributed.launch $(which ppldm) precompute …
    """
    _precompute(SimpleNamespace(**locals()))


def _precompute(asked: SimpleNamespace) -> None:
    """asked: the flags of `precompute`."""
    vae, text_encoder, engine = asked.vae, asked.text_encoder, asked.engine or EAGER
    on_spark = bool(asked.master) or is_submitted()
    check_asked(asked, engine, on_spark)
    names = ("buckets", "bucket_group_size", "bucket_upscale", "crop_fraction", "interpolation")
    data = DataOptions(**{name: getattr(asked, name) for name in names})
    crops, sizes = read_crops(asked.crops, asked.flips, data), read_sizes(data, asked.resolutions)
    texts = CaptionRule.of_flags(asked.captions, asked.clean_captions, asked.caption_choice)
    own, requests = {"batch_size": asked.batch_size, "offline": asked.offline}, []
    if vae:
        requests.append(LatentsRequest(model=vae, dtype=asked.dtype, engine=engine, crops=crops, **own))
    if text_encoder:
        names = ("tokenizer", "model_max_length", "mask_pad_tokens", "text_projection", "omitted_text_encoders",
                 "text_encoder_3_max_length")  # fmt: skip
        own |= {name: getattr(asked, name) for name in names}
        requests.append(EmbeddingsRequest(model=text_encoder, dtype=asked.text_dtype, captions=texts, **own))
    num_threads, num_workers = asked.num_workers or 1, check_workers(asked.num_workers)
    condition = None if asked.where is None else parse_where(asked.where)
    sources = [source for filelist in asked.filelists for source in read_sources(filelist, asked.layout)]
    folder = make_output_dir(local_path(asked.latents_dir)) if asked.latents_dir else None
    # On Spark as many threads as a task has, so that what is measured before is what it will take.
    with entry(threads=1 if on_spark else None, meets=True):
        use_device("cpu" if on_spark else asked.device)
        world = join_world()
        chosen = choose_rows(sources, condition, sizes if vae else [0], num_workers)
        plans = [make_plan(request, request.load(), sources, chosen, folder) for request in requests]
        with spark_session_if(on_spark, asked.master, DRIVER_MEMORY_GB) as spark:
            report = run(plans, num_workers, world, asked.dry_run, spark, num_threads)
        if world.is_main:
            print_report(report, describe, asked.json)


def check_asked(asked: SimpleNamespace, engine: str, on_spark: bool) -> None:
    """Raises ConfigError for what cannot be."""
    if asked.vae is None and asked.text_encoder is None:
        raise ConfigError("nothing to compute; name --vae for latents, --text_encoder for text embeddings, or both")
    for name in filter(None, (asked.vae, asked.text_encoder)):
        check_name(name)
    for flag in ("dtype", "text_dtype"):
        if (value := getattr(asked, flag)) not in LATENTS_DTYPES:
            raise ConfigError(f"--{flag} {value} is not one of {', '.join(LATENTS_DTYPES)}")
    if asked.batch_size < 1:
        raise ConfigError(f"--batch-size {asked.batch_size} must be 1 or more")
    if engine not in EXACT_ENGINES:
        raise ConfigError(f"--engine {engine} would change the latents; choose {' or '.join(EXACT_ENGINES)}")
    if engine != EAGER and asked.vae is None:
        raise ConfigError(f"--engine {engine} encodes pictures, and no --vae is given; omit it, or name the VAE")
    if on_spark and asked.device not in (None, "cpu"):
        raise ConfigError(f"--device {asked.device} is not for Spark, which encodes on CPUs; omit it, or Spark")


def read_crops(crops: str, flips: bool, data: DataOptions) -> CropRule:
    """What the flags ask for. Raises ConfigError."""
    fixed = crops in ("center", "smart")
    if not fixed and not (crops.isdecimal() and 0 < int(crops) <= MOST_CROPS):
        raise ConfigError(f"--crops {crops} must be center, smart, or a number of random crops from 1 to {MOST_CROPS}")
    number, enlarge = 0 if fixed else int(crops), data.bucket_upscale and data.buckets != "off"
    return CropRule(data.crop_fraction, not fixed, flips, data.interpolation, number, crops == "smart", enlarge)


def read_sizes(data: DataOptions, resolutions: list[int]) -> list[int | ShapeRule]:
    """What `choose_rows` takes, each once. Raises ConfigError."""
    if min(resolutions) < 1 or (data.bucket_group_size or 0) < 0:
        raise ConfigError("--resolutions must be 1 or more, and --bucket-group-size no less than 0")
    if data.buckets == "off":
        return list(dict.fromkeys(resolutions))
    return list(dict.fromkeys(shape_rule(replace(data, resolution=side), 0) for side in resolutions))


def run(plans: list[Plan], num_workers: int, world: World, dry_run: bool, spark=None, num_threads: int = 1) -> dict:
    """Do this rank's share of the parts, or all by Spark; the account of all ranks. Raises DataError, OutputError."""
    for folder in {file.path.parent for plan in plans for task in plan.tasks for file in task.files}:
        make_output_dir(folder)
    with ThreadPoolExecutor(num_workers) as pool:
        projected = [(plan, project(plan, pool)) for plan in plans]
        check_disks([projection for _, projection in projected])
        barrier(world)  # so that nobody measures a disk that others fill already
        num_tasks = spark.sparkContext.defaultParallelism if spark else world.size
        reports = {plan.request.name: tell(plan, own, num_tasks, world.is_main) for plan, own in projected}
        for plan in () if dry_run else plans:
            began = time.monotonic()
            if spark:
                account = encode_on_spark(spark, plan.tasks, num_threads)
            else:
                tasks = [plan.tasks[number] for number in shard(len(plan.tasks), world)]
                name, total = plan.tasks[0].files[0].key.what, sum(task.num_rows for task in tasks)
                with progress(total=total, desc=name, disable=not world.is_main) as bar:
                    own = sum((encode_part(task, plan.encoder, pool, bar.update) for task in tasks), Account())
                account = sum(gather_objects(own, world), Account())
            found = asdict(account) | {"bad": dict(account.bad.most_common()), "seconds": time.monotonic() - began}
            reports[plan.request.name] |= found | latent_statistics(found.pop("sums"))
    return {**reports.pop("", {}), **reports}


def tell(plan: Plan, projection: Projection, num_tasks: int, is_main: bool) -> dict:
    """What is to be done, in the log and as the first part of a report. num_tasks: that run at a time."""
    costs = [*zip(plan.tasks[0].files, projection.cells, projection.seconds, strict=True)]
    hours = sum(count * cost for _, count, cost in costs) / num_tasks / 3600
    num_bytes = sum(size for _, size in projection.needed)
    if is_main:
        log = get_logger().info
        log("%d of %d files are there", projection.finished, projection.files)
        for file, count, cost in costs:
            cells = file.key.cells({**plan.encoder.header, "variants": 1})
            size = max(count_bytes(cells, file.key.dtype)) / cells.variants / 1e6
            words = "  %s: %s to encode, about %.0f ms and %.3f MB each in %s"
            log(words, file.key.label, f"{count:,}", 1000 * cost, size, file.key.dtype)
        log("that is %.3f GB and about %.2f hours", num_bytes / 1e9, hours)
    return {
        "files": projection.files,
        "finished_before": projection.finished,
        "projected_bytes": num_bytes,
        "projected_hours": hours,
    }


def describe(report: dict) -> str:
    lines = []
    for kind in (LatentsRequest, EmbeddingsRequest):
        own = report.get(kind.name, {}) if kind.name else report
        if "encoded" in own:
            done = f"{own['encoded']} {kind.things} encoded in {own['seconds']:.0f} s"
            lines.append(f"{done}, {own['found']} were there before")
            lines += [f"  {own['repaired']} of them were damaged and are repaired"] if own["repaired"] else []
            lines += [f"  cannot be used, {reason}: {count}" for reason, count in own["bad"].items()]
            lines.append(f"train on them with {kind.flag} (docs/latents.md)")
            if stated := {name: own[name] for name in ("latents_mean", "latents_std") if name in own}:
                lines.append("their mean and deviation by channel, for --latents_statistics:")
                lines.append(json.dumps(stated))
        elif "files" in own:
            size = f"{own['projected_bytes'] / 1e9:.3f} GB, about {own['projected_hours']:.2f} hours"
            lines.append(f"{own['files']} file(s) of {kind.things}, {own['finished_before']} there; the others: {size}")
    return "\n".join(lines)


def sums_of(moments: np.ndarray) -> np.ndarray:
    """float64 [3, C], as `Account.sums` has them, of samples of a posterior [2, C, h, w], mean and deviation: what is
    expected of a sample's square is mean² + deviation²."""
    mean, std = moments.reshape(*moments.shape[:2], -1).astype(np.float64)
    return np.stack([np.full(len(mean), mean.shape[1]), mean.sum(1), (mean**2 + std**2).sum(1)])


def latent_statistics(sums) -> dict[str, list[float]]:
    """Mean and standard deviation by channel, by the names and with the meaning of a VAE's config; {} of no latents."""
    if not np.ndim(sums):
        return {}
    mean, square = sums[1:] / sums[0]
    found = {"latents_mean": mean, "latents_std": np.sqrt(square - mean**2)}
    return {name: [float(f"{one:.6g}") for one in values] for name, values in found.items()}


@dataclass
class Account:
    """What became of arrays. repaired: of those encoded, damaged before. bad: of unusable rows, by reason. sums: of
    encoded latents that are measured float64 [3, C], by channel: how many, their sum, and that of their squares."""

    encoded: int = 0
    found: int = 0
    repaired: int = 0
    bad: Counter = field(default_factory=Counter)
    sums: Any = 0.0

    def __add__(self, other: "Account") -> "Account":
        return Account(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def wants(self, cell: Cell) -> bool:
        """Whether an array is to be computed, which is then missing; one that is there is counted."""
        file, place = cell.file, (cell.row, cell.variant)
        reason = file.reason(*place)
        if file.is_damaged(*place) or reason == _PASSING:
            self.repaired += reason != _PASSING
            file.forget(*place)
        elif file.states[place]:
            self.found += reason is None
            self.bad.update([reason] if reason else [])
            return False
        return True


def encode_part(
    task: Task, encoder: Encoder, pool: Executor, told: Callable[[int], object] = lambda count: None
) -> Account:
    """Make the files of a part whole. told: called with the rows settled. Raises PartError, ConfigError, OSError."""
    account, wanted = Account(), []
    own = [file for file in task.files if len(file.rows)]
    with ExitStack() as stack:
        for file in own:
            stack.enter_context(build_lock(file.path))
        part = stack.enter_context(closing(open_part(task.path, task.source)))
        if part.identity[:2] != task.content:
            raise PartError(f"{task.path} has changed since the command began; run it again")
        contents = task.request.open(part, encoder)
        files = [stack.enter_context(_unfinished_file(one, contents)) for one in own]
        for one, file in zip(own, files, strict=True):
            for cell in filter(account.wants, contents.list_cells(file, one.rows)):
                file.check_engine(task.request.engine)
                wanted.append(cell)
        told(task.num_rows - _count_rows(wanted))
        _fill(wanted, contents.load(wanted, pool), encoder, account, told)
    return account


def _fill(
    wanted: list[Cell],
    loaded: Iterator[tuple[Cell, Any]],
    encoder: Encoder,
    account: Account,
    told: Callable[[int], object],
) -> None:
    """Write the arrays of cells, encoded in batches of one shape."""
    left, batches = Counter(cell.shape for cell in wanted), defaultdict(list)
    for cell, content in loaded:
        batch = batches[cell.shape]
        left[cell.shape] -= 1
        if isinstance(content, RowError):
            cell.file.mark_bad(cell.row, cell.variant, content.reason)
            account.bad[content.reason] += 1
            told(_count_rows([cell]))
        else:
            batch.append((cell, content))
        if len(batch) == encoder.batch_size or (batch and not left[cell.shape]):
            cells, contents = zip(*batch, strict=True)
            for one, array in zip(cells, encoder(contents), strict=True):
                is_finite = one.file.write(one.row, one.variant, array) is not None
                account.encoded += is_finite
                account.bad.update([] if is_finite else ["not_finite"])
                if is_finite and encoder.measured:
                    account.sums = account.sums + sums_of(array)
            told(_count_rows(cells))
            batch.clear()


def _count_rows(cells) -> int:
    """How many rows these are of, each counted with its first array."""
    return sum(cell.variant == 0 for cell in cells)


@contextmanager
def _unfinished_file(wanted: Wanted, contents: Contents) -> Iterator[CachedFile]:
    """A file of a locked part, to be filled in: as it is there, else created; durable, with its name, afterwards."""
    unfinished, key = unfinished_path(wanted.path), wanted.key
    codes = contents.find_codes(key)
    file = _open_file(wanted.path, key, codes) or _open_file(unfinished, key, codes)
    if file is None:
        create_file(unfinished, key, contents.header, codes, contents.sizes, contents.texts)
        file = CachedFile(unfinished, key, writable=True)
    try:
        yield file
        file.flush()
    finally:
        file.close()
    if file.path == unfinished:
        finish_file(unfinished, wanted.path)


def _open_file(path: Path, key: CacheKey, codes: np.ndarray) -> CachedFile | None:
    if not path.exists():
        return None
    try:
        file = CachedFile(path, key, writable=True)
        if np.array_equal(file.codes, codes):
            return file
        file.close()
        error = f"{path} is of other texts"
    except PartError as damage:
        error = str(damage)
    get_logger().warning("making a file of %s again: %s", key.what, error)
    path.unlink()
    return None


def encode_on_spark(spark, tasks: list[Task], num_threads: int) -> Account:
    """Make the files of parts whole by Spark's executors, with `num_threads` each that decode pictures."""
    encode, tasks = partial(_encode, num_threads=num_threads), [*map(_with_absolute_paths, tasks)]
    done = run_tasks(spark, tasks[0].files[0].key.what, tasks, encode)
    return sum((account for _, account in done), Account())


def _with_absolute_paths(task: Task) -> Task:
    prompts = task.source.idx_to_prompt
    names = {name: getattr(task.request, name, None) for name in ("model", "tokenizer")}
    found = {name: os.path.abspath(one) for name, one in names.items() if one and os.path.exists(one)}
    return replace(
        task,
        request=replace(task.request, **found),
        path=task.path.absolute(),
        source=replace(task.source, idx_to_prompt=prompts and Path(prompts).absolute()),
        files=tuple(replace(file, path=file.path.absolute()) for file in task.files),
    )


def _encode(task: Task, num_threads: int) -> Account:
    encoder = _load(task.request)
    if encoder.digest != task.digest:
        raise ModelError(
            f"{task.request.model} on {socket.gethostname()} has the encoder {encoder.digest}, but the driver "
            f"has {task.digest}; copy the same files to all machines"
        )
    try:
        with ThreadPoolExecutor(num_threads) as pool:
            return encode_part(task, encoder, pool)
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        where = f"{error.filename or task.path} on {socket.gethostname()}"
        raise DiskFullError(
            f"the disk is full for {where} ({error.strerror}); free some and give the same command again"
        ) from error


@lru_cache(maxsize=1)
def _load(request: Request) -> Encoder:
    """What encodes in this process, which Spark keeps for its next tasks."""
    load_paddle()
    use_device("cpu")
    return request.load()
