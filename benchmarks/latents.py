"""What cached latents save and cost:  python benchmarks/latents.py [--rows N] [--quick] [--json [OUT]]

On one core, by CPU time, so that other load on the machine hurts little; the least of several measurements:

- rows: a batch of training from cached latents (float16) beside one from pixels of the same rows, both with noise,
  timesteps and tokens, and what of either is not reading pixels or latents;
- encode: a crop through the encoder of the published size (84 M parameters, eight times smaller latents), in float32,
  by each engine of `ppldm precompute` in turn;
- bytes: of a row, for each dtype, resolution and number of variants.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", MKL_DEBUG_CPU_TYPE="5")

import numpy as np
from loaders import BATCH_SIZE, MAX_TOKENS, write_rows
from photographs import make_rows
from results import add_result_flags, processor, save_results

from ppldm.config.data import LATENTS_DTYPES
from ppldm.data.cached.file import Latents, cached_path, count_bytes, create_latents
from ppldm.data.cached.key import LatentsKey
from ppldm.data.cached.run import LatentsRule
from ppldm.data.dataset import TextImageDataset
from ppldm.data.filelist import read_sources
from ppldm.data.formats.open import open_part
from ppldm.data.images import CropRule
from ppldm.data.inputs import Level, Moments, Normals, Pixels, Tokens, Uncached
from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.utils.rng import Stream

CHANNELS, FACTOR, AUTOENCODER = 4, 8, "0" * 32
VARIANTS = {"center": CropRule(random=False), "center --flips": CropRule(random=False, flip=True),
            "4 --flips": CropRule(num_crops=4, flip=True)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=320, help="photographs to make")
    parser.add_argument("--resolutions", type=int, nargs="+", default=[256, 512], help="sides of the crops, pixels")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only-encode", action="store_true", help="no rows")
    parser.add_argument("--quick", action="store_true", help="a few small rows: to see that it runs")
    add_result_flags(parser, "latents")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.resolutions, arguments.repeats = 32, [64], 1
    results = {"processor": processor(), "rows": [], "encode": [], "bytes": measure_bytes()}
    if not arguments.only_encode:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_rows(folder, make_rows(arguments.rows))
            for resolution in arguments.resolutions:
                results["rows"].append(compare_rows(folder, resolution, arguments.repeats))
    for resolution in arguments.resolutions:
        results["encode"].append(measure_encoding(resolution, arguments.quick))
    sys.stdout.write(table(results) + "\n")
    save_results(arguments, results)


def compare_rows(folder: Path, resolution: int, repeats: int) -> dict:
    """CPU milliseconds of a row: from pixels, from latents, and what both do besides."""
    sources = read_sources(folder / "rows.filelist")
    write_latents(sources, resolution)
    found = {
        "pixels": open_dataset(folder, sources, resolution, {"pixel_values": Pixels()}),
        "latents": open_dataset(
            folder, sources, resolution, {"moments": Moments(CHANNELS, FACTOR), "uncached": Uncached()}
        ),
    }
    milliseconds = {name: measure_rows(dataset, repeats) for name, dataset in found.items()}
    return {"resolution": resolution, **milliseconds, "ratio": milliseconds["pixels"] / milliseconds["latents"]}


def open_dataset(folder: Path, sources: list, resolution: int, pictures: dict) -> TextImageDataset:
    """As `loaders.open_dataset`, of centred crops, from pixels or moments."""
    inputs = {
        **pictures,
        "posterior_noise": Normals(Stream.POSTERIOR, CHANNELS, FACTOR),
        "input_ids": Tokens(MAX_TOKENS),
        "timesteps": Level(Stream.TIMESTEP, 1000),
        "noise": Normals(Stream.NOISE, CHANNELS, FACTOR),
    }
    if "moments" in pictures:
        inputs["pixel_values"] = Pixels()
        sources = [replace(source, latents="cached") for source in sources]
    tokenizer = load_tokenizer(folder / "tokenizer", MAX_TOKENS)
    rule = LatentsRule(AUTOENCODER, 0.18215, "float16")
    return TextImageDataset(sources, inputs, resolution, 0, tokenizer, crops=VARIANTS["center"], latents=rule)


def write_latents(sources: list, resolution: int) -> None:
    """Random ones, of every row."""
    rng = np.random.default_rng(0)
    for path, source in [(path, one) for one in sources for path in one.parts]:
        with closing(open_part(path, source)) as part:
            key = LatentsKey.of(AUTOENCODER, [(resolution, resolution)], VARIANTS["center"], "float16")
            key = key.of_part(source, part.identity[:2])
            target = cached_path(path, key)
            create_latents(target, key, {"channels": CHANNELS, "factor": FACTOR}, part)
            latents = Latents(target, key, writable=True)
            for row in range(len(part)):
                shape = (2, CHANNELS, resolution // FACTOR, resolution // FACTOR)
                latents.write(row, 0, rng.standard_normal(shape).astype(np.float32))
            latents.close()


def measure_rows(dataset: TextImageDataset, repeats: int) -> float:
    """The least CPU milliseconds of a row, in batches."""
    places = [(0, place) for place in range(len(dataset))]
    batches = [places[start : start + BATCH_SIZE] for start in range(0, len(places), BATCH_SIZE)]
    dataset.make_batch(batches[0])
    costs = []
    for _ in range(repeats):
        for batch in batches:
            began = time.process_time()
            dataset.make_batch(batch)
            costs.append((time.process_time() - began) / len(batch))
    return 1000 * (min(costs) if repeats == 1 else statistics.quantiles(costs, n=10)[0])


def measure_encoding(resolution: int, quick: bool) -> dict:
    """CPU seconds of a crop through a VAE of the published size by each engine, the least of two turns after one that
    is not measured, and the greatest difference from eager."""
    from ppldm.cache.encoders import PictureEncoder
    from ppldm.config.network_files import CONFIG_DIR
    from ppldm.networks.build import build_network
    from ppldm.networks.configs import read_new_config
    from ppldm.networks.engine import EAGER, EXACT_ENGINES, use_engine

    pixels = np.random.default_rng(0).integers(0, 256, (1, 3, resolution, resolution), dtype=np.uint8)
    encoders, found, seconds = {}, {}, {engine: [] for engine in EXACT_ENGINES}
    for engine in EXACT_ENGINES:
        config = read_new_config("vae", CONFIG_DIR / ("vae_tiny.json" if quick else "vae_kl_f8.json"), "")
        vae = build_network("vae", config, seed=0)
        vae.eval()
        use_engine([vae.encoder], engine)
        encoders[engine] = PictureEncoder(vae, 1)
    for _ in range(3):
        for engine, encoder in encoders.items():
            began = time.process_time()
            found[engine] = encoder(pixels)
            seconds[engine].append(time.process_time() - began)
    return {
        "resolution": resolution,
        "seconds": {engine: min(costs[1:]) for engine, costs in seconds.items()},
        "gap": {engine: float(np.abs(moments - found[EAGER]).max()) for engine, moments in found.items()},
    }


def measure_bytes() -> list[dict]:
    """Of the moments of a row."""
    header = {"channels": CHANNELS, "factor": FACTOR}
    return [
        {"dtype": dtype, "resolution": side, "crops": name, "bytes": int(
            count_bytes(LatentsKey.of("", [(side, side)], rule, dtype).cells(header), dtype)[0])}
        for dtype in LATENTS_DTYPES for side in (256, 512, 768) for name, rule in VARIANTS.items()
    ]  # fmt: skip


def table(results: dict) -> str:
    """For people."""
    lines = [f"{'':>10} {'pixels':>12} {'latents':>12} {'ratio':>8}"]
    for one in results["rows"]:
        lines.append(
            f"{one['resolution']:>7} px {one['pixels']:>9.3f} ms {one['latents']:>9.3f} ms {one['ratio']:>7.1f}x"
        )
    lines += [
        f"{one['resolution']:>7} px: {seconds:.2f} CPU s for a crop by {engine}, {one['gap'][engine]:.1e} off eager"
        for one in results["encode"] for engine, seconds in one["seconds"].items()
    ]  # fmt: skip
    return "\n".join(lines)


if __name__ == "__main__":
    main()
