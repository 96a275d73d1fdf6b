"""Merging: what a merged model computes is what the pairs beside it compute; extraction is its opposite."""

import numpy as np
import paddle
import paddle.nn.functional as F
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_loras import layers_of, small_lora
from small_weights import small_weights

from ppldm.utils.errors import ConfigError, ModelError
from ppldm.weights.components import ComponentWeights, Weights
from ppldm.weights.fill import fill_component
from ppldm.weights.lora.files import Lora, LoraPair, write_lora
from ppldm.weights.lora.flag import split_word
from ppldm.weights.lora.merge import add_loras, extract_lora, identify_loras, merge_lora, nearest_pair


@pytest.fixture(scope="module")
def weights():
    return small_weights()


@pytest.fixture(scope="module")
def loras(weights):
    own = {kind: weights.components[kind] for kind in ("unet", "text_encoder")}
    return [small_lora(own, rank=2, alpha=0.5, seed=1), small_lora(own, rank=3, alpha=2.0, seed=2, of="to_")]


def forward(unet):
    rng = np.random.default_rng(3)
    latents, text = rng.standard_normal((2, 4, 8, 8), "f4"), rng.standard_normal((2, 5, 32), "f4")
    with paddle.no_grad():
        return unet(paddle.to_tensor(latents), paddle.to_tensor([10, 700]), paddle.to_tensor(text)).sample.numpy()


def beside(layer, pair: LoraPair, weight: float) -> None:
    """Add weight * alpha / r * up(down(x)) to what `layer` gives."""
    down, up = (paddle.to_tensor(array) for array in (pair.down, pair.up))

    def add(own, inputs, output):
        if isinstance(own, paddle.nn.Linear):
            return output + weight * pair.alpha / pair.rank * (inputs[0] @ down.T @ up.T)
        hidden = F.conv2d(inputs[0], down, stride=own._stride, padding=own._updated_padding)
        return output + weight * pair.alpha / pair.rank * F.conv2d(hidden, up)

    layer.register_forward_post_hook(add)


def test_merged_is_what_the_pairs_compute_beside_the_layers(weights, loras):
    merged, unet = weights, fill_component("unet", weights.components["unet"])
    plain = forward(unet)
    layers = dict(unet.named_sublayers())
    for lora, weight in zip(loras, (0.1, -0.3), strict=True):
        merged = merge_lora(merged, lora, weight)
        for name, pair in lora.components["unet"].items():
            beside(layers[name], pair, weight)
    expected = forward(unet)
    assert np.abs(expected - plain).max() > 0.01
    assert np.abs(forward(fill_component("unet", merged.components["unet"])) - expected).max() < 1e-5


def test_a_negative_weight_takes_it_out_again(weights, loras):
    again = merge_lora(merge_lora(weights, loras[0], 0.8), loras[0], -0.8)
    for kind, component in weights.components.items():
        for name, array in component.arrays.items():
            np.testing.assert_allclose(again.components[kind].arrays[name], array, atol=1e-6)


def test_merging_leaves_its_input_and_the_other_components(weights, loras):
    before = {name: array.copy() for name, array in weights.components["unet"].arrays.items()}
    merged = merge_lora(weights, loras[1])
    assert all((weights.components["unet"].arrays[name] == array).all() for name, array in before.items())
    assert merged.components["vae"] is weights.components["vae"]


def test_files_are_added_in_kohyas_keys_too(weights, tmp_path):
    lora = small_lora({"unet": weights.components["unet"]}, alpha=0.5)
    file = write_lora(lora, tmp_path / "with:colon.safetensors", "kohya")
    added = add_loras(weights, [f"{file}:0.5", str(file)])
    expected = merge_lora(merge_lora(weights, lora, 0.5), lora)
    for name, array in expected.components["unet"].arrays.items():
        assert (added.components["unet"].arrays[name] == array).all()
    assert added.metadata["lora"] == [f"{file}:0.5", str(file)]
    assert add_loras(weights, []) is weights


def test_names_with_other_separators_are_the_models_own(weights):
    """Where the words with underscores do not tell, the layers of the model do."""
    lora = small_lora({"unet": weights.components["unet"]}, of="attn1.to_q")
    odd = Lora({"unet": {layer.replace("_", "."): pair for layer, pair in lora.components["unet"].items()}})
    one, other = (merge_lora(weights, each).components["unet"].arrays for each in (lora, odd))
    assert all((one[name] == other[name]).all() for name in one)


def test_a_convolution_of_1_x_1_may_be_a_linear_layer(weights):
    linear = {name: shape for name, shape in layers_of(weights.components["unet"]).items() if name.endswith("proj_in")}
    name, shape = next(iter(linear.items()))
    assert shape[2:] == (1, 1)
    pair = LoraPair(np.ones((2, shape[1]), "f4"), np.ones((shape[0], 2), "f4"), 2.0)
    merged = merge_lora(weights, Lora({"unet": {name: pair}}))
    key = f"{name}.weight"
    np.testing.assert_array_equal(
        merged.components["unet"].arrays[key], weights.components["unet"].arrays[key] + np.float32(2)
    )


def test_what_does_not_fit_is_named(weights):
    pair = LoraPair(np.ones((2, 7), "f4"), np.ones((32, 2), "f4"), 2.0)
    for changes, message in (
        ({"unet": {"conv_out": pair}}, r"unet conv_out as a weight of \[32, 7\], and it is \[4, 32, 3, 3\] in unet"),
        ({"unet": {"conv_middle": pair}}, "unet conv_middle, and unet has no such layer"),
        ({"prior": {"conv_out": pair}}, "changes the prior, and the model has none"),
    ):
        with pytest.raises(ModelError, match=message):
            merge_lora(weights, Lora(changes, source="a.safetensors"))


def test_words_of_files_and_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "a:b"):
        (tmp_path / name).touch()
    expected = {"a": ("a", 1.0), "a:0.8": ("a", 0.8), "a:-1": ("a", -1.0), "a:b": ("a:b", 1.0), "a:b:2": ("a:b", 2.0)}
    assert {word: (str(split_word(word)[0]), split_word(word)[1]) for word in expected} == expected
    for word in ("c", "c:1", "a:nan", ":1"):
        with pytest.raises(ConfigError, match="--lora"):
            split_word(word)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.sampled_from([(5, 9), (9, 5), (4, 3, 3, 3), (6, 8, 1, 1)]),
    rank=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_the_nearest_pair_is_that_of_the_singular_values(shape, rank, seed):
    change = np.random.default_rng(seed).standard_normal(shape, "f4")
    pair = nearest_pair(change, rank)
    values = np.linalg.svd(change.reshape(len(change), -1), compute_uv=False)
    missing = np.sum(np.square(change - pair.change))
    np.testing.assert_allclose(missing, np.sum(values[rank:] ** 2), atol=1e-4)
    np.testing.assert_allclose(pair.squared_norm, np.sum(np.square(pair.change)), rtol=1e-4)
    assert pair.shape == shape and pair.alpha == pair.rank == min(rank, len(values))


def test_extracting_is_the_opposite_of_merging(weights, loras):
    tuned = merge_lora(weights, loras[0])
    found, kept = extract_lora(weights, tuned, 2)
    again = merge_lora(weights, found)
    for kind in ("unet", "text_encoder"):
        assert kept[kind].share == pytest.approx(1.0, abs=1e-5) and kept[kind].left_out == ()
        for name, array in tuned.components[kind].arrays.items():
            np.testing.assert_allclose(again.components[kind].arrays[name], array, atol=1e-5)
    assert extract_lora(weights, tuned, 1)[1]["unet"].share < 0.9


def test_what_an_extraction_leaves_out_is_said(weights):
    unet = weights.components["unet"]
    arrays = {**unet.arrays, "conv_in.bias": unet.arrays["conv_in.bias"] + 1}
    arrays["conv_in.weight"] = arrays["conv_in.weight"] + np.float32(0.1)
    tuned = Weights({"unet": ComponentWeights(unet.config, arrays, "tuned")})
    lora, kept = extract_lora(weights, tuned, 4)
    assert lora.components.keys() == {"unet"} and kept["unet"].left_out == ("conv_in.bias",)
    bias, weight = 32.0, 0.01 * arrays["conv_in.weight"].size
    assert kept["unet"].share == pytest.approx(weight / (weight + bias), rel=1e-3)
    with pytest.raises(ModelError, match="do not differ"):
        extract_lora(weights, weights, 4)
    del arrays["conv_in.bias"]
    with pytest.raises(ModelError, match=r"only one of .* has unet conv_in\.bias"):
        extract_lora(weights, tuned, 4)


@pytest.mark.parametrize("names, used", [
    (("pytorch_lora_weights.safetensors",), 1),
    (("adapter_model.safetensors", "adapter_config.json"), 2),  # whose scale is in the config
    (("pytorch_lora_weights.safetensors", "learned_embeds-cat.safetensors", "readme.md"), 2),
])  # fmt: skip
def test_what_identifies_a_lora_is_each_file_that_is_used(tmp_path, names, used):
    for name in names:
        (tmp_path / name).write_text(name)
    [found] = identify_loras([f"{tmp_path}:0.5"])
    assert found["weight"] == 0.5 and len(found["sha256"]) == used
    [alone] = identify_loras([str(tmp_path / names[0])])
    assert alone["weight"] == 1.0 and {*alone["sha256"]} <= {*found["sha256"]}
    (tmp_path / names[-1]).write_text("changed")
    assert (identify_loras([f"{tmp_path}:0.5"]) == [found]) == (names[-1] == "readme.md")
