"""The flags that describe model and data, the same for both training scripts. No paddle here.

A field is a flag: its type, default and help. `check` refuses what cannot work, naming flag, value and remedy.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Optional

from ..utils.errors import ConfigError

CONFIG_DIR = Path(__file__).parents[2] / "examples" / "config"

# Published model names, each a size that is built from configs and initialised here as PyTorch does: those folders hold
# nothing but such initial weights, so nothing needs to be downloaded for them.
KNOWN_MODELS = {
    "CompVis/ldm_laion400M_pretrain": ("ldmbert.json", "unet.json"),
    "CompVis/ldm_12_laion400M_pretrain": ("ldmbert_12.json", "unet_12.json"),
}
DEFAULT_MODEL = "CompVis/ldm_laion400M_pretrain"
DEFAULT_VAE = "CompVis/stable-diffusion-v1-4/vae"
DEFAULT_TOKENIZER = "bert-base-uncased"


@dataclass
class ModelArguments:
    """What is trained: which parts, from where, with which target."""

    _argument_group_name = "model"
    loop_defaults: ClassVar[dict] = {}

    model_name_or_path: Optional[str] = field(
        default=None,
        metadata={
            "help": "What to start from: a pipeline's folder (ppldm's, ppdiffusers', diffusers'), a checkpoint, "
            "CompVis' .ckpt, a name (docs/weights.md); or a published size, built and initialised here: "
            f"{' (32 layers, the default), '.join(KNOWN_MODELS)} (12 layers)."
        },
    )
    vae_name_or_path: Optional[str] = field(
        default=None,
        metadata={
            "help": "Frozen VAE: a folder with config.json and weights, a pipeline's folder, a .ckpt, or a name "
            f"(default: {DEFAULT_VAE})."
        },
    )
    unet_name_or_path: Optional[str] = field(
        default=None,
        metadata={"help": "UNet to start from, such as Stable Diffusion's: a folder, a .ckpt, or a name."},
    )
    original_config_file: Optional[str] = field(
        default=None, metadata={"help": "YAML file of a .ckpt (default: the one of its name beside it)."}
    )
    load_ema: bool = field(
        default=False, metadata={"help": "Start from the averaged weights of a checkpoint or a .ckpt."}
    )
    offline: bool = field(default=False, metadata={"help": "Never touch the network: names must be in the cache."})
    pretrained_text_encoder_name: Optional[str] = field(
        default=None,
        metadata={"help": "A frozen CLIP text encoder in place of a trained LDMBert: a folder, or a name."},
    )
    text_encoder_config_file: Optional[str] = field(
        default=None, metadata={"help": "JSON config of an LDMBert text encoder, built from scratch."}
    )
    unet_config_file: Optional[str] = field(
        default=None, metadata={"help": "JSON config of a UNet2DConditionModel, built from scratch."}
    )
    tokenizer_name: Optional[str] = field(
        default=None,
        metadata={
            "help": "Folder with vocab.txt, or a name: bert-base-chinese, ernie-1.0, "
            f"{DEFAULT_TOKENIZER} (the default)."
        },
    )
    model_max_length: int = field(
        default=77, metadata={"help": "Tokens of a caption; longer ones are cut, shorter ones padded."}
    )
    prediction_type: str = field(
        default="epsilon", metadata={"help": "What the UNet predicts.", "choices": ["epsilon", "v_prediction"]}
    )
    noise_offset: float = field(
        default=0.0, metadata={"help": "Strength of a noise that is constant over each latent channel; 0 is none."}
    )
    input_perturbation: float = field(
        default=0.0,
        metadata={"help": "Strength of a second noise in what the UNet sees but does not predict (0.1 recommended)."},
    )
    snr_gamma: Optional[float] = field(
        default=None, metadata={"help": "Min-SNR loss weighting with this gamma (5.0 recommended); default: none."}
    )
    rescale_betas_zero_snr: bool = field(
        default=False, metadata={"help": "A noise schedule that ends in noise alone; needs v_prediction."}
    )
    freeze_text_encoder: bool = field(default=False, metadata={"help": "Train the UNet only."})
    use_ema: bool = field(
        default=False,
        metadata={"help": "Keep an exponential moving average of the weights; pictures are drawn with it."},
    )
    ema_decay: float = field(default=0.9999, metadata={"help": "Decay of the average; reached gradually."})
    ema_start_iters: Optional[int] = field(
        default=None,
        metadata={"help": "With one of the ema_ flags below: copy the weights up to this update (default: 5000)."},
    )
    ema_iters: Optional[int] = field(
        default=None, metadata={"help": "Average every this many updates, with --ema_beta for a decay (default: 100)."}
    )
    ema_beta: Optional[float] = field(
        default=None, metadata={"help": "Decay of the average that is taken every --ema_iters updates (default: 0.9)."}
    )
    num_inference_steps: int = field(
        default=200, metadata={"help": "DDIM steps of the sample pictures drawn while training."}
    )
    image_logging_steps: int = field(
        default=1000, metadata={"help": "Draw sample pictures every this many updates; 0 or less: never."}
    )
    enable_xformers_memory_efficient_attention: bool = field(
        default=False, metadata={"help": "Memory-efficient attention in the UNet (GPU only)."}
    )

    def check(self) -> None:
        """Raises ConfigError for values and combinations that cannot work."""
        parts = (
            self.text_encoder_config_file, self.unet_config_file, self.vae_name_or_path, self.unet_name_or_path,
            self.pretrained_text_encoder_name,
        )  # fmt: skip
        if self.starts_from_pipeline and any(parts):
            raise ConfigError(
                f"--model_name_or_path {self.model_name_or_path} is a whole pipeline; do not give "
                "--vae_name_or_path, --unet_name_or_path, --pretrained_text_encoder_name, --text_encoder_config_file "
                "or --unet_config_file beside it"
            )
        if self.unet_name_or_path and self.unet_config_file:
            raise ConfigError("--unet_name_or_path brings its own config; do not give --unet_config_file beside it")
        if self.pretrained_text_encoder_name and self.text_encoder_config_file:
            raise ConfigError(
                "--pretrained_text_encoder_name brings its own config; do not give --text_encoder_config_file beside it"
            )
        _require_positive("model_max_length", self.model_max_length)
        _require_positive("num_inference_steps", self.num_inference_steps)
        for name in ("ema_decay", "ema_beta"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"--{name} {getattr(self, name)} must be from 0 to 1")
        if self.ema_iters is not None:
            _require_positive("ema_iters", self.ema_iters)
        if self.snr_gamma is not None:
            _require_positive("snr_gamma", self.snr_gamma)
        for name in ("noise_offset", "input_perturbation"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"--{name} {getattr(self, name)} must be 0 or more")
        if self.rescale_betas_zero_snr and self.prediction_type == "epsilon":
            raise ConfigError(
                "--rescale_betas_zero_snr with --prediction_type epsilon cannot learn: the last timestep is noise "
                "alone; add --prediction_type v_prediction"
            )

    @property
    def averages_at_intervals(self) -> bool:
        """True where an average of the form of Stable Cascade's training is asked for."""
        return any(value is not None for value in (self.ema_start_iters, self.ema_iters, self.ema_beta))

    @property
    def starts_from_pipeline(self) -> bool:
        """True where the weights come from an exported pipeline, not from configs."""
        return self.model_name_or_path is not None and self.model_name_or_path not in KNOWN_MODELS

    def config_files(self) -> tuple[Path, Path]:
        """(text encoder, UNet): those given, else those of the published size."""
        text_encoder, unet = KNOWN_MODELS[self.model_name_or_path or DEFAULT_MODEL]
        return (
            Path(self.text_encoder_config_file or CONFIG_DIR / text_encoder),
            Path(self.unet_config_file or CONFIG_DIR / unet),
        )


@dataclass
class AutoencoderArguments:
    """What an autoencoder is trained as."""

    _argument_group_name = "autoencoder"
    # Of the hand-written loop's flags, where the defaults of the published text-to-image script do not fit.
    loop_defaults: ClassVar[dict] = {
        "output_dir": "./output-autoencoder",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 1e-4,
    }

    vae_config_file: str = field(
        default=str(CONFIG_DIR / "vae_tiny.json"),
        metadata={"help": "JSON config of an AutoencoderKL, built from scratch."},
    )
    reconstruction_loss: str = field(
        default="l1",
        metadata={
            "help": "Error between picture and reconstruction: absolute, squared, or their sum.",
            "choices": ["l1", "mse", "l1_mse"],
        },
    )
    kl_weight: float = field(
        default=1e-6,
        metadata={"help": "Weight of the KL divergence, in nats a picture, against the summed error of its pixels."},
    )
    image_logging_steps: int = field(
        default=1000, metadata={"help": "Draw reconstructions and log PSNR every this many updates; 0: never."}
    )

    def check(self) -> None:
        """Raises ConfigError for values that cannot work."""
        if not self.kl_weight >= 0:
            raise ConfigError(f"--kl_weight {self.kl_weight} must be 0 or more")


@dataclass
class DataArguments:
    """What is trained on: which rows, at which size, in which order."""

    _argument_group_name = "data"

    file_list: str = field(
        default="./data/filelist/train.filelist.list",
        metadata={"help": "A list of filelists (one a line, optionally with a weight), or one filelist of parts."},
    )
    layout: str = field(
        default="default",
        metadata={"help": "Column order of the parts of lists that do not name one themselves (docs/data_format.md)."},
    )
    where: Optional[str] = field(
        default=None,
        metadata={
            "help": 'Train on the rows for which this holds, as in "width>=512 and aesthetic>=5"; @FILE reads it from '
            "a file (docs/data_format.md)."
        },
    )
    resolution: int = field(default=256, metadata={"help": "Side of the square training pictures, pixels."})
    num_records: int = field(
        default=10000000,
        metadata={"help": "Accepted for older command lines and not used: the number of rows is read from the index."},
    )
    buffer_size: int = field(
        default=100,
        metadata={
            "help": "Accepted for older command lines and not used: the order is a windowed shuffle of row numbers."
        },
    )
    shuffle_every_n_samples: int = field(
        default=5, metadata={"help": "Accepted for older command lines and not used, as --buffer_size."}
    )
    caption_drop: float = field(
        default=0.1,
        metadata={"help": "Share of captions replaced by the empty one, for classifier-free guidance."},
    )
    crop_fraction: float = field(
        default=0.9,
        metadata={"help": "Side of the crop by the resized picture's short side: 0.9 resizes to 284 to crop 256."},
    )
    interpolation: str = field(
        default="lanczos",
        metadata={
            "help": "How pictures are resized: as Pillow does, or area, the mean of the pixels covered, which is "
            "faster.",
            "choices": ["lanczos", "bicubic", "bilinear", "area"],
        },
    )
    random_crop: bool = field(default=True, metadata={"help": "Crop at random; otherwise the centre."})
    random_flip: bool = field(default=False, metadata={"help": "Mirror half of the pictures. Mirrors text too."})
    validation_file_list: Optional[str] = field(
        default=None,
        metadata={"help": "As --file_list, rows that are not trained on: their loss is logged as validation_loss."},
    )
    validation_rows: int = field(
        default=256, metadata={"help": "How many of these rows, spread evenly over them, are looked at."}
    )
    max_skipped: int = field(
        default=100, metadata={"help": "Stop after this many unusable rows one after another; 0 stops at the first."}
    )

    def check(self) -> None:
        """Raises ConfigError for values that cannot work."""
        _require_positive("resolution", self.resolution)
        _require_positive("validation_rows", self.validation_rows)
        if not 0 <= self.caption_drop <= 1:
            raise ConfigError(f"--caption_drop {self.caption_drop} must be from 0 to 1")
        if not 0 < self.crop_fraction <= 1:
            raise ConfigError(f"--crop_fraction {self.crop_fraction} must be above 0 and at most 1")


def _require_positive(name: str, value) -> None:
    if not value > 0:  # NaN is not, either
        raise ConfigError(f"--{name} {value} must be above 0")
