"""What leaving patches out saves, and what it costs:  python benchmarks/patch_masking.py [--json]

Two measurements. The CPU time of a step (forward, backward, AdamW) of a UViT and a DiT with three patches of four left
out, by that without; and of forward and backward alone. And the loss of pictures of eight kinds, at noise levels and
noises that are always the same, of a DiT that was trained with all patches, and of one that was trained with three of
four left out for the first part of its updates: of several seeds, with the interval of the difference.
"""

import argparse
import time

import numpy as np
import paddle
from results import add_result_flags, save_results
from scipy.stats import t

from ppldm.data.inputs import KeptPatches
from ppldm.networks.build import build_transformer
from ppldm.networks.configs import check_config
from ppldm.networks.transformers import grid_of, take_patches, transform
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
SMALL = {
    **DIT, "sample_size": 8, "num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 32,
    "cross_attention_dim": 64,
}  # fmt: skip
KINDS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--masked_updates", type=int, default=1200)
    parser.add_argument("--updates", type=int, default=2000)
    add_result_flags(parser, "patch_masking")
    arguments = parser.parse_args()
    steps = {name: measure_step(config, arguments) for name, config in (("uvit", UVIT), ("dit", DIT))}
    for name, one in steps.items():
        print(f"{name}: {one['ms']} ms a step, {one['masked_ms']} ms with {MASKED:.0%} left out: {one['share']:.1%}")
    curves = compare_curves(arguments)
    print(f"loss: {curves}")
    save_results(arguments, {"masked": MASKED, "step": steps, "unmasking": curves})


def measure_step(config: dict, arguments) -> dict:
    """Milliseconds of CPU time a step, the best of `--repeats` in turns, and their share."""
    network = build_transformer(check_config("transformer", config, "here"), 1)
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


def compare_curves(arguments) -> dict:
    """Held-out losses of both ways by seed, at the end and where the patches came back, and the 95 % interval of the
    mean of their quotients, by Student's t of their logarithms."""
    losses = {"all": [], "masked_then_all": [], "when_unmasked": []}
    for seed in range(arguments.seeds):
        losses["all"].append(train(seed, 0, arguments.updates)[0])
        end, there = train(seed, arguments.masked_updates, arguments.updates)
        losses["masked_then_all"].append(end)
        losses["when_unmasked"].append(there)
    logs = np.log(losses["masked_then_all"]) - np.log(losses["all"])
    half = t.ppf(0.975, len(logs) - 1) * logs.std(ddof=1) / np.sqrt(len(logs))
    interval = [round(float(np.exp(logs.mean() + sign * half)), 4) for sign in (-1, 1)]
    rounded = {name: [round(one, 5) for one in values] for name, values in losses.items()}
    return {**rounded, "quotient": round(float(np.exp(logs.mean())), 4), "interval_95": interval,
            "masked_updates": arguments.masked_updates, "updates": arguments.updates}  # fmt: skip


def train(seed: int, masked_updates: int, updates: int, batch: int = 16) -> tuple[float, float]:
    """(held-out loss at the end, after `masked_updates`) of a small DiT on pictures of waves, by their kind; rectified
    flow."""
    network = build_transformer(check_config("transformer", SMALL, "here"), seed)
    network.train()
    rate = paddle.optimizer.lr.CosineAnnealingDecay(2e-3, updates)
    optimizer = paddle.optimizer.AdamW(rate, parameters=network.parameters(), weight_decay=0.0)
    there = 0.0
    for step in range(updates):
        if step == masked_updates:
            there = held_out(network)
        kept = None
        if step < masked_updates:
            keys = [(step, row) for row in range(batch)]
            kept = paddle.to_tensor(KeptPatches(2, MASKED).draw(keys, (8, 8), Generators(seed), {}))
        update(network, optimizer, *make_batch(make_rng(seed, Stream.NOISE, step), batch), kept)
        rate.step()
    return held_out(network), there


def make_batch(rng: np.random.Generator, count: int):
    """(noisy latents, timesteps, captions, target) of `count` pictures of random kinds and phases."""
    kinds, phases = rng.integers(0, KINDS, count), rng.random((count, 4, 1, 1)) * 2 * np.pi
    y, x = np.mgrid[:8, :8] * (2 * np.pi / 8)
    angle = (kinds * np.pi / KINDS)[:, None, None, None]
    clean = np.sqrt(2) * np.sin(np.cos(angle) * x + np.sin(angle) * y + phases)
    noise, level = rng.standard_normal(clean.shape), rng.random((count, 1, 1, 1))
    hidden = np.zeros((count, TOKENS, WIDTH))
    hidden[np.arange(count), :, kinds] = 3.0
    arrays = ((1 - level) * clean + level * noise, 1000 * level.ravel(), hidden, noise - clean)
    return [paddle.to_tensor(one, "float32") for one in arrays]


@paddle.no_grad()
def held_out(network) -> float:
    """The loss of 512 samples that are always the same."""
    network.eval()
    noisy, timesteps, hidden, target = make_batch(make_rng(1000, Stream.EVALUATION), 512)
    loss = float((transform(network, noisy, timesteps, hidden) - target).square().mean())
    network.train()
    return loss


if __name__ == "__main__":
    main()
