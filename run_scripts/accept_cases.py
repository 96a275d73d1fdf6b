"""What run_scripts/accept_gpu.py tries: its cases, and the command line of each."""

import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ppldm.utils.machine.devices import KINDS, Kind, launch_arguments  # noqa: E402

PYTHON = os.environ.get("PPLDM_PYTHON", sys.executable)
SCRIPTS = {name: f"examples/train_txt2img_laion400m_{name}.py" for name in ("no_trainer", "trainer")}

# Largest relative difference of a loss from the reference's, at any update. The first is for what computes the same in
# another order; the second for 10 bits of mantissa in products (TF32); the third for half precision.
EXACT, ROUNDED, HALF = 2e-3, 2e-2, 5e-2


@dataclass(frozen=True)
class Case:
    """A training to try: the flags that it adds, the number of cards, and how far its losses may be off `reference`.

    `stop`: a signal that is sent once a checkpoint is there, after which the same command is given again.
    """

    name: str
    flags: tuple[str, ...] = ()
    bar: float = EXACT
    cards: int = 1
    script: str = "no_trainer"
    stop: signal.Signals | None = None
    reference: str = "plain"


CASES = (
    Case("plain"),
    Case("plain again"),
    Case("bf16 O1", ("--bf16",), HALF),
    Case("bf16 O2", ("--bf16", "--fp16_opt_level", "O2"), HALF),
    Case("fp16 O1", ("--fp16",), HALF),
    Case("fp16 O2", ("--fp16", "--fp16_opt_level", "O2"), HALF),
    Case("two cards, half the batch each", cards=2),
    Case("two cards, sharding stage1", ("--sharding", "stage1"), cards=2),
    Case("two cards, sharding stage2", ("--sharding", "stage2"), cards=2),
    Case("two cards, sharding stage3", ("--sharding", "stage3"), cards=2),
    Case("killed, then resumed", stop=signal.SIGKILL),
    Case("stopped by SIGUSR1, then resumed", stop=signal.SIGUSR1),
    Case("fused attention", ("--enable_xformers_memory_efficient_attention",), ROUNDED),
    Case("TF32", ("--tf32",), ROUNDED),
    Case("cuDNN's search", ("--cudnn_search",)),
    Case("fused AdamW", ("--fused_adamw",)),
    Case("compiled (to_static)", ("--to_static",)),
    Case("recompute", ("--recompute",)),
    Case("Trainer", script="trainer"),
    Case("Trainer, two cards", cards=2, script="trainer"),
    Case("Trainer, bf16 O2", ("--bf16", "--fp16_opt_level", "O2"), HALF, script="trainer"),
    Case("two cards, bf16 O1", ("--bf16",), HALF, cards=2),
    Case("two cards, killed, then resumed", cards=2, stop=signal.SIGKILL),
    Case("all that is fast", ("--bf16", "--tf32", "--cudnn_search", "--fused_adamw",
                              "--enable_xformers_memory_efficient_attention"), HALF),
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """Networks (ppldm/config/networks) and a global batch of pictures of `resolution` pixels."""

    networks: str
    vae: str
    resolution: int
    batch: int
    tokens: int


SIZES = {
    "tiny": Size("tiny", "vae_tiny", 48, 4, 12),
    "middle": Size("middle", "vae_kl_f8", 256, 8, 12),
    "12": Size("12", "vae_kl_f8", 256, 4, 12),
}


@dataclass(frozen=True)
class Settings:
    """What the command line says. device: the name of a kind."""

    out: Path
    size: Size
    device: str
    steps: int

    @property
    def kind(self) -> Kind:
        """What is known of it."""
        return KINDS[self.device]


def data_command(settings: Settings) -> list[str]:
    """Pictures with captions, and a tokenizer."""
    return [PYTHON, "-m", "ppldm", "demo-data", "--out", str(settings.out / "data"), "--subset", "quickstart",
            "--size", str(settings.size.resolution)]  # fmt: skip


def autoencoder_command(settings: Settings) -> list[str]:
    """An autoencoder with random weights: its speed is that of a trained one."""
    program = (
        "from ppldm.utils.entry import entry\nwith entry():\n"
        "    from ppldm.networks.build import build_network, save_component\n"
        "    from ppldm.networks.configs import read_new_config\n"
        f"    config = read_new_config('vae', {settings.size.vae!r}, '')\n"
        "    save_component(build_network('vae', config, seed=0), "
        f"{str(settings.out / 'vae')!r})"
    )
    return [PYTHON, "-c", program]


def train_command(case: Case, settings: Settings) -> list[str]:
    """The command line of a case: on two cards each takes half of the batch."""
    size = settings.size
    launch = []
    if case.cards > 1:
        cards = launch_arguments(settings.kind, ",".join(map(str, range(case.cards))), {})
        log = settings.out / "logs" / slug(case)
        launch = ["-m", "ppldm.training.distributed.launch", *cards, "--log_dir", str(log)]
    flags = {
        "output_dir": folder_of(case, settings),
        "file_list": settings.out / "data/demo.filelist.list",
        "vae_name_or_path": settings.out / "vae",
        "text_encoder_config_file": f"ldmbert_{size.networks}",
        "unet_config_file": f"unet_{size.networks}",
        "tokenizer_name": settings.out / "data/tokenizer",
        "model_max_length": size.tokens,
        "resolution": size.resolution,
        "crop_fraction": 1.0,
        "random_crop": "false",
        "device": settings.device,
        "per_device_train_batch_size": size.batch // case.cards,
        "gradient_accumulation_steps": 1,
        "max_steps": settings.steps,
        "learning_rate": 1e-4,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_steps": max(1, settings.steps // 3),
        "save_total_limit": 1,
        "image_logging_steps": 0,
        "num_inference_steps": 2,
        "dataloader_num_workers": 2,
        "seed": 23,
        "report_to": "none",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    trainer = ["--do_train"] if case.script == "trainer" else []
    return [PYTHON, "-u", *launch, SCRIPTS[case.script], *trainer, *words, *case.flags]


def folder_of(case: Case, settings: Settings) -> Path:
    return settings.out / "runs" / slug(case)


def slug(case: Case) -> str:
    """The name as one of a folder."""
    return "".join(letter if letter.isalnum() else "_" for letter in case.name)


def why_not(case: Case, settings: Settings, cards: int) -> str | None:
    """Why a case cannot run on this machine; None where it can. On a CPU two processes stand for two cards."""
    if not settings.kind.is_cpu and cards < case.cards:
        return f"needs {case.cards} cards, this machine has {cards}"
    return None
