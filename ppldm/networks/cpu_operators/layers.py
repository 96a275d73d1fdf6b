"""The layers of a network, each by the operator that is fastest on a CPU.

`use_cpu_operators` gives the layers of a built network other forwards and leaves their names, weights and classes as
they are. A forward that an operator cannot compute (half precision, a graph that is traced, no rows, a padding of its
own) is the layer's own. They are for Paddle 3.3 on Linux and processors with AVX2. `PPLDM_NO_CPU_TUNING=1` turns them
off.
"""

import platform
from types import MethodType

import paddle
from paddle import nn
from ppdiffusers.models.attention_processor import Attention, AttnProcessor

from ...utils import variables
from ...utils.machine.devices import current_kind
from ...utils.machine.resources import has_vectors
from . import operators
from .onednn import libraries

VERSION = "3.3."  # of Paddle


def operators_are_usable() -> bool:
    """Whether a network that is built now is to compute by them."""
    known = paddle.__version__.startswith(VERSION) and (platform.system(), platform.machine()) == ("Linux", "x86_64")
    wanted = known and has_vectors("avx2") and not variables.is_on("PPLDM_NO_CPU_TUNING")
    return wanted and current_kind().is_cpu and libraries() is not None


def use_cpu_operators(network: nn.Layer) -> nn.Layer:
    """`network`, whose layers compute by these operators from now on, where they are usable."""
    for layer in network.sublayers(include_self=True) if operators_are_usable() else ():
        kind = type(layer)
        if forward := _FORWARDS.get(f"{kind.__module__}.{kind.__qualname__}"):
            layer.forward = MethodType(forward, layer)
        elif kind is Attention and type(layer.processor) is AttnProcessor:
            layer.set_processor(CpuAttention())
    return network


def plain_attention() -> AttnProcessor:
    """What computes attention as the formula has it, in float32 on every device: ours on a CPU, else ppdiffusers'."""
    return CpuAttention() if operators_are_usable() else AttnProcessor()


def attend(query, key, value, heads: int, bias=None):
    """Attention by the formula, of [B, N, H D], [B, M, H D] and [B, M, H D], with a bias [B, H, N, M] on its scores."""
    scale = (query.shape[-1] // heads) ** -0.5
    if operators_are_usable() and _can(query):
        return operators.attention(query, key, value, heads, scale, bias)
    query, key, value = (one.reshape([0, 0, heads, -1]).transpose([0, 2, 1, 3]) for one in (query, key, value))
    scores = paddle.matmul(query * scale, key, transpose_y=True)
    shares = nn.functional.softmax(scores if bias is None else scores + bias, -1)
    return paddle.matmul(shares.astype(value.dtype), value).transpose([0, 2, 1, 3]).flatten(2)


def leave_to_paddle(layer: nn.Layer) -> None:
    """Let this layer compute as its class does: `paddle.grad` of its weight alone tells an operator in Python that it
    must give no gradient of its input, but not in time."""
    vars(layer).pop("forward", None)


def _can(x, weight=None) -> bool:
    """Whether the operators can compute of x, and of a layer's weight, which must be here."""
    if not paddle.in_dynamic_mode() or x.dtype != paddle.float32 or 0 in x.shape or not x.place.is_cpu_place():
        return False
    is_here = weight is None or (weight.dtype == paddle.float32 and weight._is_initialized())
    return is_here and paddle.base.framework._dygraph_tracer()._amp_level == paddle.base.core.AmpLevel.O0


def _has_hooks(*layers: nn.Layer) -> bool:
    """Whether somebody, such as an adapter, changes or sees what these give: then they must be called."""
    return any(layer._forward_pre_hooks or layer._forward_post_hooks for layer in layers)


def _conv2d(self, x, *scale, **named):
    padding = self._updated_padding if self._padding_algorithm == "EXPLICIT" else ()
    plain = self._padding_mode == "zeros" and self._data_format == "NCHW" and len(padding) == 2
    if not plain or getattr(self, "lora_layer", None) is not None or not _can(x, self.weight):
        return type(self).forward(self, x, *scale, **named)
    geometry = tuple(self._stride), tuple(padding), tuple(self._dilation)
    return operators.conv2d(x, self.weight, self.bias, *geometry, self._groups)


def _downsample(self, x, *scale, **named):
    """With the zeros below and at the right as padding of the convolution."""
    convolution, plain = self.conv, type(self.conv).__name__ in ("Conv2D", "LoRACompatibleConv")
    takes = plain and self.use_conv and self.padding == 0 and getattr(convolution, "lora_layer", None) is None
    takes = takes and self.data_format == "NCHW" and not _has_hooks(convolution)
    if not takes or not _can(x, convolution.weight):
        return type(self).forward(self, x, *scale, **named)
    geometry = tuple(convolution._stride), (0, 0), tuple(convolution._dilation), convolution._groups
    return operators.conv2d(x, convolution.weight, convolution.bias, *geometry, more=1)


def _linear(self, x, *scale, **named):
    plain = getattr(self, "lora_layer", None) is None and _can(x, self.weight)
    return operators.linear(x, self.weight, self.bias) if plain else type(self).forward(self, x, *scale, **named)


def _group_norm(self, x):
    if self.weight is None or self.bias is None or self._data_format != "NCHW" or not _can(x, self.weight):
        return type(self).forward(self, x)
    return operators.group_norm(x, self.weight, self.bias, self._num_groups, self._epsilon)


def _layer_norm(self, x):
    if (self.weight is None) != (self.bias is None) or len(self._normalized_shape) != 1 or not _can(x, self.weight):
        return layer_norm_by_paddle(self, x)
    return operators.layer_norm(x, self.weight, self.bias, self._epsilon)


def _rms_norm(self, x):
    return operators.rms_norm(x, self.weight, self.epsilon) if _can(x, self.weight) else type(self).forward(self, x)


def layer_norm_by_paddle(layer: nn.LayerNorm, x):
    """What the class gives, to the bit. Paddle 3.3's kernel for CPUs makes a wrong gradient of x where none of the
    weight is asked for; so one always is, and nobody takes it."""
    weight = layer.weight
    if weight is not None and weight.stop_gradient:
        weight = weight.detach()
        weight.stop_gradient = x.stop_gradient
    return nn.functional.layer_norm(x, layer._normalized_shape, weight, layer.bias, layer._epsilon)


def _silu(self, x):
    return operators.silu(x) if _can(x) else type(self).forward(self, x)


def _gelu(self, x):
    exact = not self._approximate if isinstance(self, nn.GELU) else self.act is nn.functional.gelu
    return operators.gelu(x) if exact and _can(x) else type(self).forward(self, x)


def _geglu(self, x, *scale, **named):
    if not _can(x, self.proj.weight):
        return type(self).forward(self, x, *scale, **named)
    return operators.geglu(self.proj(x, *scale, **named))


def _resnet(self, x, temb, *scale, **named):
    """With SiLU inside the norms, and the embedding of the noise level inside the second."""
    usual = self.time_embedding_norm == "default" and isinstance(self.nonlinearity, nn.Silu) and not self.skip_time_act
    usual = usual and self.upsample is None and self.downsample is None and not _has_hooks(self.norm1, self.norm2)
    usual = usual and (temb is None or temb.shape[0] == x.shape[0]) and self.data_format == "NCHW"
    if not usual or not _can(x, self.norm1.weight):
        return type(self).forward(self, x, temb, *scale, **named)
    shift = None if self.time_emb_proj is None else self.time_emb_proj(self.nonlinearity(temb))
    hidden = self.conv1(_group_norm_silu(self.norm1, x))
    hidden = self.conv2(self.dropout(_group_norm_silu(self.norm2, hidden, shift)))
    total = (x if self.conv_shortcut is None else self.conv_shortcut(x)) + hidden
    return total if self.output_scale_factor == 1.0 else total / self.output_scale_factor


def _group_norm_silu(norm, x, shift=None):
    return operators.group_norm(x, norm.weight, norm.bias, norm._num_groups, norm._epsilon, True, shift)


def _ldmbert_attention(self, hidden_states, key_value_states=None, past_key_value=None, attention_mask=None,
                       output_attentions=False):  # fmt: skip
    special = key_value_states is not None or past_key_value is not None or output_attentions or self.is_decoder
    if special or (self.dropout and self.training) or not _can(hidden_states, self.q_proj.weight):
        given = hidden_states, key_value_states, past_key_value, attention_mask, output_attentions
        return type(self).forward(self, *given)
    projected = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
    attended = operators.attention(*projected, self.num_heads, self.scaling, attention_mask)
    return self.out_proj(attended), None, None


def _uvit_attention(self, x):
    special = (self.attn_drop and self.training) or self._use_memory_efficient_attention_xformers
    if special or not _can(x, self.qkv.weight):
        return type(self).forward(self, x)
    attended = operators.attention(*self.qkv(x).chunk(3, axis=-1), self.num_heads, self.scale)
    return self.proj_drop(self.proj(attended))


def _pool(self, x):
    """What a caption's mean attends to among itself and the tokens: [B, L, W] to [B, W]."""
    mean = x.mean(axis=1, keepdim=True) + self.positional_embedding.astype(x.dtype)
    words = paddle.concat([mean, x], axis=1)
    return attend(self.q_proj(mean), self.k_proj(words), self.v_proj(words), self.num_heads)[:, 0]


class CpuAttention(AttnProcessor):
    """ppdiffusers' processor of attention by the operator."""

    def __call__(
        self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, temb=None, *scale, **further
    ):
        words = encoder_hidden_states
        usual = attn.spatial_norm is None and (words is None or words.shape[0] == hidden_states.shape[0])
        if not usual or not _can(hidden_states, attn.to_q.weight):
            return super().__call__(attn, hidden_states, words, attention_mask, temb, *scale, **further)
        shape, x = hidden_states.shape, hidden_states
        if len(shape) == 4:
            x = x.flatten(2)
            x = (x if attn.group_norm is None else attn.group_norm(x)).transpose([0, 2, 1])
        elif attn.group_norm is not None:
            x = attn.group_norm(x.transpose([0, 2, 1])).transpose([0, 2, 1])
        words = x if encoder_hidden_states is None else encoder_hidden_states
        if encoder_hidden_states is not None and attn.norm_cross:
            words = attn.norm_encoder_hidden_states(words)
        added = attn.prepare_attention_mask(attention_mask, words.shape[1], words.shape[0])
        projected = attn.to_q(x), attn.to_k(words), attn.to_v(words)
        attended = operators.attention(*projected, attn.heads, attn.scale, added)
        attended = attn.to_out[1](attn.to_out[0](attended))
        if len(shape) == 4:
            attended = attended.transpose([0, 2, 1]).reshape(shape)
        if attn.residual_connection:
            attended = attended + hidden_states
        return attended if attn.rescale_output_factor == 1.0 else attended / attn.rescale_output_factor


_MODELS = "ppdiffusers.models"
_FORWARDS = {  # by the names of classes, which are imported only where a network has them
    "paddle.nn.layer.conv.Conv2D": _conv2d,
    f"{_MODELS}.lora.LoRACompatibleConv": _conv2d,
    "paddle.nn.layer.common.Linear": _linear,
    f"{_MODELS}.lora.LoRACompatibleLinear": _linear,
    "paddle.nn.layer.norm.GroupNorm": _group_norm,
    "paddle.nn.layer.norm.LayerNorm": _layer_norm,
    "paddle.nn.layer.activation.Silu": _silu,
    "paddle.nn.layer.activation.GELU": _gelu,
    "paddlenlp.transformers.activations.GELUActivation": _gelu,
    f"{_MODELS}.activations.GEGLU": _geglu,
    f"{_MODELS}.resnet.ResnetBlock2D": _resnet,
    f"{_MODELS}.resnet.Downsample2D": _downsample,
    f"{_MODELS}.uvit_t2i.Attention": _uvit_attention,
    f"{_MODELS}.embeddings.AttentionPooling": _pool,
    "ppldm.networks.transformers.single_stream.RMSNorm": _rms_norm,
    "ppdiffusers.pipelines.latent_diffusion.pipeline_latent_diffusion.LDMBertAttention": _ldmbert_attention,
}
