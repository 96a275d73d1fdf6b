"""A repository of open_clip's is read as the CLIP text encoder that it is: the same hidden states and projection as
transformers', with the padding that its own tokenizer has."""

import json

import needs
import numpy as np
import paddle
import pytest

needs.need("parity")

import torch  # noqa: E402
from safetensors.numpy import save_file  # noqa: E402
from transformers import CLIPTextConfig, CLIPTextModelWithProjection  # noqa: E402

from ppldm.cache.plan import EmbeddingsRequest  # noqa: E402
from ppldm.config.network_files import published_network  # noqa: E402
from ppldm.data.text.tokenizer import load_tokenizer  # noqa: E402
from ppldm.networks.configs import read_new_config  # noqa: E402
from ppldm.networks.model import hidden_states, projected_caption  # noqa: E402
from ppldm.utils.errors import ModelError  # noqa: E402
from ppldm.weights.configs import complete_config  # noqa: E402
from ppldm.weights.fill import fill_component  # noqa: E402
from ppldm.weights.source import config_here, open_model  # noqa: E402

WIDTH, LAYERS, WORDS, LENGTH, OUT = 32, 3, 49408, 12, 24
END, START = WORDS - 1, WORDS - 2
TEXT = {"context_length": LENGTH, "vocab_size": WORDS, "width": WIDTH, "heads": 4, "layers": LAYERS}
LAYER = {"layer_norm1": "ln_1", "layer_norm2": "ln_2", "mlp.fc1": "mlp.c_fc", "mlp.fc2": "mlp.c_proj",
         "self_attn.out_proj": "attn.out_proj"}  # fmt: skip


def model_of(quick, ratio=4.0):
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=int(WIDTH * ratio), projection_dim=OUT,
        num_hidden_layers=LAYERS, num_attention_heads=4, max_position_embeddings=LENGTH,
        hidden_act="quick_gelu" if quick else "gelu", bos_token_id=START, eos_token_id=END,
    )  # fmt: skip
    model = CLIPTextModelWithProjection(config).eval()
    with torch.no_grad():
        for one in model.parameters():  # so that each counts
            one.add_(torch.randn_like(one) / 10)
    return model


def their_names(model) -> dict[str, np.ndarray]:
    """The state of open_clip's CLIP with this text encoder, and a picture's that is not read."""
    state = {name: value.numpy() for name, value in model.state_dict().items()}
    top = "text_model."
    found = {
        "token_embedding.weight": state[f"{top}embeddings.token_embedding.weight"],
        "positional_embedding": state[f"{top}embeddings.position_embedding.weight"],
        "ln_final.weight": state[f"{top}final_layer_norm.weight"],
        "ln_final.bias": state[f"{top}final_layer_norm.bias"],
        "text_projection": state["text_projection.weight"].T.copy(),
        "logit_scale": np.float32([4.6]),
        "visual.conv1.weight": np.zeros((8, 3, 4, 4), np.float32),
        "visual.transformer.resblocks.0.ln_1.weight": np.zeros(8, np.float32),
    }
    for number in range(LAYERS):
        ours, theirs = f"{top}encoder.layers.{number}.", f"transformer.resblocks.{number}."
        for leaf in ("weight", "bias"):
            parts = [state[f"{ours}self_attn.{one}_proj.{leaf}"] for one in "qkv"]
            found[f"{theirs}attn.in_proj_{leaf}"] = np.concatenate(parts)
            found |= {f"{theirs}{b}.{leaf}": state[f"{ours}{a}.{leaf}"] for a, b in LAYER.items()}
    return found


def write(folder, model, form="safetensors", prefix="", text=(), **said):
    folder.mkdir(parents=True, exist_ok=True)
    cfg = {"embed_dim": OUT, "vision_cfg": {"layers": 1}, "text_cfg": {**TEXT, **dict(text)}, **said}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": cfg, "preprocess_cfg": {"mean": [0.5]}}))
    state = their_names(model)
    state = {name if name.startswith(("visual", "logit")) else f"{prefix}{name}": one for name, one in state.items()}
    if form == "safetensors":
        save_file(
            {name: np.ascontiguousarray(one) for name, one in state.items()}, folder / "open_clip_model.safetensors"
        )
    else:
        torch.save({name: torch.tensor(one) for name, one in state.items()}, folder / "open_clip_pytorch_model.bin")
    return folder


def captions():
    ids = np.zeros((3, LENGTH), np.int64)
    for row, count in zip(ids, (3, LENGTH - 2, 0), strict=True):
        row[: count + 2] = [START, *range(5, 5 + count), END]
    return ids


def same(ours, theirs):
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=0, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    "form, changes",
    [
        ("safetensors", {}),
        ("bin", {"quick_gelu": True}),
        ("safetensors", {"prefix": "text.", "custom_text": True, "text": {"mlp_ratio": 2.5, "pool_type": "argmax"}}),
    ],
)
def test_hidden_states_and_projection_are_those_of_transformers(tmp_path, form, changes):
    theirs = model_of(changes.get("quick_gelu"), dict(changes.get("text", {})).get("mlp_ratio", 4.0))
    source = open_model(write(tmp_path / "clip", theirs, form, **changes))
    ids = captions()
    with torch.no_grad():
        expected = theirs(torch.tensor(ids), output_hidden_states=True)
    ours = fill_component("text_encoder", source.component("text_encoder"))
    ours.eval()
    same(hidden_states(ours, paddle.to_tensor(ids), None), expected.last_hidden_state)
    ours = fill_component("projected_text_encoder", source.component("projected_text_encoder"))
    ours.eval()
    states, pooled = projected_caption(ours, paddle.to_tensor(ids), END)
    same(pooled[:, 0], expected.text_embeds)
    own = [(states[row, :end], expected.hidden_states[-1][row, :end]) for row, end in enumerate((5, LENGTH, 2))]
    for one, other in own:
        same(one, other)


def test_captions_are_padded_with_0_and_computed_ahead(tmp_path):
    folder = write(tmp_path / "clip", model_of(True), quick_gelu=True)
    (folder / "merges.txt").write_text("#version: 0.2\n")  # of another library, whose padding is the end
    source = open_model(folder)
    ids = load_tokenizer(source.tokenizer, LENGTH).encode(["a red cat", ""])
    assert (ids[0, 5:] == 0).all() and (ids[1, 2:] == 0).all() and ids[1, 1] == END == ids[0, 4]
    encoder = EmbeddingsRequest(
        model=str(folder), model_max_length=LENGTH, dtype="float32", batch_size=2, offline=True
    ).load()
    assert encoder(["a red cat", ""]).shape == (2, LENGTH, WIDTH)
    assert config_here("text_encoder", str(folder))["hidden_act"] == "quick_gelu"


def test_the_form_of_transformers_beside_it_goes_first(tmp_path):
    folder = write(tmp_path, model_of(False))
    other = model_of(False)
    other.text_model.final_layer_norm.bias.data += 1
    other.save_pretrained(folder)
    found = open_model(folder).component("text_encoder")
    bias = other.text_model.final_layer_norm.bias.detach().numpy()
    np.testing.assert_array_equal(found.arrays["text_model.final_layer_norm.bias"], bias)


@pytest.mark.parametrize(
    "text, said, words",
    [
        ({"hf_model_name": "roberta-base"}, {}, "text_cfg has hf_model_name 'roberta-base'"),
        ({"hf_tokenizer_name": "other"}, {}, "hf_tokenizer_name"),
        ({"no_causal_mask": True}, {}, "no_causal_mask True"),
        ({"embed_cls": True}, {}, "embed_cls"),
        ({"pool_type": "last"}, {}, "pool_type 'last'"),
        ({"ls_init_value": 0.1}, {}, "ls_init_value"),
        ({"width": "wide"}, {}, 'hidden_size "wide" must be a whole number'),
        ({"mlp_ratio": 0}, {}, "intermediate_size 0 must be a whole number"),
        ({"heads": 5}, {}, "num_attention_heads 5 does not divide"),
        ({}, {"text_cfg": None}, "no model_cfg with a text_cfg"),
    ],
)
def test_what_is_another_network_is_refused(tmp_path, text, said, words):
    folder = write(tmp_path, model_of(False), text=text, **said)
    with pytest.raises(ModelError, match=words):
        open_model(folder).component("text_encoder")


def test_the_published_one_is_known_without_a_download():
    """Its config is that of `ViT-H-14-378-quickgelu` in open_clip 3.3."""
    text = {"context_length": 77, "vocab_size": 49408, "width": 1024, "heads": 16, "layers": 24}
    said = {"model_cfg": {"embed_dim": 1024, "quick_gelu": True, "vision_cfg": {}, "text_cfg": text}}
    name = published_network("text_encoder", "apple/DFN5B-CLIP-ViT-H-14-378")
    assert complete_config("text_encoder", said, "x") == read_new_config("text_encoder", name, "")


def test_a_folder_without_weights_is_named(tmp_path):
    (write(tmp_path, model_of(False)) / "open_clip_model.safetensors").unlink()
    with pytest.raises(ModelError, match="open_clip_config.json and no weights"):
        open_model(tmp_path).component("text_encoder")
    with pytest.raises(ModelError, match="known for a VAE"):
        open_model(tmp_path).component("vae")
