"""A checkpoint knows its networks: it is read with nothing beside it, and refuses another run's by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from command_line import parse_arguments

import ppldm
from ppldm.families.ldm_build import build_model
from ppldm.networks.build import build_network, save_component
from ppldm.networks.configs import read_new_config
from ppldm.training.checkpoint import read_manifest, verify
from ppldm.training.prepare import prepare
from ppldm.training.resume import differences
from ppldm.training.train import run_loop
from ppldm.training.trainer import run_trainer
from ppldm.utils.errors import CheckpointError, ModelError
from ppldm.weights.model_file import read_model_file
from ppldm.weights.source import open_model, read_component

FACTOR = 0.9


def train(kind, flags):
    run = prepare(*parse_arguments([*flags, "--do_train"], kind == "loop"))
    (run_loop if kind == "loop" else run_trainer)(run)
    return run


def make_vae(tiny, folder: Path, factor: float = FACTOR, seed: int = 1) -> Path:
    vae = build_network("vae", read_new_config("vae", tiny.config("vae"), ""), seed)
    vae.register_to_config(scaling_factor=factor)
    save_component(vae, folder)
    return folder


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """(what the run started from, its folder): the folder holds the configs, the VAE and the tokenizer of its flags."""
    start = tmp_path_factory.mktemp("start")
    make_vae(tiny, start / "vae")
    for name in ("ldmbert", "unet"):
        shutil.copy(tiny.config(name), start)
    shutil.copytree(tiny.tokenizer, start / "tokenizer")
    folder = tmp_path_factory.mktemp("trained") / "run"
    train("loop", flags(tiny, start, folder, max_steps=3, save_steps=2))
    return start, folder


def test_stored_settings_of_sampling_are_kept(tiny, trained, tmp_path):
    """A run that starts from a pipeline exports what that stores for samplers, after a resume too."""
    stored = {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1, "timestep_spacing": "trailing"}
    start = shutil.copytree(trained[1] / "pipeline", tmp_path / "start")
    path = start / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | stored))
    drop_known_files(start)
    none = {"vae_name_or_path": None, "text_encoder_config_file": None, "unet_config_file": None}
    settings = {"model_name_or_path": start, "tokenizer_name": None, "save_steps": 1, **none}
    train("loop", tiny.flags(tmp_path / "run", max_steps=1, **settings))
    train("loop", tiny.flags(tmp_path / "run", max_steps=2, **settings))
    for form in (tmp_path / "run" / "checkpoint-2", tmp_path / "run" / "pipeline"):
        found = ppldm.load(form).model.sampling
        assert stored.items() <= found.items(), form


def drop_known_files(pipeline: Path) -> None:
    metadata = json.loads((pipeline / "ppldm.json").read_text())
    (pipeline / "ppldm.json").write_text(json.dumps({k: v for k, v in metadata.items() if k != "files"}))


def flags(tiny, start, folder, **changes):
    own = {
        "vae_name_or_path": start / "vae",
        "text_encoder_config_file": start / "ldmbert.json",
        "unet_config_file": start / "unet.json",
        "tokenizer_name": start / "tokenizer",
    }
    return tiny.flags(folder, **own | changes)


def make_older(folder: Path) -> Path:
    """A checkpoint as it was before there was model.json."""
    (folder / "model.json").unlink()
    shutil.rmtree(folder / "tokenizer")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"] = {name: metadata for name, metadata in manifest["files"].items() if (folder / name).is_file()}
    manifest.pop("crc32")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert verify(folder) is None
    return folder


@pytest.mark.parametrize("kind", ["loop", "trainer"])
def test_a_checkpoint_is_read_with_nothing_beside_it(tiny, trained, tmp_path, monkeypatch, kind):
    start, run = trained
    if kind == "trainer":
        run = tmp_path / "trainer"
        train(kind, flags(tiny, start, run, max_steps=2, save_steps=2))
    alone = shutil.copytree(run / "checkpoint-2", tmp_path / "elsewhere" / "checkpoint-2")
    monkeypatch.chdir(tmp_path)
    weights = open_model(alone).read()
    described = read_model_file(alone)
    assert described.family == "ldm" and described.process["prediction_type"] == "epsilon"
    assert {name: one.trained for name, one in described.components.items()} == {
        "vae": False, "text_encoder": True, "unet": True
    }  # fmt: skip
    assert weights.components["vae"].config["scaling_factor"] == FACTOR and weights.frozen == ("vae",)
    assert build_model(weights, alone).latent_map.scale == FACTOR
    assert open_model(alone).tokenizer == alone / "tokenizer" == weights.tokenizer
    model = ppldm.load(alone)
    assert (model.tokenizer.max_length, model.resolution) == (12, 32)
    assert model.generate("picture 1", num_inference_steps=2).shape == (1, 1, 32, 32, 3)
    assert read_component("unet", alone).config["cross_attention_dim"] == 32
    for name in ("model.json", "tokenizer/vocab.txt"):
        assert name in read_manifest(alone)["files"]


def test_a_run_starts_from_a_checkpoint_alone(tiny, trained, tmp_path):
    alone = shutil.copytree(trained[1] / "checkpoint-2", tmp_path / "elsewhere" / "checkpoint-2")
    none = {"vae_name_or_path": None, "text_encoder_config_file": None, "unet_config_file": None}
    run = train(
        "loop", tiny.flags(tmp_path / "next", model_name_or_path=alone, tokenizer_name=None, max_steps=1, **none)
    )
    assert run.state.model.latent_map.scale == FACTOR and run.start_step == 0
    assert read_model_file(tmp_path / "next" / "checkpoint-1").components["vae"].config["scaling_factor"] == FACTOR
    train("loop", tiny.flags(tmp_path / "vae", vae_name_or_path=alone, max_steps=1))
    assert read_model_file(tmp_path / "vae" / "checkpoint-1").components["vae"].crc32 == (
        read_model_file(alone).components["vae"].crc32
    )


@pytest.mark.parametrize("name", ["model.json", "tokenizer/vocab.txt"])
def test_damage_is_noticed(trained, tmp_path, name):
    alone = shutil.copytree(trained[1] / "checkpoint-2", tmp_path / "checkpoint-2")
    (alone / name).write_text((alone / name).read_text().replace("1", "2", 1))
    assert verify(alone) == f"{name} has changed or is cut short"
    with pytest.raises(ModelError, match=f"{name} has changed or is cut short; choose another checkpoint"):
        open_model(alone).read()


def test_exports_say_what_they_are(trained, tmp_path):
    from ppldm.inference.export import export

    pipeline = read_model_file(trained[1] / "pipeline")
    assert pipeline.components["vae"].config["scaling_factor"] == FACTOR and not pipeline.components["vae"].trained
    assert "model.json" in json.loads((trained[1] / "pipeline" / "ppldm.json").read_text())["files"]
    checkpoint = read_model_file(trained[1] / "checkpoint-3")
    for form in ("diffusers", "ppdiffusers"):
        export(str(trained[1] / "checkpoint-3"), out=str(tmp_path / form), to=form)
        exported = read_model_file(tmp_path / form)
        assert exported.process == pipeline.process == checkpoint.process
        assert exported.tokenizer == pipeline.tokenizer == checkpoint.tokenizer
        for name, component in exported.components.items():
            assert component.config == pipeline.components[name].config == checkpoint.components[name].config


CHANGES = {
    "vae": ({"vae_name_or_path": "other weights"}, "vae's weights"),
    "factor": ({"vae_name_or_path": "other factor"}, "vae's scaling_factor 0.9, this run has 0.5"),
    "unet": ({"unet_config_file": {"act_fn": "gelu"}}, "unet's act_fn silu, this run has gelu"),
    "text_encoder": ({"text_encoder_config_file": {"dropout": 0.25}}, "text_encoder's dropout 0.0, this run has 0.25"),
    "tokenizer": ({"tokenizer_name": "other"}, "tokenizer's crc32"),
}


def changed_flags(tiny, trained, tmp_path, name) -> dict:
    """The flags of a run that differs in one thing from `trained`."""
    ((flag, value),) = CHANGES[name][0].items()
    if isinstance(value, dict):
        config = json.loads((trained[0] / ("unet.json" if name == "unet" else "ldmbert.json")).read_text())
        (tmp_path / "changed.json").write_text(json.dumps(config | value))
        return {flag: tmp_path / "changed.json"}
    if name == "tokenizer":
        shutil.copytree(trained[0] / "tokenizer", tmp_path / "tokenizer")
        lines = (tmp_path / "tokenizer" / "vocab.txt").read_text().splitlines()
        lines[-2:] = reversed(lines[-2:])
        (tmp_path / "tokenizer" / "vocab.txt").write_text("\n".join(lines) + "\n")
        return {flag: tmp_path / "tokenizer"}
    return {flag: make_vae(tiny, tmp_path / "vae", 0.5 if name == "factor" else FACTOR, 1 if name == "factor" else 2)}


@pytest.mark.parametrize("name", CHANGES)
def test_another_network_is_refused_by_name(tiny, trained, tmp_path, name):
    run = shutil.copytree(trained[1], tmp_path / "run")
    changes = changed_flags(tiny, trained, tmp_path, name)
    accept = CHANGES[name][1].partition("'")[0]
    with pytest.raises(CheckpointError, match=f"was trained with {CHANGES[name][1]}.*--accept_changes {accept},"):
        train("loop", flags(tiny, trained[0], run, max_steps=4, **changes))
    assert not (run / "checkpoint-4").exists()


def test_the_setting_is_named_and_not_what_follows_from_it(tiny, trained, tmp_path):
    """A falling rate makes the number of updates matter, and so does its end: the schedule is what was changed."""
    start, folder = trained
    shutil.copytree(folder, tmp_path / "run")
    with pytest.raises(CheckpointError, match="was trained with lr_scheduler_type constant, this run has cosine"):
        train("loop", flags(tiny, start, tmp_path / "run", max_steps=4, lr_scheduler_type="cosine"))
    # What is refused has not touched the record of what was trained.
    assert (tmp_path / "run/run.json").read_bytes() == (folder / "run.json").read_bytes()


def test_another_schedule_is_refused(tiny, trained, tmp_path):
    """That of a pipeline that the run started from, and which has changed since."""
    start = shutil.copytree(trained[1] / "pipeline", tmp_path / "start")
    none = {"vae_name_or_path": None, "text_encoder_config_file": None, "unet_config_file": None}
    own = tiny.flags(tmp_path / "run", model_name_or_path=start, max_steps=1, **none)
    train("loop", own)
    path = start / "scheduler" / "scheduler_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"beta_end": 0.02}))
    with pytest.raises(CheckpointError, match="was trained with process's beta_end 0.012, this run has 0.02"):
        train("loop", [*own, "--max_steps", "2"])


def test_an_accepted_vae_is_the_one_that_is_trained_with(tiny, trained, tmp_path):
    """Neither the old weights under the new factor, nor the new ones forgotten at the next start."""
    run = shutil.copytree(trained[1], tmp_path / "run")
    other = make_vae(tiny, tmp_path / "other", factor=0.5, seed=2)
    own = flags(tiny, trained[0], run, max_steps=4, vae_name_or_path=other, accept_changes="vae")
    model = train("loop", own).state.model
    assert model.latent_map.scale == 0.5
    for path, same in ((run / "checkpoint-4", True), (run / "checkpoint-3", False)):
        found, wanted = read_component("vae", path).arrays, read_component("vae", other).arrays
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted) is same
    assert read_model_file(run / "checkpoint-4").components["vae"].config["scaling_factor"] == 0.5
    assert train("loop", flags(tiny, trained[0], run, max_steps=4, vae_name_or_path=other)).start_step == 4


def test_a_checkpoint_without_model_json_resumes_with_its_vae_alone(tiny, trained, tmp_path):
    run = shutil.copytree(trained[1], tmp_path / "run")
    shutil.rmtree(run / "checkpoint-3")
    make_older(run / "checkpoint-2")
    other = make_vae(tiny, tmp_path / "other", seed=2)
    with pytest.raises(CheckpointError, match="was trained with vae's weights .*--accept_changes vae"):
        train("loop", flags(tiny, trained[0], run, vae_name_or_path=other))
    assert train("loop", flags(tiny, trained[0], run, max_steps=3)).start_step == 2


def test_a_checkpoint_without_model_json_is_never_filled_up(tiny, trained, tmp_path):
    """It is read where the files of its run are there, and else says which flag to give."""
    start = shutil.copytree(trained[0], tmp_path / "start")
    run = shutil.copytree(trained[1], tmp_path / "run")
    settings = json.loads((run / "run.json").read_text())
    names = {"vae_name_or_path": "vae", "text_encoder_config_file": "ldmbert.json", "unet_config_file": "unet.json",
             "tokenizer_name": "tokenizer"}  # fmt: skip
    settings["ModelArguments"] = {flag: str(start / name) for flag, name in names.items()}
    (run / "run.json").write_text(json.dumps(settings))
    older = make_older(run / "checkpoint-2")
    assert open_model(older).read().components["vae"].config["scaling_factor"] == FACTOR  # of the exported pipeline
    shutil.rmtree(run / "pipeline")
    weights = open_model(older).read()
    assert weights.components["vae"].config["scaling_factor"] == FACTOR and weights.tokenizer == start / "tokenizer"
    assert weights.components["unet"].config["attention_head_dim"] == 2
    shutil.rmtree(start / "vae")
    with pytest.raises(ModelError, match="checkpoint-2 was trained with the vae .*/start/vae, which is not found here; "
                                         ".*name the config.json of its VAE with --original_config_file"):  # fmt: skip
        open_model(older).read()
    config = trained[0] / "vae" / "config.json"
    assert open_model(older, config_file=config).read().components["vae"].config["scaling_factor"] == FACTOR
    make_vae(tiny, start / "vae", seed=2)
    with pytest.raises(ModelError, match="/start/vae is not the VAE that .*checkpoint-2 was trained with"):
        open_model(older).read()
    (start / "unet.json").unlink()
    with pytest.raises(ModelError, match="trained with the unet .*start/unet.json, which is not found here; go to the"):
        open_model(older, config_file=config).read()


@pytest.mark.parametrize(
    "then, now, found",
    [
        (1, 1, []),
        (1, 2, [("x", 1, 2)]),
        (None, {"a": 1}, [("x", None, {"a": 1})]),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, [("x's b", 2, 3)]),
        ({"a": 1, "b": 2}, {"a": 4, "b": 3}, [("x's a", 1, 4), ("x's b", 2, 3)]),
        ({"a": 1}, {"b": 3, "a": 1}, []),
        ({"weights": "1"}, {"a": 1, "weights": "2"}, [("x's weights", "1", "2")]),
    ],
)
def test_all_differences_are_named(then, now, found):
    assert differences("x", then, now) == found


def test_a_refusal_names_all_differences_and_accepting_what_it_says_goes_through(tiny, trained, tmp_path):
    run = shutil.copytree(trained[1], tmp_path / "run")
    changes = {"learning_rate": 1e-4, "caption_drop": 0.5, "random_flip": True, "lr_scheduler_type": "cosine"}
    changes |= changed_flags(tiny, trained, tmp_path, "factor")
    with pytest.raises(CheckpointError) as caught:
        train("loop", flags(tiny, trained[0], run, max_steps=4, **changes))
    said = str(caught.value)
    for name in ("learning_rate", "caption_drop 0", "random_flip False, this run has True", "lr_scheduler_type",
                 "max_steps None, this run has 4", "vae's scaling_factor 0.9, this run has 0.5"):  # fmt: skip
        assert name in said, name
    words = said.partition("--accept_changes ")[2].partition(",")[0].split()
    assert {*words} == {"learning_rate", "caption_drop", "random_flip", "lr_scheduler_type", "max_steps", "vae"}
    again = flags(tiny, trained[0], run, max_steps=4, **changes)
    assert train("loop", [*again, "--accept_changes", *words]).start_step == 3


@pytest.mark.parametrize("words", ["--ema_posthoc 0.05 0.1", "--use_ema", "--ema_posthoc 0.05 0.1 --seed 7", "wider"])
def test_what_cannot_be_accepted_is_not_advised(tiny, trained, tmp_path, words):
    run = shutil.copytree(trained[1], tmp_path / "run")
    if words == "wider":
        config = json.loads((trained[0] / "unet.json").read_text())
        (tmp_path / "wider.json").write_text(json.dumps(config | {"layers_per_block": config["layers_per_block"] + 1}))
        words = f"--unet_config_file {tmp_path}/wider.json"
    with pytest.raises(CheckpointError, match=r"that cannot be accepted: .*; resume ") as caught:
        train("loop", [*flags(tiny, trained[0], run, max_steps=4), *words.split()])
    assert "--accept_changes" not in str(caught.value)
    assert ("seed 5, this run has 7" in str(caught.value)) is ("--seed" in words)
