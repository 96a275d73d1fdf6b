"""A frozen latent diffusion model that is led by a control image: ControlNet, Zhang et al. 2023 (arXiv:2302.05543). A
batch has, beside what `latent_diffusion` says, control [B, K, H, W] uint8 (0 .. 1 to the network).

What is trained is a copy of the UNet's encoder that also sees the control image. Its outputs reach the UNet's decoder
through convolutions that start at zero (section 3.1), so that a new one changes nothing.
"""

import paddle
from paddle import nn
from ppdiffusers import ControlNetModel

from ..utils.errors import ModelError
from .build import init_like_pytorch, make_network
from .config_fields import settings_of
from .configs import check_config, downscale_factor
from .latent_diffusion import LatentDiffusionModel
from .model import Component

_EMBEDDING_CHANNELS = (16, 32, 96, 256)  # of the layers that take a control image to latents; each halves the sides
# Of what a UNet has and the copy of its encoder has not, all that may be as it likes. The rest must be at its default.
_FREE = {
    "sample_size", "out_channels", "up_block_types", "reverse_transformer_layers_per_block", "time_cond_proj_dim",
    "conv_out_kernel", "data_format",
}  # fmt: skip


class ControlledDiffusionModel(LatentDiffusionModel):
    """All frozen but `controlnet`. Without a control image it is the model that it stands on. The attention of the
    control network sees the padding behind captions, whatever `mask_behind` says."""

    def __init__(self, vae, text_encoder, denoiser, controlnet: nn.Layer, process, sampling: dict | None = None):
        super().__init__(vae, text_encoder, denoiser, process, True, sampling, controlnet=controlnet)

    @property
    def networks(self) -> dict[str, Component]:
        base = {
            name: Component(one.layer, False, stays_float32=one.stays_float32) for name, one in super().networks.items()
        }
        recompute = self.controlnet.enable_gradient_checkpointing
        return base | {"controlnet": Component(self.controlnet, True, "controlnet", recompute=recompute)}

    def predict(self, noisy, timesteps, input_ids, sizes=None, text_embeddings=None, control=None):
        condition = self.condition(input_ids, text_embeddings) | self.size_condition(sizes)
        return self.denoise(noisy, timesteps, control=control, **condition)

    def denoise(self, noisy, timesteps, control=None, control_scale: float = 1.0, **condition):
        """The same under conditions that are there already. control_scale: how much of what the network adds."""
        if control is None:
            return super().denoise(noisy, timesteps, **condition)
        seen = {name: condition[name] for name in ("encoder_hidden_states", "added_cond_kwargs") if name in condition}
        picture = control.astype(self.controlnet.dtype) / 255.0
        down, middle = self.controlnet(
            noisy, timesteps, controlnet_cond=picture, conditioning_scale=control_scale, return_dict=False, **seen
        )
        added = {"down_block_additional_residuals": down, "mid_block_additional_residual": middle}
        return super().denoise(noisy, timesteps, **condition, **added)


def controlnet_config(unet: dict, vae, num_channels: int) -> dict:
    """The completed config of a control network beside a UNet. Raises ModelError for one that cannot be copied."""
    settings, copied = settings_of("unet"), settings_of("controlnet").keys() & unet.keys()
    bound = settings.keys() - copied - _FREE
    odd = {name: unet[name] for name in unet if name in bound and unet[name] not in (settings[name].default, None)}
    lists = {name: unet[name] for name in ("layers_per_block", "cross_attention_dim") if isinstance(unet[name], list)}
    if unet["mid_block_type"] is None or odd or lists:
        odd = {"mid_block_type": unet["mid_block_type"], **odd, **lists}
        shown = ", ".join(f"{name} {value}" for name, value in odd.items())
        raise ModelError(f"no ControlNet can be made for this UNet ({shown}); start from another")
    halvings = downscale_factor(vae).bit_length() - 1
    last = _EMBEDDING_CHANNELS[-1:] * max(0, halvings + 1 - len(_EMBEDDING_CHANNELS))
    own = {
        "conditioning_channels": num_channels,
        "conditioning_embedding_out_channels": [*_EMBEDDING_CHANNELS[: halvings + 1], *last],
    }
    return check_config("controlnet", {name: unet[name] for name in copied} | own, "the UNet")


@paddle.no_grad()
def new_controlnet(unet: nn.Layer, config: dict, seed: int) -> ControlNetModel:
    """A control network that copies a UNet's encoder, and changes nothing yet."""
    with paddle.utils.unique_name.guard("controlnet_"):  # the names of the base's parameters are taken
        made = make_network("controlnet", config)
    embedding = init_like_pytorch(made.controlnet_cond_embedding, seed, salt=5)
    for parameter in embedding.conv_out.parameters():
        parameter.zero_()
    own, copied = made.state_dict(), unet.state_dict()
    for name, parameter in own.items():
        if name in copied:
            parameter.set_value(copied[name])
        elif not name.startswith("controlnet_cond_embedding."):
            parameter.zero_()
    return made
