"""What the families whose noise a transformer removes share: all but which one it is."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from ...config.option import Bounds, option
from ...data.shapes import make_shapes
from ...networks.configs import downscale_factor, is_uvit, table_of
from ...utils.errors import ConfigError, ModelError
from ..settings.adapters import lora_components
from ..settings.average import learning_rate_of
from ..settings.parts import OF_PARTS, PartsSettings, anew
from .text_to_image import TextToImage

_model = partial(option, section="model")


@dataclass(kw_only=True)
class TransformerSettings(PartsSettings):
    """Of a UViT or a DiT, as the family says."""

    denoiser: ClassVar[str] = "transformer"
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


class TextToImageTransformer(TextToImage):
    """Trains a transformer, and the text encoder if it is asked to. Its name is the
    transformer's in `networks.config_fields.CLASSES`."""

    components: ClassVar = {"vae": "vae", "text_encoder": "text_encoder", "transformer": "transformer"}
    masks_padding = False  # behind captions, where `--mask_pad_tokens` asks for it

    def check(self, config: TransformerSettings, data) -> None:
        """Also that patches fill the latents, and that some are kept."""
        super().check(config, data)
        found, new = self.known_configs(config)
        vae, transformer = (found.get(name) or new.get(name) for name in ("vae", "transformer"))
        if not (vae and transformer):
            return
        side = downscale_factor(vae) * transformer["patch_size"]
        for height, width in make_shapes(data) or ((data.resolution, data.resolution),):
            if height % side or width % side:
                flag = "--resolution" if (height, width) == (data.resolution,) * 2 else "--buckets"
                raise ConfigError(
                    f"{flag}: the sides of {width} x {height} pictures must be multiples of {side}, the VAE's "
                    "downscaling factor times the transformer's patch_size; correct it"
                )

    def check_configs(self, configs: dict, config: TransformerSettings) -> None:
        """Also that the transformer is of this family, and takes captions as they are."""
        super().check_configs(configs, config)
        transformer = configs["transformer"]
        if not transformer:
            return
        if (other := table_of("transformer", transformer)) != self.name:
            raise ModelError(f"the transformer is of another kind; train it as `family: {other}`")
        if is_uvit(transformer) and transformer["num_text_tokens"] != config.model_max_length:
            raise ModelError(
                f"the transformer has positions for {transformer['num_text_tokens']} tokens of a caption; give it "
                f"--model_max_length {transformer['num_text_tokens']}"
            )
        if config.mask_pad_tokens and not self.masks_padding:
            raise ConfigError(f"--mask_pad_tokens is not for {self.plural}, which look at all tokens; omit it")

    def build(self, config: TransformerSettings, data, seed: int):
        """With the patches that are kept in a batch, where some are left out."""
        from ...data.inputs import KeptPatches

        model = super().build(config, data, seed)
        if config.patch_masking:
            side = downscale_factor(model.vae.config) * model.transformer.config.patch_size
            model.inputs["kept_patches"] = KeptPatches(side, config.patch_masking)
        return model
