"""Text to image by a frozen VAE, a text encoder and what removes the noise: all but the settings of such families; and
those whose denoiser is a UNet (latent diffusion, Rombach et al. 2022, arXiv:2112.10752).

ldm               by default as published: LDMBert and UNet from scratch over the VAE of Stable Diffusion; a CLIP or
                  a T5 may stand frozen in place of an LDMBert
stable_diffusion  1.x and 2.x: CLIP's text encoder, frozen or trained, or a frozen T5; from --model_name_or_path all,
                  else each from --<component>_name_or_path or --<component>_config_file (docs/finetune.md)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from ..config.network_files import DEFAULT_MODEL, DEFAULT_TOKENIZER, DEFAULT_VAE, KNOWN_MODELS
from ..config.option import Needs, Positive, option
from ..data.text.tokenizer import load_tokenizer
from ..diffusion.drawing import Drawing
from ..networks.configs import (
    CLIPS,
    POOLS_CAPTIONS,
    TEXT_ENCODERS,
    check_fit,
    check_sizes_taken,
    downscale_factor,
    is_ldmbert,
    is_pixels,
    is_t5,
    with_statistics,
)
from ..utils.errors import ConfigError, ModelError
from ..weights.model_file import Component
from ..weights.source import config_here
from .base import Family, Sitting, check_sides, published_config
from .settings import PartsSettings, TextToImageSettings, UNetSettings, config_option, learning_rate_of, weights_option

_model = partial(option, section="model")


class TextToImage(Family):
    """Trains what removes the noise, and the text encoder unless that is frozen. `Config` is a TextToImageSettings."""

    plural = "text-to-image models"
    components: ClassVar = {"vae": "vae", "text_encoder": "text_encoder", "unet": "unet"}
    needs_process = True
    export_folder = "pipeline"

    def check(self, config: TextToImageSettings, data) -> None:
        """Configs that are here: each by itself, together, and with the size of pictures and captions."""
        if data.text_embeddings != "off" and config.trains_text_encoder:
            raise ConfigError(
                f"--text_embeddings cached is for a text encoder that is not trained; {config.how_to_freeze}"
            )
        configs = self.configs(config)
        self.check_configs(configs, config)
        if configs.get("vae"):
            check_sides(downscale_factor(configs["vae"]), "the VAE's", data)
            if data.latents != "off" and is_pixels(configs["vae"]):
                raise ConfigError(f"--latents {data.latents} is for a VAE's, and pixels are their own; omit it")
        read = configs["text_encoder"] if self.places(config).get("text_encoder") else None
        positions = (read or {}).get("max_position_embeddings", config.model_max_length)
        if positions < config.model_max_length:
            raise ModelError(
                f"the text encoder knows {positions} positions, fewer than --model_max_length "
                f"{config.model_max_length}; use the model's own"
            )

    def configs(self, config, published: bool = False) -> dict[str, dict | None]:
        """The completed configs of components, None for weights that are not here, unless `published` are asked for.
        Raises ConfigError, ModelError."""
        found: dict[str, dict | None] = {}
        for name, place in self.places(config).items():
            kind = self.components[name]
            found[name] = config_here(kind, place) if place else self.new_config(name, config, found)
            if place and published and not found[name]:
                found[name] = self.published(name, config, found)
            if name == "vae" and found[name] and config.latents_statistics:
                found[name] = with_statistics(found[name], config.latents_statistics)
        return found

    def published(self, name: str, config, found: dict) -> dict | None:
        """That of a component of a published model that is not here. Raises ModelError where unknown."""
        return published_config(self.components[name], name, self.places(config)[name])

    def new_config(self, name: str, config, found: dict) -> dict | None:
        """That of a component built anew, beside those `found`; None where it follows from what is not here."""
        return config.new_config(name)

    def places(self, config: TextToImageSettings) -> dict[str, str | None]:
        """Component to the folder or name of its weights; None where it is built anew."""
        if config.starts_from_pipeline:
            return dict.fromkeys(self.components, config.model_name_or_path)
        return config.component_names()

    def networks(self, config: TextToImageSettings, data) -> dict[str, Component]:
        """Also of published models that are not here. A new text encoder has the words of a tokenizer in a folder."""
        configs = self.configs(config, published=True)
        for name in (name for name, place in self.places(config).items() if name in TEXT_ENCODERS and not place):
            sizes = {"max_position_embeddings": config.model_max_length} if name in CLIPS else {}
            if config.tokenizer_name and Path(config.tokenizer_name).is_dir():
                sizes["vocab_size"] = load_tokenizer(config.tokenizer_name, config.model_max_length).vocab_size
            configs[name] |= sizes
        self.check_configs(configs, config)
        return {name: Component(one, name in config.trained) for name, one in configs.items()}

    def check_configs(self, configs: dict, config: TextToImageSettings) -> None:
        """Raises ModelError where completed configs, by name, of those that are known, make no model of this family,
        and ConfigError where a T5 is to be trained."""
        check_fit(configs)
        if config.trains_text_encoder and configs.get("text_encoder") and is_t5(configs["text_encoder"]):
            raise ConfigError(f"the text encoder is a T5, which stays frozen; {config.how_to_freeze}")
        if configs.get("unet"):
            check_sizes_taken(configs["unet"], config.size_conditioning)
            if config.mask_pad_tokens and configs["unet"]["addition_embed_type"] == POOLS_CAPTIONS:
                raise ConfigError("the UNet pools captions with their padding; omit --mask_pad_tokens")

    def build(self, config: TextToImageSettings, data, seed: int):
        """From weights or from configs, with the tokenizer of what it starts from unless another is named."""
        tokenizer = self.tokenizer(config)
        model = self.make(config, data, seed, tokenizer)
        model.tokenizer = tokenizer
        model.usual = Drawing(**config.kept()).fit(model.process, model.usual)
        if config.trains_adapters:
            from ..networks.adapters import adapt
            from ..weights.lora.files import read_lora

            adapt(model, config, seed, read_lora(config.lora_from).components if config.lora_from else None)
        return model

    def tokenizer(self, config: TextToImageSettings):
        """Of captions. Raises ConfigError."""
        from .ldm_build import tokenizer_source

        return load_tokenizer(tokenizer_source(config), config.model_max_length, config.offline)

    def read_tokenizer(self, place, components: Iterable[str], said: dict):
        """That of a trained model with these components: in a folder, or by name. said: lengths. Raises ConfigError."""
        return load_tokenizer(place, said["model_max_length"])

    def make(self, config: TextToImageSettings, data, seed: int, tokenizer):
        """The model for captions of this tokenizer."""
        from .ldm_build import build_ldm

        model = build_ldm(config, getattr(tokenizer, "vocab_sizes", tokenizer.vocab_size), seed, data.resolution)
        model.read_by(tokenizer, config.mask_pad_tokens, config.empty_caption)
        check_sides(downscale_factor(model.vae.config), "the VAE's", data)
        if methods := config.chosen_methods():
            from ..methods.base import attach_methods

            attach_methods(model, methods, seed)
        return model

    def new_network(self, name: str, config: dict, parts: dict, seed: int):
        """A component of a completed config, that is built anew beside the `parts` before it."""
        from ..networks.build import build_network

        return build_network(self.components[name], config, seed)

    def draw(self, sitting: Sitting) -> tuple[dict, dict]:
        """Samples at each guidance scale, and what the autoencoder makes of pictures."""
        from .ldm_draw import draw_sample_pictures

        return draw_sample_pictures(sitting), {}

    def export(self, model, config: TextToImageSettings, dataset, folder: Path, average, metadata: dict) -> None:
        """A ppdiffusers pipeline."""
        from ..weights.write import write_weights
        from .ldm_build import weights_of

        weights = weights_of(model, average)
        weights.metadata = {**metadata, "model_max_length": config.model_max_length, "ema": average is not None}
        write_weights(weights, "ppdiffusers", folder)


@dataclass(kw_only=True)
class LdmConfig(UNetSettings):
    """What is trained: which components, from where, with which target."""

    family: ClassVar[str] = "ldm"
    new_text_encoder = "ldmbert"
    default_tokenizer = DEFAULT_TOKENIZER
    replaced_by_pipeline = (
        *("vae_name_or_path", "unet_name_or_path", "pretrained_text_encoder_name"),
        *("text_encoder_config_file", "unet_config_file"),
    )
    how_to_freeze = "add --freeze_text_encoder, or start from a frozen one with --pretrained_text_encoder_name"

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
    unet_name_or_path: str | None = _model(None, kind="model")
    "UNet to start from, such as Stable Diffusion's: a folder, a .ckpt, or a name."
    pretrained_text_encoder_name: str | None = _model(None, kind="model")
    "A frozen CLIP or T5 text encoder in place of a trained LDMBert: a folder, or a name."
    text_encoder_config_file: str | None = _model(None, kind="network")
    "Config of an LDMBert text encoder, built from scratch: a JSON file, or a name."
    unet_config_file: str | None = _model(None, kind="network")
    "Config of a UNet2DConditionModel, built from scratch: a JSON file, or a name."
    tokenizer_name: str | None = _model(
        None,
        f"Folder with vocab.txt, or a name: bert-base-chinese, ernie-1.0, {DEFAULT_TOKENIZER} (the default).",
        kind="tokenizer",
    )
    freeze_text_encoder: bool = _model(False, "Train the UNet only.", identity=True)
    text_encoder_learning_rate: Positive | None = learning_rate_of(
        "the text encoder",
        Needs(
            "a text encoder that is trained: those of --freeze_text_encoder and --pretrained_text_encoder_name are not",
            lambda given: given.trains_text_encoder,
        ),
    )

    def check(self) -> None:
        given = [one for one in self.replaced_by_pipeline if getattr(self, one)]
        if self.starts_from_pipeline and given:
            name = self.model_name_or_path
            what = "is a whole pipeline" if Path(name).exists() else "is not here, so it must be a pipeline on a hub"
            omitted = " and ".join(f"--{one}" for one in given)
            raise ConfigError(f"--model_name_or_path {name} {what}; correct it, or omit {omitted}")
        for name, flag in (
            ("unet_name_or_path", "unet_config_file"),
            ("pretrained_text_encoder_name", "text_encoder_config_file"),
        ):
            if getattr(self, name) and getattr(self, flag):
                raise ConfigError(f"--{name} brings its own config; do not give --{flag} beside it")
        super().check()

    @property
    def train_text_encoder(self) -> bool:
        return not (self.freeze_text_encoder or self.pretrained_text_encoder_name)

    @property
    def starts_from_pipeline(self) -> bool:
        """True where the weights come from an exported pipeline, not from configs."""
        return self.model_name_or_path is not None and self.model_name_or_path not in KNOWN_MODELS

    def name_of(self, component: str) -> str | None:
        """The published VAE where none is named."""
        if component == "vae":
            return self.vae_name_or_path or DEFAULT_VAE
        return self.pretrained_text_encoder_name if component == "text_encoder" else self.unet_name_or_path

    def file_of(self, component: str) -> str | None:
        """Of the published size where none is given."""
        published = dict(
            zip(("text_encoder", "unet"), KNOWN_MODELS[self.model_name_or_path or DEFAULT_MODEL], strict=True)
        )
        return super().file_of(component) or published.get(component)


class LatentDiffusion(TextToImage):
    """Of an LDMBert that is trained, or of a text encoder that is frozen."""

    Config = LdmConfig


@dataclass(kw_only=True)
class StableDiffusionConfig(PartsSettings, UNetSettings):
    """What is trained, and where its components come from."""

    family: ClassVar[str] = "stable_diffusion"
    new_text_encoder = "clip"

    unet_name_or_path: str | None = weights_option("UNet to start from", in_parts=True)
    unet_config_file: str | None = config_option(
        "unet", "a UNet2DConditionModel that is trained from scratch", "unet_sd1, unet_sd2", in_parts=True
    )


class StableDiffusion(TextToImage):
    plural = "Stable Diffusion models"
    Config = StableDiffusionConfig

    def check_configs(self, configs: dict, config: StableDiffusionConfig) -> None:
        """Also that the text encoder is no LDMBert."""
        super().check_configs(configs, config)
        if configs["text_encoder"] and is_ldmbert(configs["text_encoder"]):
            raise ModelError("the text encoder is an LDMBert, not CLIP's; train it as `family: ldm`")


FAMILIES = (LatentDiffusion(), StableDiffusion())
