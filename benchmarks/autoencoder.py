"""What LPIPS and a discriminator bring to an autoencoder:  python benchmarks/autoencoder.py --out DIR

Preset `autoencoder-f4-tiny-cpu` as it is, and with L1 + KL alone, from the same seeds for as many updates. Run where
the preset finds its data (docs/models.md). Each is measured on pictures held out, by PSNR, SSIM, rFID by an
InceptionV3 of random weights (`fid`), and LPIPS twice: with the random weights that it was trained with (`lpips_own`)
and with those of a seed that no run has (`lpips_other`). What random weights measure is not how pictures look to a
person. DIR/VARIANT/seed-N holds the run; one with its result.json is not
trained again.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from commands import measure_command
from results import add_result_flags, save_results

from ppldm.networks.build import init_network
from ppldm.networks.losses import Lpips
from ppldm.utils.files import write_json
from ppldm.weights.formats.files import write_safetensors

PRESET, OTHER_SEED = "autoencoder-f4-tiny-cpu", 1000
VARIANTS = {
    "full": [],
    "l1_kl": ["model.perceptual_weight=0", "model.lpips_weights=null", "model.adversarial_weight=0"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--world", type=Path, default="shapes_world/data", help="what `ppldm demo-data` wrote")
    parser.add_argument("--seeds", type=int, nargs="+", default=[23, 24, 25])
    parser.add_argument("--pictures", type=int, default=256, help="held out, to measure")
    add_result_flags(parser, "autoencoder")
    arguments = parser.parse_args()
    found = {variant: [] for variant in VARIANTS}
    for seed in arguments.seeds:
        for variant, own in found.items():
            own.append({"seed": seed, **carry_out(variant, seed, arguments)})
            print(variant, own[-1], file=sys.stderr, flush=True)
    for variant, own in found.items():
        means = {name: statistics.mean(one[name] for one in own) for name in own[0] if name != "seed"}
        print(variant, *(f"{name} {value:.4g}" for name, value in means.items()), sep="  ")
    save_results(arguments, {"preset": PRESET, "pictures": arguments.pictures, "runs": found})


def carry_out(variant: str, seed: int, arguments) -> dict:
    """CPU seconds of the training, and the measures of what it made."""
    folder = arguments.out / variant / f"seed-{seed}"
    if (folder / "result.json").exists():
        return json.loads((folder / "result.json").read_text())
    words = ["--preset", PRESET, "--seed", seed, "--output_dir", folder / "run", "--overwrite_output_dir", True]
    cost = measure_command("ppldm", ["train", "--loop", "hand", *words, *VARIANTS[variant]])
    found = {"cpu_seconds": round(cost.cpu_seconds, 1)}
    for whose, lpips_seed in (("own", seed), ("other", OTHER_SEED)):
        metrics = ("psnr", "ssim", "lpips", "fid") if whose == "own" else ("lpips",)
        measure_command("ppldm", [
            "evaluate", folder / "run/vae", "--against", arguments.world / "held_out.filelist.list",
            "--num-real", arguments.pictures, "--metrics", *metrics, "--out", folder / whose,
            "--lpips", write_lpips(arguments.out, lpips_seed), "--inception", "random",
        ])  # fmt: skip
        values = json.loads((folder / whose / "reconstructions.json").read_text())["metrics"]
        found |= {f"lpips_{whose}" if name == "lpips" else name: round(values[name]["value"], 4) for name in metrics}
    write_json(folder / "result.json", found)
    return found


def write_lpips(folder: Path, seed: int) -> Path:
    """A file of the weights that training draws from `seed`."""
    path = folder / f"lpips-{seed}.safetensors"
    if not path.exists():
        arrays = {name: value.numpy() for name, value in init_network(Lpips(), "lpips", seed).state_dict().items()}
        write_safetensors(path, arrays, "pd")
    return path


if __name__ == "__main__":
    main()
