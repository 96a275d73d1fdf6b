"""Is what patch masking costs made good behind it?  python benchmarks/unmasking_shapes.py [--json]

The tiny presets of a DiT and a MicroDiT learn the shapes world, by `ppldm train`: on all patches throughout, or with
three of four left out in a first share of the updates, and then on all, from the checkpoint of the first part. Runs of
one seed have the same first weights, samples, noises and learning rate (constant behind its warmup), and the same
held-out rows and noises in `validation_loss`. It is played in a folder that has the shapes world and its autoencoder
(docs/recipes/ablations.md).
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from results import add_result_flags, save_results

MASKED = 0.75
HELD_OUT = "shapes_world/data/held_out.filelist.list"
FLAGS = {
    "use_ema": False, "lr_scheduler_type": "constant_with_warmup", "image_logging_steps": 0, "logging_steps": 10**6,
    "validation_file_list": HELD_OUT, "validation_rows": 512,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=["dit", "microdit"], default=["dit", "microdit"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[23, 24])
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--share", type=float, default=0.25, help="of the updates, masked")
    parser.add_argument("--out", type=Path, default=Path("shapes_world/unmasking"))
    add_result_flags(parser, "unmasking_shapes")
    arguments = parser.parse_args()
    found = {name: {} for name in arguments.networks}
    for seed in arguments.seeds:
        for name in arguments.networks:
            runs = {}
            for kind, parts in (("all", [(0, 1.0)]), ("masked", [(MASKED, arguments.share), (0, 1.0)])):
                for masked, share in parts:
                    until = int(share * arguments.updates)
                    runs[kind] = train(arguments, name, seed, arguments.out / f"{name}-{seed}-{kind}", masked, until)
            quotients = {step: round(runs["masked"][step] / loss, 4) for step, loss in runs["all"].items()}
            found[name][seed] = runs | {"quotients": quotients}
            print(name, seed, found[name][seed], flush=True)
            masked_updates = int(arguments.share * arguments.updates)
            facts = {"masked": MASKED, "masked_updates": masked_updates, "updates": arguments.updates}
            save_results(arguments, facts | {"networks": found})


def train(arguments: argparse.Namespace, name: str, seed: int, out: Path, masked: float, until: int) -> dict:
    """The held-out loss by update, at eight times of the whole training; what is there is not done again."""
    every = arguments.updates // 8
    flags = FLAGS | {"seed": seed, "patch_masking": masked, "max_steps": until, "save_steps": until, "output_dir": out,
                     "validation_steps": every, "accept_changes": ["patch_masking", "max_steps"]}  # fmt: skip
    words = [word for flag, value in flags.items() for word in (f"--{flag}", *map(str, np.atleast_1d(value)))]
    command = [sys.executable, "-m", "ppldm", "train", "--preset", f"{name}-tiny-cpu", *words]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    records = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {one["global_step"]: round(one["validation_loss"], 5) for one in records if "validation_loss" in one}


if __name__ == "__main__":
    main()
