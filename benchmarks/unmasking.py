"""What leaving patches out costs, and what is made good behind it:  python benchmarks/unmasking.py [--json]

A small DiT and a small MicroDiT learn pictures of waves by their kind (rectified flow, patches of 2 x 2 latents). All
runs of a seed have the same first weights, pictures, noises and number of updates. One trains on all patches
throughout; the others leave three of four out for a first share of the updates, and then none. The held-out loss is
of 512 samples that are always the same, all patches of them, at eight times of the training. Its quotient to that
without masking comes with a 95 % interval over the seeds, by Student's t of the logarithms.
"""

import argparse
import os
from concurrent.futures import ProcessPoolExecutor, as_completed

import numpy as np
from results import add_result_flags, save_results
from scipy.stats import t

TOKENS, WIDTH, KINDS, BATCH = 12, 64, 8, 16
MASKED = 0.75
TIMES = 8
_LATENTS = {"in_channels": 4, "patch_size": 2, "caption_channels": WIDTH}
NETWORKS = {
    "dit": {
        **_LATENTS, "num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 32, "cross_attention_dim": 64,
        "attention_bias": True, "activation_fn": "gelu-approximate", "norm_type": "ada_norm_single",
        "num_embeds_ada_norm": 1000, "norm_elementwise_affine": False, "norm_eps": 1e-6,
    },
    "microdit": {
        **_LATENTS, "dim": 64, "depth": 3, "head_dim": 32, "multiple_of": 32, "patch_mixer_depth": 1,
        "patch_mixer_dim": 64, "num_experts": 4,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--side", type=int, default=16, help="of the latents; a quarter of its square is patches")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.75], help="of the updates, masked")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["microdit", "dit"])
    add_result_flags(parser, "unmasking")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    losses = {name: {} for name in arguments.networks}
    shares = [0.0, *arguments.shares]
    facts = {"masked": MASKED, "updates": arguments.updates, "patches": arguments.side**2 // 4}
    with ProcessPoolExecutor(arguments.processes) as pool:
        jobs = {
            pool.submit(
                train, NETWORKS[name], arguments.side, seed, int(share * arguments.updates), arguments.updates
            ): (name, seed, share)
            for seed in range(arguments.seeds)
            for name in arguments.networks
            for share in shares
        }
        for job in as_completed(jobs):
            name, seed, share = jobs[job]
            losses[name].setdefault(seed, {})[str(share)] = job.result()
            print(name, seed, share, job.result(), flush=True)
            whole = {one: {k: v for k, v in runs.items() if len(v) == len(shares)} for one, runs in losses.items()}
            found = {one: summary(seeds, arguments.shares) for one, seeds in whole.items() if len(seeds) > 1}
            save_results(arguments, facts | {"networks": found})
    print(found)


def train(config: dict, side: int, seed: int, masked_updates: int, updates: int) -> list[float]:
    """Held-out losses at TIMES times of a new network that sees a quarter of the patches first, and then all."""
    import paddle
    from patch_masking import update

    from ppldm.data.inputs import KeptPatches
    from ppldm.networks.build import build_network
    from ppldm.networks.configs import check_config
    from ppldm.utils.rng import Generators, Stream, make_rng

    network = build_network("transformer", check_config("transformer", {**config, "sample_size": side}, "here"), seed)
    network.train()
    rate = paddle.optimizer.lr.CosineAnnealingDecay(2e-3, updates)
    optimizer = paddle.optimizer.AdamW(rate, parameters=network.parameters(), weight_decay=0.0)
    found = []
    for step in range(updates):
        kept = None
        if step < masked_updates:
            keys = [(step, row) for row in range(BATCH)]
            kept = paddle.to_tensor(KeptPatches(2, MASKED).draw(keys, (side, side), Generators(seed), {}))
        update(network, optimizer, *make_batch(make_rng(seed, Stream.NOISE, step), BATCH, side), kept)
        rate.step()
        if (step + 1) % (updates // TIMES) == 0:
            found.append(held_out(network, side))
    return found


def make_batch(rng: np.random.Generator, count: int, side: int):
    """(noisy latents, timesteps, captions, target) of `count` pictures of random kinds and phases."""
    import paddle

    kinds, phases = rng.integers(0, KINDS, count), rng.random((count, 4, 1, 1)) * 2 * np.pi
    y, x = np.mgrid[:side, :side] * (2 * np.pi / 8)
    angle = (kinds * np.pi / KINDS)[:, None, None, None]
    clean = np.sqrt(2) * np.sin(np.cos(angle) * x + np.sin(angle) * y + phases)
    noise, level = rng.standard_normal(clean.shape), rng.random((count, 1, 1, 1))
    hidden = np.zeros((count, TOKENS, WIDTH))
    hidden[np.arange(count), :, kinds] = 3.0
    arrays = ((1 - level) * clean + level * noise, 1000 * level.ravel(), hidden, noise - clean)
    return [paddle.to_tensor(one, "float32") for one in arrays]


def held_out(network, side: int) -> float:
    """The loss of 512 samples that are always the same."""
    import paddle

    from ppldm.networks.transformers.transform import transform
    from ppldm.utils.rng import Stream, make_rng

    network.eval()
    noisy, timesteps, hidden, target = make_batch(make_rng(1000, Stream.EVALUATION), 512, side)
    with paddle.no_grad():
        loss = float((transform(network, noisy, timesteps, hidden) - target).square().mean())
    network.train()
    return round(loss, 5)


def summary(seeds: dict[int, dict[str, list[float]]], masked: list[float]) -> dict:
    """Losses by share and seed, and by share the quotients at all times, with the interval at the end."""
    losses = {share: [seeds[seed][share] for seed in sorted(seeds)] for share in map(str, [0.0, *masked])}
    quotients, intervals = {}, {}
    for share in map(str, masked):
        logs = np.log(losses[share]) - np.log(losses["0.0"])
        half = t.ppf(0.975, len(logs) - 1) * logs[:, -1].std(ddof=1) / np.sqrt(len(logs))
        quotients[share] = np.exp(logs.mean(0)).round(4).tolist()
        intervals[share] = np.exp([logs[:, -1].mean() + sign * half for sign in (-1, 1)]).round(4).tolist()
    return {"seeds": sorted(seeds), "quotients": quotients, "interval_95": intervals, "losses": losses}


if __name__ == "__main__":
    main()
