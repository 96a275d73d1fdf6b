"""Training on cached embeddings of captions is training with the frozen text encoder: the same samples, and the same
losses as far as the embeddings were rounded."""

import json
import os
import shutil

import numpy as np
import pytest
from command_line import parse_arguments
from sampling import ALL
from small_weights import UNET, write_clip

import ppldm
from ppldm.cli.main import run as run_command
from ppldm.data.filelist import write_filelist
from ppldm.data.formats.part import Part, write_part
from ppldm.data.formats.row import Row
from ppldm.data.loader import first_epoch
from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.training.trainer import run_trainer
from ppldm.utils.errors import CheckpointError, ConfigError, PartError

CAPTIONS = "caption:1,blip:2"
MANY = 200 if ALL else 40  # updates
SETTINGS = {"per_device_train_batch_size": 8, "max_steps": 6, "save_steps": 3, "random_crop": False,
            "caption_drop": 0.3, "captions": CAPTIONS, "model_max_length": 16,
            "text_encoder_config_file": None, "tokenizer_name": None}  # fmt: skip


@pytest.fixture(scope="module")
def clip(tiny, tmp_path_factory):
    """A folder with a CLIP text encoder, a UNet for it, and the tiny data set with a second caption."""
    folder = tmp_path_factory.mktemp("texts")
    parts = [Part(tiny.folder / name) for name in ("part-00000.gz", "part-00001.gz")]
    rows = [part.read(number) for part in parts for number in range(len(part))]
    rows = [Row(row.caption, row.image, {"blip": f"red blue {number}"}) for number, row in enumerate(rows)]
    write_part(folder / "part-00000.gz", rows[:25])
    write_part(folder / "part-00001.gz", rows[25:])
    write_filelist(folder / "tiny.filelist", ["part-00000.gz", "part-00001.gz"])
    (folder / "unet.json").write_text(json.dumps(UNET | {"sample_size": 4, "in_channels": 4, "out_channels": 4}))
    write_clip(folder)
    return folder


def start(tiny, clip, folder, kind="loop", **changes):
    own = {"file_list": clip / "tiny.filelist", "unet_config_file": clip / "unet.json",
           "pretrained_text_encoder_name": clip / "text_encoder"}  # fmt: skip
    words = [*tiny.flags(folder, **{**SETTINGS, **own, **changes}), *(["--do_train"] if kind == "trainer" else [])]
    return prepare(*parse_arguments(words, kind == "loop"))


def train(tiny, clip, folder, kind="loop", **changes):
    run = start(tiny, clip, folder, kind, **changes)
    (run_loop if kind == "loop" else run_trainer)(run)
    return [record["loss"] for record in read_metrics(folder / "metrics.jsonl")]


def precompute(clip, *words, encoder=None):
    run_command(["precompute", str(clip / "tiny.filelist"), "--text_encoder", str(encoder or clip / "text_encoder"),
                 "--model_max_length", "16", "--captions", CAPTIONS, *map(str, words)])  # fmt: skip


@pytest.fixture(scope="module")
def runs(tiny, clip):
    """Losses of a run that encodes captions, and of one from cached embeddings."""
    online = train(tiny, clip, clip / "online")
    precompute(clip)
    return online, train(tiny, clip, clip / "cached", text_embeddings="cached")


@pytest.mark.turn("a cached file changes no loss", 2)
def test_cached_embeddings_are_the_captions_rounded(runs):
    online, cached = runs
    assert len(online) == 6 and online != cached
    np.testing.assert_allclose(cached, online, rtol=1e-3)


@pytest.mark.parametrize("empty_caption", ["embedding", "zeros"])
def test_masks_and_empty_captions_are_those_of_the_online_run(tiny, clip, runs, empty_caption):
    changes = {"max_steps": 1, "mask_pad_tokens": True, "empty_caption": empty_caption, "caption_drop": 0.5}
    batches = []
    for mode in ("off", "cached"):
        run = start(tiny, clip, clip / f"one-{empty_caption}-{mode}", text_embeddings=mode, **changes)
        model, batch = run.state.model, first_epoch(run.dataset, list(range(12)))
        for parameter in model.unet.parameters():  # so that every one counts; the last layer begins as zeros
            parameter.set_value(parameter + 0.01)
        batches.append(
            (model.condition(batch["input_ids"], batch.get("text_embeddings")), float(model.loss(batch).value))
        )
    (online, loss), (cached, again) = batches
    hidden = online["encoder_hidden_states"].numpy()
    np.testing.assert_allclose(cached["encoder_hidden_states"].numpy(), hidden, rtol=1e-3, atol=2e-3)
    assert (cached["encoder_attention_mask"] == online["encoder_attention_mask"]).all()
    empty = [not rows.any() for rows in hidden]
    assert any(empty) == (empty_caption == "zeros") and not all(empty)
    assert again == pytest.approx(loss, rel=1e-3) and (cached["encoder_hidden_states"].numpy() != hidden).any()


@pytest.mark.turn("a cached file changes no loss", 2)
@pytest.mark.slow
@pytest.mark.parametrize("kind, workers", [("loop", 0), ("trainer", 2)])
def test_the_same_run_with_workers_the_trainer_a_resume_and_cached_latents(tiny, clip, runs, tmp_path, kind, workers):
    changes = {"text_embeddings": "cached", "dataloader_num_workers": workers}
    shutil.copytree(clip / "cached", tmp_path / "run")
    for left in ("checkpoint-6", "pipeline"):
        shutil.rmtree(tmp_path / "run" / left)
    assert train(tiny, clip, tmp_path / "run", kind, **changes) == runs[1]
    with pytest.raises(CheckpointError, match="text_embeddings float16"):
        start(tiny, clip, tmp_path / "run", kind)
    with pytest.raises(CheckpointError, match="empty_caption"):
        start(tiny, clip, tmp_path / "run", kind, empty_caption="zeros", **changes)
    for path in (*clip.glob("part-*"), clip / "tiny.filelist"):
        os.link(path, tmp_path / path.name)
    changes["file_list"] = tmp_path / "tiny.filelist"
    latents = train(tiny, clip, tmp_path / "ondemand", kind, latents="ondemand", **changes)
    np.testing.assert_allclose(latents, runs[1], rtol=1e-3)
    for path in tmp_path.glob("part-*"):
        if path.suffix not in (".latents", ".embeddings"):
            path.unlink()
    again = train(tiny, clip, tmp_path / "cached", kind, latents="cached", max_steps=2, **changes)
    np.testing.assert_allclose(again, latents[:2], rtol=1e-3)


@pytest.mark.parametrize(
    "changes, error, words",
    [
        ({"pretrained_text_encoder_name": None, "text_encoder_config_file": "x"}, ConfigError, "--freeze_text_encoder"),
        ({"shuffle_tags": True}, ConfigError, "omit --shuffle_tags"),
        ({"caption_wildcards": True}, ConfigError, "known ahead"),
        ({"captions": "caption:1"}, PartError, "captions was .*'caption', 'blip'.* and is .*'caption'"),
        ({"captions": None}, PartError, "captions was"),
        ({"model_max_length": 12}, PartError, "model_max_length was 16 and is 12"),
        ({"clean_captions": True}, PartError, "clean_captions was False and is True.*--clean-captions"),
        ({"text_embeddings_dtype": "float32"}, PartError, "dtype was 'float16' and is 'float32'"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_on_is_refused_by_the_field(tiny, clip, runs, tmp_path, changes, error, words):
    if changes.get("text_encoder_config_file"):
        changes = {
            **changes,
            "text_encoder_config_file": tiny.config("ldmbert"),
            "unet_config_file": tiny.config("unet"),
        }
    with pytest.raises(error, match=words):
        start(tiny, clip, tmp_path / "run", **{"text_embeddings": "cached", **changes})


def test_another_text_encoder_is_refused(tiny, clip, runs, tmp_path):
    write_clip(tmp_path / "other", seed=1)
    with pytest.raises(PartError, match="text_encoder was"):
        start(tiny, clip, tmp_path / "run", text_embeddings="cached",
              pretrained_text_encoder_name=tmp_path / "other/text_encoder")  # fmt: skip


def test_a_model_that_guides_with_zeros_says_so(tiny, clip, runs, tmp_path):
    train(tiny, clip, tmp_path / "run", text_embeddings="cached", empty_caption="zeros", max_steps=1)
    for name in ("pipeline", "checkpoint-1"):
        loaded = ppldm.load(tmp_path / "run" / name)
        assert loaded.model.empty_end == (1, loaded.tokenizer.end_id)
    assert ppldm.load(clip / "cached/pipeline").model.empty_end is None
    assert "trained with zeros" in (tmp_path / "run/pipeline/README.md").read_text()


@pytest.mark.turn("a long run on cached files is the one on pictures and captions", 1)
@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [("float16", 1e-3), ("float32", 1e-6)])
def test_a_long_run_on_embeddings_is_the_one_on_captions(tiny, clip, tmp_path, dtype, tolerance):
    """With a frozen LDMBert, whose padding is masked, from a pipeline."""
    ldmbert = {"text_encoder_config_file": tiny.config("ldmbert"), "unet_config_file": tiny.config("unet"),
               "pretrained_text_encoder_name": None, "tokenizer_name": tiny.tokenizer}  # fmt: skip
    train(tiny, clip, tmp_path / "first", **{**ldmbert, "max_steps": 1})
    pipeline = tmp_path / "first/pipeline"
    settings = {**ldmbert, "text_encoder_config_file": None, "unet_config_file": None, "tokenizer_name": None,
                "vae_name_or_path": None, "model_name_or_path": pipeline, "freeze_text_encoder": True,
                "mask_pad_tokens": True, "max_steps": MANY, "per_device_train_batch_size": 4, "learning_rate": 1e-4,
                "save_steps": 1000, "logging_steps": 1}  # fmt: skip
    online = train(tiny, clip, tmp_path / "online", **settings)
    precompute(clip, "--latents-dir", tmp_path, "--mask-pad-tokens", "--text-dtype", dtype, encoder=pipeline)
    changes = {"text_embeddings": "cached", "text_embeddings_dtype": dtype, "latents_dir": tmp_path}
    cached = train(tiny, clip, tmp_path / dtype, **settings, **changes)
    assert len(cached) == MANY and len([*tmp_path.glob("*.embeddings")]) == 2
    np.testing.assert_allclose(cached, online, rtol=tolerance)
