"""Text to image: a frozen VAE, a text encoder and a UNet (latent diffusion, Rombach et al. 2022, arXiv:2112.10752)."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from ..config.option import Bounds, Needs, option
from ..config.published_models import DEFAULT_MODEL, DEFAULT_TOKENIZER, DEFAULT_VAE, KNOWN_MODELS
from ..networks.configs import SIZE_EMBEDDING, check_fit, check_sizes_taken, read_new_config
from ..utils.errors import ConfigError, ModelError
from ..weights.configs import read_folder_config
from .base import Family, Sitting, check_sizes

_model = partial(option, section="model")
_loss = partial(option, section="model", identity=True)
_optimizer = partial(option, section="optimizer")
_drawn = partial(option, section="validation")
_ABOVE_0, _NOT_NEGATIVE, _SHARE = Bounds(above=0), Bounds(least=0), Bounds(least=0, most=1)


def _trains_text_encoder(given) -> bool:
    return not (given.freeze_text_encoder or given.pretrained_text_encoder_name)


@dataclass(kw_only=True)
class LdmConfig:
    """What is trained: which components, from where, with which target."""

    family: ClassVar[str] = "ldm"
    loop_defaults: ClassVar[dict] = {}

    model_name_or_path: str | None = _model(
        None,
        "What to start from: a pipeline's folder (ppldm's, ppdiffusers', diffusers'), a checkpoint, CompVis' .ckpt, a "
        "name (docs/weights.md); or a published size, built and initialised here: "
        f"{' (32 layers, the default), '.join(KNOWN_MODELS)} (12 layers).",
        also=("pretrained_model_name_or_path",),
        kind="model",
    )
    vae_name_or_path: str | None = _model(
        None,
        "Frozen VAE: a folder with config.json and weights, a pipeline's folder, a .ckpt, or a name "
        f"(default: {DEFAULT_VAE}).",
        kind="model",
    )
    unet_name_or_path: str | None = _model(
        None, "UNet to start from, such as Stable Diffusion's: a folder, a .ckpt, or a name.", kind="model"
    )
    original_config_file: str | None = _model(
        None,
        "YAML file of a .ckpt (default: the one of its name beside it); config.json of the VAE of a checkpoint that "
        "holds no model.json.",
        kind="path",
    )
    load_ema: bool = _model(False, "Start from the averaged weights of a checkpoint or a .ckpt.")
    offline: bool = _model(False, "Never touch the network: names must be in the cache.")
    pretrained_text_encoder_name: str | None = _model(
        None, "A frozen CLIP text encoder in place of a trained LDMBert: a folder, or a name.", kind="model"
    )
    text_encoder_config_file: str | None = _model(
        None, "Config of an LDMBert text encoder, built from scratch: a JSON file, or a name.", kind="network"
    )
    unet_config_file: str | None = _model(
        None, "Config of a UNet2DConditionModel, built from scratch: a JSON file, or a name.", kind="network"
    )
    tokenizer_name: str | None = _model(
        None,
        f"Folder with vocab.txt, or a name: bert-base-chinese, ernie-1.0, {DEFAULT_TOKENIZER} (the default).",
        kind="tokenizer",
    )
    model_max_length: int = _loss(
        77, "Tokens of a caption; longer ones are cut, shorter ones padded.", bounds=_ABOVE_0, unit="tokens"
    )
    mask_pad_tokens: bool = _loss(
        False, "Attention ignores the padding behind captions, in the text encoder and the UNet; saved with the model."
    )
    empty_caption: str = _loss(
        "embedding",
        "What the UNet sees of an empty caption, in guidance too: the embedding of it, or zeros; saved with the model.",
        choices=("embedding", "zeros"),
    )
    prediction_type: str = _loss("epsilon", "What the UNet predicts.", choices=("epsilon", "v_prediction"))
    noise_offset: float = _loss(
        0.0, "Strength of a noise that is constant over each latent channel; 0 is none.", bounds=_NOT_NEGATIVE
    )
    input_perturbation: float = _loss(
        0.0,
        "Strength of a second noise in what the UNet sees but does not predict (0.1 recommended).",
        bounds=_NOT_NEGATIVE,
    )
    snr_gamma: float | None = _loss(
        None, "Min-SNR loss weighting with this gamma (5.0 recommended); default: none.", bounds=_ABOVE_0
    )
    rescale_betas_zero_snr: bool = _loss(False, "A noise schedule that ends in noise alone; needs v_prediction.")
    size_conditioning: bool = _loss(
        False,
        "Tell the UNet each picture's own size, where its crop lies and the size trained at, as SDXL's is told; a new "
        "UNet gets layers for it, which are saved with the model (docs/shapes.md).",
    )
    size_conditioning_drop: float = _loss(
        0.0,
        "Of this share of the samples it is told six zeros: sizes unknown.",
        bounds=_SHARE,
        needs=Needs("--size_conditioning", lambda given: given.size_conditioning),
    )
    freeze_text_encoder: bool = _loss(False, "Train the UNet only.")
    unet_learning_rate: float | None = _optimizer(
        None, "Learning rate of the UNet (default: --learning_rate).", bounds=_ABOVE_0, identity=True
    )
    text_encoder_learning_rate: float | None = _optimizer(
        None,
        "Learning rate of the text encoder (default: --learning_rate).",
        bounds=_ABOVE_0,
        identity=True,
        needs=Needs(
            "a text encoder that is trained: those of --freeze_text_encoder and --pretrained_text_encoder_name are not",
            _trains_text_encoder,
        ),
    )
    use_ema: bool = _optimizer(False, "Keep an exponential moving average of the weights; pictures are drawn with it.")
    ema_decay: float = _optimizer(
        0.9999,
        "Decay of the average; reached gradually.",
        bounds=_SHARE,
        needs=Needs(
            "--use_ema without --ema_start_iters, --ema_iters and --ema_beta, which have a decay of their own",
            lambda given: given.use_ema and given.ema_start_iters is given.ema_iters is given.ema_beta is None,
        ),
    )
    ema_start_iters: int | None = _optimizer(
        None, "With one of the ema_ flags below: copy the weights up to this update (default: 5000).", unit="updates"
    )
    ema_iters: int | None = _optimizer(
        None,
        "Average every this many updates, with --ema_beta for a decay (default: 100).",
        bounds=_ABOVE_0,
        unit="updates",
    )
    ema_beta: float | None = _optimizer(
        None, "Decay of the average that is taken every --ema_iters updates (default: 0.9).", bounds=_SHARE
    )
    num_inference_steps: int = _drawn(
        200, "DDIM steps of the sample pictures drawn while training.", bounds=_ABOVE_0, unit="steps"
    )
    image_logging_steps: int = _drawn(
        1000, "Draw sample pictures every this many updates; 0: never.", bounds=_NOT_NEGATIVE, unit="updates"
    )
    enable_xformers_memory_efficient_attention: bool = _model(
        False, "Memory-efficient attention in the UNet (GPU only)."
    )

    def check(self) -> None:
        """Raises ConfigError for combinations that cannot work."""
        components = (
            self.text_encoder_config_file, self.unet_config_file, self.vae_name_or_path, self.unet_name_or_path,
            self.pretrained_text_encoder_name,
        )  # fmt: skip
        if self.starts_from_pipeline and any(components):
            name = self.model_name_or_path
            what = "is a whole pipeline" if Path(name).exists() else "is not here, so it must be a pipeline on a hub"
            raise ConfigError(
                f"--model_name_or_path {name} {what}; correct it, or omit --vae_name_or_path, --unet_name_or_path, "
                "--pretrained_text_encoder_name, --text_encoder_config_file and --unet_config_file"
            )
        for name, flag in (
            ("unet_name_or_path", "unet_config_file"),
            ("pretrained_text_encoder_name", "text_encoder_config_file"),
        ):
            if getattr(self, name) and getattr(self, flag):
                raise ConfigError(f"--{name} brings its own config; do not give --{flag} beside it")
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
    def trains_text_encoder(self) -> bool:
        """False where it is frozen."""
        return _trains_text_encoder(self)

    @property
    def starts_from_pipeline(self) -> bool:
        """True where the weights come from an exported pipeline, not from configs."""
        return self.model_name_or_path is not None and self.model_name_or_path not in KNOWN_MODELS

    def component_names(self) -> dict[str, str | None]:
        """Component to the folder or name of weights of its own, as the flags say."""
        names = (self.vae_name_or_path, self.pretrained_text_encoder_name, self.unet_name_or_path)
        return dict(zip(LatentDiffusion.components, names, strict=True))

    def config_files(self) -> dict[str, str]:
        """Text encoder and UNet to their config files: those given, else those of the published size."""
        text_encoder, unet = KNOWN_MODELS[self.model_name_or_path or DEFAULT_MODEL]
        return {
            "text_encoder": self.text_encoder_config_file or text_encoder,
            "unet": self.unet_config_file or unet,
        }

    def new_configs(self) -> dict[str, dict]:
        """The completed configs of the components that are built anew. Raises ConfigError."""
        found = {
            name: read_new_config("ldmbert" if name == "text_encoder" else name, file, f"--{name}_config_file")
            for name, file in self.config_files().items()
            if not self.component_names()[name]
        }
        if self.size_conditioning and "unet" in found and found["unet"]["addition_embed_type"] is None:
            found["unet"] |= SIZE_EMBEDDING
        return found


class LatentDiffusion(Family):
    """Trains the UNet, and the text encoder unless that is frozen."""

    name = "ldm"
    plural = "text-to-image models"
    Config = LdmConfig
    components: ClassVar = {"vae": "vae", "text_encoder": "text_encoder", "unet": "unet"}
    needs_process = True
    export_folder = "pipeline"

    def check(self, config: LdmConfig, data) -> None:
        """Configs that are here: each by itself, together, and with the size of pictures and captions."""
        if data.text_embeddings != "off" and config.trains_text_encoder:
            raise ConfigError(
                "--text_embeddings cached is for a text encoder that is not trained; add --freeze_text_encoder, or "
                "start from a frozen one with --pretrained_text_encoder_name"
            )
        if config.starts_from_pipeline:
            names, configs = dict.fromkeys(self.components, config.model_name_or_path), {}
        else:
            names, configs = config.component_names(), config.new_configs()
        found = {name: read_folder_config(name, place) for name, place in names.items() if place}
        configs = {name: found.get(name) or configs.get(name) for name in self.components}
        check_fit(configs)
        if configs["unet"]:
            check_sizes_taken(configs["unet"], config.size_conditioning)
        if configs["vae"]:
            check_sizes(configs["vae"], data)
        positions = (found.get("text_encoder") or {}).get("max_position_embeddings", config.model_max_length)
        if positions < config.model_max_length:
            raise ModelError(
                f"the text encoder knows {positions} positions, fewer than --model_max_length "
                f"{config.model_max_length}; use the model's own"
            )

    def identity(self, config: LdmConfig, data) -> dict:
        """The average."""
        return {"ema": str(self.average(config))}

    def average(self, config: LdmConfig):
        """At intervals where one of their settings is given, else gradual with `--use_ema`."""
        from ..networks.ema import GradualDecay, IntervalDecay

        if config.averages_at_intervals:
            given = {"start_iters": config.ema_start_iters, "iters": config.ema_iters, "beta": config.ema_beta}
            return IntervalDecay(**{name: value for name, value in given.items() if value is not None})
        return GradualDecay(config.ema_decay) if config.use_ema else None

    def build(self, config: LdmConfig, data, seed: int):
        """From weights or from configs, with the tokenizer of what it starts from unless another is named."""
        from ..data.text.tokenizer import load_tokenizer
        from .ldm_build import build_ldm, tokenizer_source

        tokenizer = load_tokenizer(tokenizer_source(config), config.model_max_length, config.offline)
        model = build_ldm(config, tokenizer.vocab_size, seed)
        model.tokenizer = tokenizer
        model.mask_behind = tokenizer.end_id if config.mask_pad_tokens else None
        model.empty_end = tokenizer.end_id if config.empty_caption == "zeros" else None
        check_sizes(model.vae.config, data)
        return model

    def draw(self, sitting: Sitting) -> tuple[dict, dict]:
        """Reconstructions, and samples at each guidance scale."""
        from .ldm_draw import draw_sample_pictures

        return draw_sample_pictures(sitting), {}

    def export(self, model, config: LdmConfig, dataset, folder: Path, average, metadata: dict) -> None:
        """A ppdiffusers pipeline."""
        from ..weights.write import write_weights
        from .ldm_build import weights_of

        weights = weights_of(model, average)
        weights.metadata = {
            **metadata, "model_max_length": config.model_max_length, "ema": average is not None
        }  # fmt: skip
        write_weights(weights, "ppdiffusers", folder)


FAMILY = LatentDiffusion()
