"""What a model of VAE, text encoder and UNet or transformer is told, wherever its components come from."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ...config.option import Bounds, Needs, option
from ...diffusion.drawing import KEPT, MOST_GUIDANCE, SAMPLERS, USUAL
from ...networks.configs import SIZE_EMBEDDING, read_new_config
from .adapters import AdapterSettings
from .average import AverageSettings, learning_rate_of
from .objective import ObjectiveSettings

_model = partial(option, section="model")
_loss = partial(option, section="model", identity=True)
_optimizer = partial(option, section="optimizer")
_ABOVE_0, _SHARE = Bounds(above=0), Bounds(least=0, most=1)


_drawn = partial(option, section="validation")
_KEEPS = "by default, while training and afterwards; saved with it (default: the whole starting model's"


@dataclass(kw_only=True)
class DrawnSettings:
    """A base of the settings of such families."""

    image_logging_steps: int = _drawn(
        1000, "Draw sample pictures every this many updates; 0: never.", bounds=Bounds(least=0), unit="updates"
    )
    guidance_scale: float | None = _drawn(
        None,
        f"Guidance scale that the model is drawn with {_KEEPS}, else {USUAL.guidance_scale}).",
        bounds=Bounds(least=0, most=MOST_GUIDANCE),
    )
    num_inference_steps: int | None = _drawn(
        None,
        f"Sampling steps that the model is drawn in {_KEEPS}, else {USUAL.num_inference_steps}).",
        bounds=Bounds(above=0),
        unit="steps",
    )
    sampler: str | None = _drawn(
        None, f"Sampler that the model is drawn by {_KEEPS}, else ddim, or flow-euler of flow).", choices=SAMPLERS
    )

    def kept(self) -> dict:
        """What is said of these, by the names of `Drawing`."""
        return {name: getattr(self, name) for name in KEPT if getattr(self, name) is not None}


@dataclass(kw_only=True)
class ControlSettings:
    """A base of the settings of families that train a control network: by what pictures are led."""

    control: str = _loss(
        "canny",
        "Control images: canny, edges, grey, blur, tiles, super-resolution or inpainting, made of the pictures; row, "
        "the rows' second images; or a class of one's own, package.module:Class. Parameters follow with commas: "
        "canny,low=50,high=150 (docs/controlnet.md).",
    )


@dataclass(kw_only=True)
class TextToImageSettings(ObjectiveSettings, AverageSettings, AdapterSettings, DrawnSettings):
    """A base of the settings of text-to-image families. A subclass has options that name the components, among them
    `model_name_or_path` and `tokenizer_name`, and says by the methods below what these give.

    denoiser: the component that removes the noise. new_text_encoder: the kind of one that is built anew.
    default_tokenizer: of one that has none of its own; None where it must be named. how_to_freeze: the text encoder, in
    words.
    """

    denoiser: ClassVar[str] = "unet"
    new_text_encoder: ClassVar[str]
    size_conditioning: ClassVar[bool] = False
    default_tokenizer: ClassVar[str | None] = None
    how_to_freeze: ClassVar[str]

    original_config_file: str | None = _model(
        None,
        "YAML file of a .ckpt (default: the one of its name beside it); config.json of the VAE of a checkpoint that "
        "holds no model.json.",
        kind="path",
    )
    load_ema: bool = _model(False, "Start from the averaged weights of a checkpoint or a .ckpt.")
    offline: bool = _model(False, "Never touch the network: names must be in the cache.")
    model_max_length: int = _loss(
        77, "Tokens of a caption; longer ones are cut, shorter ones padded.", bounds=_ABOVE_0, unit="tokens"
    )
    mask_pad_tokens: bool = _loss(
        False,
        "Attention ignores the padding behind captions, in the text encoder and in what removes the noise; saved with "
        "the model.",
    )
    empty_caption: str = _loss(
        "embedding",
        "What is seen of an empty caption, in guidance too: the embedding of it, or zeros; saved with the model.",
        choices=("embedding", "zeros"),
    )
    enable_xformers_memory_efficient_attention: bool = _model(
        False, "Memory-efficient attention in what removes the noise (GPU only)."
    )

    def check(self) -> None:
        """Raises ConfigError for combinations that cannot work, wherever the components come from."""
        self.check_objective()
        self.check_average()
        self.check_adapters()

    @property
    def trains_text_encoder(self) -> bool:
        """False where it is frozen."""
        raise NotImplementedError

    @property
    def starts_from_pipeline(self) -> bool:
        """True where all components come from the whole model that `model_name_or_path` names."""
        raise NotImplementedError

    def component_names(self) -> dict[str, str | None]:
        """Component to the folder or name of weights of its own; None where it is built anew. Asked where the run does
        not start from a whole model."""
        raise NotImplementedError

    def config_files(self) -> dict[str, str]:
        """Components that may be built anew to their config files."""
        raise NotImplementedError

    def new_configs(self) -> dict[str, dict]:
        """The completed configs of the components that are built anew. Raises ConfigError."""
        names = self.component_names()
        found = {
            name: read_new_config(
                self.new_text_encoder if name == "text_encoder" else name, file, f"--{name}_config_file"
            )
            for name, file in self.config_files().items()
            if not names[name]
        }
        if self.size_conditioning and "unet" in found and found["unet"]["addition_embed_type"] is None:
            found["unet"] |= SIZE_EMBEDDING
        return found


@dataclass(kw_only=True)
class UNetSettings(TextToImageSettings):
    """The same where a UNet removes the noise."""

    size_conditioning: bool = _loss(
        False,
        "Tell the UNet each picture's own size, where its crop lies and the size trained at, as SDXL's is told; a new "
        "UNet gets layers for it, which are saved with the model (docs/data.md).",
    )
    size_conditioning_drop: float = _loss(
        0.0,
        "Of this share of the samples it is told six zeros: sizes unknown.",
        bounds=_SHARE,
        needs=Needs("--size_conditioning", lambda given: given.size_conditioning),
    )
    unet_learning_rate: float | None = learning_rate_of("the UNet")
