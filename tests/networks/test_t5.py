"""A T5's hidden states are those of transformers, from every form in which its weights are stored."""

import importlib
import json

import needs
import numpy as np
import paddle
import pytest

needs.need("parity")

import torch  # noqa: E402
from small_t5 import CONFIG, WRITTEN, t5_arrays, write_t5  # noqa: E402
from transformers import T5Config, T5EncoderModel, T5ForConditionalGeneration, T5Tokenizer  # noqa: E402

from ppldm.data.text.tokenizer import load_tokenizer  # noqa: E402
from ppldm.networks.build import build_network  # noqa: E402
from ppldm.networks.configs import check_config, read_new_config  # noqa: E402
from ppldm.networks.model import hidden_states  # noqa: E402
from ppldm.utils.errors import ModelError  # noqa: E402
from ppldm.weights.components import text_encoder_digest  # noqa: E402
from ppldm.weights.fill import component_of, fill_component, parameter_shapes  # noqa: E402
from ppldm.weights.formats.files import write_safetensors  # noqa: E402
from ppldm.weights.formats.paddle_files import write_tree  # noqa: E402
from ppldm.weights.source import read_component  # noqa: E402
from ppldm.weights.write import write_component  # noqa: E402

KIND, END = "text_encoder", 1


def their_model(seed=0, cls=T5EncoderModel, **changes):
    torch.manual_seed(seed)
    model = cls(T5Config(**CONFIG | {"num_decoder_layers": 1, "tie_word_embeddings": False} | changes)).eval()
    with torch.no_grad():
        for name, one in model.named_parameters():
            if "layer_norm" in name:
                one.uniform_(0.5, 1.5)
    return model


def their_states(model, ids, masked):
    mask = {"attention_mask": torch.tensor((np.cumsum(ids == END, 1) - (ids == END) == 0).astype(np.int64))}
    encoder = getattr(model, "encoder", model)
    with torch.no_grad():
        return encoder(torch.tensor(ids), **(mask if masked else {})).last_hidden_state.numpy()


def captions(length):
    rng, ids = np.random.default_rng(0), np.zeros((4, length), np.int64)
    for row, count in zip(ids, (length - 1, length // 2, 1, 0), strict=True):
        row[: count + 1] = [*rng.integers(2, CONFIG["vocab_size"], count), END]
    return ids


def our_states(folder, ids, masked):
    network = fill_component(KIND, read_component(KIND, folder))
    network.eval()
    with paddle.no_grad():
        return hidden_states(network, paddle.to_tensor(ids), END if masked else None).numpy()


def same(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [16, 512])
def test_hidden_states_are_those_of_transformers(tmp_path, length, masked):
    theirs = their_model()
    theirs.save_pretrained(tmp_path)
    ids = captions(length)
    expected = their_states(theirs, ids, masked)
    ours = our_states(tmp_path, ids, masked)
    same(ours, expected)
    other = our_states(tmp_path, ids, not masked)
    assert np.abs(ours - other)[1:].max() > 1e-2 and np.abs(ours - other)[0].max() < 1e-5


@pytest.mark.parametrize(
    "changes",
    [{"feed_forward_proj": "relu"}, {"feed_forward_proj": "gated-silu"}, {"num_layers": 1, "d_kv": 4},
     {"relative_attention_num_buckets": 16, "relative_attention_max_distance": 200}, {"layer_norm_epsilon": 1e-2}],
)  # fmt: skip
def test_settings_that_change_the_network(tmp_path, changes):
    theirs = their_model(**changes)
    theirs.save_pretrained(tmp_path)
    ids = captions(300)
    same(our_states(tmp_path, ids, True), their_states(theirs, ids, True))


@pytest.mark.parametrize("form", ["shards", "pickle", "whole", "other name", "paddle", "paddle whole"])
def test_every_form_of_the_weights(tmp_path, form):
    """A T5 that was published whole has a decoder, which is not read; PaddleNLP puts `t5.` before all names of one."""
    theirs = their_model(cls=T5ForConditionalGeneration if "whole" in form else T5EncoderModel)
    settings = {"shards": {"max_shard_size": "20KB"}, "pickle": {"safe_serialization": False}}.get(form, {})
    theirs.save_pretrained(tmp_path, **settings)
    if form == "other name":
        arrays = t5_arrays()
        arrays["encoder.embed_tokens.weight"] = arrays.pop("shared.weight")
        write_safetensors(tmp_path / "model.safetensors", arrays, "pt")
        theirs.load_state_dict({name: torch.tensor(np.array(array)) for name, array in arrays.items()}, strict=False)
        theirs.shared.weight = theirs.encoder.embed_tokens.weight
    if form.startswith("paddle"):
        (tmp_path / "model.safetensors").unlink()
        tables = ("shared.weight", "embed_tokens.weight", "relative_attention_bias.weight")
        prefix = "t5." * ("whole" in form)
        arrays = {f"{prefix}{name}": value.numpy() if value.ndim < 2 or name.endswith(tables) else value.numpy().T
                  for name, value in theirs.state_dict().items()}  # fmt: skip
        write_tree(tmp_path / "model_state.pdparams", {name: np.ascontiguousarray(a) for name, a in arrays.items()})
    assert form != "shards" or len([*tmp_path.glob("model-*.safetensors")]) > 1
    ids = captions(20)
    same(our_states(tmp_path, ids, True), their_states(theirs, ids, True))


def test_the_folder_of_hugging_face_and_its_tokenizer(tmp_path):
    folder = write_t5(tmp_path)
    theirs = T5EncoderModel.from_pretrained(folder).eval()
    words = ["a red cat", "", "一只 红色的猫", "a small blue dog over the green mat " * 3]
    tokens = T5Tokenizer.from_pretrained(tmp_path / "tokenizer")
    told = {"padding": "max_length", "truncation": True, "max_length": 24, "return_tensors": "np"}
    given = tokens(words, **told)
    ids = load_tokenizer(tmp_path / "tokenizer", 24).encode(words)
    np.testing.assert_array_equal(ids, given["input_ids"])
    same(our_states(folder, ids, True), their_states(theirs, ids, True))
    mask = (np.cumsum(ids == END, 1) - (ids == END) == 0).astype(np.int64)
    np.testing.assert_array_equal(mask, given["attention_mask"])


def test_the_fast_tokenizer_of_transformers(tmp_path, monkeypatch):
    """It is made of the same file, by classes for a protobuf that is here."""
    from transformers import T5TokenizerFast
    from transformers.utils import sentencepiece_model_pb2_new

    module = importlib.import_module("transformers.convert_slow_tokenizer")  # whose name also is a function's
    monkeypatch.setattr(module, "import_protobuf", lambda *_: sentencepiece_model_pb2_new)
    write_t5(tmp_path)
    fast = T5TokenizerFast(str(tmp_path / "tokenizer/spiece.model"), add_prefix_space=True)
    words = ["a red cat", "", "一只 红色的猫", " a \t small  blue dog"]
    told = {"padding": "max_length", "truncation": True, "max_length": 9, "return_tensors": "np"}
    ids = load_tokenizer(tmp_path / "tokenizer", 9).encode(words)
    np.testing.assert_array_equal(ids, fast(words, **told).input_ids)


@pytest.mark.parametrize("form", ["diffusers", "ppdiffusers"])
def test_what_is_written_is_loaded_by_the_library(tmp_path, form):
    from ppdiffusers.transformers import T5EncoderModel as PaddleT5

    found = read_component(KIND, write_t5(tmp_path / "given"))
    write_component(KIND, found, tmp_path / "out", form)
    ids = captions(16)
    if form == "diffusers":
        states = their_states(T5EncoderModel.from_pretrained(tmp_path / "out").eval(), ids, True)
    else:
        network = PaddleT5.from_pretrained(str(tmp_path / "out"))
        network.eval()
        states = hidden_states(network, paddle.to_tensor(ids), END).numpy()
    same(our_states(tmp_path / "given/text_encoder", ids, True), states)


def test_initial_weights_are_spread_as_those_of_transformers():
    config = read_new_config(KIND, "t5_tiny", "") | {"d_model": 96, "d_ff": 200, "vocab_size": 500, "d_kv": 16}
    ours, theirs = build_network(KIND, config, 0), T5EncoderModel(T5Config(**config))
    for name, value in theirs.state_dict().items():
        own = ours.state_dict()[name].numpy()
        if own.ndim == 1:
            assert (own == 1).all() and (value.numpy() == 1).all()
        else:
            assert abs(own.std() / value.numpy().std() - 1) < 6 / np.sqrt(own.size), name


def test_the_published_size():
    shapes = parameter_shapes(KIND, read_new_config(KIND, "t5_v1_1_xxl", ""))
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 4_762_310_656


def test_a_built_one_is_described_again_and_digests_tell_apart(tmp_path):
    found = read_component(KIND, write_t5(tmp_path))
    again = component_of(KIND, fill_component(KIND, found))
    assert again.config == found.config and again.arrays.keys() == found.arrays.keys()
    assert text_encoder_digest(again) == text_encoder_digest(found)
    for change in ({"num_heads": 8, "d_kv": 4}, {"feed_forward_proj": "gated-silu"}, {"layer_norm_epsilon": 1e-5}):
        again.config = found.config | change
        assert text_encoder_digest(again) != text_encoder_digest(found)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"feed_forward_proj": "gated-tanh"}, "feed_forward_proj .* one of relu, gated-gelu, gated-silu"),
        ({"relative_attention_num_buckets": 2}, "relative_attention_num_buckets 2 must be"),
        ({"relative_attention_max_distance": 8}, "relative_attention_max_distance 8 must be"),
        ({"d_kv": 0}, "d_kv 0 must be"),
    ],
)
def test_configs_that_no_network_has(change, words):
    assert check_config(KIND, WRITTEN | CONFIG, "x") == read_new_config(KIND, "t5_tiny", "")
    with pytest.raises(ModelError, match=words):
        check_config(KIND, CONFIG | change, "x")
    with pytest.raises(ModelError, match="no setting 'positions' is known for a T5 text encoder"):
        check_config(KIND, CONFIG | {"positions": 3}, "x")


def test_what_its_file_lacks_is_named(tmp_path):
    folder, arrays = write_t5(tmp_path), t5_arrays()
    del arrays["shared.weight"]
    write_safetensors(folder / "model.safetensors", arrays, "pt")
    with pytest.raises(ModelError, match="2 missing: encoder.embed_tokens.weight, shared.weight"):
        fill_component(KIND, read_component(KIND, folder))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "t5"


def test_a_pixart_of_diffusers_attends_as_its_pipeline_does(tmp_path):
    """Its folder says nothing of masks: the pipeline always gives them."""
    import diffusers

    import ppldm

    encoder = write_t5(tmp_path)
    torch.manual_seed(0)
    transformer = diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=8, num_layers=2, sample_size=4,
        cross_attention_dim=32, caption_channels=32, patch_size=2, num_embeds_ada_norm=1000,
    ).eval()  # fmt: skip
    with torch.no_grad():
        for one in transformer.parameters():  # zeros would hide what is attended to
            one.copy_(torch.randn_like(one) / 8)
    theirs = diffusers.PixArtAlphaPipeline(
        tokenizer=T5Tokenizer.from_pretrained(tmp_path / "tokenizer"),
        text_encoder=T5EncoderModel.from_pretrained(encoder).eval(),
        vae=diffusers.AutoencoderKL(block_out_channels=(32, 32), down_block_types=("DownEncoderBlock2D",) * 2,
                                    up_block_types=("UpDecoderBlock2D",) * 2),
        transformer=transformer, scheduler=diffusers.DDIMScheduler(),
    )  # fmt: skip
    theirs.save_pretrained(tmp_path / "pixart")
    ours = ppldm.load(tmp_path / "pixart")
    states, mask, *_ = theirs.encode_prompt(
        ["a red cat", "一只"], do_classifier_free_guidance=False, clean_caption=False
    )
    noisy, level = torch.randn(2, 4, 4, 4), torch.tensor([700, 30])
    told = {"resolution": None, "aspect_ratio": None}
    with torch.no_grad():
        expected = transformer(noisy, states, level, told, encoder_attention_mask=mask).sample[:, :4]
    ids = paddle.to_tensor(ours.tokenizer.encode(["a red cat", "一只"]))
    with paddle.no_grad():
        found = ours.model.predict(paddle.to_tensor(noisy.numpy()), paddle.to_tensor([700, 30]), ids)
    same(found.numpy(), expected.numpy())
    assert ours.generate("a red cat", num_inference_steps=2, height=8, width=8).shape[-3:] == (8, 8, 3)
