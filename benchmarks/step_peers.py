"""A training step on a CPU beside PyTorch's:  python benchmarks/step_peers.py [--cases quickstart ldm-256 sd15]
... and whole trainings:                         python benchmarks/step_peers.py --trainings 10

The same networks with the same weights, batches and losses, three times: by ppldm (`ours`), by ppldm without its CPU
tuning (`plain`: Paddle's own operators and allocation), and by diffusers on PyTorch (needs requirements/parity.txt).
Each side is a process of its own; they take turns, step by step (of sd15, which is too large for that, one after the
other), and what counts is the fastest step of each. A step is the autoencoder's encoding of the pictures, where latents
are not cached, forward, backward and AdamW, which sd15 goes without: its states do not fit into 24 GB. Before the clock
runs the sides are compared: the loss and the gradient of every weight must differ by at most 1e-5 of the largest value,
or the benchmark fails. Both take our sinusoids of the timesteps: the last bit of a frequency counts 1000 times there.

A training is UPDATES updates of quickstart's networks, by each side on the same batches from the same weights, others
in each training, and by PyTorch once more in float64 (`exact`), which tells how far float32 carries. It fails where a
loss of ours differs from the exact one by more than 1e-5 of itself, or where our weights end farther from the exact
ones, as a share of their way (the length of their change), than PyTorch's.

Run it with nothing beside it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from results import add_result_flags, processor, save_results

ROOT = Path(__file__).resolve().parents[1]
NETWORKS = ROOT / "ppldm/config/networks"
SIDES = ("ours", "plain", "pytorch")
EXACT = "exact"  # of trainings: PyTorch in float64
PARTS = ("encode", "forward", "backward", "optimizer")
BAR = 1e-5  # of differences
UPDATES, LOSS_BAR = 100, 1e-5  # of a training
ALONE = ("sd15",)  # whose sides come one after the other, since two do not fit into 24 GB
RATIOS = {"quickstart": 1.0, "ldm-256": 1.2, "sd15": 1.2}  # of ours to PyTorch: the bars


def network(name: str, **changes) -> dict:
    return json.loads((NETWORKS / f"{name}.json").read_text()) | changes


def case_of(name: str) -> dict:
    """Configs of the networks, latents [channels, h, w], samples, tokens and threads."""
    if name == "quickstart":  # one of its two processes; its latents are cached
        nets = {"unet": network("unet_tiny"), "text_encoder": network("ldmbert_tiny")}
        return {"networks": nets, "latents": (8, 6, 6), "samples": 8, "tokens": 12, "threads": 1, "side": None}
    if name == "ldm-256":
        blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
        vae = network("vae_kl_f8", block_out_channels=[64, 64, 128, 128], layers_per_block=1, **blocks)
        unet = network(
            "unet_tiny", sample_size=32, in_channels=4, out_channels=4, block_out_channels=[64, 128, 256],
            down_block_types=["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
            up_block_types=["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"], attention_head_dim=8,
        )  # fmt: skip
        nets = {"unet": unet, "text_encoder": network("ldmbert_tiny", max_position_embeddings=77), "vae": vae}
        return {"networks": nets, "latents": (4, 32, 32), "samples": 4, "tokens": 77, "threads": 2, "side": 256}
    nets = {
        "unet": network("unet_sd1"),
        "text_encoder": network("ldmbert_tiny", d_model=768, max_position_embeddings=77),
    }
    return {"networks": nets, "latents": (4, 32, 32), "samples": 2, "tokens": 77, "threads": 2, "side": None}


def make_batch(case: dict, *number: int) -> dict[str, np.ndarray]:
    rng, samples = np.random.default_rng((0, *number)), case["samples"]
    shape = (samples, *case["latents"])
    batch = {
        "input_ids": rng.integers(1, 128, (samples, case["tokens"])),
        "timesteps": rng.integers(0, 1000, samples),
        "noise": rng.standard_normal(shape, dtype=np.float32),
        "posterior_noise": rng.standard_normal(shape, dtype=np.float32),
    }
    if case["side"]:
        return batch | {"pixel_values": rng.integers(0, 256, (samples, 3, case["side"], case["side"]), dtype=np.uint8)}
    return batch | {"moments": np.abs(rng.standard_normal((samples, 2, *case["latents"]), dtype=np.float32))}


class PaddleSide:
    """The model as a training has it. It writes the weights that PyTorch takes, and its loss and gradients."""

    def __init__(self, case: dict, folder: Path, writes: bool, learns: bool, seed: int):
        from ppldm.utils.machine.cpu import load_paddle

        load_paddle(case["threads"])
        import paddle

        from ppldm.diffusion.process import Process
        from ppldm.networks.build import build_network
        from ppldm.networks.cpu_operators.layers import operators_are_usable
        from ppldm.networks.latent_diffusion import LatentDiffusionModel
        from ppldm.training.optimizer import CpuAdamW
        from ppldm.weights.configs import complete_config

        self.paddle, rng = paddle, np.random.default_rng(seed)
        configs = {"vae": network("vae_tiny", latent_channels=case["latents"][0])} | case["networks"]
        nets = {kind: build_network(kind, complete_config(kind, one, kind), 5) for kind, one in configs.items()}
        for net in nets.values():  # no zeros, which would hide a gradient
            for parameter in net.parameters():
                shape = parameter.shape
                if len(shape) > 1:
                    width = np.prod(shape[1:]) if len(shape) == 4 else shape[0]
                    parameter.set_value(rng.standard_normal(shape, dtype=np.float32) / np.float32(width**0.5))
        self.model = LatentDiffusionModel(Process(), **nets)
        self.model.train()
        self.batch = self.take(make_batch(case))
        learned = [one for one in self.model.parameters() if not one.stop_gradient]
        kind = CpuAdamW if operators_are_usable() else paddle.optimizer.AdamW
        self.optimizer = kind(1e-4, parameters=learned, weight_decay=1e-2) if learns else None
        if writes:
            arrays = {
                f"{kind}.{name}": one.numpy() for kind, net in nets.items() for name, one in net.state_dict().items()
            }
            np.savez(folder / "weights.npz", **arrays)
            loss = self.loss(self.batch)
            loss.backward()
            gradients = {name: one.grad.numpy() for name, one in self.model.named_parameters() if one.grad is not None}
            sinusoids = nets["unet"].time_proj(paddle.arange(1000)).numpy()
            np.savez(folder / "gradients.npz", loss=loss.numpy(), sinusoids=sinusoids, **gradients)
            self.clear()

    def take(self, batch):
        return {name: self.paddle.to_tensor(value) for name, value in batch.items()}

    def weights(self) -> dict[str, np.ndarray]:
        return {name: one.numpy() for name, one in self.model.named_parameters() if not one.stop_gradient}

    def encode(self, batch):
        from ppldm.networks.model import encode_moments

        pixels = batch["pixel_values"]
        rest = {name: value for name, value in batch.items() if name != "pixel_values"}
        return rest | {"moments": encode_moments(self.model.vae, pixels)}

    def loss(self, batch):
        return self.model(**batch).value

    def clear(self) -> None:
        for parameter in self.model.parameters():
            parameter.clear_gradient(False)


class TorchSide:
    """diffusers' networks and PyTorch's AdamW, with the weights of the other side."""

    def __init__(self, case: dict, folder: Path, learns: bool, exact: bool = False):
        import diffusers
        import torch
        from diffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel

        torch.set_num_threads(case["threads"])
        self.torch, configs, self.dtype = torch, case["networks"], torch.float64 if exact else torch.float32
        nets = {"unet": diffusers.UNet2DConditionModel(**configs["unet"]),
                "text_encoder": LDMBertModel(LDMBertConfig(**configs["text_encoder"]))}  # fmt: skip
        if "vae" in configs:
            nets["vae"] = diffusers.AutoencoderKL(**configs["vae"]).requires_grad_(False)
        weights = np.load(folder / "weights.npz")
        self.turned = {f"{kind}.{name}.weight" for kind, net in nets.items() for name, layer in net.named_modules()
                       if isinstance(layer, torch.nn.Linear)}  # fmt: skip
        for kind, net in nets.items():
            arrays = {name: weights[f"{kind}.{name}"] for name in net.state_dict()}
            net.load_state_dict({name: torch.tensor(one.T.copy() if f"{kind}.{name}" in self.turned else one)
                                 for name, one in arrays.items()})  # fmt: skip
            net.to(self.dtype)
        nets["text_encoder"].to_logits.requires_grad_(False)
        sinusoids = torch.tensor(np.load(folder / "gradients.npz")["sinusoids"], dtype=self.dtype)
        nets["unet"].time_proj.forward = lambda timesteps: sinusoids[timesteps]
        self.nets, self.scale = nets, nets["vae"].config.scaling_factor if "vae" in nets else 0.18215
        self.batch = self.take(make_batch(case))
        betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
        self.levels = torch.cumprod(1 - betas, 0).to(self.dtype)
        self.learned = {f"{kind}.{name}": one for kind, net in nets.items() for name, one in net.named_parameters()
                        if one.requires_grad}  # fmt: skip
        self.optimizer = torch.optim.AdamW(self.learned.values(), 1e-4, weight_decay=1e-2) if learns else None
        self.compare(folder)

    def compare(self, folder: Path) -> None:
        """Fail where loss or gradients are others than the other side's."""
        theirs, worst = np.load(folder / "gradients.npz"), {}
        loss = self.loss(self.encode(self.batch) if "vae" in self.nets else self.batch)
        loss.backward()
        worst["loss"] = abs(float(loss) - float(theirs["loss"])) / abs(float(loss))
        for name, parameter in self.learned.items():
            if parameter.grad is not None:
                own = self.turn(name, parameter.grad)
                worst[name] = float(np.abs(own - theirs[name]).max() / max(np.abs(own).max(), 1e-6))
        self.clear()
        name = max(worst, key=worst.get)
        print(f"most different: {name}, by {worst[name]:.1e}", file=sys.stderr, flush=True)
        if worst[name] > BAR:
            sys.exit(f"{name} differs by {worst[name]:.1e} of its largest value, more than {BAR}")

    def take(self, batch):
        arrays = {name: self.torch.tensor(value) for name, value in batch.items()}
        return {name: one.to(self.dtype) if one.is_floating_point() else one for name, one in arrays.items()}

    def turn(self, name: str, value) -> np.ndarray:
        """As Paddle has it."""
        return value.numpy().T if name in self.turned else value.numpy()

    def weights(self) -> dict[str, np.ndarray]:
        return {name: self.turn(name, parameter.detach()) for name, parameter in self.learned.items()}

    def encode(self, batch):
        with self.torch.no_grad():
            found = self.nets["vae"].encode(batch["pixel_values"].float() / 127.5 - 1.0).latent_dist
        return batch | {"moments": self.torch.stack([found.mean, found.std], 1)}

    def loss(self, batch):
        mean, std = batch["moments"].unbind(1)
        level = self.levels[batch["timesteps"]].reshape(-1, 1, 1, 1)
        latents = (mean + std * batch["posterior_noise"]) * self.scale
        noisy = level.sqrt() * latents + (1.0 - level).sqrt() * batch["noise"]
        words = self.nets["text_encoder"](batch["input_ids"])[0]
        predicted = self.nets["unet"](noisy, batch["timesteps"], encoder_hidden_states=words).sample
        return self.torch.nn.functional.mse_loss(predicted, batch["noise"])

    def clear(self) -> None:
        for parameter in self.learned.values():
            parameter.grad = None


def timed_step(side, encodes: bool) -> dict[str, float]:
    """Seconds of each part of one step, and its seconds of CPU."""
    moments, batch, cpu = [time.perf_counter()], side.batch, time.process_time()
    batch = side.encode(batch) if encodes else batch
    moments.append(time.perf_counter())
    loss = side.loss(batch)
    moments.append(time.perf_counter())
    loss.backward()
    moments.append(time.perf_counter())
    if side.optimizer:
        side.optimizer.step()
    side.clear()
    moments.append(time.perf_counter())
    return dict(zip(PARTS, np.diff(moments).tolist(), strict=True)) | {"cpu": time.process_time() - cpu}


def train(side, case: dict, file: Path) -> dict[str, list[float]]:
    """The loss of each update; the weights after the last one go to `file`."""
    losses = []
    for number in range(UPDATES):
        loss = side.loss(side.take(make_batch(case, number)))
        loss.backward()
        side.optimizer.step()
        side.clear()
        losses.append(float(loss))
    np.savez(file, **side.weights())
    return {"losses": losses}


def serve(name: str, side: str, folder: Path, seed: int) -> None:
    """A side: one line of JSON when it is ready, and one for each step, or training, that a line of standard input asks
    for."""
    case, learns = case_of(name), name != "sd15"
    if side in ("pytorch", EXACT):
        made = TorchSide(case, folder, learns, side == EXACT)
    else:
        made = PaddleSide(case, folder, side == "ours", learns, seed)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        is_step = line.strip() == "step"
        done = timed_step(made, case["side"] is not None) if is_step else train(made, case, folder / f"{side}.npz")
        print(json.dumps(done), flush=True)


class Process:
    """A side, seen from outside."""

    def __init__(self, name: str, side: str, folder: Path, seed: int = 1):
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MKL_", "PPLDM_"))}
        environ |= {"OMP_NUM_THREADS": str(case_of(name)["threads"]), "PYTHONPATH": str(ROOT)}
        environ |= {"PPLDM_NO_CPU_TUNING": "1"} if side == "plain" else {}
        command = [sys.executable, "-W", "ignore", __file__, "--serve", name, side, str(folder), str(seed)]
        self.child = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.read()

    def read(self) -> dict:
        for line in self.child.stdout:
            if line.startswith("{"):
                return json.loads(line)
        sys.exit(f"a side ended: {self.child.wait()}")

    def ask(self, what: str = "step") -> dict:
        self.child.stdin.write(f"{what}\n")
        self.child.stdin.flush()
        return self.read()

    def close(self) -> None:
        self.child.stdin.close()
        self.child.wait()


def measure(name: str, sides: list[str], steps: int) -> dict:
    """Seconds of the fastest step of each side and of each of its parts, and the ratio of the steps to PyTorch's."""
    times: dict[str, list] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        for together in [[side] for side in sides] if name in ALONE else [sides]:
            processes = {side: Process(name, side, Path(folder)) for side in together}
            for process in processes.values():
                process.ask()
            for _ in range(steps):
                for side, process in processes.items():
                    times[side].append(process.ask())
            for process in processes.values():
                process.close()
    found = {side: figures(several) for side, several in times.items()}
    if "pytorch" in found:
        for side in sides:
            found[side]["ratio"] = round(found[side]["step"] / found["pytorch"]["step"], 3)
    return found


def compare_trainings(seed: int) -> dict[str, dict[str, float]]:
    """Of each side, and of both Paddle sides beside PyTorch too: the largest relative difference of a loss to the exact
    one, and that of the weights at the end as a share of their way."""
    losses = {}
    with tempfile.TemporaryDirectory() as folder:
        for side in (*SIDES, EXACT):
            process = Process("quickstart", side, Path(folder), seed)
            losses[side] = np.array(process.ask("train")["losses"])
            process.close()
        arrays = {name: np.load(Path(folder, f"{name}.npz")) for name in ("weights", *SIDES, EXACT)}

        def length(one: str, two: str) -> float:
            pairs = ((arrays[one][name].astype(np.float64), arrays[two][name]) for name in arrays["ours"])
            return sum(float(np.square(a - b).sum()) for a, b in pairs) ** 0.5

        def apart(side: str, other: str) -> dict[str, float]:
            return {"losses": float(np.abs(losses[side] / losses[other] - 1).max()),
                    "weights": length(side, other) / length(other, "weights")}  # fmt: skip

        found = {side: apart(side, EXACT) for side in SIDES}
        return found | {f"{side}, to PyTorch": apart(side, "pytorch") for side in SIDES if side != "pytorch"}


def figures(steps: list[dict]) -> dict:
    """Of the fastest step; the median of all, and the least CPU time."""
    whole = [sum(one[part] for part in PARTS) for one in steps]
    fastest = steps[int(np.argmin(whole))]
    found = {part: fastest[part] for part in PARTS} | {"step": min(whole), "median": float(np.median(whole))}
    return {name: round(value, 4) for name, value in (found | {"cpu": min(one["cpu"] for one in steps)}).items()}


def table(name: str, found: dict) -> str:
    lines = [f"{name}: seconds of the fastest step; bar of the ratio of ours to PyTorch's {RATIOS[name]}"]
    columns = (*PARTS, "step", "median", "cpu", "ratio")
    lines.append(f"{'':<10}" + "".join(f"{column:>11}" for column in columns))
    for side, values in found.items():
        lines.append(f"{side:<10}" + "".join(f"{values.get(column, float('nan')):>11.4g}" for column in columns))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=RATIOS, default=["quickstart", "ldm-256"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES), help="pytorch needs ours")
    parser.add_argument("--steps", type=int, default=20, help="of each side and case")
    parser.add_argument(
        "--trainings", type=int, default=0, metavar="N", help="compare so many trainings, and time no step"
    )
    add_result_flags(parser, "step_peers")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)  # case, side, folder, seed
    arguments = parser.parse_args()
    if arguments.serve:
        name, side, folder, seed = arguments.serve
        return serve(name, side, Path(folder), int(seed))
    print(f"{processor()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    found = {}
    for seed in range(1, arguments.trainings + 1):
        found[f"training {seed}"] = apart = compare_trainings(seed)
        for side, one in apart.items():
            told = f"losses {one['losses']:.1e}, weights {one['weights']:.1e} of their way"
            print(f"training {seed}: {side if ',' in side else f'{side}, to float64'}: {told}", flush=True)
        if apart["ours"]["losses"] > LOSS_BAR or apart["ours"]["weights"] > apart["pytorch"]["weights"]:
            sys.exit(f"a loss is more than {LOSS_BAR} from float64's, or weights are farther from it than PyTorch's")
    for name in () if arguments.trainings else arguments.cases:
        sides = [side for side in arguments.sides if name != "sd15" or side != "plain"]
        found[name] = measure(name, sides, arguments.steps if name == "quickstart" else max(3, arguments.steps // 4))
        print(table(name, found[name]), flush=True)
    save_results(arguments, found)


if __name__ == "__main__":
    main()
