"""Transformers that remove the noise in place of a UNet: ppdiffusers' UViT and DiT, Stable Diffusion 3's (`mmdit`), and
two of ppldm's own classes.

`transform` is the forward of all. Of ppdiffusers' it gives what their own gives, to the bit, and takes two things more.
With `kept`, all other patches leave the sequence once they have their positions, in a MicroDiT once they were mixed,
which is what makes a step cheaper. And a UViT takes latents of any sides: its table of positions is resampled to them.
"""

from pkgutil import resolve_name

import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from paddle.nn import functional as F
from ppdiffusers import Transformer2DModel, UViTT2IModel
from ppdiffusers.models.attention_processor import Attention, AttnProcessor
from ppdiffusers.models.embeddings import PixArtAlphaTextProjection, get_timestep_embedding

from ..config_fields import CLASSES
from ..configs import is_sd3, is_uvit, table_of
from ..latent_diffusion import LatentDiffusionModel
from ..model import Loss, token_mask
from .microdit import Grid, grid_of, take_patches

_MASKED = -10000.0  # added to the scores of what is not attended to, as ppdiffusers does
_NO_SIZES = {"resolution": None, "aspect_ratio": None}


class TransformerDiffusionModel(LatentDiffusionModel):
    """Latent diffusion whose noise a transformer removes. A batch may have kept_patches [B, K] int64, ascending: which
    of each sample's patches are trained on, and loss and errors are means of. In evaluation mode all are."""

    denoiser_name = "transformer"
    words = "hidden"

    @property
    def joins_words(self) -> bool:
        """False for a UViT, in whose sequence each word has a place."""
        return not isinstance(self.denoiser, UViTT2IModel)

    def condition(self, input_ids, text_embeddings=None) -> dict:
        """What the transformer takes of captions [B, L]: hidden states, and a mask or None."""
        mask = token_mask(input_ids, self.mask_behind)
        return {"hidden": self.encode_text(input_ids, text_embeddings), "mask": mask}

    def predict(self, noisy, timesteps, input_ids, text_embeddings=None, kept=None):
        return self.denoise(noisy, timesteps, **self.condition(input_ids, text_embeddings), kept=kept)

    def forward(self, kept_patches=None, **batch) -> Loss:
        """The `denoising_loss` of latents under captions, of the patches that are kept."""
        if kept_patches is None or not self.training:
            return super().forward(**batch)

        def seen(latents):
            """[B, C, h, w] to [B, K, 1, C p p]."""
            return take_patches(grid_of(self.denoiser, latents).split(latents), kept_patches).unsqueeze(2)

        return super().forward(**batch, seen=seen, kept=kept_patches)

    def denoise(self, noisy, timesteps, *, by=None, **condition):
        """The transformer's output [B, C, h, w] for x_t; where patches are left out, it is of no meaning there."""
        return transform(by or self.denoiser, noisy, timesteps, **condition)


def make_transformer(config: dict) -> nn.Layer:
    """The transformer of a completed config, as its class makes it; ppdiffusers' compute attention in float32 and the
    same on every device. What a class raises on a config that makes none passes through."""
    if (own := CLASSES[table_of("transformer", config)]).startswith("ppldm."):
        return resolve_name(own)(**config)
    if is_sd3(config):
        from .mmdit import make_sd3

        return make_sd3(config)
    if is_uvit(config):
        network = UViTT2IModel(**config)
        network.disable_xformers_memory_efficient_attention()
        return network
    # Its own layers for captions cannot be made by ppdiffusers 0.29, nor would anything use the table of random numbers
    # among them; these are the same without it.
    captions = PixArtAlphaTextProjection(config["caption_channels"], config["cross_attention_dim"])
    network = Transformer2DModel(**config | {"caption_channels": None})
    network.caption_projection = captions
    network.register_to_config(caption_channels=config["caption_channels"])
    for layer in network.sublayers():
        if isinstance(layer, Attention):
            layer.set_processor(AttnProcessor())
    return network


def transform(network: nn.Layer, noisy, timesteps, hidden, mask=None, kept=None, pooled=None):
    """Noisy latents [B, C, h, w] at timesteps [B] or [1], under hidden states [B, L, D] of captions, to a prediction
    [B, C, h, w]. mask: [B, L] int64, 0 where attention does not look. kept: [B, K] int64, the patches that are not left
    out, None for all; in place of others are zeros, or what a last convolution makes of zeros. pooled [B, P]: of
    captions, for Stable Diffusion 3's."""
    noisy, hidden = noisy.astype(network.dtype), hidden.astype(network.dtype)
    grid = grid_of(network, noisy)
    timesteps = timesteps.expand([noisy.shape[0]])
    if pooled is not None:
        from .mmdit import mmdit

        return mmdit(network, noisy, timesteps, hidden, pooled, grid, kept)
    if isinstance(network, UViTT2IModel):
        return _uvit(network, noisy, timesteps, hidden, grid, kept)
    if isinstance(network, Transformer2DModel):
        return _dit(network, noisy, timesteps, hidden, mask, grid, kept)
    return network(noisy, timesteps, hidden, kept=kept, **({} if mask is None else {"mask": mask}))


def _uvit(network: UViTT2IModel, noisy, timesteps, hidden, grid: Grid, kept):
    patches = network.patch_embed(noisy)
    time = get_timestep_embedding(timesteps, network.embed_dim, True, 0).unsqueeze(1).astype(network.dtype)
    extras = paddle.concat([time, network.context_embed(hidden)], 1)
    positions = network.pos_embed
    if grid.sides != (rows := network.img_size[0] // grid.side, rows):
        table = positions[:, network.extras :].reshape([1, rows, rows, -1]).transpose([0, 3, 1, 2])
        table = F.interpolate(table, grid.sides, mode="bilinear").flatten(2).transpose([0, 2, 1])
        positions = paddle.concat([positions[:, : network.extras], table], 1)
    tokens = network.pos_drop(paddle.concat([extras, patches], 1) + positions)
    if kept is not None:
        tokens = paddle.concat([tokens[:, : network.extras], take_patches(tokens[:, network.extras :], kept)], 1)
    again = network.gradient_checkpointing and network.training
    skips = []
    for block in network.in_blocks:
        tokens = recompute(block, tokens) if again else block(tokens)
        skips.append(tokens)
    tokens = recompute(network.mid_block, tokens) if again else network.mid_block(tokens)
    for block in network.out_blocks:
        tokens = recompute(block, tokens, skips.pop()) if again else block(tokens, skips.pop())
    tokens = network.decoder_pred(network.norm(tokens))[:, network.extras :]
    return network.final_layer(grid.join(tokens, kept))


def _dit(network: Transformer2DModel, noisy, timesteps, hidden, mask, grid: Grid, kept):
    tokens = network.pos_embed(noisy)
    if kept is not None:
        tokens = take_patches(tokens, kept)
    changes, time = network.adaln_single(
        timesteps, _NO_SIZES, batch_size=tokens.shape[0], hidden_dtype=tokens.dtype
    )  # fmt: skip
    hidden = network.caption_projection(hidden)
    bias = None if mask is None else ((1 - mask.astype(tokens.dtype)) * _MASKED).unsqueeze(1)
    for block in network.transformer_blocks:
        given = (tokens, None, hidden, bias, changes)
        tokens = recompute(block, *given) if network.gradient_checkpointing and network.training else block(*given)
    shift, scale = (network.scale_shift_table[None] + time[:, None]).chunk(2, axis=1)
    tokens = network.proj_out(network.norm_out(tokens) * (1 + scale) + shift)
    # A network with twice the channels tells the variance too, which no loss or sampler here asks for.
    return grid.join(tokens, kept)[:, : network.config.in_channels]
