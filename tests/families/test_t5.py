"""Families whose denoiser takes hidden states of any width train on a frozen T5: masks, captions computed ahead, export
and drawing."""

import json

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from small_t5 import write_t5

import ppldm
from ppldm.cli.main import run as run_command
from ppldm.data.loader import first_epoch
from ppldm.families.base import get_family
from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import ConfigError
from ppldm.weights.source import open_model

FAMILIES = ("dit", "ldm", "microdit", "stable_diffusion", "uvit")
LENGTH = 20


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    return write_t5(tmp_path_factory.mktemp("t5"))


def flags(tiny, t5, family, folder, **changes):
    """Of two updates; a DiT, which can, ignores the padding."""
    own = {"text_encoder_name_or_path": t5, "unet_config_file": tiny.config("unet")}
    if family not in ("ldm", "stable_diffusion"):
        own |= {"unet_config_file": None, "transformer_config_file": tiny.config(family)}
    if family == "ldm":
        own["pretrained_text_encoder_name"] = own.pop("text_encoder_name_or_path")
    kept = {"text_encoder_config_file": None, "tokenizer_name": None, "model_max_length": LENGTH, "max_steps": 2,
            "mask_pad_tokens": True if family in ("dit", "ldm") else None}  # fmt: skip
    return tiny.flags(folder, **kept | own | changes)


def start(tiny, t5, family, folder, **changes):
    return prepare(*parse_arguments(flags(tiny, t5, family, folder, **changes), True, get_family(family).Config))


@pytest.fixture(params=FAMILIES, scope="module")
def trained(tiny, t5, request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run_loop(start(tiny, t5, request.param, folder))
    return request.param, folder


def test_it_is_exported_with_its_tokenizer_and_draws(t5, trained):
    family, folder = trained
    exported, source = folder / "pipeline", open_model(t5)
    own, given = open_model(exported).read().components["text_encoder"], source.component("text_encoder")
    assert own.config == given.config and own.arrays.keys() == given.arrays.keys()
    assert all(own.arrays[name].tobytes() == np.ascontiguousarray(given.arrays[name]).tobytes() for name in own.arrays)
    assert (exported / "tokenizer/spiece.model").read_bytes() == (source.tokenizer / "spiece.model").read_bytes()
    index = json.loads((exported / "model_index.json").read_text())
    assert index["text_encoder"][1] == "T5EncoderModel" and index["tokenizer"][1] == "T5Tokenizer"
    known = json.loads((exported / "model.json").read_text())
    assert known["family"] == ("stable_diffusion" if family == "ldm" else family)
    assert (known["tokenizer"]["class"], known["tokenizer"]["max_length"]) == ("T5Tokenizer", LENGTH)
    draw = {"seed": 3, "num_inference_steps": 2, "height": 32, "width": 32}
    pictures = [ppldm.load(folder / name).generate("a red cat", **draw) for name in ("pipeline", "checkpoint-2")]
    np.testing.assert_array_equal(*pictures)


@pytest.mark.parametrize("form", ["diffusers", "ppdiffusers"])
def test_a_pipeline_of_either_library_is_read_to_the_bit(trained, tmp_path, form):
    family, folder = trained
    if (form, family) == ("diffusers", "uvit"):
        return
    run_command(["export", str(folder / "pipeline"), "--to", form, "--out", str(tmp_path / "out")])
    one, two = (open_model(path).read().components["text_encoder"] for path in (folder / "pipeline", tmp_path / "out"))
    assert one.config == two.config
    assert all(one.arrays[name].tobytes() == np.ascontiguousarray(two.arrays[name]).tobytes() for name in one.arrays)
    reasons = {"dit": "change captions before", "ldm": "this UNet", "stable_diffusion": "this UNet and text encoder"}
    said = (tmp_path / "out/README.md").read_text()
    assert "draw with ppldm" in said and (family == "ldm" or reasons.get(family, "no pipeline") in said)


def test_a_run_on_captions_computed_ahead_is_the_same(tiny, t5, trained, tmp_path, caplog):
    family, folder = trained
    words = ["--mask-pad-tokens"] if family in ("dit", "ldm") else []
    place = ["--latents-dir", str(tmp_path), "--text-dtype", "float32"]
    length = ["--model-max-length", str(LENGTH)]
    run_command(["precompute", tiny.file_list, "--text-encoder", str(t5), *length, *words, *place])
    assert f"and {LENGTH * 32 * 4 / 1e6:.3f} MB each in float32" in caplog.text
    changes = {"text_embeddings": "cached", "text_embeddings_dtype": "float32", "latents_dir": tmp_path}
    run_loop(start(tiny, t5, family, tmp_path / "run", **changes))
    records = (read_metrics(path / "metrics.jsonl") for path in (folder, tmp_path / "run"))
    online, cached = ([one["loss"] for one in own] for own in records)
    np.testing.assert_allclose(cached, online, rtol=1e-6)


def test_masks_reach_the_text_encoder_and_what_attends(tiny, t5, tmp_path):
    """What is predicted under a mask does not depend on how far captions are padded; without, it does."""

    def predicted(length, masked):
        run = start(tiny, t5, "dit", tmp_path / f"{length}-{masked}", model_max_length=length, mask_pad_tokens=masked)
        model, batch = run.state.model, first_epoch(run.dataset, list(range(4)))
        rng = np.random.default_rng(0)
        for parameter in model.transformer.parameters():  # zeros would hide what is attended to
            parameter.set_value(rng.standard_normal(parameter.shape).astype(np.float32) / 8)
        model.eval()
        hidden = model.encode_text(batch["input_ids"]).numpy()[:, :6]
        return hidden, model.predict(batch["noise"], batch["timesteps"], batch["input_ids"]).numpy()

    for masked, alike in ((True, True), (None, False)):
        (hidden, short), (again, long) = (predicted(length, masked) for length in (12, 512))
        assert (np.abs(hidden - again).max() < 1e-4) == (np.abs(short - long).max() < 1e-4) == alike


def test_zeros_stand_for_an_empty_caption_and_for_no_word(tiny, t5, tmp_path):
    """Its end is the first token, which is the second of a caption of one."""
    run = start(tiny, t5, "ldm", tmp_path, empty_caption="zeros")
    model = run.state.model
    hidden = model.encode_text(paddle.to_tensor(model.tokenizer.encode(["", "a", "a red cat"]))).numpy()
    assert [bool(one.any()) for one in hidden] == [False, True, True]


@pytest.mark.parametrize("masked", [True, None])
def test_it_is_part_of_a_compiled_graph(tiny, t5, tmp_path, masked):
    run = start(tiny, t5, "dit", tmp_path, to_static=True, mask_pad_tokens=masked)
    model, batch = run.state.model, first_epoch(run.dataset, list(range(4)))
    given = batch["noise"], batch["timesteps"], batch["input_ids"]
    with paddle.no_grad():
        plain, compiled = (predict(*given).numpy() for predict in (model.predict, model.compiled_predict))
    np.testing.assert_allclose(compiled, plain, atol=1e-5)


@pytest.mark.parametrize(
    "family, changes",
    [("dit", {"train_text_encoder": True}), ("ldm", {"lora_rank": 2, "lora_components": "text_encoder"}),
     ("stable_diffusion", {"train_tokens": "<fido>=^a"}),
     ("uvit", {"train_text_encoder": True, "text_encoder_config_file": "t5_tiny", "text_encoder_name_or_path": None,
               "tokenizer_name": "bert-base-uncased"})],
)  # fmt: skip
def test_it_is_not_trained(tiny, t5, tmp_path, family, changes):
    with pytest.raises(ConfigError, match="the text encoder is a T5, which stays frozen; "):
        start(tiny, t5, family, tmp_path, **changes)
