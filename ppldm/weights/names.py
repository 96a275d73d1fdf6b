"""Names of parameters in CompVis' files and in diffusers' (which are ppdiffusers' too), as maps of prefixes, made from
the component's config. A parameter is renamed by the longest prefix that fits, so every map can be read either way."""

_RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}  # of a VAE


class Unmapped(Exception):
    """A parameter that the map has no name for."""


def rename(name: str, pairs: dict[str, str]) -> str:
    """`name` with its longest prefix (whole pieces) in `pairs` replaced. Raises Unmapped."""
    pieces = name.split(".")
    for length in range(len(pieces), 0, -1):
        prefix = ".".join(pieces[:length])
        if prefix in pairs:
            return ".".join([pairs[prefix], *pieces[length:]])
    raise Unmapped(name)


def unet_names(config: dict) -> dict[str, str]:
    """diffusers' prefixes of a UNet2DConditionModel to those of CompVis' UNetModel."""
    pairs = {
        "conv_in": "input_blocks.0.0",
        "time_embedding.linear_1": "time_embed.0",
        "time_embedding.linear_2": "time_embed.2",
        "add_embedding.linear_1": "label_emb.0.0",
        "add_embedding.linear_2": "label_emb.0.2",
        "conv_norm_out": "out.0",
        "conv_out": "out.2",
        "mid_block.attentions.0": "middle_block.1",
        **_resnet("mid_block.resnets.0", "middle_block.0"),
        **_resnet("mid_block.resnets.1", "middle_block.2"),
    }
    levels, depth = len(config["block_out_channels"]), config.get("layers_per_block", 2)
    block = 1
    for level, kind in enumerate(config["down_block_types"]):
        for layer in range(depth):
            pairs |= _resnet(f"down_blocks.{level}.resnets.{layer}", f"input_blocks.{block}.0")
            if "CrossAttn" in kind:
                pairs[f"down_blocks.{level}.attentions.{layer}"] = f"input_blocks.{block}.1"
            block += 1
        if level < levels - 1:
            pairs[f"down_blocks.{level}.downsamplers.0.conv"] = f"input_blocks.{block}.0.op"
            block += 1
    block = 0
    for level, kind in enumerate(config["up_block_types"]):
        attention = "CrossAttn" in kind
        for layer in range(depth + 1):
            pairs |= _resnet(f"up_blocks.{level}.resnets.{layer}", f"output_blocks.{block}.0")
            if attention:
                pairs[f"up_blocks.{level}.attentions.{layer}"] = f"output_blocks.{block}.1"
            if layer == depth and level < levels - 1:
                pairs[f"up_blocks.{level}.upsamplers.0.conv"] = f"output_blocks.{block}.{1 + attention}.conv"
            block += 1
    return pairs


def vae_names(config: dict) -> dict[str, str]:
    """diffusers' prefixes of an AutoencoderKL to those of CompVis' AutoencoderKL."""
    pairs = {"quant_conv": "quant_conv", "post_quant_conv": "post_quant_conv"}
    levels, depth = len(config["block_out_channels"]), config.get("layers_per_block", 1)
    for half, down, layers in (("encoder", True, depth), ("decoder", False, depth + 1)):
        pairs |= {
            f"{half}.conv_in": f"{half}.conv_in",
            f"{half}.conv_out": f"{half}.conv_out",
            f"{half}.conv_norm_out": f"{half}.norm_out",
        }
        for number in (0, 1):
            pairs |= _vae_resnet(f"{half}.mid_block.resnets.{number}", f"{half}.mid.block_{number + 1}")
        for ours, theirs in _ATTENTION.items():
            pairs[f"{half}.mid_block.attentions.0.{ours}"] = f"{half}.mid.attn_1.{theirs}"
        for level in range(levels):
            # CompVis counts the decoder's levels from the highest resolution.
            theirs = f"encoder.down.{level}" if down else f"decoder.up.{levels - 1 - level}"
            ours = f"{half}.{'down' if down else 'up'}_blocks.{level}"
            for layer in range(layers):
                pairs |= _vae_resnet(f"{ours}.resnets.{layer}", f"{theirs}.block.{layer}")
            if level < levels - 1:
                sampler = ("downsamplers", "downsample") if down else ("upsamplers", "upsample")
                pairs[f"{ours}.{sampler[0]}.0.conv"] = f"{theirs}.{sampler[1]}.conv"
    return pairs


def text_encoder_names(config: dict) -> dict[str, str]:
    """diffusers' prefixes of an LDMBertModel to those of CompVis' BERTEmbedder, an x-transformers encoder."""
    pairs = {
        "model.embed_tokens": "transformer.token_emb",
        "model.embed_positions": "transformer.pos_emb.emb",
        "model.layer_norm": "transformer.norm",
        "to_logits": "transformer.to_logits",
    }
    for layer in range(config["encoder_layers"]):
        ours = f"model.layers.{layer}"
        attention, feed_forward = (f"transformer.attn_layers.layers.{2 * layer + place}" for place in (0, 1))
        pairs |= {
            f"{ours}.self_attn_layer_norm": f"{attention}.0",
            f"{ours}.self_attn.q_proj": f"{attention}.1.to_q",
            f"{ours}.self_attn.k_proj": f"{attention}.1.to_k",
            f"{ours}.self_attn.v_proj": f"{attention}.1.to_v",
            f"{ours}.self_attn.out_proj": f"{attention}.1.to_out",
            f"{ours}.final_layer_norm": f"{feed_forward}.0",
            f"{ours}.fc1": f"{feed_forward}.1.net.0.0",
            f"{ours}.fc2": f"{feed_forward}.1.net.2",
        }
    return pairs


def _resnet(ours: str, theirs: str) -> dict[str, str]:
    return {f"{ours}.{a}": f"{theirs}.{b}" for a, b in _RESNET.items()}


def _vae_resnet(ours: str, theirs: str) -> dict[str, str]:
    same = {f"{ours}.{layer}": f"{theirs}.{layer}" for layer in ("norm1", "conv1", "norm2", "conv2")}
    return same | {f"{ours}.conv_shortcut": f"{theirs}.nin_shortcut"}
