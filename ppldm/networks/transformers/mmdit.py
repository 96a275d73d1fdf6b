"""The transformer of Stable Diffusion 3 (Esser et al. 2024, arXiv:2403.03206): ppdiffusers' SD3Transformer2DModel.

Patches and words have weights of their own in each block, and attend to one another as one sequence. Noise level and
pooled caption shift, scale and gate what the blocks do. `mmdit` gives what ppdiffusers' forward gives, whose
recomputation loses the words' half of each block.
"""

import numpy as np
import paddle
from paddle import nn
from paddle.distributed.fleet.utils import recompute
from ppdiffusers.models.embeddings import get_1d_sincos_pos_embed_from_grid
from ppdiffusers.models.transformer_sd3 import SD3Transformer2DModel

from ...utils.errors import ConfigError
from ...utils.machine.devices import current_kind
from ..cpu_operators.layers import attend
from .microdit import Grid, take_patches


class JointAttention:
    """A processor of attention over patches and words as the formula has it, in place of one that needs a GPU."""

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask=None):
        pairs = ((attn.to_q, attn.add_q_proj), (attn.to_k, attn.add_k_proj), (attn.to_v, attn.add_v_proj))
        joined = [paddle.concat([own(hidden_states), added(encoder_hidden_states)], axis=1) for own, added in pairs]
        tokens, words = attend(*joined, attn.heads).split([hidden_states.shape[1], encoder_hidden_states.shape[1]], 1)
        return attn.to_out[1](attn.to_out[0](tokens)), words if attn.context_pre_only else attn.to_add_out(words)


def make_sd3(config: dict) -> nn.Layer:
    """The transformer of a completed config, without the biases that ppdiffusers gives norms which have none. Its table
    of positions is made of one line, with the same bits: ppdiffusers takes seconds to make a published model's."""
    side, width = config["pos_embed_max_size"], config["num_attention_heads"] * config["attention_head_dim"]
    network = SD3Transformer2DModel(**config | {"pos_embed_max_size": 1})
    network.register_to_config(pos_embed_max_size=side)
    network.pos_embed.pos_embed_max_size = side
    table = paddle.zeros([1, side * side, width])
    if paddle.in_dynamic_mode():
        places = np.arange(side, dtype=np.float32) / (side / network.pos_embed.base_size)
        lines = get_1d_sincos_pos_embed_from_grid(width // 2, places).astype(np.float32)
        across, down = (np.broadcast_to(one, (side, side, width // 2)) for one in (lines[None], lines[:, None]))
        table = paddle.to_tensor(np.concatenate([across, down], 2).reshape(table.shape))
    network.pos_embed.register_buffer("pos_embed", table)
    for layer in network.sublayers():
        if isinstance(layer, nn.LayerNorm):
            layer.bias = None
    if not current_kind().efficient_attention:
        network.set_attn_processor(JointAttention())
    return network


def mmdit(network: SD3Transformer2DModel, noisy, timesteps, hidden, pooled, grid: Grid, kept):
    """`transform` of this network, told of captions pooled [B, P] too. Raises ConfigError for pictures without
    positions."""
    most = network.config.pos_embed_max_size
    if max(grid.sides) > most:
        raise ConfigError(f"the transformer has positions for {most} patches a side, and pictures of this size have "
                          f"{max(grid.sides)}; choose smaller ones")  # fmt: skip
    tokens = network.pos_embed(noisy)
    if kept is not None:
        tokens = take_patches(tokens, kept)
    state = network.time_text_embed(timesteps, pooled.astype(network.dtype))
    words, again = network.context_embedder(hidden), network.gradient_checkpointing and network.training
    *blocks, last = network.transformer_blocks
    for block in blocks:
        words, tokens = recompute(block, tokens, words, state) if again else block(tokens, words, state)

    def end(*given):
        return last(*given)[1]

    tokens = recompute(end, tokens, words, state) if again else end(tokens, words, state)
    return grid.join(network.proj_out(network.norm_out(tokens, state)), kept)
