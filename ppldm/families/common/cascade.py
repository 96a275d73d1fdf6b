"""What the families of Stable Cascade's stages share (Pernias et al. 2023, arXiv:2306.00637, and its public trainer).

A picture goes through three networks: stage A, an autoencoder; stage B, which draws the latents of A by the small
latents of an EfficientNet; and stage C, which draws those by a caption. B and C are trained here, one at a time, beside
networks that stay frozen.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import ClassVar

from ...config.option import Bounds, Needs, option
from ...data.text.tokenizer import load_tokenizer
from ...networks.configs import EFFNET_FACTOR, check_config, check_tokenizer_fit, read_new_config
from ...utils.errors import ConfigError, ModelError
from ...weights.configs import read_folder_config
from ...weights.model_file import Component
from ..base import Family, check_sides, published_config
from ..settings.average import AverageSettings
from ..settings.objective import ObjectiveSettings
from ..settings.text_to_image import DrawnSettings
from .text_to_image import TextToImage

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


class CascadeStage(Family):
    """Trains the last of a config's `components`; the others are frozen. `Config` is a CascadeSettings.

    model: where in `networks.cascade` the class of its models is. joints: (component, setting, another component, its
    setting) of settings that must be equal.
    """

    model: ClassVar[str]
    joints: ClassVar[tuple[tuple[str, str, str, str], ...]]
    frozen: ClassVar = {"effnet": "effnet", "text_encoder": "projected_text_encoder"}
    needs_process = True
    unsupported = ("to_static",)

    def check(self, config: CascadeSettings, data) -> None:
        """Configs that are here, by themselves and together, and the size of pictures."""
        check_sides(EFFNET_FACTOR, "the EfficientNet's", data)
        self.check_fit(self.known_configs(config))

    def known_configs(self, config: CascadeSettings, published: bool = False) -> dict[str, dict | None]:
        """By component; None for those with weights that are not here to be read, unless they are `published` and
        those too are asked for. Raises ConfigError, ModelError."""
        found = {}
        for name in config.components:
            kind = self.components[name]
            if place := config.name_of(name):
                found[name] = read_folder_config(kind, place)
                if published and not found[name]:
                    found[name] = published_config(kind, name, place)
            else:
                found[name] = self.new_config(name, config, found)
        return found

    def new_config(self, name: str, config: CascadeSettings, found: dict) -> dict | None:
        """The completed config of a component that is built anew, beside those `found` before it. Raises ConfigError,
        ModelError."""
        return read_new_config(self.components[name], config.file_of(name), f"--{name}_config_file")

    def networks(self, config: CascadeSettings, data) -> dict[str, Component]:
        """Also of published models that are not here."""
        found = self.known_configs(config, published=True)
        self.check_fit(found)
        trained = None if config.trains_adapters else config.components[-1]
        return {name: Component(one, name == trained) for name, one in found.items()}

    def check_fit(self, configs: dict[str, dict | None]) -> None:
        """Raises ModelError where completed configs, of those that are known, do not fit one another."""
        for name, key, other, needed in self.joints:
            one, two = configs.get(name), configs.get(other)
            if one and two and one[key] != two[needed]:
                raise ModelError(
                    f"the {name} gives {key} {one[key]}, and the {other} takes {needed} {two[needed]}; "
                    "choose networks that were made for one another"
                )

    def build(self, config: CascadeSettings, data, seed: int):
        """From weights or from configs, with the tokenizer of the text encoder unless another is named."""
        import paddle

        from ...diffusion.drawing import Drawing
        from ...diffusion.process import Process
        from ...weights.fill import config_of
        from .ldm_build import tokenizer_source

        tokenizer = load_tokenizer(tokenizer_source(config), config.model_max_length, config.offline)
        with paddle.utils.unique_name.guard():
            parts = {}
            for name in config.components:
                parts[name] = self.part(name, config, tokenizer, seed, parts)
            configs = {name: config_of(self.components[name], part) for name, part in parts.items()}
            self.check_fit(configs)
            check_tokenizer_fit(configs["text_encoder"], tokenizer.vocab_size, config.model_max_length)
            process = Process.of(config.schedule(data.resolution), config.weighting())
            model = resolve_name(f"ppldm.networks.cascade.{self.model}")(**parts, process=process)
        model.tokenizer, model.end_id = tokenizer, tokenizer.end_id
        model.usual = Drawing(**config.kept()).fit(model.process, model.usual)
        model.inputs = self.inputs(config, configs, model.process)
        return model

    def part(self, name: str, config: CascadeSettings, tokenizer, seed: int, parts: dict):
        """A component, filled with its weights or built anew, beside the `parts` before it."""
        from ...networks.build import build_network
        from ...weights.fill import fill_component, find_component_by_name

        kind = self.components[name]
        if place := config.name_of(name):
            return fill_component(kind, find_component_by_name(kind, place, offline=config.offline))
        found = self.new_config(name, config, {})
        if name == "text_encoder":
            sizes = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": config.model_max_length}
            found = check_config(kind, found | sizes, config.file_of(name), ConfigError)
        return build_network(kind, found, seed)

    def inputs(self, config: CascadeSettings, configs: dict, process) -> dict:
        """What a batch must hold, by name: here the caption and a noise level."""
        from ...data.inputs import TextEmbeddings, Tokens

        length = config.model_max_length
        return {
            "input_ids": Tokens(length),
            "text_embeddings": TextEmbeddings(length + 1, configs["text_encoder"]["hidden_size"]),
            "timesteps": config.level_input(process.num_levels),
        }

    draw = TextToImage.draw

    def exported(self, config: CascadeSettings) -> tuple[str, ...]:
        """What is trained."""
        return config.components[-1:]

    def export(self, model, config: CascadeSettings, dataset, folder: Path, average, metadata: dict) -> None:
        """The network that was trained, a stage as diffusers' StableCascadeUNet reads it, beside model.json and
        ppldm.json."""
        from contextlib import nullcontext

        from ...utils.files import atomic_dir, write_json
        from ...weights.components import Weights
        from ...weights.fill import component_of, describe_model
        from ...weights.lora.merge import lora_of, merge_lora
        from ...weights.write import write_component

        name = config.components[-1]
        kind = self.components[name]
        with atomic_dir(folder) as target:
            if not model.adapters:  # nothing is left of them once they are merged in
                describe_model(self, model).write(target)
            with average.applied() if average else nullcontext():
                whole = merge_lora(Weights({name: component_of(kind, getattr(model, name))}), lora_of(model))
                write_component(kind, whole.components[name], target, "diffusers")
            write_json(target / "ppldm.json", {**metadata, "ema": average is not None})
