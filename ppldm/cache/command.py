"""`ppldm precompute`: latents of all rows of filelists, and embeddings of their captions, computed once, for training
with `--latents cached` and `--text_embeddings cached`.

Beside each part, or in `--latents-dir`, a file for each resolution and one of embeddings (`data.cached`). Before it
begins the command says how many bytes and hours it will take, and refuses what does not fit the disk. Stopped at any
point, the same command goes on; it also repairs what is damaged. Several processes share the parts out, or the
executors of Spark.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Annotated

from ..config.data import EAGER, LATENTS_DTYPES, DataOptions
from ..data.filelist import read_sources
from ..data.formats.layouts import DEFAULT_LAYOUT
from ..data.images.crop import CropRule
from ..data.select.parse import parse_where
from ..data.shapes import ShapeRule, shape_rule
from ..data.text.captions import CaptionRule
from ..families.settings.text_to_image import TextToImageSettings
from ..networks.engine import EXACT_ENGINES, Engine
from ..utils.entry import entry
from ..utils.errors import ConfigError
from ..utils.files import local_path, make_output_dir
from ..utils.log import get_logger, progress
from ..utils.machine.devices import use_device
from ..utils.machine.spark import is_submitted, spark_session_if
from ..utils.processes.meeting import join_world
from ..utils.processes.rank_watch import barrier, gather_objects
from ..utils.processes.workers import check_workers
from ..utils.processes.world import World, shard
from ..utils.report import print_report
from ..weights.fetch import check_name
from .encode import Account, encode_part
from .kinds import EmbeddingsRequest, LatentsRequest, Request
from .on_spark import DRIVER_MEMORY_GB, encode_on_spark
from .plan import Plan, Projection, check_disks, choose_rows, make_plan, project

MOST_CROPS = 64
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
    check_asked(vae, text_encoder, {"dtype": asked.dtype, "text_dtype": asked.text_dtype}, asked.batch_size, engine)
    device = check_device(asked.device, on_spark := bool(asked.master) or is_submitted())
    names = ("buckets", "bucket_group_size", "bucket_upscale", "crop_fraction", "interpolation")
    data = DataOptions(**{name: getattr(asked, name) for name in names})
    crops, sizes = read_crops(asked.crops, asked.flips, data), read_sizes(data, asked.resolutions)
    texts = CaptionRule.of_flags(asked.captions, asked.clean_captions, asked.caption_choice)
    own, requests = {"batch_size": asked.batch_size, "offline": asked.offline}, []
    if vae:
        requests.append(LatentsRequest(model=vae, dtype=asked.dtype, engine=engine, crops=crops, **own))
    if text_encoder:
        names = ("tokenizer", "model_max_length", "mask_pad_tokens", "text_projection")
        own |= {name: getattr(asked, name) for name in names}
        requests.append(EmbeddingsRequest(model=text_encoder, dtype=asked.text_dtype, captions=texts, **own))
    num_threads, num_workers = asked.num_workers or 1, check_workers(asked.num_workers)
    condition = None if asked.where is None else parse_where(asked.where)
    sources = [source for filelist in asked.filelists for source in read_sources(filelist, asked.layout)]
    folder = make_output_dir(local_path(asked.latents_dir)) if asked.latents_dir else None
    # On Spark as many threads as a task has, so that what is measured before is what it will take.
    with entry(threads=1 if on_spark else None, meets=True):
        use_device(device)
        world = join_world()
        chosen = choose_rows(sources, condition, sizes if vae else [0], num_workers)
        plans = [make_plan(request, request.load(), sources, chosen, folder) for request in requests]
        with spark_session_if(on_spark, asked.master, DRIVER_MEMORY_GB) as spark:
            report = run(plans, num_workers, world, asked.dry_run, spark, num_threads)
        if world.is_main:
            print_report(report, describe, asked.json)


def check_asked(vae: str | None, text_encoder: str | None, dtypes: dict, batch_size: int, engine: str) -> None:
    """Raises ConfigError for what cannot be."""
    if vae is None and text_encoder is None:
        raise ConfigError("nothing to compute; name --vae for latents, --text_encoder for text embeddings, or both")
    for name in filter(None, (vae, text_encoder)):
        check_name(name)
    for flag, value in dtypes.items():
        if value not in LATENTS_DTYPES:
            raise ConfigError(f"--{flag} {value} is not one of {', '.join(LATENTS_DTYPES)}")
    if batch_size < 1:
        raise ConfigError(f"--batch-size {batch_size} must be 1 or more")
    if engine not in EXACT_ENGINES:
        raise ConfigError(f"--engine {engine} would change the latents; choose {' or '.join(EXACT_ENGINES)}")
    if engine != EAGER and vae is None:
        raise ConfigError(f"--engine {engine} encodes pictures, and no --vae is given; omit it, or name the VAE")


def check_device(device: str | None, on_spark: bool) -> str | None:
    """The device to use. Raises ConfigError for one that Spark does not have."""
    if on_spark and device not in (None, "cpu"):
        raise ConfigError(f"--device {device} is not for Spark, which encodes on CPUs; omit it, or Spark")
    return "cpu" if on_spark else device


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
    """Do this rank's share of the parts, or let the executors of a Spark session do all, with `num_threads` each; the
    account of all ranks. Raises DataError, OutputError."""
    for folder in {file.path.parent for plan in plans for task in plan.tasks for file in task.files}:
        make_output_dir(folder)
    reports = {}
    with ThreadPoolExecutor(num_workers) as pool:
        projections = [project(plan, pool) for plan in plans]
        check_disks(projections)
        barrier(world)  # so that nobody measures a disk that others fill already
        num_tasks = spark.sparkContext.defaultParallelism if spark else world.size
        for plan, projection in zip(plans, projections, strict=True):
            reports[plan.request.name] = tell(plan, projection, num_tasks, world.is_main)
        for plan in () if dry_run else plans:
            began = time.monotonic()
            if spark:
                account = encode_on_spark(spark, plan.tasks, num_threads)
            else:
                account = sum(gather_objects(encode_parts(plan, pool, world), world), Account())
            found = asdict(account) | {"bad": dict(account.bad.most_common()), "seconds": time.monotonic() - began}
            reports[plan.request.name] |= found
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
            log("  %s: %s to encode, about %.0f ms each", file.key.label, f"{count:,}", 1000 * cost)
        log("that is %.3f GB and about %.2f hours", num_bytes / 1e9, hours)
    return {
        "files": projection.files,
        "finished_before": projection.finished,
        "projected_bytes": num_bytes,
        "projected_hours": hours,
    }


def encode_parts(plan: Plan, pool: ThreadPoolExecutor, world: World) -> Account:
    """This rank's share of the parts, one after another, under a progress bar."""
    account, tasks = Account(), [plan.tasks[number] for number in shard(len(plan.tasks), world)]
    name, total = plan.tasks[0].files[0].key.what, sum(task.num_rows for task in tasks)
    with progress(total=total, desc=name, disable=not world.is_main) as bar:
        for task in tasks:
            account += encode_part(task, plan.encoder, pool, bar.update)
    return account


def describe(report: dict) -> str:
    """Lines for people."""
    kinds = [(kind, report.get(kind.name, {}) if kind.name else report) for kind in (LatentsRequest, EmbeddingsRequest)]
    return "\n".join(_describe(own, kind) for kind, own in kinds if "files" in own)


def _describe(report: dict, kind: type[Request]) -> str:
    if "encoded" not in report:
        size = f"{report['projected_bytes'] / 1e9:.3f} GB, about {report['projected_hours']:.2f} hours"
        return f"{report['files']} file(s) of {kind.things}, {report['finished_before']} there; the others: {size}"
    found = (
        f"{report['encoded']} {kind.things} encoded in {report['seconds']:.0f} s, {report['found']} were there before"
    )
    lines = [found]
    if report["repaired"]:
        lines.append(f"  {report['repaired']} of them were damaged and are repaired")
    lines += [f"  cannot be used, {reason}: {count}" for reason, count in report["bad"].items()]
    return "\n".join([*lines, f"train on them with {kind.flag} (docs/latents.md)"])
