"""New networks from completed configs, initialised as PyTorch does it.

Every builder of a whole model makes its parameters under a fresh `unique_name` guard, so that Paddle's own parameter
names, which key its optimizer's state, are the same in every process that builds the same model.
"""

import paddle
from paddle import nn
from ppdiffusers import AutoencoderKL, UNet2DConditionModel
from ppdiffusers.pipelines.latent_diffusion.pipeline_latent_diffusion import LDMBertConfig, LDMBertModel
from ppdiffusers.pipelines.wuerstchen.modeling_paella_vq_model import PaellaVQModel
from ppdiffusers.transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from ..utils.errors import ConfigError
from ..utils.log import get_logger
from .configs import check_config, check_fit, is_ldmbert, read_new_config
from .init import (
    init_autoencoder,
    init_cascade,
    init_clip,
    init_effnet,
    init_paella,
    init_text_encoder,
    init_transformer,
    init_unet,
)

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


def build_projected_text_encoder(config: dict, seed: int) -> CLIPTextModelWithProjection:
    """A new CLIP text encoder with a projection, of a completed config."""
    return init_clip(CLIPTextModelWithProjection(CLIPTextConfig(**config)), seed)


def build_unet(config: dict, seed: int) -> UNet2DConditionModel:
    """A new UNet of a completed config. Raises ConfigError."""
    return init_unet(make_network(UNet2DConditionModel, config), seed)


def build_transformer(config: dict, seed: int) -> nn.Layer:
    """A new UViT, DiT or MicroDiT of a completed config. Raises ConfigError."""
    from .transformers.transform import make_transformer

    return init_transformer(make_network(make_transformer, {"config": config}), seed)


def build_cascade(config: dict, seed: int):
    """A new prior or decoder of Stable Cascade, a CascadeUNet, of a completed config. Raises ConfigError."""
    from .cascade.unet import CascadeUNet

    return init_cascade(make_network(CascadeUNet, config), seed)


def build_effnet(config: dict, seed: int):
    """A new EffNetEncoder of pictures for Stable Cascade, of a completed config. Raises ConfigError."""
    from .cascade.effnet import EffNetEncoder

    return init_effnet(make_network(EffNetEncoder, config), seed)


def build_paella(config: dict, seed: int) -> PaellaVQModel:
    """A new autoencoder of Stable Cascade, of a completed config. Raises ConfigError."""
    return init_paella(make_network(PaellaVQModel, config), seed)


def build_autoencoder(config_file, seed: int) -> AutoencoderKL:
    """A new AutoencoderKL from its JSON config."""
    config = read_new_config("vae", config_file, "--vae_config_file")
    check_fit({"vae": config}, config_file, ConfigError)
    with paddle.utils.unique_name.guard():
        return init_autoencoder(make_network(AutoencoderKL, config), seed)


def make_network(model_class, config: dict):
    """A network of a completed config, as its class initialises it. Raises ConfigError."""
    try:
        return model_class(**config)
    except UNBUILDABLE as error:
        raise ConfigError(f"no {model_class.__name__} can be built of this config: {error}") from error


def save_component(component, folder) -> None:
    """config.json and model_state.pdparams of one component, as `from_pretrained` reads them."""
    if isinstance(component, LDMBertModel):
        component.save_pretrained(str(folder))
    else:
        component.save_pretrained(str(folder), safe_serialization=False)
