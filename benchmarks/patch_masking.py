"""What leaving patches out saves:  python benchmarks/patch_masking.py [--json]

The CPU time of a step (forward, backward, AdamW) of each transformer with three patches of four left out, by that
without. The MicroDiT has MicroDiT_XL_2's proportions: 3 light blocks of three quarters of the width before 14.
unmasking.py measures what it costs.
"""

import argparse
import time

import numpy as np
import paddle
from results import add_result_flags, save_results

from ppldm.data.inputs import KeptPatches
from ppldm.networks.build import build_network
from ppldm.networks.configs import check_config
from ppldm.networks.transformers.microdit import grid_of, take_patches
from ppldm.networks.transformers.transform import transform
from ppldm.utils.rng import Generators, Stream, make_rng

MASKED = 0.75
TOKENS, WIDTH = 12, 64
SIDE = 16  # patches of 2 x 2 latents
UVIT = {
    "sample_size": 2 * SIDE, "in_channels": 4, "patch_size": 2, "num_layers": 6, "num_attention_heads": 6,
    "attention_head_dim": 64, "clip_dim": WIDTH, "num_text_tokens": TOKENS,
}  # fmt: skip
DIT = {
    "sample_size": 2 * SIDE, "in_channels": 4, "patch_size": 2, "num_layers": 6, "num_attention_heads": 6,
    "attention_head_dim": 64, "cross_attention_dim": 384, "caption_channels": WIDTH, "attention_bias": True,
    "activation_fn": "gelu-approximate", "norm_type": "ada_norm_single", "num_embeds_ada_norm": 1000,
    "norm_elementwise_affine": False, "norm_eps": 1e-6,
}  # fmt: skip
MICRODIT = {
    "sample_size": 2 * SIDE, "in_channels": 4, "patch_size": 2, "dim": 256, "depth": 14, "head_dim": 64,
    "multiple_of": 64, "caption_channels": WIDTH, "patch_mixer_depth": 3, "patch_mixer_dim": 192, "num_experts": 8,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    add_result_flags(parser, "patch_masking")
    arguments = parser.parse_args()
    configs = {"uvit": UVIT, "dit": DIT, "microdit": MICRODIT}
    steps = {name: measure_step(config, arguments) for name, config in configs.items()}
    for name, one in steps.items():
        print(f"{name}: {one['ms']} ms a step, {one['masked_ms']} ms with {MASKED:.0%} left out: {one['share']:.1%}")
    save_results(arguments, {"masked": MASKED, "step": steps})


def measure_step(config: dict, arguments) -> dict:
    """Milliseconds of CPU time a step, the best of `--repeats` in turns, and their share."""
    network = build_network("transformer", check_config("transformer", config, "here"), 1)
    network.train()
    optimizer = paddle.optimizer.AdamW(1e-4, parameters=network.parameters())
    batch = [
        make_rng(1, Stream.NOISE, row=row).standard_normal((4, 2 * SIDE, 2 * SIDE)) for row in range(arguments.batch)
    ]
    noisy = paddle.to_tensor(np.stack(batch), "float32")
    hidden = paddle.ones([arguments.batch, TOKENS, WIDTH])
    timesteps = paddle.arange(arguments.batch) * (1000 // arguments.batch)
    keys = [(0, row) for row in range(arguments.batch)]
    drawn = KeptPatches(2, MASKED).draw(keys, (2 * SIDE, 2 * SIDE), Generators(1), {})
    found = {None: [], MASKED: []}
    for _ in range(arguments.repeats + 1):
        for masked, times in found.items():
            started = time.process_time()
            update(network, optimizer, noisy, timesteps, hidden, noisy, masked and paddle.to_tensor(drawn))
            times.append(1000 * (time.process_time() - started))
    whole, part = (round(min(times[1:]), 1) for times in found.values())
    return {"ms": whole, "masked_ms": part, "share": round(part / whole, 4), "patches": SIDE**2}


def update(network, optimizer, noisy, timesteps, hidden, target, kept) -> None:
    """One step on the mean squared error over the patches that are kept, None for all."""
    predicted = transform(network, noisy, timesteps, hidden, kept=kept)
    if kept is not None:
        predicted, target = (take_patches(grid_of(network, one).split(one), kept) for one in (predicted, target))
    (predicted - target).square().mean().backward()
    optimizer.step()
    optimizer.clear_grad()


if __name__ == "__main__":
    main()
