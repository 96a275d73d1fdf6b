"""New networks from completed configs, initialised as PyTorch does it.

Every builder of a whole model makes its parameters under a fresh `unique_name` guard, so that Paddle's own parameter
names, which key its optimizer's state, are the same in every process that builds the same model.
"""

import paddle
from ppdiffusers import AutoencoderKL, UNet2DConditionModel
from ppdiffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel
from ppdiffusers.transformers import CLIPTextConfig, CLIPTextModel

from ..utils.errors import ConfigError
from ..utils.log import get_logger
from .configs import check_config, check_fit, is_ldmbert, read_new_config
from .init import init_autoencoder, init_clip, init_text_encoder, init_unet

# What the classes raise on settings that no network can have.
UNBUILDABLE = (TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError)


def resize_text_encoder(config: dict, source, sizes: dict[str, int]) -> dict:
    """`config` with the tokenizer's `sizes` (vocab_size, max_position_embeddings), checked again."""
    for name, value in sizes.items():
        if config[name] != value:
            get_logger().info("text encoder: %s %s of %s becomes the tokenizer's %d",
                              name, config[name], source, value)  # fmt: skip
    return check_config("text_encoder", config | sizes, source, ConfigError)


def build_text_encoder(config: dict, seed: int) -> LDMBertModel | CLIPTextModel:
    """A new LDMBert, or CLIP text encoder, of a completed config."""
    if is_ldmbert(config):
        return init_text_encoder(LDMBertModel(LDMBertConfig(**config)), seed)
    return init_clip(CLIPTextModel(CLIPTextConfig(**config)), seed)


def build_unet(config: dict, seed: int) -> UNet2DConditionModel:
    """A new UNet of a completed config. Raises ConfigError."""
    return init_unet(make_network(UNet2DConditionModel, config), seed)


def build_autoencoder(config_file, seed: int) -> AutoencoderKL:
    """A new AutoencoderKL from its JSON config."""
    config = read_new_config("vae", config_file, "--vae_config_file")
    check_fit({"vae": config}, config_file, ConfigError)
    with paddle.utils.unique_name.guard():
        return init_autoencoder(make_network(AutoencoderKL, config), seed)


def make_network(model_class, config: dict):
    """A network of ppdiffusers of a completed config, as its class initialises it. Raises ConfigError."""
    try:
        return model_class(**config)
    except UNBUILDABLE as error:
        raise ConfigError(f"ppdiffusers cannot build {model_class.__name__} of this config: {error}") from error


def save_component(component, folder) -> None:
    """config.json and model_state.pdparams of one component, as `from_pretrained` reads them."""
    if isinstance(component, LDMBertModel):
        component.save_pretrained(str(folder))
    else:
        component.save_pretrained(str(folder), safe_serialization=False)
