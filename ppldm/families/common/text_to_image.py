"""What the families of VAE, text encoder and UNet, or transformer, share: all but their settings."""

from functools import partial
from pathlib import Path
from typing import ClassVar

from ...data.text.tokenizer import load_tokenizer
from ...networks.configs import check_fit, check_sizes_taken
from ...utils.errors import ConfigError, ModelError
from ...weights.configs import read_folder_config
from ...weights.model_file import Component
from ..base import Family, Sitting, check_sizes, published_config
from ..settings.text_to_image import TextToImageSettings


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
        found, new = self.known_configs(config)
        configs = {name: found.get(name) or new.get(name) for name in self.components}
        self.check_configs(configs, config)
        if configs["vae"]:
            check_sizes(configs["vae"], data)
        positions = (found.get("text_encoder") or {}).get("max_position_embeddings", config.model_max_length)
        if positions < config.model_max_length:
            raise ModelError(
                f"the text encoder knows {positions} positions, fewer than --model_max_length "
                f"{config.model_max_length}; use the model's own"
            )

    def known_configs(self, config: TextToImageSettings) -> tuple[dict, dict]:
        """(completed configs of components with weights, None for those that are not here to be read; of those built
        anew), by name. Raises ConfigError, ModelError."""
        new = {} if config.starts_from_pipeline else config.new_configs()
        return {name: read_folder_config(name, place) for name, place in self.places(config).items() if place}, new

    def places(self, config: TextToImageSettings) -> dict[str, str | None]:
        """Component to the folder or name of its weights; None where it is built anew."""
        whole = dict.fromkeys(self.components, config.model_name_or_path)
        return whole if config.starts_from_pipeline else config.component_names()

    def networks(self, config: TextToImageSettings, data) -> dict[str, Component]:
        """Also of published models that are not here. A new text encoder has the words of a tokenizer in a folder."""
        found, configs = self.known_configs(config)
        for name, place in self.places(config).items():
            if place:
                found[name] = found[name] or published_config(name, name, place)
        if "text_encoder" in configs:
            sizes = {"max_position_embeddings": config.model_max_length}
            if config.tokenizer_name and Path(config.tokenizer_name).is_dir():
                sizes["vocab_size"] = load_tokenizer(config.tokenizer_name, config.model_max_length).vocab_size
            configs["text_encoder"] |= sizes
        configs |= found
        self.check_configs(configs, config)
        whole = not config.trains_adapters
        trained = {"vae": False, "text_encoder": config.trains_text_encoder and whole, config.denoiser: whole}
        return {name: Component(configs[name], is_trained) for name, is_trained in trained.items()}

    def check_configs(self, configs: dict, config: TextToImageSettings) -> None:
        """Raises ModelError where completed configs, by name, of those that are known, make no model of this family."""
        check_fit(configs)
        if configs.get("unet"):
            check_sizes_taken(configs["unet"], config.size_conditioning)

    def build(self, config: TextToImageSettings, data, seed: int):
        """From weights or from configs, with the tokenizer of what it starts from unless another is named."""
        from ...weights.fill import config_of
        from .ldm_build import build_ldm, tokenizer_source

        tokenizer = load_tokenizer(tokenizer_source(config), config.model_max_length, config.offline)
        assemble = partial(self.assemble, config, seed)
        model = build_ldm(config, tokenizer.vocab_size, seed, data.resolution, assemble)
        model.tokenizer = tokenizer
        model.mask_behind = tokenizer.end_id if config.mask_pad_tokens else None
        model.empty_end = tokenizer.end_id if config.empty_caption == "zeros" else None
        self.check_configs({name: config_of(name, getattr(model, name)) for name in self.components}, config)
        check_sizes(model.vae.config, data)
        if config.trains_adapters:
            from ...networks.adapters import adapt

            adapt(model, config, seed)
        return model

    def assemble(self, config: TextToImageSettings, seed: int, *parts):
        """The model of built parts, as `LatentDiffusionModel` takes them."""
        from .ldm_build import class_of

        return class_of(self.components)(*parts)

    def draw(self, sitting: Sitting) -> tuple[dict, dict]:
        """Samples at each guidance scale, and what the autoencoder makes of pictures."""
        from .ldm_draw import draw_sample_pictures

        return draw_sample_pictures(sitting), {}

    def export(self, model, config: TextToImageSettings, dataset, folder: Path, average, metadata: dict) -> None:
        """A ppdiffusers pipeline."""
        from ...weights.write import write_weights
        from .ldm_build import weights_of

        weights = weights_of(model, average)
        weights.metadata = {
            **metadata, "model_max_length": config.model_max_length, "ema": average is not None
        }  # fmt: skip
        write_weights(weights, "ppdiffusers", folder)
