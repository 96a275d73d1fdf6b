"""What the families whose noise a transformer removes share: all but which one it is."""

from typing import ClassVar

from ...data.shapes import make_shapes
from ...networks.configs import downscale_factor, is_uvit, table_of
from ...utils.errors import ConfigError, ModelError
from ..settings.transformer import TransformerSettings
from .text_to_image import TextToImage


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

    def assemble(self, config: TransformerSettings, seed: int, *parts):
        """The model of built parts."""
        from ...networks.transformers.transform import TransformerDiffusionModel

        return TransformerDiffusionModel(*parts)
