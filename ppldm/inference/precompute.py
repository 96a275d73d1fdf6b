"""`ppldm precompute`: the latents of all rows of filelists, computed once, for training with `--latents cached`.

Beside each part, or in `--latents-dir`, a file for each resolution (`ppldm.data.cached.latents`). Before it begins the
command says how many bytes and hours it will take, and refuses what does not fit the disk. Stopped at any point, the
same command goes on; it also repairs what is damaged. Several processes share the parts out.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

from ..config.data import DataOptions
from ..data.cached.key import DTYPES
from ..data.filelist import read_sources
from ..data.formats.layouts import DEFAULT_LAYOUT
from ..data.images.crop import CropRule
from ..data.select.parse import parse_where
from ..data.shapes import ShapeRule, shape_rule
from ..utils.devices import set_exactness, use_device
from ..utils.entry import entry
from ..utils.errors import ConfigError
from ..utils.files import local_path, make_output_dir
from ..utils.log import get_logger, progress
from ..utils.rank_watch import barrier, gather_objects
from ..utils.report import print_report
from ..utils.text import count_of
from ..utils.workers import check_workers
from ..utils.world import World, shard
from ..weights.fetch import check_name
from .encode_part import Account, Encode, encode_part, measure_cost
from .latents_plan import PartTask, Projection, Settings, Shapes, choose_rows, list_tasks, project

MOST_CROPS = 64
_Sides = Annotated[list[int], {"nargs": "+", "type": int, "metavar": "PIXELS"}]


def precompute(
    filelists: Annotated[str, {"nargs": "+", "metavar": "FILELIST"}],  # filelists, or lists of filelists
    vae: Annotated[str, {"opt": True, "required": True}],  # as --vae_name_or_path: folder, CompVis' .ckpt, or a name
    resolutions: _Sides = (DataOptions.resolution,),  # sides of the square crops, a file of latents for each
    buckets: str = "off",  # as in training: off, ratios, steps, or a list of width x height (docs/shapes.md)
    bucket_group_size: int = 1,  # as in training, whose default is --per_device_train_batch_size
    bucket_upscale: bool = False,  # as in training
    crops: str = "center",  # center, smart (as --smart_crop), or how many random crops, as --num_crops of training
    flips: bool = False,  # each crop also mirrored, for --random_flip
    dtype: str = "float16",  # float16, bfloat16 or float32: how latents are stored; they are computed in float32
    latents_dir: str = None,  # folder for the files; by default each lies beside its part
    crop_fraction: float = DataOptions.crop_fraction,  # as in training
    interpolation: str = DataOptions.interpolation,  # as in training
    where: str = None,  # only the rows for which this holds, as in training
    layout: str = DEFAULT_LAYOUT,  # column order of the parts of lists that name none (docs/data_format.md)
    batch_size: int = 16,  # pictures encoded at a time; changes at most the last bits of a latent
    num_workers: int = 0,  # threads that decode pictures; 0 means one per core
    device: str = None,  # cpu, gpu or gpu:N; by default what paddle finds
    offline: bool = False,  # never touch the network
    dry_run: bool = False,  # say how much it would be, and end
    json: bool = False,  # print the account as JSON
):  # fmt: skip
    """Encode pictures once, so that training needs no autoencoder's time.

    Train on the latents with --latents cached and the same resolution, crops and VAE (docs/latents.md). Stopped at any
    point, the same command goes on; it computes again what is missing or damaged and nothing else. Several processes,
    one a GPU: python -m paddle.distributed.launch $(which ppldm) precompute …
    """
    rule = read_crops(crops, flips, crop_fraction, interpolation, bucket_upscale and buckets != "off")
    data = DataOptions(buckets=buckets, bucket_group_size=bucket_group_size, bucket_upscale=bucket_upscale,
                       crop_fraction=crop_fraction)  # fmt: skip
    sizes = read_sizes(data, resolutions)
    if dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype} is not one of {', '.join(DTYPES)}")
    if batch_size < 1:
        raise ConfigError(f"--batch-size {batch_size} must be 1 or more")
    num_workers = check_workers(num_workers)
    condition = None if where is None else parse_where(where)
    sources = [source for filelist in filelists for source in read_sources(filelist, layout)]
    check_name(vae)
    folder = make_output_dir(local_path(latents_dir)) if latents_dir else None
    with entry():
        from ..utils.log import quiet_libraries
        from .encoder import load_encoder
        from .generate import join_world

        use_device(device)
        world = join_world()
        quiet_libraries()
        set_exactness(fewer_bits=False, search_kernels=False)
        encoder = load_encoder(vae, batch_size, offline)
        chosen = choose_rows(sources, condition, sizes, num_workers)
        settings = settle(encoder, [shapes for shapes, _ in chosen], rule, dtype, folder)
        tasks = list_tasks(settings, sources, [selection for _, selection in chosen])
        report = run(tasks, encoder, num_workers, world, dry_run)
        if world.is_main:
            print_report(report, describe, json)


def read_crops(crops: str, flips: bool, crop_fraction: float, interpolation: str, enlarge: bool) -> CropRule:
    """What the flags ask for. Raises ConfigError."""
    fixed = crops in ("center", "smart")
    if not fixed and not (crops.isdecimal() and 0 < int(crops) <= MOST_CROPS):
        raise ConfigError(f"--crops {crops} must be center, smart, or a number of random crops from 1 to {MOST_CROPS}")
    number = 0 if fixed else int(crops)
    return CropRule(crop_fraction, not fixed, flips, interpolation, number, crops == "smart", enlarge)


def read_sizes(data: DataOptions, resolutions: list[int]) -> list[int | ShapeRule]:
    """What `choose_rows` takes, each once. Raises ConfigError."""
    if min(data.bucket_group_size, *resolutions) < 1:
        raise ConfigError("--resolutions and --bucket-group-size must be 1 or more")
    if data.buckets == "off":
        return list(dict.fromkeys(resolutions))
    return list(dict.fromkeys(shape_rule(replace(data, resolution=side), 1) for side in resolutions))


def settle(encoder: Encode, shapes: list[Shapes], crops: CropRule, dtype: str, folder: Path | None) -> Settings:
    """The settings of a run. Raises ConfigError for a side that the VAE cannot encode."""
    for height, width in (shape for one in shapes for shape in one):
        if height % encoder.factor or width % encoder.factor:
            raise ConfigError(
                f"pictures of {width} x {height} cannot be encoded; --resolutions and --buckets must be multiples of "
                f"{encoder.factor}, the VAE's downscaling factor"
            )
    return Settings(encoder.digest, encoder.channels, encoder.factor, tuple(shapes), crops, dtype, folder)


def run(tasks: list[PartTask], encoder: Encode, num_workers: int, world: World, dry_run: bool) -> dict:
    """Do this rank's share of the parts; the account of all ranks. Raises DataError, OutputError."""
    settings = tasks[0].settings
    for folder in {target.parent for task in tasks for target in task.paths}:
        make_output_dir(folder)
    with ThreadPoolExecutor(num_workers) as pool:
        text_bytes, seconds = measure_cost(tasks[0], encoder, pool)
        projection = project(tasks, text_bytes)
        barrier(world)  # so that nobody measures a disk that others fill already
        report = tell(projection, settings, seconds, world)
        if dry_run:
            return report
        began = time.monotonic()
        own = encode_parts([tasks[number] for number in shard(len(tasks), world)], encoder, pool, world)
        account = sum(gather_objects(own, world), Account())
    return report | asdict(account) | {"bad": dict(account.bad.most_common()), "seconds": time.monotonic() - began}


def tell(projection: Projection, settings: Settings, seconds: list[float], world: World) -> dict:
    """What is to be done, in the log and as the first part of the report. seconds: of a crop of each of the shapes."""
    hours = sum(count * cost for count, cost in zip(projection.cells, seconds, strict=True)) / world.size / 3600
    if world.is_main:
        log = get_logger().info
        log("%d of %d files of latents are there", projection.finished, projection.files)
        for shapes, count, cost in zip(settings.shapes, projection.cells, seconds, strict=True):
            (height, width), *others = shapes
            what = f"{width} x {height}" + (f" and {count_of(len(others), 'other shape')}" if others else "")
            log("  %s: %s crops to encode, about %.0f ms each", what, f"{count:,}", 1000 * cost)
        log("that is %.3f GB and about %.2f hours", projection.bytes / 1e9, hours)
    return {
        "files": projection.files,
        "finished_before": projection.finished,
        "projected_bytes": projection.bytes,
        "projected_hours": hours,
    }


def encode_parts(tasks: list[PartTask], encoder: Encode, pool: ThreadPoolExecutor, world: World) -> Account:
    """The latents of parts, one after another, under a progress bar."""
    account = Account()
    with progress(
        total=sum(task.num_cells for task in tasks), desc="latents", unit="crop", disable=not world.is_main
    ) as bar:
        for task in tasks:
            account += encode_part(task, encoder, pool, bar.update)
    return account


def describe(report: dict) -> str:
    """Lines for people."""
    size = f"{report['projected_bytes'] / 1e9:.3f} GB, about {report['projected_hours']:.2f} hours"
    if "encoded" not in report:
        return (
            f"{report['rows']} rows in {report['files']} file(s) of latents, {report['finished_before']} there: {size}"
        )
    lines = [f"{report['encoded']} crops encoded in {report['seconds']:.0f} s, {report['found']} were there before"]
    if report["repaired"]:
        lines.append(f"  {report['repaired']} of them were damaged and are repaired")
    lines += [f"  cannot be used, {reason}: {count}" for reason, count in report["bad"].items()]
    return "\n".join([*lines, "train on them with --latents cached (docs/latents.md)"])
