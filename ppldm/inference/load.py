"""A trained model by its place: a pipeline, a checkpoint, a single file, or a name; or the stages of Stable Cascade: C
draws small latents of a prompt, and of a control image, and B and A make a picture of these."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import paddle
from paddle import nn

from ..data.text.tokenizer import load_tokenizer
from ..diffusion.drawing import Drawing, drawing_of
from ..diffusion.guided import draw
from ..diffusion.process import Process
from ..families.cascade import control_misfits
from ..families.ldm_build import build_model, require_components
from ..families.several import SeveralTexts
from ..networks.cascade.control import ControlledPriorModel
from ..networks.cascade.stages import CascadeDecoderModel, CascadePriorModel
from ..networks.configs import EFFNET_FACTOR, LABELS, downscale_factor
from ..networks.engine import EAGER, FLOAT32, check_dtype, check_engine, drawing_layers, use_dtype, use_engine
from ..utils.errors import ConfigError, ModelError
from ..utils.log import get_logger
from ..utils.machine.devices import current_device
from ..utils.rng import Stream
from ..weights.components import Weights
from ..weights.configs import FLOW_CLASS, SCHEDULER_CLASS
from ..weights.fill import fill_component
from ..weights.folders import CHECKPOINT, FOLDER, whole_model
from ..weights.lora.merge import add_loras
from ..weights.model_file import family_of
from ..weights.source import open_model
from ..weights.textual_inversion import add_inversions
from ..weights.write import metadata_of
from .beginning import check_sides
from .pipeline import TextStates, TextToImage, check_keywords

DDIM = "DDIMScheduler"  # the class of a stored scheduler that ddim is
DECODING = Drawing(num_inference_steps=10)  # of stage B, as diffusers' pipeline by default
_CONTROL = "cascade_controlnet"
_MODELS = {
    "cascade_prior": (CascadePriorModel, {}),
    _CONTROL: (ControlledPriorModel, {"controlnet": _CONTROL}),
    "cascade_decoder": (CascadeDecoderModel, {"vqgan": "vqgan"}),
}
_SIDES = {"cascade_prior": 768, "cascade_decoder": 1024}  # of the published ones, whose pipelines do not say it
_COSINE = {"num_train_timesteps": 1000, "beta_schedule": "cosine", "prediction_type": "epsilon"}


@check_keywords()
def load(
    path,
    *,
    ema: bool = False,
    original_config_file=None,
    tokenizer=None,
    lora: Sequence[str] = (),
    textual_inversion: Sequence[str] = (),
    offline: bool = False,
    decoder=None,
    controlnet=None,
    prediction_type: str | None = None,
    rescale_betas_zero_snr: bool = False,
    engine: str | None = None,
    dtype: str | None = None,
    guide_model=None,
) -> TextToImage:
    """The model at `path`: a pipeline folder (ppldm, ppdiffusers, diffusers), a checkpoint, a run or a folder with one,
    a single file (CompVis' .ckpt, PaddleMIX's .pdparams, Stable Diffusion's .safetensors or .ckpt), or a name. `ema`: a
    checkpoint's averaged weights, or a file's. `original_config_file`: the YAML file of a .ckpt, the folder of a
    .pdparams' JSON files, or config.json of the VAE of a checkpoint without model.json. `tokenizer`: a folder with
    vocab.txt, where the model brings none. `lora`: files to merge, each with its weight, as "FILE:0.8".
    `textual_inversion`: files whose vectors a token stands for, as "FILE" or "FILE:TOKEN". `offline`: never touch the
    network. `decoder`: stage B of Stable Cascade, for its stage C; `controlnet`: a control network of that.
    `prediction_type`, `rescale_betas_zero_snr`: of a single file that does not say it: epsilon or v_prediction; trained
    to a last timestep of pure noise. `engine`, `dtype`: one of `engine.ENGINES` and `engine.DTYPES`, by default eager
    and float32. `guide_model`: a worse model of the same kind that guides it (`methods.autoguidance`). Raises
    ModelError, ConfigError."""
    engine, dtype = engine or EAGER, dtype or FLOAT32
    check_engine(engine)
    check_dtype(dtype, current_device())
    told = {"config_file": original_config_file, "ema": ema, "prediction_type": prediction_type}
    source = open_model(path, offline, zero_snr=rescale_betas_zero_snr, **told)
    if prior := source.stages():
        asked = {"--engine": engine != EAGER, "--dtype": dtype != FLOAT32, "--prediction-type": prediction_type}
        asked |= {"--rescale-betas-zero-snr": rescale_betas_zero_snr, "--guide-model": guide_model}
        _refuse(asked | {"--textual-inversion": bool(textual_inversion)}, "not for Stable Cascade")
        return load_stages(prior, path, decoder, controlnet, ema=ema, tokenizer=tokenizer, lora=lora, offline=offline)
    _refuse({"--decoder": decoder, "--controlnet": controlnet}, f"for stage C of Stable Cascade, and {path} is none")
    weights = add_loras(source.read(), lora)
    require_components(whole_model(weights.components), weights, path)
    metadata = _read_metadata(weights, path)
    weights, loaded = _add_tokens(weights, path, tokenizer, metadata, textual_inversion)
    model = build_model(weights, path)
    model.usual = drawing_of(metadata, model.process, path)
    if lora:
        loaded.seen = None  # it was trained on further captions
    model.read_by(loaded, metadata["mask_pad_tokens"], metadata["empty_caption"])
    autocast = use_dtype(model, dtype)
    use_engine(drawing_layers(model), engine)
    computed = {"engine": engine} if engine != EAGER else {"dtype": dtype} if dtype != FLOAT32 else {}
    pipeline = TextToImage(model, loaded, metadata["resolution"], lora, computed, autocast)
    pipeline.textual_inversion = [*textual_inversion]
    if isinstance(example := weights.metadata.get("example_prompt"), str):
        pipeline.example_prompt = example
    if guide_model is not None:
        alike = {"tokenizer": tokenizer, "offline": offline, "engine": engine, "dtype": dtype}
        more = {"original_config_file": original_config_file, "textual_inversion": textual_inversion}
        pipeline.guide_by(_load_guide(guide_model, ema, **alike, **more), guide_model)
    return pipeline


def _add_tokens(weights: Weights, path, tokenizer, metadata: dict, textual_inversion: Sequence[str]):
    """(model, tokenizer), which know the textual inversions too; the tokenizer of the model, or one in a folder."""
    folder = tokenizer or weights.tokenizer
    if folder is None:
        raise ModelError(f"{path} brings no tokenizer; name a folder with vocab.txt (tokenizer=, --tokenizer)")
    family = family_of(weights.components)
    several = isinstance(family, SeveralTexts)
    _refuse({"--textual-inversion": several and bool(textual_inversion)}, f"not for {family.plural}")
    loaded = family.read_tokenizer(folder, weights.components, metadata)
    return add_inversions(weights, loaded, textual_inversion)


def _load_guide(place, ema: bool, offline: bool, **alike) -> TextToImage:
    own = ema and open_model(place, offline).form != FOLDER  # a pipeline has one set of weights
    return load(place, ema=own, offline=offline, **alike)


def _refuse(asked: dict, why: str) -> None:
    for flag, value in asked.items():
        if value:
            raise ConfigError(f"{flag} is {why}; omit it")


def _read_metadata(weights, path) -> dict:
    """What is known of a model besides weights; a sampler of its own is named. Raises ModelError."""
    own = weights.scheduler.get(SCHEDULER_CLASS, DDIM)
    if own not in (DDIM, FLOW_CLASS):
        get_logger().info(
            "%s brings a %s; pictures are drawn with ddim unless another sampler is chosen, and it is exported with "
            "ddim: in the noise schedule and with the timesteps that it stores",
            *(path, own),
        )
    metadata = metadata_of(weights)
    _check_sizes({name: metadata[name] for name in ("model_max_length", "resolution")}, path)
    return metadata


def _check_sizes(sizes: dict, path) -> None:
    for name, value in sizes.items():
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{path}: {name} {value!r} of ppldm.json must be 1 or more; copy it again")


def load_stages(
    prior: Weights, path, decoder, controlnet=None, *, ema: bool, tokenizer, lora: Sequence[str], offline: bool
) -> "CascadeToImage":
    """Stage C at `path` with the stage B `decoder`, and a control network. Raises ConfigError, ModelError."""
    if "cascade_prior" not in prior.components:
        raise ConfigError(f"{path} is stage B of Stable Cascade; name it as --decoder, and stage C as the model")
    if decoder is None:
        raise ConfigError(f"{path} is stage C of Stable Cascade, which draws latents; name stage B too: --decoder")
    if lora:
        raise ConfigError("--lora is not there for Stable Cascade; export the model with --export_merged")
    other = open_model(decoder, offline, ema=ema).stages()
    if other is None or "cascade_decoder" not in other.components:
        raise ConfigError(
            f"--decoder {decoder} is not stage B of Stable Cascade; give a checkpoint or a pipeline of it"
        )
    if controlnet is not None:
        place = open_model(controlnet, offline)
        own = replace(place, ema=ema and place.form == CHECKPOINT).component(_CONTROL)
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
    """(a stage with its tokenizer, with an EfficientNet if its control network needs it; the side of its pictures)."""
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
    _check_sizes(sizes, source)
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
        self.decoder, self._share, self._drawn_with = decoder, prior_resolution / resolution, (prior, decoder)
        self._decoder_states = TextStates(decoder, decoder.tokenizer)

    def latent_shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(C, h, w) of the small latents of such pictures. Raises ConfigError where the sides do not divide."""
        check_sides(height=height, width=width)
        step = EFFNET_FACTOR / self._share
        for side in (height, width):
            if side <= 0 or side % step or side % downscale_factor(self.decoder.vqgan.config):
                raise ConfigError(f"width {width}, height {height}: choose multiples of {step:g}")
        return (self.model.prior.config.in_channels, round(height / step), round(width / step))

    def _control_size(self, height: int, width: int) -> tuple[int, int]:
        """What stage C draws for."""
        _, *sides = self.latent_shape(height, width)
        return EFFNET_FACTOR * sides[0], EFFNET_FACTOR * sides[1]

    def _begin(self, image, mask, count):
        raise ConfigError("Stable Cascade does not draw over pictures: drawing has no encoder of its own; omit --image")

    def _to_pictures(self, latents, prompts: list[str], indices: list[int], seeds: list[int]) -> np.ndarray:
        """By stages B and A, from noise of their own."""
        factor = EFFNET_FACTOR / self._share / downscale_factor(self.decoder.vqgan.config)
        own = (self.decoder.decoder.config.in_channels, *(round(side * factor) for side in latents.shape[2:]))
        return draw(self.decoder, self.decoder.tokenizer, prompts, indices, own, seeds, DECODING,
                    encode=self._decoder_states.encoder(), control={"effnet": latents},
                    stream=Stream.SAMPLE_DECODER)  # fmt: skip
