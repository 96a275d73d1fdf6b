import numpy as np
import paddle
import pytest
from paddle import nn
from small_weights import write_clip

from ppldm.diffusion.process import Process
from ppldm.inference.precompute.text_encoder import load_text_encoder, make_rule
from ppldm.networks.build import build_projected_text_encoder, build_text_encoder, save_component
from ppldm.networks.cascade.stage import CascadeModel
from ppldm.networks.configs import read_new_config
from ppldm.networks.encoders import hidden_states
from ppldm.utils.errors import ConfigError
from ppldm.weights.fill import component_of

WORDS = ["red blue", "12", "", "blue 12 red red"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip"))


def load(folder, tokenizer=None, length=8, mask=False, projection=False):
    return load_text_encoder(str(folder), tokenizer, length, mask, "float32", 4, True, projection)


def test_what_is_computed_of_a_caption_does_not_depend_on_the_others(clip, monkeypatch):
    encoder = load(clip)
    together = encoder(WORDS)
    assert together.shape == (4, 8, encoder.width) and together.dtype == np.float32
    for count in (1, 3):
        assert (encoder(WORDS[:count]) == together[:count]).all()
    sizes, inner = [], encoder._tokenizer.encode
    monkeypatch.setattr(
        encoder._tokenizer, "encode", lambda captions: (sizes.append(len(captions)), inner(captions))[1]
    )
    encoder(WORDS[:1])
    assert sizes == [4]


def test_a_mask_is_of_ldmbert_alone(tiny, clip, tmp_path):
    config = read_new_config("ldmbert", tiny.config("ldmbert"), "--x")
    save_component(build_text_encoder(config, 1), tmp_path / "bert")
    plain, masked = (load(tmp_path / "bert", tiny.tokenizer, 8, mask) for mask in (False, True))
    assert plain.rule != masked.rule and abs(plain(["picture 1"]) - masked(["picture 1"])).max() > 1e-3
    ids = paddle.to_tensor(masked._tokenizer.encode(["picture 1"]))
    expected = hidden_states(masked._layer, ids, masked._tokenizer.end_id).numpy()
    np.testing.assert_allclose(masked(["picture 1"]), expected, atol=1e-5)
    assert load(clip, mask=True).rule == load(clip).rule


def test_the_rule_of_a_built_encoder_is_that_of_its_folder(clip):
    encoder = load(clip)
    layer = component_of("text_encoder", encoder._layer)
    assert make_rule(layer, encoder._tokenizer, False, "float32") == encoder.rule
    assert load(clip, length=9).rule != encoder.rule


def test_with_the_projected_caption_what_is_kept_is_what_stable_cascade_is_told(tiny, tmp_path):
    """The states before the last norm, and behind them the projected caption, also where that is narrower."""
    config = read_new_config("projected_text_encoder", tiny.config("clip"), "--x") | {"max_position_embeddings": 8}
    for width in (24, 32, 40):
        folder = tmp_path / f"clip-{width}"
        save_component(build_projected_text_encoder(config | {"projection_dim": width}, 1), folder)
        if width > config["hidden_size"]:
            with pytest.raises(ConfigError, match="width 32 with a projection of 40 cannot be cached"):
                load(folder, tiny.tokenizer, projection=True)
            continue
        encoder, captions = load(folder, tiny.tokenizer, projection=True), ["picture 1", "", "picture 12"]
        made = encoder(captions)
        assert made.shape == (3, 9, 32) and encoder.rule != load(folder, tiny.tokenizer).rule
        ids = paddle.to_tensor(encoder._tokenizer.encode([*captions, ""]))
        model = CascadeModel(nn.Identity(), encoder._layer, Process.of({}))
        model.end_id = encoder._tokenizer.end_id
        online, cached = model.embed_captions(ids[:3]), model.embed_captions(ids[:3], paddle.to_tensor(made))
        for one, other in zip(online, cached, strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-6)
        assert cached[1].shape == [3, 1, width]
