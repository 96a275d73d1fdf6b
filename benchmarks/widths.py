"""Whether a learning rate that is best for a narrow UNet is best for a wide one:  python benchmarks/widths.py

UNets of the shapes world, of two widths, train at each of some rates: plainly, and by `--methods mup` with the narrow
one as base. Their loss on held-out rows is the study's (currency.py). The text encoder's rate stays. The world is made
as docs/recipes/ablations.md says.
"""

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path

import numpy as np
from results import ROOT, add_result_flags, save_results

MULTIPLES = (1, 2, 4, 8, 16, 32)  # of 1e-3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=Path, default="shapes_world")
    parser.add_argument("--widths", type=int, nargs=2, default=[8, 32])
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    add_result_flags(parser, "widths")
    arguments = parser.parse_args()
    config = json.loads((ROOT / "benchmarks/recipes/networks/unet_32_64.json").read_text())
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for width in arguments.widths:
            Path(folder, f"{width}.json").write_text(json.dumps({**config, "block_out_channels": [width, 2 * width]}))
        narrow, wide = arguments.widths
        for width, methods in ((narrow, []), (wide, []), (wide, ["--methods", f"mup:base={folder}/{narrow}.json"])):
            losses, spent = {}, time.process_time()
            for multiple in MULTIPLES:
                words = [
                    "--unet_config_file",
                    f"{folder}/{width}.json",
                    "--learning_rate",
                    str(1e-3 * multiple),
                    *methods,
                ]
                losses[multiple] = train(words, arguments, Path(folder, "run"))
            best = min(losses, key=losses.get)
            one = {"width": width, "mup": bool(methods), "losses": losses, "best": best}
            found.append({**one, "cpu_seconds": time.process_time() - spent})
            print(one, flush=True)
    save_results(arguments, found)


def train(words: list[str], arguments, folder: Path) -> float:
    """The loss of one training, on held-out rows."""
    from ppldm.utils.machine.cpu import load_paddle

    logging.disable(logging.INFO)
    load_paddle()
    from currency import ROWS, curve_of, held_out_batches, weighted_mean

    from ppldm.training.commands.train import check_early
    from ppldm.training.optimizer import autocast
    from ppldm.training.prepare import prepare
    from ppldm.training.train import UpdateGuard, train_step
    from ppldm.training.validation import HeldOut

    words = [
        *("--preset", "shapes-world", "--max_steps", str(arguments.updates), "--per_device_train_batch_size", "16"),
        *("--use_ema", "false", "--warmup_steps", "20", "--image_logging_steps", "0", "--text_encoder_learning_rate"),
        *("1e-3", "--seed", str(arguments.seed), "--output_dir", str(folder), "--overwrite_output_dir"),
        *("--validation_file_list", str(arguments.world / "data/held_out.filelist.list"), *words),
    ]
    recipe = check_early(words, True, None, "widths")
    ready = prepare(recipe.model, recipe.data, recipe.training)
    model = ready.state.model
    batches = held_out_batches(model, HeldOut(ready.validate.args[1].dataset, ROWS, ROWS))
    guard = UpdateGuard(ready.state, ready.world, 10, autocast(ready.arguments), seed=arguments.seed)
    for batch in ready.batches():
        model.train()
        train_step(guard, [batch])
    model.eval()
    return weighted_mean(np.array(curve_of(model, batches)))


if __name__ == "__main__":
    main()
