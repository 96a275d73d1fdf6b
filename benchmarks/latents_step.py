"""What the VAE costs of a training step:  python benchmarks/latents_step.py [--unet unet_middle] [--json [OUT]]

The same step of the same model on the same rows, from pictures and from their cached latents. The two take turns, step
by step, on one thread, and each keeps its least CPU time, so that other load on the machine hurts little, and both
alike. The VAE has the published size (kl-f8, 34 M parameters in the encoder); how much it is of a step depends on the
UNet beside it.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from results import add_result_flags, save_results
from train_step import _figures, _num_trained, _some_batches, _time, our_step, prepare, prepare_run

# A small one, of the width that the UNet takes.
TEXT_ENCODER = {"encoder_layers": 4, "encoder_ffn_dim": 768, "encoder_attention_heads": 4, "head_dim": 48}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps of each kind")
    parser.add_argument("--unet", default="unet_small", help="config of the UNet, a name or a file")
    parser.add_argument("--vae", default="vae_kl_f8", help="config of the VAE, a name or a file")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--resolution", type=int, default=128, help="side of the pictures")
    add_result_flags(parser, "latents_step")
    arguments = parser.parse_args()
    arguments.rows, arguments.networks = 4 * arguments.batch_size, ["tiny"]
    from ppldm.utils.entry import entry

    with entry(), tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), arguments)
    kinds = {"pixels": "from pictures", "latents": "from cached latents"}
    lines = [f"{words:<22}{results[kind]['cpu']:>10.3f} s of CPU" for kind, words in kinds.items()]
    sys.stdout.write("\n".join([*lines, f"ratio {results['ratio']:.2f}", ""]))
    save_results(arguments, results)


def measure(folder: Path, arguments: argparse.Namespace) -> dict:
    """Both kinds of step in turn: seconds of a step, and how many times as long it takes with the VAE."""
    from ppldm.networks.build import build_network, save_component
    from ppldm.networks.configs import read_new_config
    from ppldm.networks.model import encode_moments

    prepare(folder, arguments)
    save_component(build_network("vae", read_new_config("vae", arguments.vae, ""), seed=0), folder / "vae")
    text_encoder = folder / "ldmbert.json"
    text_encoder.write_text(json.dumps(TEXT_ENCODER | {"d_model": read_width(arguments.unet)}))
    networks = {"unet_config_file": arguments.unet, "text_encoder_config_file": text_encoder}
    run = prepare_run(folder, arguments, "run", **networks)
    step, times, pixels = our_step(run), {"pixels": [], "latents": []}, _some_batches(run)
    batches = {"pixels": pixels, "latents": [_with_moments(batch, run, encode_moments) for batch in pixels]}
    for number in range(arguments.steps + 2):
        for kind, some in batches.items():
            times[kind].append(_time(step, some[number % len(some)]))
    found = {kind: _figures(pairs) for kind, pairs in times.items()}
    sizes = {"batch_size": arguments.batch_size, "resolution": arguments.resolution, "parameters": _num_trained(run)}
    return {**found, "ratio": found["pixels"]["cpu"] / found["latents"]["cpu"], **sizes}


def read_width(unet: str) -> int:
    """Of the hidden states that a UNet attends to."""
    from ppldm.networks.configs import read_new_config

    return read_new_config("unet", unet, "--unet")["cross_attention_dim"]


def _with_moments(batch: dict, run, encode) -> dict:
    others = {name: value for name, value in batch.items() if name != "pixel_values"}
    return {**others, "moments": encode(run.state.model.vae, batch["pixel_values"])}


if __name__ == "__main__":
    main()
