"""What a frozen network makes of one picture or caption does not depend on the others; what a key says of it."""

import needs
import numpy as np
import paddle
import pytest
from small_weights import write_clip

from ppldm.cache.encoders import embeddings_key
from ppldm.cache.plan import EmbeddingsRequest, LatentsRequest
from ppldm.data.images import CropRule
from ppldm.diffusion.process import Process
from ppldm.networks.build import build_network, save_component
from ppldm.networks.cascade.stages import CascadeModel
from ppldm.networks.configs import read_new_config
from ppldm.networks.model import hidden_states
from ppldm.utils.errors import ConfigError
from ppldm.weights.fill import component_of

WORDS = ["red blue", "12", "", "blue 12 red red"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip"))


def load(folder, tokenizer=None, length=8, mask=False, projection=False):
    return EmbeddingsRequest(
        model=str(folder), tokenizer=tokenizer, model_max_length=length, mask_pad_tokens=mask,
        text_projection=projection, dtype="float32", batch_size=4, offline=True,
    ).load()  # fmt: skip


def load_vae(tiny, engine="eager"):
    return LatentsRequest(model=tiny.vae, batch_size=4, offline=True, engine=engine, crops=CropRule()).load()


@pytest.mark.parametrize("kind", ["pictures", "captions"])
def test_what_is_computed_of_one_does_not_depend_on_the_others(tiny, clip, monkeypatch, kind):
    if kind == "pictures":
        encoder = load_vae(tiny)
        inputs = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
        side, owner, name = 32 // encoder.header["factor"], encoder._vae, "encode"
        shape = (2, encoder.header["channels"], side, side)
    else:
        encoder, inputs = load(clip), WORDS
        shape, owner, name = (8, encoder.header["width"]), encoder._tokenizer, "encode"
    together = encoder(inputs)
    assert together.shape == (4, *shape) and together.dtype == np.float32
    for count in (1, 3):
        assert (encoder(inputs[:count]) == together[:count]).all()
    sizes, inner = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda batch: (sizes.append(len(batch)), inner(batch))[1])
    encoder(inputs[:1])
    assert sizes == [4]


def test_an_engine_encodes_what_paddle_encodes(tiny):
    needs.need("engine")
    pixels = np.random.default_rng(0).integers(0, 256, (3, 3, 32, 32), dtype=np.uint8)
    eager, other = (load_vae(tiny, engine)(pixels) for engine in ("eager", "openvino"))
    assert eager.std() > 0.1 and 0 < np.abs(eager - other).max() <= 1e-4


def test_a_mask_is_of_ldmbert_alone(tiny, clip, tmp_path):
    config = read_new_config("ldmbert", tiny.config("ldmbert"), "--x")
    save_component(build_network("text_encoder", config, 1), tmp_path / "bert")
    plain, masked = (load(tmp_path / "bert", tiny.tokenizer, 8, mask) for mask in (False, True))
    assert plain.key != masked.key and abs(plain(["picture 1"]) - masked(["picture 1"])).max() > 1e-3
    ids = paddle.to_tensor(masked._tokenizer.encode(["picture 1"]))
    expected = hidden_states(masked._layer, ids, masked._tokenizer.end_id).numpy()
    np.testing.assert_allclose(masked(["picture 1"]), expected, atol=1e-5)
    assert load(clip, mask=True).key == load(clip).key


def test_the_key_of_a_built_encoder_is_that_of_its_folder(clip):
    encoder = load(clip)
    layer = component_of("text_encoder", encoder._layer)
    assert embeddings_key(layer, encoder._tokenizer, False, "float32") == encoder.key
    assert load(clip, length=9).key != encoder.key


class Told(CascadeModel):
    networks = {}


def test_with_the_projected_caption_what_is_kept_is_what_stable_cascade_is_told(tiny, tmp_path):
    """The states before the last norm, and behind them the projected caption, also where that is narrower."""
    config = read_new_config("projected_text_encoder", tiny.config("clip"), "--x") | {"max_position_embeddings": 8}
    for width in (24, 32, 40):
        folder = tmp_path / f"clip-{width}"
        save_component(build_network("projected_text_encoder", config | {"projection_dim": width}, 1), folder)
        if width > config["hidden_size"]:
            with pytest.raises(ConfigError, match="width 32 with a projection of 40 cannot be cached"):
                load(folder, tiny.tokenizer, projection=True)
            continue
        encoder, captions = load(folder, tiny.tokenizer, projection=True), ["picture 1", "", "picture 12"]
        made = encoder(captions)
        assert made.shape == (3, 9, 32) and encoder.key != load(folder, tiny.tokenizer).key
        ids = paddle.to_tensor(encoder._tokenizer.encode([*captions, ""]))
        model = Told(Process.of({}), text_encoder=encoder._layer)
        model.end_id = encoder._tokenizer.end_id
        online, cached = model.embed_captions(ids[:3]), model.embed_captions(ids[:3], paddle.to_tensor(made))
        for one, other in zip(online, cached, strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(one.numpy(), other.numpy(), atol=1e-6)
        assert cached[1].shape == [3, 1, width]
