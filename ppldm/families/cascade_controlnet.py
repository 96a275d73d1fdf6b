"""Stage C of Stable Cascade led by a second picture, as its published trainer does it.

The base, a stage C, is frozen; a small network is trained beside it (`networks.cascade.control`).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from ..config.option import Needs, option
from ..data.control.spec import make_filter
from ..networks.config_fields import CASCADE_BLOCKS, CONTROL_BOTTLENECKS
from ..networks.configs import check_config
from ..utils.errors import ConfigError, ModelError
from .cascade_prior import CascadePrior
from .common.cascade import PriorSettings, weights_option
from .settings.text_to_image import ControlSettings

_NAME, _PUBLISHED_BLOCKS = "controlnet", (0, 4, 8, 12, 51, 55, 59, 63)
_new = partial(
    option,
    section="model",
    needs=Needs("a new ControlNet: --controlnet_name_or_path goes before it",
                lambda given: given.controlnet_name_or_path is None),
)  # fmt: skip


@dataclass(kw_only=True)
class CascadeControlNetConfig(ControlSettings, PriorSettings):
    """Where the components come from, and what is trained."""

    family: ClassVar[str] = "cascade_controlnet"

    controlnet_name_or_path: str | None = weights_option(_NAME, "ControlNet to start from (default: a new one)")
    controlnet_blocks: list[int] = _new(
        list(_PUBLISHED_BLOCKS),
        "The numbers of the residual blocks of stage C before which the ControlNet adds something; the published ones "
        "are for the 64 blocks of the largest.",
    )
    controlnet_bottleneck: str = _new(
        "effnet",
        "What the ControlNet is: a copy of the EfficientNet, of the control image; large, of what the EfficientNet "
        "makes of that; simple, two convolutions of its means over 32 x 32 pixels.",
        choices=CONTROL_BOTTLENECKS,
    )

    @property
    def components(self) -> tuple[str, ...]:
        """The ControlNet last."""
        return (*super().components, _NAME)


class CascadeControlNet(CascadePrior):
    """Trains only the control network."""

    plural = "ControlNets of Stable Cascade"
    Config = CascadeControlNetConfig
    components: ClassVar = {**CascadePrior.components, _NAME: "cascade_controlnet"}
    export_folder = _NAME
    model = "control.ControlledPriorModel"

    def unsaved(self, config: CascadeControlNetConfig) -> tuple[str, ...]:
        """What is frozen."""
        return config.components[:-1]

    def check(self, config: CascadeControlNetConfig, data) -> None:
        """With the filter of control images, and the ControlNet's config."""
        super().check(config, data)
        found = self.known_configs(config)
        seen = self._num_channels(config, found[_NAME], found["effnet"])
        if seen and found[_NAME]["conditioning_channels"] != seen:
            raise ModelError(
                f"{config.controlnet_name_or_path} sees {found[_NAME]['conditioning_channels']} channels; with "
                f"--control {config.control} there are {seen}"
            )

    def new_config(self, name: str, config: CascadeControlNetConfig, found: dict) -> dict | None:
        """The ControlNet's follows from the others; None where those are not here."""
        if name != _NAME:
            return super().new_config(name, config, found)
        effnet, prior = found["effnet"], found["prior"]
        if not (effnet and prior):
            return None
        own: dict[str, Any] = {"bottleneck": config.controlnet_bottleneck, "blocks": config.controlnet_blocks}
        own |= {"conditioning_channels": self._num_channels(config, own, effnet)}
        own |= {"projection_channels": prior["block_out_channels"][0]}
        own |= {key: effnet[key] for key in ("stage_channels", "stage_layers")}
        return check_config(self.components[name], own, "--controlnet_blocks", ConfigError)

    def _num_channels(self, config: CascadeControlNetConfig, own: dict | None, effnet: dict | None) -> int | None:
        """Of what a ControlNet of the config `own` sees; None where that, or the EfficientNet's, is not here. Raises
        ConfigError."""
        channels = make_filter(config.control).num_channels
        if not (own and effnet):
            return None
        if own["bottleneck"] != "large":
            return channels
        if channels != 3:
            raise ConfigError(
                f"--control {config.control} has {channels} channels, and the EfficientNet of --controlnet_bottleneck "
                "large takes 3; choose another"
            )
        return effnet["latent_channels"]

    def check_fit(self, configs: dict[str, dict | None]) -> None:
        """The ControlNet and the prior too."""
        super().check_fit(configs)
        known = configs.get(_NAME) and configs["prior"]
        if known and (problem := next(control_misfits(configs[_NAME], configs["prior"]), None)):
            raise ModelError(f"{problem}; choose others, or set --controlnet_blocks")

    def part(self, name: str, config: CascadeControlNetConfig, tokenizer, seed: int, parts: dict):
        """A new ControlNet begins with the EfficientNet."""
        if name != _NAME or config.controlnet_name_or_path:
            return super().part(name, config, tokenizer, seed, parts)
        from ..networks.cascade.control import new_controlnet
        from ..weights.fill import config_of

        found = {one: config_of(self.components[one], layer) for one, layer in parts.items()}
        made = self.new_config(name, config, found)
        self.check_fit({**found, name: made})
        return new_controlnet(parts["effnet"], made, seed)

    def inputs(self, config: CascadeControlNetConfig, configs: dict, process) -> dict:
        """Those of stage C, and the control image."""
        from ..data.inputs import Control

        return super().inputs(config, configs, process) | {"control": Control(make_filter(config.control))}


def control_misfits(controlnet: dict, prior: dict):
    """Why a control network, by completed configs, is not for a prior."""
    channels, widths = controlnet["projection_channels"], prior["block_out_channels"]
    if set(widths) != {channels}:
        yield f"the ControlNet gives {channels} channels, and the prior's levels have {widths}"
    passes = zip((*zip(prior["down_num_layers_per_block"], prior["down_blocks_repeat_mappers"], strict=True),
                  *zip(prior["up_num_layers_per_block"], prior["up_blocks_repeat_mappers"], strict=True)),
                 (*prior["block_types_per_layer"], *prior["block_types_per_layer"][::-1]), strict=True)  # fmt: skip
    blocks = sum(depth * times * names.count(CASCADE_BLOCKS[0]) for (depth, times), names in passes)
    if controlnet["blocks"][-1] >= blocks:
        yield f"the ControlNet is for block {controlnet['blocks'][-1]}, and the prior has 0 .. {blocks - 1}"


FAMILY = CascadeControlNet()
