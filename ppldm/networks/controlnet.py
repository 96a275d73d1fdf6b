"""A frozen latent diffusion model that is led by a control image: ControlNet, Zhang et al. 2023 (arXiv:2302.05543). A
batch has, beside what `latent_diffusion` says, control [B, K, H, W] uint8 (0 .. 1 to the network).

What is trained is a copy of the UNet's encoder that also sees the control image. Its outputs reach the UNet's decoder
through convolutions that start at zero (section 3.1), so that a new one changes nothing.
"""

import paddle
from paddle import nn
from ppdiffusers import ControlNetModel

from .build import init_like_pytorch, make_network
from .latent_diffusion import LatentDiffusionModel
from .model import Component


class ControlledDiffusionModel(LatentDiffusionModel):
    """All frozen but `controlnet`. Without a control image it is the model that it stands on. The attention of the
    control network sees the padding behind captions, whatever `mask_behind` says."""

    def __init__(self, process, sampling: dict | None = None, frozen: bool = True, **parts: nn.Layer):
        super().__init__(process, sampling, True, **parts)

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


@paddle.no_grad()
def new_controlnet(unet: nn.Layer, config: dict, seed: int) -> ControlNetModel:
    """A control network that copies a UNet's encoder, and changes nothing yet."""
    with paddle.utils.unique_name.guard("controlnet_"):  # the names of the base's parameters are taken
        made = make_network("controlnet", config)
    embedding = init_like_pytorch(made.controlnet_cond_embedding, seed, salt=5)
    for parameter in embedding.conv_out.parameters():
        parameter.zero_()
    own, copied = made.state_dict(), unet.state_dict()
    for name in own.keys() & copied.keys():  # all else of a made network is zero
        own[name].set_value(copied[name])
    return made
