"""Stages C and B of Stable Cascade together: a prompt to small latents, led by a control image where there is a control
network, and these by stages B and A to a picture."""

from collections.abc import Sequence

import numpy as np
import paddle
from paddle import nn

from ..data.text.tokenizer import load_tokenizer
from ..diffusion.drawing import Drawing, drawing_of
from ..diffusion.guided import draw
from ..diffusion.process import Process
from ..families.cascade_controlnet import control_misfits
from ..networks.cascade.control import ControlledPriorModel
from ..networks.cascade.stages import CascadeDecoderModel, CascadePriorModel
from ..networks.configs import EFFNET_FACTOR, LABELS, paella_factor
from ..utils.errors import ConfigError, ModelError
from ..utils.rng import Stream
from ..weights.components import Weights
from ..weights.fetch import locate_model
from ..weights.fill import fill_component
from ..weights.folders import is_checkpoint
from ..weights.read import read_cascade, read_component
from .beginning import check_sides
from .pipeline import TextToImage
from .text_states import TextStates

DECODING = Drawing(num_inference_steps=10)  # of stage B, as diffusers' pipeline by default
_CONTROL = "cascade_controlnet"
_MODELS = {
    "cascade_prior": (CascadePriorModel, {}),
    _CONTROL: (ControlledPriorModel, {"controlnet": _CONTROL}),
    "cascade_decoder": (CascadeDecoderModel, {"vqgan": "vqgan"}),
}
_SIDES = {"cascade_prior": 768, "cascade_decoder": 1024}  # of the published ones, whose pipelines do not say it
_COSINE = {"num_train_timesteps": 1000, "beta_schedule": "cosine", "prediction_type": "epsilon"}


def load_stages(
    prior: Weights, path, decoder, controlnet=None, *, ema: bool, tokenizer, lora: Sequence[str], offline: bool
) -> "CascadeToImage":
    """Stage C, read from `path`, with the stage B at `decoder`, and the control network at `controlnet`. Raises
    ConfigError, ModelError."""
    if "cascade_prior" not in prior.components:
        raise ConfigError(f"{path} is stage B of Stable Cascade; name it as --decoder, and stage C as the model")
    if decoder is None:
        raise ConfigError(f"{path} is stage C of Stable Cascade, which draws latents; name stage B too: --decoder")
    if lora:
        raise ConfigError("--lora is not there for Stable Cascade; export the model with --export_merged")
    other = read_cascade(locate_model(decoder, offline), None, ema)
    if other is None or "cascade_decoder" not in other.components:
        raise ConfigError(
            f"--decoder {decoder} is not stage B of Stable Cascade; give a checkpoint or a pipeline of it"
        )
    if controlnet is not None:
        place = locate_model(controlnet, offline)
        own = read_component(_CONTROL, place, None, ema and is_checkpoint(place))
        if problem := next(control_misfits(own.config, prior.components["cascade_prior"].config), None):
            raise ModelError(f"{problem}; give --controlnet the one that was trained beside {path}")
        prior.components[_CONTROL] = own
    (first, side), (second, other_side) = (
        _build(kind, weights, source, tokenizer)
        for kind, weights, source in (("cascade_prior", prior, path), ("cascade_decoder", other, decoder))
    )
    channels = (first.prior.config.in_channels, second.decoder.config.effnet_in_channels)
    if channels[0] != channels[1]:
        raise ModelError(
            f"{path} draws latents of {channels[0]} channels, and {decoder} takes {channels[1]}; choose stages that "
            "were made for one another"
        )
    return CascadeToImage(first, second, side, other_side)


def _build(kind: str, weights: Weights, source, tokenizer):
    """(a stage in evaluation mode with its tokenizer, and with an EfficientNet only where its control network looks
    through one; the side of its pictures)."""
    control = weights.components.get(_CONTROL)
    make, further = _MODELS[_CONTROL if control else kind]
    names = {**further, "text_encoder": "projected_text_encoder", kind.removeprefix("cascade_"): kind}
    if control and control.config["bottleneck"] == "large":
        names["effnet"] = "effnet"
    for one in names.values():
        if one not in weights.components:
            raise ModelError(f"{source} has no {LABELS[one]}; give a checkpoint, or a pipeline made by ppldm export")
    folder, known = tokenizer or weights.tokenizer, weights.metadata
    if folder is None:
        raise ModelError(f"{source} brings no tokenizer; name its folder (tokenizer=, --tokenizer)")
    longest = weights.components["projected_text_encoder"].config["max_position_embeddings"]
    sizes = {"resolution": _SIDES[kind], "model_max_length": longest}
    sizes |= {name: known[name] for name in sizes if name in known}
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{source}: {name} {value!r} must be 1 or more; copy it again")
    with paddle.utils.unique_name.guard():
        parts = {name: fill_component(one, weights.components[one]) for name, one in names.items()}
        model = make(**{"effnet": nn.Identity(), **parts}, process=Process.of(_COSINE | weights.scheduler))
    model.tokenizer = load_tokenizer(folder, sizes["model_max_length"])
    model.end_id = model.tokenizer.end_id
    model.usual = drawing_of(known, model.process, source, model.usual)
    model.eval()
    return model, sizes["resolution"]


class CascadeToImage(TextToImage):
    """`model` is stage C, decoder a model of stage B; each with the side of its training pictures, pixels."""

    def __init__(self, prior, decoder, prior_resolution: int, resolution: int):
        super().__init__(prior, prior.tokenizer, resolution)
        self.decoder, self._share = decoder, prior_resolution / resolution
        self._decoder_states = TextStates(decoder, decoder.tokenizer)

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(C, h, w) of the small latents of such pictures. Raises ConfigError where the sides do not divide."""
        check_sides(height=height, width=width)
        step = EFFNET_FACTOR / self._share
        for side in (height, width):
            if side <= 0 or side % step or side % paella_factor(self.decoder.vqgan.config):
                raise ConfigError(f"{width} x {height}: sides must be multiples of {step:g}; change the size")
        return (self.model.prior.config.in_channels, round(height / step), round(width / step))

    def _control_size(self, height: int, width: int) -> tuple[int, int]:
        """What stage C draws for."""
        _, *sides = self.latent_shape(height, width)
        return EFFNET_FACTOR * sides[0], EFFNET_FACTOR * sides[1]

    def _begin(self, image, mask, count):
        """Raises ConfigError."""
        raise ConfigError("Stable Cascade does not draw over pictures: drawing has no encoder of its own; omit --image")

    def _to_pictures(self, latents, prompts: list[str], indices: list[int], seeds: list[int]) -> np.ndarray:
        """By stages B and A, from noise of their own."""
        factor = EFFNET_FACTOR / self._share / paella_factor(self.decoder.vqgan.config)
        own = (self.decoder.decoder.config.in_channels, *(round(side * factor) for side in latents.shape[2:]))
        return draw(self.decoder, self.decoder.tokenizer, prompts, indices, own, seeds, DECODING,
                    encode=self._decoder_states.encoder(), control={"effnet": latents},
                    stream=Stream.SAMPLE_DECODER)  # fmt: skip

    def _drawn_with(self) -> tuple[paddle.nn.Layer, ...]:
        return self.model, self.decoder
