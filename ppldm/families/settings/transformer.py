"""What a model whose noise a transformer removes is told: settings of families."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ...config.option import Bounds, option
from .adapters import lora_components
from .average import learning_rate_of
from .parts import OF_PARTS, PartsSettings, anew

_model = partial(option, section="model")


@dataclass(kw_only=True)
class TransformerSettings(PartsSettings):
    """Of a UViT or a DiT, as the family says."""

    denoiser: ClassVar[str] = "transformer"
    loop_defaults: ClassVar[dict] = {}
    new_text_encoder = "text_encoder"

    transformer_name_or_path: str | None = _model(
        None, "Transformer to start from: a pipeline's folder, its own folder, or a name.", kind="model", needs=OF_PARTS
    )
    transformer_config_file: str | None = _model(
        None,
        "Config of a transformer that is trained from scratch: a JSON file, or a name (uvit_s2, dit_xl2, …).",
        kind="network",
        needs=anew("transformer"),
    )
    patch_masking: float = _model(
        0.0,
        "Leave this share of the patches of each picture out of the training: 0.75 makes a step about four times as "
        "cheap (docs/models.md).",
        bounds=Bounds(least=0, below=1),
        identity=True,
    )
    transformer_learning_rate: float | None = learning_rate_of("the transformer")
    lora_components: list[str] = lora_components("transformer", "text_encoder")

    def new_configs(self) -> dict[str, dict]:
        """A UViT's table of positions is as long as the captions."""
        found = super().new_configs()
        if "num_text_tokens" in found.get("transformer", {}):
            found["transformer"]["num_text_tokens"] = self.model_max_length
        return found
