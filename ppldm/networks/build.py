"""Networks of completed configs: each as its class makes it, or new, with initial weights.

Every builder of a whole model makes its parameters under a fresh `unique_name` guard, so that Paddle's own parameter
names, which key its optimizer's state, are the same in every process that builds the same model.
"""

from pkgutil import resolve_name

from paddle import nn

from ..utils.errors import ConfigError
from ..utils.log import get_logger
from . import init
from .config_fields import CLASSES
from .configs import LABELS, check_config, network_class, table_of

# What the classes raise on settings that no network can have.
UNBUILDABLE = (TypeError, ValueError, AttributeError, LookupError, AssertionError, ArithmeticError)
_INITIAL = {
    "unet": init.init_unet, "vae": init.init_autoencoder, "ldmbert": init.init_text_encoder, "clip": init.init_clip,
    "uvit": init.init_transformer, "dit": init.init_transformer, "microdit": init.init_microdit,
    "cascade_prior": init.init_cascade, "cascade_decoder": init.init_cascade, "effnet": init.init_effnet,
    "vqgan": init.init_paella,
}  # fmt: skip


def make_network(kind: str, config: dict) -> nn.Layer:
    """The network of a completed config, as its class makes it. Raises UNBUILDABLE."""
    if kind == "transformer":
        from .transformers.transform import make_transformer

        return make_transformer(config)
    network = network_class(kind, config)
    settings = CLASSES[table_of(kind, config)] if kind in LABELS else network
    made = resolve_name(settings)(**config)
    return made if settings == network else resolve_name(network)(made)  # encoders take their settings as an object


def build_network(kind: str, config: dict, seed: int) -> nn.Layer:
    """A new network of a completed config, with the initial weights of its kind. Raises ConfigError."""
    try:
        made = make_network(kind, config)
    except UNBUILDABLE as error:
        raise ConfigError(f"no {LABELS[kind]} can be built of this config: {error}") from error
    return _INITIAL[table_of(kind, config)](made, seed)


def resize_text_encoder(config: dict, source, sizes: dict[str, int]) -> dict:
    """`config` with the tokenizer's `sizes` (vocab_size, max_position_embeddings), checked again."""
    for name, value in sizes.items():
        if config[name] != value:
            get_logger().info("text encoder: %s %s of %s becomes the tokenizer's %d",
                              name, config[name], source, value)  # fmt: skip
    return check_config("text_encoder", config | sizes, source, ConfigError)


def save_component(component, folder) -> None:
    """config.json and model_state.pdparams of one component, as `from_pretrained` reads them."""
    plain = {} if hasattr(component, "to_logits") else {"safe_serialization": False}  # which LDMBert's does not take
    component.save_pretrained(str(folder), **plain)
