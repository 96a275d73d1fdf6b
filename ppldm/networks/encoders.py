"""What frozen networks make of pictures and of the tokens of captions, and which tokens are padding."""

import paddle
from paddle import nn
from paddle.nn import functional as F


def token_mask(input_ids, end_id: int | None):
    """[B, L] int64, 1 up to the first `end_id` of a caption and 0 behind it; None where that is None."""
    if end_id is None:
        return None
    ends = (input_ids == end_id).astype("int64")
    return (ends.cumsum(axis=1) == ends).astype("int64")


def hidden_states(text_encoder: nn.Layer, input_ids, end_id: int | None):
    """[B, L] int64 to the last hidden states [B, L, D]. CLIP's encoder is causal, and takes no mask."""
    mask = {"attention_mask": token_mask(input_ids, end_id)} if hasattr(text_encoder, "to_logits") else {}
    return text_encoder(input_ids, **mask)[0]


def projected_caption(text_encoder: nn.Layer, input_ids, end_id: int):
    """Of captions [B, L] int64, by CLIP's text encoder with a projection: the hidden states [B, L, D] of its last layer
    before the norm, and the projected state [B, 1, P] of the first `end_id` behind it. Padding is not attended to."""
    mask = token_mask(input_ids, end_id)
    states = text_encoder.text_model(input_ids, attention_mask=mask, output_hidden_states=True, return_dict=True)
    ends = paddle.stack([paddle.arange(len(input_ids)), mask.sum(axis=1) - 1], axis=1)
    pooled = text_encoder.text_projection(states.last_hidden_state.gather_nd(ends))
    return states.hidden_states[-1], pooled.unsqueeze(1)


def join_caption(states, pooled):
    """The two of `projected_caption` as one [B, L + 1, D], as it is kept: the projected state last, with zeros."""
    return paddle.concat([states, F.pad(pooled, [0, 0, 0, 0, 0, states.shape[2] - pooled.shape[2]])], axis=1)


@paddle.no_grad()
def encode_moments(vae: nn.Layer, pixel_values):
    """[B, 3, H, W] uint8 to the posterior's mean and deviation, float32 [B, 2, C, H / f, W / f], unscaled; without a
    posterior the deviation is 0. In float32 outside autocast: half precision overflows in common VAEs."""
    with paddle.amp.auto_cast(enable=False):
        if not hasattr(vae, "encode"):  # an EfficientNet encoder
            mean = vae(pixel_values.astype("float32") / 255.0)
            return paddle.stack([mean, paddle.zeros_like(mean)], axis=1)
        posterior = vae.encode(to_unit_range(pixel_values)).latent_dist
        return paddle.stack([posterior.mean, posterior.std], axis=1)


def to_unit_range(pixel_values):
    """uint8 0 .. 255 to float32 -1 .. 1."""
    return pixel_values.astype("float32") / 127.5 - 1.0
