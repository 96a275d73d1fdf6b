"""Captions from the settings to the exported model: which a run sees, how long they may be, what padding is."""

import json

import numpy as np
import pytest
from command_line import parse_arguments

import ppldm
from ppldm.data.filelist import write_filelist
from ppldm.data.formats.part import Part, write_part
from ppldm.data.formats.row import Row
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import CheckpointError, ModelError

LENGTH = 154
DRAWN = {"captions": "caption:1,blip:1", "caption_wildcards": True, "shuffle_tags": True, "keep_tags": 1}


@pytest.fixture
def file_list(tiny, tmp_path):
    """Each fourth row has no text but its own; one has none at all."""
    part = Part(tiny.folder / "part-00000.gz")
    rows = []
    for number in range(20):
        row = part.read(number)
        meta = {"blip": "word, {red|blue}, picture"} if number % 4 else {}
        rows.append(Row("" if number == 4 else row.caption, row.image, meta))
    write_part(tmp_path / "texts.gz", rows)
    write_filelist(tmp_path / "texts.filelist", ["texts.gz"])
    return tmp_path / "texts.filelist"


def make(tiny, file_list, folder, **changes):
    words = tiny.flags(folder, **{"file_list": file_list, "model_max_length": LENGTH, "max_steps": 2, **changes})
    return prepare(*parse_arguments(words, True))


def captions(run, epoch=0) -> list[str]:
    found = []
    run.dataset.tokenizer.encode = lambda texts: found.extend(texts) or np.zeros((len(texts), LENGTH), np.int64)
    for place in range(len(run.dataset)):
        run.dataset[(epoch, place)]
    return found


def test_a_run_sees_what_the_settings_say(tiny, file_list, tmp_path, caplog):
    run = make(tiny, file_list, tmp_path / "run", caption_drop=0.2, **DRAWN)
    assert "of 19 captions" in caplog.text and run.identity["captions"] == DRAWN["captions"]
    skipped = [reason for place in range(20) for reason in run.dataset[(0, place)]["skipped"]]
    assert skipped == ["no_caption"]
    found = [captions(run, epoch) for epoch in range(2)]
    assert found[0] != found[1]
    texts = set(sum(found, []))
    assert "" in texts and any(text.startswith("picture") for text in texts)
    others = {text for text in texts if text.startswith("word, ")}
    assert others <= {f"word, {rest}" for colour in ("red", "blue")
                      for rest in (f"{colour}, picture", f"picture, {colour}")} and len(others) > 2  # fmt: skip


@pytest.mark.slow
def test_a_long_masked_model_is_trained_resumed_and_drawn_with_as_it_was_trained(tiny, file_list, tmp_path):
    settings = {**DRAWN, "mask_pad_tokens": True, "save_steps": 1}
    run = make(tiny, file_list, tmp_path / "run", **settings)
    assert run.state.model.text_encoder.config.max_position_embeddings == LENGTH
    assert run.state.model.mask_behind == run.state.model.tokenizer.end_id
    run_loop(run)
    for change in ({"captions": "caption:1,blip:2"}, {"captions": None}, {"mask_pad_tokens": None}, {"keep_tags": 0}):
        with pytest.raises(CheckpointError, match=next(iter(change))):
            make(tiny, file_list, tmp_path / "run", **{**settings, **change})
    folder = tmp_path / "run/pipeline"
    assert json.loads((folder / "ppldm.json").read_text())["mask_pad_tokens"] is True
    assert "attends to the padding" in (folder / "README.md").read_text()
    prompt = dict(guidance_scale=3.0, num_inference_steps=2)
    drawn = [ppldm.load(path).generate("picture 1", **prompt) for path in (folder, tmp_path / "run/checkpoint-2")]
    assert (drawn[0] == drawn[1]).all()
    model = ppldm.load(folder)
    assert model.tokenizer.max_length == LENGTH and model.model.mask_behind == model.tokenizer.end_id
    with pytest.raises(ModelError, match=f"knows {LENGTH} positions, fewer than --model_max_length 200"):
        make(tiny, file_list, tmp_path / "more", model_max_length=200, model_name_or_path=folder, tokenizer_name=None,
             vae_name_or_path=None, text_encoder_config_file=None, unet_config_file=None)  # fmt: skip
