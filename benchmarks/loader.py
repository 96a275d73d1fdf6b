"""How fast rows become batches:  python benchmarks/loader.py [--quick] [--json [OUT]]

Compares ppldm with the usual pipeline, WebDataset and MosaicML streaming (`loaders.py`) on the same photographs, which
it makes itself (`photographs.py`). Each measurement is a process of its own: on one core without workers, on as many
cores as workers with them. The loaders take turns, and each keeps its best of `--repeats`, so that other load on the
machine strikes all alike. Start-up is not counted: the clock starts after the first tenth of the batches. With --before
COMMIT, ppldm's loader of that commit takes its turn too, on the same files.
"""

import argparse
import gzip
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from isal import isal_zlib
from loaders import BATCH_SIZE, CROP_FRACTION, LOADERS, NEEDS, open_dataset, usual_stages, write_rows
from photographs import make_rows
from PIL import Image
from results import ROOT, add_result_flags, export_commit, save_results

from ppldm.data.formats.index import GZIP_MEMBERS, read_index
from ppldm.data.formats.part import index_path
from ppldm.data.formats.row import decode_row
from ppldm.data.images import crop_pixels, decode_image, decode_pixels
from ppldm.data.kernels import fill_normals
from ppldm.utils.rng import Generators, Stream

LEFT_OUT = 0.1  # of the batches, before the clock starts
BEFORE = ", before"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200, help="photographs to make; they are read again and again")
    parser.add_argument("--batches", type=int, default=60, help=f"batches of {BATCH_SIZE} in each measurement")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each loader")
    parser.add_argument("--resolutions", type=int, nargs="+", default=[256, 512], help="sides of the crops, pixels")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="numbers of worker processes")
    parser.add_argument("--before", metavar="COMMIT", help="also measure ppldm's loaders as they were in that commit")
    parser.add_argument("--quick", action="store_true", help="a few rows, once: to see that it runs")
    add_result_flags(parser, "loader")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)  # folder, loader, resolution, workers
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.batches, arguments.repeats = 16, 3, 1
        arguments.resolutions, arguments.workers = [256], [0]
    if arguments.measure:
        folder, name, resolution, workers = arguments.measure
        return sys.stdout.write(
            json.dumps(measure(Path(folder), name, int(resolution), int(workers), arguments.batches)) + "\n"
        )
    with tempfile.TemporaryDirectory() as folder:
        results = compare(Path(folder), arguments)
    show(results)
    save_results(arguments, results)


def compare(folder: Path, arguments: argparse.Namespace) -> dict:
    """Everything there is to say, as JSON has it."""
    rows = make_rows(arguments.rows)
    write_rows(folder, rows)
    if arguments.before:
        export_commit(arguments.before, folder / "before")
    results = {
        "before": arguments.before,
        "rows": len(rows),
        "mean_jpeg_bytes": int(np.mean([len(row.image) for row in rows])),
        "load_before": os.getloadavg()[0],
        "pixels": {str(resolution): compare_pixels(folder, resolution) for resolution in arguments.resolutions},
        "stages": {str(resolution): time_stages(folder, resolution) for resolution in arguments.resolutions},
        "loaders": [],
        "missing": {},
    }
    for resolution in arguments.resolutions:
        for workers in arguments.workers:
            results["loaders"] += compare_loaders(folder, resolution, workers, arguments, results["missing"])
    return results | {"load_after": os.getloadavg()[0]}


def compare_loaders(
    folder: Path, resolution: int, workers: int, arguments: argparse.Namespace, missing: dict
) -> list[dict]:
    """The best measurement of each loader. Those that cannot be imported go into `missing`, with the remedy."""
    best, trees = {}, {name: ROOT for name in LOADERS}
    if arguments.before:
        trees |= {name + BEFORE: folder / "before" for name in LOADERS if name.startswith("ppldm")}
    for _ in range(arguments.repeats):
        for name, tree in trees.items():
            if name in missing:
                continue
            found = run_measurement(tree, folder, name, resolution, workers, arguments.batches)
            if "missing" in found:
                missing[name] = f"{found['missing']}; {NEEDS.get(name, '')}"
            else:
                best[name] = _better(best.get(name, found), found)
    for found in best.values():
        found["ratio_to_usual"] = found["samples_per_second"] / best["usual"]["samples_per_second"]
        if before := best.get(found["loader"] + BEFORE):
            found["ratio_to_before"] = found["samples_per_second"] / before["samples_per_second"]
            found["cpu_ratio_to_before"] = found["cpu_ms"] / before["cpu_ms"]
    return list(best.values())


def _better(one: dict, other: dict) -> dict:
    """The faster measurement, with the least CPU time of both."""
    faster = max(one, other, key=lambda found: found["samples_per_second"])
    return faster | {"cpu_ms": min(one["cpu_ms"], other["cpu_ms"])}


def run_measurement(tree: Path, folder: Path, name: str, resolution: int, workers: int, batches: int) -> dict:
    """`measure` in a process of its own, with the code of `tree`."""
    command = [sys.executable, tree / "benchmarks/loader.py", "--batches", str(batches)]
    command += ["--measure", folder, name.removesuffix(BEFORE), str(resolution), str(workers)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tree)})
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1]) | {"loader": name}


def measure(folder: Path, name: str, resolution: int, workers: int, batches: int) -> dict:
    """Samples a second of one loader, and the peak memory in MB of this process and of its largest worker.

    `cpu_ms` is the CPU time of this process for a sample: all there is without workers, and little hurt by other load.
    """
    cores = sorted(os.sched_getaffinity(0))[-max(1, workers) :]
    os.sched_setaffinity(0, cores)
    try:
        loader = LOADERS[name](folder, resolution, workers)
        left_out = max(1, int(batches * LEFT_OUT))
        for _ in range(left_out):
            next(loader)
    except ImportError as error:
        return {"missing": str(error)}
    start, cpu_start = time.perf_counter(), time.process_time()
    samples = sum(next(loader) for _ in range(batches - left_out))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    loader.close()
    return {
        "loader": name,
        "resolution": resolution,
        "workers": workers,
        "cores": len(cores),
        "samples_per_second": samples / seconds,
        "cpu_ms": 1000 * cpu_seconds / samples,
        "peak_mb": _peak_kb() >> 10,
        "worker_peak_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10 if workers else 0,
    }


def _peak_kb() -> int:
    """Of this process alone: getrusage counts what its parent had before exec."""
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1))


def compare_pixels(folder: Path, resolution: int) -> dict:
    """Mean and largest difference, of 255, between ppldm's crops and those of Pillow's Lanczos of the whole image."""
    differences = {}
    for interpolation in ("lanczos", "area"):
        dataset, crop, found = open_dataset(folder, resolution, interpolation), _empty_crop(resolution), []
        for number in range(min(16, len(dataset))):
            image = dataset.read_row(number).image
            picture = decode_image(image)
            scaled = [int(resolution / CROP_FRACTION) * side // min(picture.size) for side in picture.size]
            left, top = ((side - resolution + 1) // 2 for side in scaled)
            whole = np.asarray(picture.resize(scaled, Image.Resampling.LANCZOS)).transpose(2, 0, 1)
            pixels = decode_pixels(image, exact=interpolation != "area")
            crop_pixels(pixels, CROP_FRACTION, None, interpolation, crop)
            expected = whole[:, top : top + resolution, left : left + resolution]
            found.append(np.abs(expected.astype(int) - crop))
        differences[interpolation] = {"mean": float(np.mean(found)), "largest": int(np.max(found))}
    return differences


def _empty_crop(resolution: int) -> np.ndarray:
    return np.empty((3, resolution, resolution), np.uint8)


def time_stages(folder: Path, resolution: int) -> dict:
    """Milliseconds a row of each stage, without DataLoader, for the usual pipeline and for ppldm: the best of 3."""
    times = [(_time_usual(folder, resolution), _time_ppldm(folder, resolution)) for _ in range(3)]
    return {
        name: {stage: min(run[place][stage] for run in times) for stage in times[0][place]}
        for place, name in enumerate(("usual", "ppldm"))
    }


class _Clock:
    """Adds up the time of stages."""

    def __init__(self):
        self.seconds = {}

    @contextmanager
    def __call__(self, stage: str):
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0) + time.perf_counter() - start

    def milliseconds(self, count: int) -> dict[str, float]:
        return {stage: 1000 * seconds / count for stage, seconds in self.seconds.items()}


def _time_usual(folder: Path, resolution: int) -> dict[str, float]:
    clock, stages, count = _Clock(), usual_stages(folder, resolution), 0
    with gzip.open(folder / "part-00000.gz", "rt", encoding="utf-8", newline="\n") as lines:
        while True:
            with clock("gunzip"):
                line = lines.readline()
            if not line:
                return clock.milliseconds(count)
            count += 1
            caption, _, image = line.rstrip("\n").split("\t")
            with clock("base64, JPEG decode"):
                picture = stages["decode"](image)
            for step in stages["transform"].transforms:
                with clock(type(step).__name__):
                    picture = step(picture)
            with clock("tokenize"):
                stages["tokens"](caption)


def _time_ppldm(folder: Path, resolution: int) -> dict[str, float]:
    clock, dataset, crop = _Clock(), open_dataset(folder, resolution, "lanczos"), _empty_crop(resolution)
    noise, generators = np.empty(dataset.inputs["noise"].shape(*dataset.shape(0)), np.float32), Generators(0)
    part = folder / "part-00000.gz"
    data = part.read_bytes()
    index = read_index(index_path(part), len(data), (GZIP_MEMBERS,))
    for number, (offset, length) in enumerate(zip(index.offsets.tolist(), index.lengths.tolist(), strict=True)):
        with clock("gunzip"):
            line = isal_zlib.decompress(data[offset : offset + length], 31)
        with clock("columns, base64, JSON"):
            row = decode_row(line, "")
        with clock("JPEG decode"):
            pixels = decode_pixels(row.image)
        with clock("random numbers, noise"):
            place = tuple(generators(Stream.CROP, (0, number)).random(2))
            for stream in (Stream.TIMESTEP, Stream.CAPTION_DROP):
                generators(stream, (0, number)).random()
            for stream in (Stream.NOISE, Stream.POSTERIOR):
                fill_normals(generators(stream, (0, number)), noise)
        for interpolation in ("lanczos", "area"):
            with clock(f"resize, {interpolation}"):
                crop_pixels(pixels, CROP_FRACTION, place, interpolation, crop)
        with clock("tokenize"):
            dataset.tokenizer.encode([row.caption])
    times = clock.milliseconds(len(index.offsets))
    return times | {"floor (gunzip, JPEG decode)": times["gunzip"] + times["JPEG decode"]}


def show(results: dict) -> None:
    """The results as text on stdout."""
    lines = [
        f"{results['rows']} photographs made here, {results['mean_jpeg_bytes'] / 1000:.1f} kB on average; load of the "
        f"machine {results['load_before']:.1f} before, {results['load_after']:.1f} after",
        "",
        f"{'loader':<23}{'pixels':>7}{'workers':>9}{'cores':>7}{'samples/s':>11}{'of usual':>10}{'of before':>11}"
        f"{'CPU ms':>8}{'peak MB':>9}{'worker MB':>11}",
    ]
    for found in results["loaders"]:
        lines.append(
            f"{found['loader']:<23}{found['resolution']:>7}{found['workers']:>9}{found['cores']:>7}"
            f"{found['samples_per_second']:>11.0f}{found['ratio_to_usual']:>9.2f}x{_of_before(found):>11}"
            f"{found['cpu_ms']:>8.2f}{found['peak_mb']:>9}"
            f"{found['worker_peak_mb']:>11}"
        )
    lines += [f"{name}: not measured ({why})" for name, why in results["missing"].items()]
    for resolution, differences in results["pixels"].items():
        lines += ["", f"{resolution} px, against Pillow's Lanczos of the whole image, of 255:"]
        lines += [f"  {name:<28}mean {d['mean']:.3f}, largest {d['largest']}" for name, d in differences.items()]
    for resolution, pipelines in results["stages"].items():
        for name, stages in pipelines.items():
            lines += ["", f"{resolution} px, {name}, ms a row:"]
            lines += [f"  {stage:<28}{milliseconds:6.3f}" for stage, milliseconds in stages.items()]
    sys.stdout.write("\n".join(lines) + "\n")


def _of_before(found: dict) -> str:
    return f"{found['ratio_to_before']:.2f}x" if "ratio_to_before" in found else ""


if __name__ == "__main__":
    main()
