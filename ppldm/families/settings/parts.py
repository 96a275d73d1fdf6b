"""A model whose components come one by one, or all from a pipeline: settings of families."""

from dataclasses import dataclass
from functools import partial

from ...config.option import Needs, option
from ...utils.errors import ConfigError
from .adapters import adapts_text_encoder, trains_adapters
from .average import learning_rate_of
from .text_to_image import TextToImageSettings

_model = partial(option, section="model")
OF_PARTS = Needs(
    "a model of parts: --model_name_or_path gives all of it", lambda given: given.model_name_or_path is None
)


def anew(component: str) -> Needs:
    """For the config of a component."""
    flags = ("model_name_or_path", f"{component}_name_or_path")
    words = " and ".join(f"--{flag}" for flag in flags)
    return Needs(
        f"a component that is built anew: {words} go before it",
        lambda given: all(getattr(given, flag) is None for flag in flags),
    )


def _trains_text_encoder(given) -> bool:
    return adapts_text_encoder(given) if trains_adapters(given) else given.train_text_encoder


@dataclass(kw_only=True)
class PartsSettings(TextToImageSettings):
    """A base of the settings of families without a published default. A subclass has `<denoiser>_name_or_path` and
    `<denoiser>_config_file`."""

    how_to_freeze = "omit --train_text_encoder"

    model_name_or_path: str | None = _model(
        None,
        "Pipeline to fine-tune, whole: its folder (ppldm's, ppdiffusers', diffusers'), a checkpoint, or a name, such "
        "as stabilityai/stable-diffusion-2-1. Goes before all flags of single components.",
        also=("pretrained_model_name_or_path",),
        kind="model",
    )
    vae_name_or_path: str | None = _model(
        None, "Frozen VAE: a pipeline's folder, its own folder, or a name.", kind="model", needs=OF_PARTS
    )
    text_encoder_name_or_path: str | None = _model(
        None,
        "Text encoder to start from, with its tokenizer: a pipeline's folder, its own folder, or a name.",
        kind="model",
        needs=OF_PARTS,
    )
    text_encoder_config_file: str | None = _model(
        None,
        "Config of a text encoder that is built anew: a JSON file, or a name (clip_vit_l, clip_vit_h, ldmbert_12).",
        kind="network",
        needs=anew("text_encoder"),
    )
    tokenizer_name: str | None = _model(
        None,
        "Folder with vocab.json and merges.txt, or with vocab.txt (default: the text encoder's own).",
        kind="tokenizer",
    )
    train_text_encoder: bool = _model(False, "Train the text encoder too.", identity=True)
    text_encoder_learning_rate: float | None = learning_rate_of(
        "the text encoder",
        Needs("--train_text_encoder, or an adapter in it", lambda given: _trains_text_encoder(given)),
    )

    def check(self) -> None:
        """Raises ConfigError for components that nothing gives, and combinations that cannot work."""
        if not self.starts_from_pipeline:
            names, files = self.component_names(), self.config_files()
            for name in names:
                if not (names[name] or files.get(name)):
                    own = "" if name == "vae" else f", or the config of a new one: --{name}_config_file"
                    raise ConfigError(
                        f"nothing gives the {name}: name a whole pipeline, --model_name_or_path; the folder of one, or "
                        f"of the component, --{name}_name_or_path{own}"
                    )
            if not (names["text_encoder"] or self.train_text_encoder):
                raise ConfigError(
                    f"--text_encoder_config_file {self.text_encoder_config_file} makes a text encoder that knows "
                    "nothing yet; add --train_text_encoder, or start from a trained one: --text_encoder_name_or_path"
                )
        super().check()

    @property
    def trains_text_encoder(self) -> bool:
        """`train_text_encoder`, or whether an adapter is in it."""
        return _trains_text_encoder(self)

    @property
    def starts_from_pipeline(self) -> bool:
        """True where a whole pipeline is named."""
        return self.model_name_or_path is not None

    def component_names(self) -> dict[str, str | None]:
        """As the flags say."""
        return {name: getattr(self, f"{name}_name_or_path") for name in ("vae", "text_encoder", self.denoiser)}

    def config_files(self) -> dict[str, str]:
        """As the flags say."""
        files = {name: getattr(self, f"{name}_config_file") for name in ("text_encoder", self.denoiser)}
        return {name: file for name, file in files.items() if file}
