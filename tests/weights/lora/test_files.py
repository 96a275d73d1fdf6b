"""LoRA files: every form is read as it was written, to the bit, and what is wrong with one is named."""

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small_loras import differences, layers_of, small_lora
from small_weights import UNET, small_weights, write_clip

from ppldm.config.network_files import CONFIG_DIR
from ppldm.utils.errors import ModelError
from ppldm.weights.lora.files import (
    KOHYA_PREFIXES,
    LORA_FILE,
    Lora,
    LoraPair,
    read_key,
    read_lora,
    write_key,
    write_lora,
)
from ppldm.weights.names import rename, unet_names
from ppldm.weights.source import read_component


@pytest.fixture(scope="module")
def components(tmp_path_factory):
    """A UNet and a CLIP."""
    clip = read_component("text_encoder", write_clip(tmp_path_factory.mktemp("clip")))
    return {"unet": small_weights().components["unet"], "text_encoder": clip}


@pytest.fixture(scope="module")
def lora(components):
    return small_lora(components)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("form, alpha", [("diffusers", 2), ("kohya", 2), ("kohya", 0.3)])
def test_a_file_is_read_as_it_was_written(components, tmp_path, form, dtype, alpha):
    lora = small_lora(components, alpha=float(np.float32(alpha)), dtype=dtype)
    written = write_lora(lora, tmp_path / "lora.safetensors", form)
    assert differences(lora, read_lora(written)) == []


def test_every_layer_of_the_networks_has_a_key_of_its_own(components):
    ldmbert = small_weights().components["text_encoder"]
    for form, kinds in (("diffusers", {**components, "ldmbert": ldmbert}), ("kohya", components)):
        for kind, component in kinds.items():
            kind = "text_encoder" if kind == "ldmbert" else kind
            for layer in layers_of(component):
                for array in ("down", "up"):
                    assert read_key(write_key(kind, layer, array, form)) == (kind, layer, array)


def test_diffusers_files_without_alpha_hold_the_same_change(components, tmp_path):
    """Where layers have several ranks, too: older loaders scale all by the first layer's."""
    lora = small_lora(components, rank=lambda shape: 2 + (len(shape) == 4), alpha=1.5)
    again = read_lora(write_lora(lora, tmp_path / "lora.safetensors"))
    for component, layers in lora.components.items():
        ranks = {(pair.rank, pair.alpha) for pair in again.components[component].values()}
        assert len(ranks) == 1 and all(rank == alpha for rank, alpha in ranks)
        for layer, pair in layers.items():
            np.testing.assert_allclose(again.components[component][layer].change, pair.change, atol=1e-7)


@pytest.mark.parametrize(
    "down, up",
    [
        (".lora.down.weight", ".lora.up.weight"),
        (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
        (".lora_A.default.weight", ".lora_B.default.weight"),
    ],
)
def test_older_keys_of_diffusers(lora, tmp_path, down, up):
    path = write_lora(lora, tmp_path / "lora.safetensors")
    arrays = {re.sub(r"\.lora_A\.weight$", down, key): array for key, array in load_file(path).items()}
    save_file({re.sub(r"\.lora_B\.weight$", up, key): array for key, array in arrays.items()}, path)
    assert read_lora(path).components.keys() == lora.components.keys()
    assert {one: own.keys() for one, own in read_lora(path).components.items()} == {
        one: own.keys() for one, own in lora.components.items()
    }


@pytest.mark.parametrize(
    "key, component, layer",
    [
        ("mid_block.attentions.0.transformer_blocks.0.attn1.processor.to_out_lora.up.weight", "unet",
         "mid_block.attentions.0.transformer_blocks.0.attn1.to_out.0"),
        ("unet.up_blocks.1.attentions.0.transformer_blocks.0.attn2.processor.to_k_lora.up.weight", "unet",
         "up_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k"),
        ("text_encoder.text_model.encoder.layers.3.self_attn.to_out_lora.up.weight", "text_encoder",
         "text_model.encoder.layers.3.self_attn.out_proj"),
        ("lora_te1_text_model_encoder_layers_3_mlp_fc1.lora_up.weight", "text_encoder",
         "text_model.encoder.layers.3.mlp.fc1"),
        ("lora_te2_text_model_encoder_layers_3_mlp_fc1.lora_up.weight", "text_encoder_2",
         "text_model.encoder.layers.3.mlp.fc1"),
        ("text_encoders.clip_g.transformer.text_model.encoder.layers.3.mlp.fc1.lora_up.weight", "text_encoder_2",
         "text_model.encoder.layers.3.mlp.fc1"),
        ("lora_unet_output_blocks_2_1_transformer_blocks_9_attn1_to_q.lora_up.weight", "unet",
         "up_blocks.0.attentions.2.transformer_blocks.9.attn1.to_q"),
    ],
)  # fmt: skip
def test_keys_of_attention_processors_and_prefixes(key, component, layer):
    assert read_key(key) == (component, layer, "up")


@pytest.mark.parametrize("config", [None, UNET])
def test_layers_with_compvis_numbers(config):
    """Those of Stable Diffusion's UNet where no other is given."""
    published = config or json.loads((CONFIG_DIR / "unet.json").read_text())
    for ours, theirs in unet_names(published).items():
        if ".norm" in ours or "norm_out" in ours:
            continue
        inner = ".transformer_blocks.0.attn1.to_out.0" if "attentions" in ours else ""
        key = KOHYA_PREFIXES["unet"] + rename(ours + inner, {ours: theirs}).replace(".", "_") + ".lora_down.weight"
        assert read_key(key, config) == ("unet", ours + inner, "down")
    assert read_key("lora_unet_input_blocks_99_1_proj_in.lora_down.weight", config) is None


def test_kohya_metadata_and_ours(components, tmp_path):
    lora = Lora(small_lora(components, alpha=1.0).components, {"steps": 5, "note": "ä"})
    metadata = read_lora(write_lora(lora, tmp_path, "kohya")).metadata
    assert metadata["ss_network_dim"] == "2" and metadata["ss_network_alpha"] == "1"
    assert metadata["steps"] == "5" and metadata["note"] == "ä"
    mixed = small_lora(components, rank=lambda shape: len(shape))
    assert read_lora(write_lora(mixed, tmp_path, "kohya")).metadata["ss_network_dim"] == "Dynamic"


def test_a_folder_is_its_file(lora, tmp_path):
    assert write_lora(lora, tmp_path / "new" / "run") == tmp_path / "new" / "run" / LORA_FILE
    assert read_lora(tmp_path / "new" / "run").components.keys() == lora.components.keys()


def test_layers_that_kohya_has_no_name_for(tmp_path):
    lora = small_lora({"text_encoder": small_weights().components["text_encoder"]}, of="layers.0")
    with pytest.raises(ModelError, match=r"no layer model\.layers\.0.* write the LoRA for diffusers"):
        write_lora(lora, tmp_path, "kohya")
    assert not (tmp_path / LORA_FILE).exists()
    assert differences(lora, read_lora(write_lora(_with_alpha(lora, 2.0), tmp_path))) != []
    assert differences(_with_alpha(lora, 2.0), read_lora(tmp_path)) == []


def _with_alpha(lora: Lora, alpha: float) -> Lora:
    pairs = {
        component: {layer: LoraPair(pair.down, pair.up, alpha) for layer, pair in layers.items()}
        for component, layers in lora.components.items()
    }
    return Lora(pairs)


KEY = "lora_unet_mid_block_attentions_0_proj_in"
GOOD = {f"{KEY}.lora_down.weight": np.ones((2, 8), "f4"), f"{KEY}.lora_up.weight": np.ones((8, 2), "f4")}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({f"{KEY}.dora_scale": np.ones(8, "f4")}, rf"is a DoRA \({KEY}.dora_scale"),
        ({"lora_te3_text_model.lora_down.weight": np.ones((2, 8), "f4")}, "lora_te3_text_model"),
        ({f"x{number}": np.ones(1, "f4") for number in range(5)}, "x0, x1, x2 and 2 more"),
        ({f"{KEY}.lora_up.weight": None}, "lacks its up matrix"),
        ({f"{KEY}.lora_up.weight": np.ones((8, 3), "f4")}, r"not a pair of matrices \(down \[2, 8\], up \[8, 3\]"),
        ({f"{KEY}.lora_up.weight": np.ones((8, 2, 3, 3), "f4")}, "not a pair"),
        ({f"{KEY}.lora_down.weight": np.ones((2, 8), "i4")}, "not a pair"),
        ({f"{KEY}.alpha": np.float32("nan")}, "alpha that is not a number"),
        ({"unet.mid_block.attentions.0.proj_in.lora_A.weight": np.ones((2, 8), "f4")}, "twice, in two forms"),
        (dict.fromkeys(GOOD), "holds no LoRA"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path, changes, message):
    arrays = {key: np.asarray(array) for key, array in (GOOD | changes).items() if array is not None}
    save_file(arrays, tmp_path / "bad.safetensors")
    with pytest.raises(ModelError, match=message) as caught:
        read_lora(tmp_path / "bad.safetensors")
    assert "bad.safetensors" in str(caught.value)
