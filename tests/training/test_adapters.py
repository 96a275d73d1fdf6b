"""Runs that train adapters: what their checkpoints and exports hold, and which base they accept."""

import json

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from small_loras import differences
from tiny_model import load_pipeline, make_model

from ppldm.data.text.tokenizer import load_tokenizer
from ppldm.families.ldm_build import weights_of
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import CheckpointError, ModelError
from ppldm.weights.lora.files import LORA_FILE, read_lora
from ppldm.weights.lora.merge import lora_of, read_tokens
from ppldm.weights.model_file import read_model_file
from ppldm.weights.source import open_model
from ppldm.weights.write import write_weights

ASKED = {"lora_rank": 2, "lora_modules": "out", "export_merged": True, "model_name_or_path": None}


def train(tiny, folder, base, *words, **changes):
    own = dict.fromkeys(("vae_name_or_path", "text_encoder_config_file", "unet_config_file", "tokenizer_name"))
    flags = tiny.flags(folder, **{**own, **ASKED, "model_name_or_path": base, **changes})
    run = prepare(*parse_arguments([*flags, "--train_tokens", "<pic>=^pict", "^picture$", *words], True))
    run_loop(run)
    return run


@pytest.fixture(scope="module")
def bases(tiny, tmp_path_factory):
    """Two pipelines that differ in one number of the UNet."""
    folder = tmp_path_factory.mktemp("bases")
    model = make_model(tiny)
    model.tokenizer = load_tokenizer(tiny.tokenizer, 12)
    for name in ("one", "other"):
        write_weights(weights_of(model), "ppdiffusers", folder / name)
        bias = model.unet.conv_out.bias
        bias.set_value(bias + 0.25)
    return folder


@pytest.fixture(scope="module")
def run(tiny, bases, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters") / "run"
    train(tiny, folder, bases / "one")
    return folder


def test_a_checkpoint_holds_only_what_is_trained(run, bases):
    described = read_model_file(run / "checkpoint-4")
    assert described.adapters == ["unet_lora", "text_encoder_tokens"]
    state = paddle.load(str(run / "checkpoint-4" / "model_state.pdparams"), return_numpy=True)
    state.pop("StructuredToParameterName@@", None)
    assert {name.partition(".")[0] for name in state} == set(described.adapters)
    assert all(np.abs(array).max() > 0 for array in state.values())
    assert all(described.components[name].crc32 for name in ("vae", "text_encoder", "unet"))
    with pytest.raises(ModelError, match="holds adapters and not the model .* the run's lora folder as --lora"):
        open_model(run / "checkpoint-4").read()


def test_another_base_is_refused_by_name(tiny, run, bases):
    with pytest.raises(CheckpointError, match="was trained with unet's weights"):
        train(tiny, run, bases / "other", max_steps=6)


def test_a_run_begins_with_the_file_that_another_left(tiny, run, bases, tmp_path):
    asked = dict.fromkeys(("vae_name_or_path", "text_encoder_config_file", "unet_config_file", "tokenizer_name"))
    asked |= ASKED | {"model_name_or_path": bases / "one", "lora_from": run / "lora" / LORA_FILE}
    begun = prepare(*parse_arguments(tiny.flags(tmp_path / "next", **asked), True))
    assert differences(lora_of(begun.state.model), read_lora(run / "lora")) == []


def test_what_is_exported(tiny, run, bases):
    """The files of the adapters; and by choice the whole model, which draws as base and adapters together do."""
    folder = run / "lora"
    assert json.loads((folder / "ppldm.json").read_text())["lora_rank"] == 2
    rows = read_tokens(folder)
    assert sorted(path.name for path in folder.glob("learned*")) == [
        "learned_embeds.safetensors", "learned_embeds_1.safetensors",
    ]  # fmt: skip
    assert list(rows) == ["<pic>", "picture"]
    merged, base = load_pipeline(run / "pipeline"), load_pipeline(bases / "one")
    words = base.text_encoder.model.embed_tokens.weight.numpy()
    found = merged.text_encoder.model.embed_tokens.weight.numpy()
    plain = load_tokenizer(tiny.tokenizer, 12)
    own = [plain.vocab_size, plain.vocab.index("picture")]  # the table has rows to spare
    assert (found[own] == np.concatenate([*rows.values()])).all() and (found[own[1]] != words[own[1]]).any()
    assert (np.delete(found, own, axis=0) == np.delete(words, own, axis=0)).all()
    for name, pair in read_lora(folder).components["unet"].items():
        before, after = (dict(net.unet.named_sublayers())[name].weight.numpy() for net in (base, merged))
        change = pair.change.T if before.ndim == 2 else pair.change
        np.testing.assert_allclose(after, before + change, atol=1e-6)
    for place in (folder, run / "pipeline"):
        tokenizer = load_tokenizer(place / "tokenizer", 12)
        assert tokenizer.encode(["a <pic> picture"])[0, 2:4].tolist() == own
