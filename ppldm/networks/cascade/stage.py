"""What the models of stages B and C share: frozen networks beside the one that is trained, and the loss."""

import paddle
from paddle import nn

from ...diffusion.process import Process
from ..denoising import DenoisingModel
from ..encoders import projected_caption, split_caption
from ..model import Component, Loss


class CascadeModel(DenoisingModel):
    """What both stages have: a frozen EfficientNet and a frozen CLIP text encoder with a projection beside the network
    that is trained. end_id: of the token that ends a caption."""

    caption_encoder = "text_encoder"
    end_id: int

    def __init__(self, effnet: nn.Layer, text_encoder: nn.Layer, process: Process):
        super().__init__()
        self.effnet = effnet
        self.text_encoder = text_encoder
        self.register_buffer("ratios", paddle.to_tensor(process.schedule.ratios(), "float32"), persistable=False)
        self.set_process(process)

    @property
    def frozen(self) -> dict[str, Component]:
        """The EfficientNet, in float32, and the text encoder."""
        return {
            "effnet": Component(self.effnet, trained=False, stays_float32=True),
            "text_encoder": Component(self.text_encoder, trained=False),
        }

    @paddle.no_grad()
    def small_latents(self, pixel_values):
        """[B, 3, H, W] uint8 to the EfficientNet's latents [B, 16, H / 32, W / 32] float32, outside autocast."""
        with paddle.amp.auto_cast(enable=False):
            return self.effnet(pixel_values.astype("float32") / 255.0)

    def embed_captions(self, input_ids, text_embeddings=None):
        """`projected_caption` of [B, L] int64, or of `text_embeddings` [B, L + 1, D], which is it, joined. There are
        gradients only of tokens that are trained."""
        if text_embeddings is not None:
            return split_caption(text_embeddings, self.text_encoder.config.projection_dim)
        return projected_caption(self.text_encoder, input_ids, self.end_id)

    def denoise(self, noisy, timesteps, **condition):
        """The network's output for x_t at timesteps [B] int64, or one for all, under what `condition` gives."""
        return self.denoiser(noisy, self.ratios[timesteps].expand([len(noisy)]), **condition)

    def loss_under(self, condition: dict, latents, timesteps, noise, input_noise=None) -> Loss:
        """The `denoising_loss` of latents, of the network's arguments `condition`."""

        def predicted(noisy, level):
            return self.denoise(noisy, timesteps, **condition)

        return self.denoising_loss(predicted, latents, timesteps, noise, input_noise)
