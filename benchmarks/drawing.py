"""What a call of the networks that draw costs by each engine:  python benchmarks/drawing.py --model quickstart sd15

UNet (two pictures, as guidance asks) and decoder (one picture), random weights, eager, by each engine, and by diffusers
with PyTorch on the same weights where these are installed. All take turns, call by call; each keeps its least CPU time
and its least time on the clock. A picture of 50 steps with guidance is 50 calls of the UNet and one of the decoder.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

from results import add_result_flags, save_results

# UNet, autoencoder, side of the latents, tokens of a caption.
MODELS = {
    "quickstart": ("unet_tiny", "vae_tiny", 6, 12),
    "shapes-world": ("unet_shapes_world", "vae_shapes_world", 8, 77),
    "sd15": ("unet_sd1", "vae_kl_f8", 32, 77),
}
STEPS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=["quickstart"])
    parser.add_argument("--calls", type=int, default=3, help="of each, after one that is not measured")
    parser.add_argument("--threads", type=int, default=1)
    add_result_flags(parser, "drawing")
    arguments = parser.parse_args()
    from ppldm.utils.machine.cpu import load_paddle

    load_paddle(threads=arguments.threads)
    results = {name: measure(*MODELS[name], arguments) for name in arguments.model}
    for name, networks in results.items():
        for engine in networks["unet"]:
            unet, vae = (networks[kind][engine] for kind in ("unet", "vae"))
            cpu, wall = (STEPS * unet[kind] + vae[kind] for kind in ("cpu", "wall"))
            sys.stdout.write(
                f"{name:<13}{engine:<18} UNet {unet['cpu']:.4f} s of CPU, decoder {vae['cpu']:.4f}; "
                f"a picture {cpu:.2f} s of CPU, {wall:.2f} on the clock; "
                f"differ by {unet['gap']:.1e} and {vae['gap']:.1e}\n"
            )
    save_results(arguments, results)


def measure(unet: str, vae: str, side: int, tokens: int, arguments) -> dict:
    """Least seconds of a call, and the greatest difference from eager, by network and engine."""
    kinds = (("unet", unet), ("vae", vae))
    return {kind: measure_network(kind, name, side, tokens, arguments) for kind, name in kinds}


def measure_network(kind: str, name: str, side: int, tokens: int, arguments) -> dict:
    import numpy as np
    import paddle
    from ppdiffusers.models.attention_processor import AttnProcessor

    from ppldm.config.network_files import CONFIG_DIR
    from ppldm.networks.engine import EAGER, ENGINES, use_engine
    from ppldm.utils.files import read_json_object
    from ppldm.weights.configs import complete_config
    from ppldm.weights.fill import bare_network

    config = complete_config(kind, read_json_object(Path(CONFIG_DIR, f"{name}.json"), ValueError), name)
    paddle.seed(0)
    network, rng = bare_network(kind, config, name), np.random.default_rng(0)
    network.eval()
    shapes = [(1, config.get("latent_channels"), side, side)]
    if kind == "unet":
        network.set_attn_processor(AttnProcessor())
        shapes = [(2, config["in_channels"], side, side), (2, tokens, config["cross_attention_dim"])]
    arrays = [rng.standard_normal(shape, dtype=np.float32) for shape in shapes]
    inputs = [paddle.to_tensor(array) for array in arrays]

    def call(run):
        with paddle.no_grad():
            if kind == "unet":
                return run(inputs[0], paddle.to_tensor(501), encoder_hidden_states=inputs[1]).sample.numpy()
            return run(inputs[0]).numpy()

    own, runs = network if kind == "unet" else network.decoder, {}
    for engine in ENGINES:
        computed = SimpleNamespace(forward=own.forward)
        use_engine([computed], engine)
        runs[engine] = partial(call, computed.forward)
    if theirs := in_torch(kind, config, network, arrays, arguments.threads):
        runs["diffusers"] = theirs
    expected, found = runs[EAGER](), {}
    for turn in range(1 + arguments.calls):
        for engine, run in runs.items():
            wall, cpu = time.perf_counter(), time.process_time()
            result = run()
            seconds = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            if turn:
                best = found.setdefault(engine, {**seconds, "gap": float(np.abs(result - expected).max())})
                found[engine] = best | {name: min(best[name], value) for name, value in seconds.items()}
    return found


def in_torch(kind: str, config: dict, network, arrays, threads: int):
    """A call of diffusers' network with the same weights; None where it is not installed."""
    try:
        import diffusers
        import torch
    except ImportError:
        return None
    from ppldm.weights.components import to_torch, to_torch_config

    torch.set_num_threads(threads)
    classes = {"unet": diffusers.UNet2DConditionModel, "vae": diffusers.AutoencoderKL}
    layer = classes[kind](**to_torch_config(kind, config, "")).eval()
    weights = to_torch({name: value.numpy() for name, value in network.state_dict().items()})
    layer.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in weights.items()})
    tensors = [torch.from_numpy(array) for array in arrays]

    @torch.no_grad()
    def call():
        if kind == "unet":
            return layer(tensors[0], 501, encoder_hidden_states=tensors[1]).sample.numpy()
        return layer.decoder(tensors[0]).numpy()

    return call


if __name__ == "__main__":
    main()
