"""How long the quickstart takes, and how good its pictures are:  python benchmarks/quickstart.py --out DIR

Runs `ppldm quickstart`, and has every prompt drawn --draws times. A picture is as good as it is near OpenMoji's own of
that name: PSNR in dB, the mean over the prompts whose drawings were in the training, and over those of which the model
saw no picture. A quickstart that is there is not made again.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from commands import measure_command
from PIL import Image
from results import add_result_flags, save_results

from ppldm.evaluation.metrics.base import psnr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the quickstart")
    parser.add_argument("--processes", type=int, default=1, help="of the quickstart")
    parser.add_argument("--draws", type=int, default=8, help="of each prompt")
    add_result_flags(parser, "quickstart")
    arguments = parser.parse_args()
    out = arguments.out
    measure_command("ppldm", ["quickstart", "--out", out, "--processes", arguments.processes])
    stages = {path.stem: json.loads(path.read_text())["seconds"] for path in sorted(out.glob(".done/*.json"))}
    drawn = out / "graded"
    words = ["--prompts", out / "data/prompts.txt", "--num-samples", arguments.draws]
    measure_command("ppldm", ["generate", "--model", out, *words, "--out", drawn])
    found = {
        "processes": arguments.processes,
        "seconds": {name: round(seconds, 1) for name, seconds in stages.items()},
        "seconds_of_all": round(sum(stages.values()), 1),
        "psnr_db": grade(out / "data", drawn),
    }
    print(json.dumps(found, indent=1))
    save_results(arguments, found)


def grade(data: Path, drawn: Path) -> dict[str, float]:
    """The mean PSNR of the pictures `drawn`, by whether their prompts were in the training."""
    own = {
        text.read_text().strip(): text.with_suffix(".png")
        for text in [*data.glob("images/*.txt"), *data.glob("unseen/images/*.txt")]
    }
    found: dict[str, list[float]] = {}
    for number, line in enumerate((data / "prompts.txt").read_text().splitlines()):
        prompt, _, kind = line.partition("\t")
        pictures = [read(path) for path in sorted(drawn.glob(f"{number:03d}-*.png"))]
        found.setdefault(kind, []).append(psnr(pictures, [read(own[prompt])] * len(pictures), seed=0).value)
    return {kind: round(float(np.mean(values)), 2) for kind, values in found.items()}


def read(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


if __name__ == "__main__":
    main()
