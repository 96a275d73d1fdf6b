"""What the families of Stable Cascade's stages share (Pernias et al. 2023, arXiv:2306.00637, and its public trainer).

A picture goes through three networks: stage A, an autoencoder; stage B, which draws the latents of A by the small
latents of an EfficientNet; and stage C, which draws those by a caption. B and C are trained here, one at a time, beside
networks that stay frozen.
"""

from pathlib import Path
from typing import ClassVar

from ...config.network_files import published_network
from ...data.text.tokenizer import load_tokenizer
from ...networks.configs import EFFNET_FACTOR, check_config, check_tokenizer_fit, read_new_config
from ...utils.errors import ConfigError, ModelError
from ...weights.configs import read_folder_config
from ...weights.model_file import Component
from ..base import Family, Sitting, check_sides
from ..settings.cascade import CascadeSettings


class CascadeStage(Family):
    """Trains the last of a config's `components`; the others are frozen. `Config` is a CascadeSettings."""

    frozen: ClassVar = {"effnet": "effnet", "text_encoder": "projected_text_encoder"}
    needs_process = True
    unsupported = ("to_static",)

    def check(self, config: CascadeSettings, data) -> None:
        """Configs that are here, by themselves and together, and the size of pictures."""
        check_sides(EFFNET_FACTOR, "the EfficientNet's", data)
        self.check_fit(self.known_configs(config))

    def known_configs(self, config: CascadeSettings) -> dict[str, dict | None]:
        """By component; None for those with weights that are not here to be read. Raises ConfigError, ModelError."""
        found = {}
        for name in config.components:
            kind = self.components[name]
            if place := config.name_of(name):
                found[name] = read_folder_config(kind, place)
            else:
                found[name] = self.new_config(name, config, found)
        return found

    def new_config(self, name: str, config: CascadeSettings, found: dict) -> dict | None:
        """The completed config of a component that is built anew, beside those `found` before it. Raises ConfigError,
        ModelError."""
        return read_new_config(self.components[name], config.file_of(name), f"--{name}_config_file")

    def networks(self, config: CascadeSettings, data) -> dict[str, Component]:
        """Also of published models that are not here."""
        found = self.known_configs(config)
        for name in config.components:
            if found[name] is None and config.name_of(name) is None:
                found[name] = self.new_config(name, config, found)
            elif found[name] is None:
                # Of EfficientNets one is published, and that without its config.
                file = "effnet_v2_s" if name == "effnet" else published_network(name, config.name_of(name))
                if file is None:
                    raise ModelError(
                        f"{config.name_of(name)}: there is not a config of its {name} here; download it first"
                    )
                found[name] = read_new_config(self.components[name], file, f"--{name}_name_or_path")
        self.check_fit(found)
        trained = None if config.trains_adapters else config.components[-1]
        return {name: Component(one, name == trained) for name, one in found.items()}

    def check_fit(self, configs: dict[str, dict | None]) -> None:
        """Raises ModelError where completed configs, of those that are known, do not fit one another."""
        for name, key, other, needed in self.joints():
            one, two = configs.get(name), configs.get(other)
            if one and two and one[key] != two[needed]:
                raise ModelError(
                    f"the {name} gives {key} {one[key]}, and the {other} takes {needed} {two[needed]}; "
                    "choose networks that were made for one another"
                )

    def joints(self) -> tuple[tuple[str, str, str, str], ...]:
        """(component, setting, another component, its setting) of settings that must be equal."""
        raise NotImplementedError

    def identity(self, config: CascadeSettings, data) -> dict:
        """The average."""
        return {"ema": str(self.average(config))}

    def average(self, config: CascadeSettings):
        """What the settings ask for."""
        return config.decay()

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
            model = self.assemble(parts, Process.of(config.schedule(data.resolution), config.weighting()))
        model.tokenizer, model.end_id = tokenizer, tokenizer.end_id
        model.usual = Drawing(**config.kept()).fit(model.process, model.usual)
        model.inputs = self.inputs(config, configs, model.process)
        return model

    def part(self, name: str, config: CascadeSettings, tokenizer, seed: int, parts: dict):
        """A component, filled with its weights or built anew, beside the `parts` before it."""
        from ...networks.build import build_cascade, build_effnet, build_paella, build_projected_text_encoder
        from ...weights.fill import fill_component, find_component_by_name

        kind = self.components[name]
        if place := config.name_of(name):
            return fill_component(kind, find_component_by_name(kind, place, offline=config.offline))
        found = self.new_config(name, config, {})
        if name == "text_encoder":
            sizes = {"vocab_size": tokenizer.vocab_size, "max_position_embeddings": config.model_max_length}
            found = check_config(kind, found | sizes, config.file_of(name), ConfigError)
        make = {"effnet": build_effnet, "text_encoder": build_projected_text_encoder, "vqgan": build_paella}
        return make.get(name, build_cascade)(found, seed)

    def assemble(self, parts: dict, process):
        """The model of built components."""
        raise NotImplementedError

    def inputs(self, config: CascadeSettings, configs: dict, process) -> dict:
        """What a batch must hold, by name: here the caption and a noise level."""
        from ...data.inputs import TextEmbeddings, Tokens

        length = config.model_max_length
        return {
            "input_ids": Tokens(length),
            "text_embeddings": TextEmbeddings(length + 1, configs["text_encoder"]["hidden_size"]),
            "timesteps": config.level_input(process.num_levels),
        }

    def draw(self, sitting: Sitting) -> tuple[dict, dict]:
        """Samples at each guidance scale, and what they are drawn after."""
        from .ldm_draw import draw_sample_pictures

        return draw_sample_pictures(sitting), {}

    def exported(self, config: CascadeSettings) -> tuple[str, ...]:
        """What is trained."""
        return config.components[-1:]

    def export(self, model, config: CascadeSettings, dataset, folder: Path, average, metadata: dict) -> None:
        """The network that was trained, a stage as diffusers' StableCascadeUNet reads it, beside model.json and
        ppldm.json."""
        from contextlib import nullcontext

        from ...utils.files import atomic_dir, write_json
        from ...weights.adapters import lora_of
        from ...weights.components import Weights
        from ...weights.fill import component_of, describe_model
        from ...weights.lora.merge import merge_lora
        from ...weights.write import write_component

        name = config.components[-1]
        kind = self.components[name]
        with atomic_dir(folder) as target:
            if not model.adapters:  # of which nothing is left once they are merged in
                describe_model(self, model).write(target)
            with average.applied() if average else nullcontext():
                whole = merge_lora(Weights({name: component_of(kind, getattr(model, name))}), lora_of(model))
                write_component(kind, whole.components[name], target, "diffusers")
            write_json(target / "ppldm.json", {**metadata, "ema": average is not None})
