"""What aspect-ratio buckets keep, and what they cost:  python benchmarks/buckets.py [--json] [--keep DIR]

Three measurements. How much of the pictures is cut away by squares and by buckets, with `--crop_fraction 1`: of made
pictures, drawings of OpenMoji on grounds of shapes like those of photographs (the logarithm of width / height is
normal, mean 0.12, deviation 0.38; short sides of 200 to 500 pixels). How fast shapes are assigned, in one process, to
rows of such sizes. And the loader's samples a second on the pictures of benchmarks/photographs.py, in squares and in
buckets of as many pixels, with as many workers as asked for, in turns; the best of `--repeats`.

With --keep the pictures stay in DIR, with a sheet and a chart for each kind of buckets, to be looked at.
"""

import argparse
import io
import json
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

import numpy as np
from loaders import BATCH_SIZE, open_dataset, write_rows
from photographs import make_rows
from PIL import Image
from results import add_result_flags, save_results

from ppldm.data.filelist import write_filelist
from ppldm.data.formats.part import write_part
from ppldm.data.formats.row import Row
from ppldm.data.shapes import draw_chart, shape_rule
from ppldm.demo.openmoji import read_catalog, render
from ppldm.inspect.buckets import preview_shapes, read_settings
from ppldm.inspect.parts import index_parts, list_parts
from ppldm.utils.pictures import save_png

RESOLUTION = 256
KINDS = {
    "squares": (f"{RESOLUTION}x{RESOLUTION}", []),
    "ratios": ("ratios", []),
    "ratios, at most 2": ("ratios", ["max_aspect_ratio=2"]),
    "steps of 64": ("steps", []),
    "steps of 32": ("steps", ["bucket_step=32"]),
    "steps of 32, enlarged": ("steps", ["bucket_step=32", "bucket_upscale=true"]),
}
LEAST, MOST = 200, 500  # pixels of short sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=1000, help="drawings to cut")
    parser.add_argument("--sizes", type=int, default=10_000_000, help="rows to assign shapes to")
    parser.add_argument("--rows", type=int, default=1600, help="photographs to load")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--keep", metavar="DIR", help="where the drawings and pictures of buckets are kept")
    add_result_flags(parser, "buckets")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cut = measure_cut(Path(arguments.keep or folder), arguments.pictures, bool(arguments.keep))
        results = {
            "cut": cut,
            "assign": measure_assignment(arguments.sizes),
            "loader": measure_loader(Path(folder), arguments),
        }
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    save_results(arguments, results)


def draw_sizes(count: int) -> tuple[np.ndarray, np.ndarray]:
    """(widths, heights) of pictures, int64 [count]."""
    rng = np.random.default_rng(0)
    ratios, short = np.exp(rng.normal(0.12, 0.38, count)), rng.integers(LEAST, MOST, count)
    sides = np.where(ratios > 1, short * ratios, short), np.where(ratios > 1, short, short / ratios)
    return sides[0].astype(int), sides[1].astype(int)


def draw_pictures(folder: Path, count: int) -> Path:
    """A filelist of drawings, each of one to three OpenMoji at chance places of a coloured ground."""
    folder.mkdir(parents=True, exist_ok=True)
    drawings, rows = list(read_catalog("en").drawings.values())[:300], []
    for number, (width, height) in enumerate(zip(*draw_sizes(count), strict=True)):
        rng = np.random.default_rng((1, number))
        picture = Image.new("RGB", (int(width), int(height)), tuple(rng.integers(130, 240, 3).tolist()))
        chosen = [drawings[place] for place in rng.choice(len(drawings), rng.integers(1, 4), replace=False)]
        for drawing in chosen:
            side = int(min(picture.size) * rng.uniform(0.35, 0.6))
            mark = render(drawing.svg.read_text(encoding="utf-8"), side)
            picture.paste(mark, tuple(int(rng.integers(0, whole - side + 1)) for whole in picture.size))
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=90)
        rows.append(Row(" and ".join(one.caption for one in chosen), file.getvalue(), {"key": f"{number:06}"}))
    write_part(folder / "drawings.gz", rows)
    write_filelist(folder / "drawings.filelist", ["drawings.gz"])
    return folder / "drawings.filelist"


def measure_cut(folder: Path, count: int, draw: bool) -> dict:
    """Of each kind of buckets, how many shapes and rows there are, and the share of the pictures that is cut away."""
    indexed = index_parts(list_parts([str(draw_pictures(folder, count))]), 1)
    found = {}
    for number, (name, (buckets, words)) in enumerate(KINDS.items()):
        settings = read_settings(buckets, [f"resolution={RESOLUTION}", "crop_fraction=1.0", *words])
        report, sheet = preview_shapes(indexed, settings)
        if draw:
            save_png(folder / f"sheet-{number}.png", sheet())
            draw_chart(folder / f"chart-{number}.png", report, report["skipped"])
        found[name] = {"shapes": len(report["shapes"]), "rows": report["rows"], "cut": report["cut"]}
    return found


def measure_assignment(count: int) -> dict:
    """Rows a second."""
    widths, heights = (sides.astype(np.uint16) for sides in draw_sizes(count))
    rule = shape_rule(read_settings("ratios", [f"resolution={RESOLUTION}"]), 1)
    begin = time.perf_counter()
    rule.assign(widths, heights)
    seconds = time.perf_counter() - begin
    return {"rows": count, "shapes": len(rule.shapes), "rows_per_second": round(count / seconds)}


def measure_loader(folder: Path, arguments) -> dict:
    """Samples a second in squares and in buckets, and the mean pixels of a sample."""
    from ppldm.data.loader import BatchLoader
    from ppldm.data.order import Mix, StepSampler
    from ppldm.utils.processes.ranks import World

    write_rows(folder, make_rows(arguments.rows))
    rates, pixels = {}, {}
    for _ in range(arguments.repeats):
        for name, buckets in (("squares", "off"), ("ratios", "ratios"), ("ratios, smart crop", "ratios")):
            dataset = open_dataset(folder, RESOLUTION, "lanczos", buckets, smart="smart" in name)
            order = Mix(dataset.list_sizes, None, 0, dataset.buckets, BATCH_SIZE)
            sampler = StepSampler(order, BATCH_SIZE, BATCH_SIZE, World(), 0, 1 << 30)
            batches = iter(BatchLoader(dataset, sampler, arguments.workers))
            for _ in range(2):
                next(batches)
            count = max(1, arguments.rows // BATCH_SIZE)
            begin = time.perf_counter()
            shapes = [batch["pixel_values"].shape for batch in islice(batches, count)]
            seconds = time.perf_counter() - begin
            rates.setdefault(name, []).append(count * BATCH_SIZE / seconds)
            pixels[name] = sum(shape[2] * shape[3] for shape in shapes) / count
    return {
        name: {"samples_per_second": round(max(found)), "pixels_per_sample": round(pixels[name])}
        for name, found in rates.items()
    }


if __name__ == "__main__":
    main()
