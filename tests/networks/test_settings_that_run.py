"""What a UNet's settings take, runs; what does not run is refused before anything is built."""

import numpy as np
import paddle
import pytest
from small_weights import UNET

from ppldm.networks.build import build_network
from ppldm.networks.config_fields import settings_of
from ppldm.networks.configs import check_config
from ppldm.utils.errors import ModelError, PpldmError

TRIED = {
    "sample_size": [None, [4, 8]], "in_channels": [5], "out_channels": [3], "layers_per_block": [2],
    "center_input_sample": [True], "flip_sin_to_cos": [False], "freq_shift": [1], "mid_block_type": [None,
    "UNetMidBlock2D", "UNetMidBlock2DSimpleCrossAttn"], "only_cross_attention": [True], "downsample_padding": [0, 1, 2,
    None], "mid_block_scale_factor": [2.0], "dropout": [0.1], "act_fn": ["gelu", "mish", "relu"],
    "norm_num_groups": [None, 16], "norm_eps": [1e-3], "cross_attention_dim": [16], "transformer_layers_per_block": [2],
    "dual_cross_attention": [True, None, False], "use_linear_projection": [True, None], "upcast_attention": [True],
    "resnet_time_scale_shift": ["scale_shift", "ada_group", "spatial"], "resnet_skip_time_act": [True, None],
    "resnet_out_scale_factor": [2.0], "time_embedding_type": ["fourier"], "time_embedding_dim": [64],
    "time_embedding_act_fn": ["silu"], "timestep_post_act": ["silu"], "time_cond_proj_dim": [8], "conv_in_kernel": [5],
    "conv_out_kernel": [1, 5], "attention_type": ["gated", "gated-text-image"], "class_embeddings_concat": [True, None],
    "mid_block_only_cross_attention": [True, False], "cross_attention_norm": ["layer_norm", "group_norm"],
    "addition_embed_type_num_heads": [8], "encoder_hid_dim": [24], "encoder_hid_dim_type": ["text_proj"],
    "attention_head_dim": [4], "num_attention_heads": [4], "addition_embed_type": ["text", "image"],
    "class_embed_type": ["timestep", "identity"], "num_class_embeds": [5], "data_format": ["NHWC"],
}  # fmt: skip
ASK_FOR_MORE = {
    "addition_embed_type",
    "class_embed_type",
    "num_class_embeds",
    "encoder_hid_dim",
    "encoder_hid_dim_type",
}


def test_the_tried_ones_are_the_classes():
    given = {"down_block_types", "up_block_types", "block_out_channels", "reverse_transformer_layers_per_block",
             "addition_time_embed_dim", "projection_class_embeddings_input_dim"}  # fmt: skip
    assert TRIED.keys() == settings_of("unet").keys() - given


@pytest.mark.parametrize("name, value", [(name, value) for name, values in TRIED.items() for value in values])
def test_a_setting_runs_as_in_paddle_or_is_refused(name, value, monkeypatch):
    try:
        config = check_config("unet", {"addition_embed_type_num_heads": 4, **UNET, name: value}, "config.json")
    except ModelError as error:
        assert name in str(error)
        return
    if name in ASK_FOR_MORE and value != "text":  # which `check_fit` refuses
        return
    results, shapes = [], ([2, config["in_channels"], 8, 8], [2, 5, config["cross_attention_dim"]])
    for tuned in (True, False):
        if not tuned:
            monkeypatch.setenv("PPLDM_NO_CPU_TUNING", "1")
        rng = np.random.default_rng(0)
        paddle.seed(0)  # of buffers
        try:
            with paddle.utils.unique_name.guard():
                unet = build_network("unet", config, 0)
        except PpldmError:
            return
        unet.eval()
        for parameter in unet.parameters():  # no zeros, which would hide what differs
            parameter.set_value(rng.standard_normal(parameter.shape, dtype=np.float32) / 8)
        x, words = (paddle.to_tensor(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes)
        with paddle.no_grad():
            results.append(unet(x, paddle.to_tensor([1, 700]), words).sample.numpy())
    assert results[0].shape[0] == 2 and np.abs(results[1]).max() > 0
    np.testing.assert_allclose(*results, rtol=0, atol=1e-4 * np.abs(results[1]).max())
