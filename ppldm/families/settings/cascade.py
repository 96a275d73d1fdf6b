"""What a stage of Stable Cascade is told: settings of both families."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ...config.option import Bounds, Needs, option
from ...utils.errors import ConfigError
from .average import AverageSettings
from .objective import ObjectiveSettings
from .text_to_image import DrawnSettings

_model = partial(option, section="model")


def weights_option(name: str, what: str):
    """The option `<name>_name_or_path`."""
    return _model(None, f"{what}: its own folder, that of a pipeline with it, or a name.", kind="model")


def config_option(name: str, what: str, known: str):
    """The option `<name>_config_file`."""
    return _model(
        None,
        f"Config of {what}, with initial weights: a JSON file, or a name ({known}).",
        kind="network",
        needs=Needs(
            f"a network without weights: --{name}_name_or_path goes before it",
            lambda given: getattr(given, f"{name}_name_or_path") is None,
        ),
    )


@dataclass(kw_only=True)
class CascadeSettings(ObjectiveSettings, AverageSettings, DrawnSettings):
    """A base of the settings of a stage. A subclass has the two options of the network that is trained.

    networks: the names of the components that it must have, the one that is trained last; optional: of those that it
    has where their weights are named.
    """

    networks: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ()
    trains_adapters: ClassVar[bool] = False
    loop_defaults: ClassVar[dict] = {}
    starts_from_pipeline: ClassVar[bool] = False
    default_tokenizer: ClassVar[None] = None
    trains_text_encoder: ClassVar[bool] = False
    mask_pad_tokens: ClassVar[bool] = True

    effnet_name_or_path: str | None = weights_option("effnet", "Frozen EfficientNet, which makes the small latents")
    effnet_config_file: str | None = config_option(
        "effnet", "an EfficientNet that stays as it is drawn, to try things out", "effnet_v2_s, effnet_tiny"
    )
    text_encoder_name_or_path: str | None = weights_option(
        "text_encoder", "Frozen CLIP text encoder with its projection and its tokenizer"
    )
    text_encoder_config_file: str | None = config_option(
        "text_encoder", "a text encoder that stays as it is drawn, to try things out", "clip_vit_bigg, clip_tiny"
    )
    tokenizer_name: str | None = _model(
        None,
        "The tokenizer's folder, with vocab.json and merges.txt, or vocab.txt (default: the text encoder's own).",
        kind="tokenizer",
    )
    offline: bool = _model(False, "Never touch the network: names must be in the cache.")
    model_max_length: int = _model(
        77,
        "Tokens of a caption; longer ones are cut, shorter ones padded.",
        bounds=Bounds(above=0),
        unit="tokens",
        identity=True,
    )

    def check(self) -> None:
        """Raises ConfigError for components that nothing gives, and combinations that cannot work."""
        for name in self.networks:
            if not (self.name_of(name) or self.file_of(name)):
                raise ConfigError(
                    f"nothing gives the {name}: name its weights, --{name}_name_or_path, or the config of a new one, "
                    f"--{name}_config_file"
                )
        if self.prediction_type == "flow":
            raise ConfigError("--prediction_type flow is not supported for Stable Cascade; use epsilon or v_prediction")
        self.check_objective()
        self.check_average()

    @property
    def components(self) -> tuple[str, ...]:
        """The names of those that these settings give."""
        return (*(name for name in self.optional if self.name_of(name)), *self.networks)

    def name_of(self, component: str) -> str | None:
        """The folder or name of its weights; None for one that is built anew."""
        return getattr(self, f"{component}_name_or_path")

    def file_of(self, component: str) -> str | None:
        """The config of one that is built anew."""
        return getattr(self, f"{component}_config_file")

    def component_names(self) -> dict[str, str | None]:
        """As the flags say."""
        return {name: self.name_of(name) for name in self.components}

    def schedule(self, resolution: int | None) -> dict:
        """The settings of the process (`diffusion.process.Process.of`): the cosine schedule, where none is chosen."""
        return {"beta_schedule": "cosine", **self.chosen_schedule(resolution)}


@dataclass(kw_only=True)
class PriorSettings(CascadeSettings):
    """The same of stage C, trained or led."""

    networks: ClassVar = ("effnet", "text_encoder", "prior")
    optional: ClassVar = ("image_encoder",)

    image_encoder_name_or_path: str | None = weights_option(
        "image_encoder", "Frozen CLIP image encoder, of which stage C is told for 10 % of the samples (default: none)"
    )
    prior_name_or_path: str | None = weights_option("prior", "Stage C to start from")
    prior_config_file: str | None = config_option(
        "prior", "a stage C that is trained from scratch", "cascade_c_3b, cascade_c_1b, cascade_c_tiny"
    )
