"""What PaddleMIX's script trains is one state dict, and is read like any other form."""

import json
import shutil

import numpy as np
import paddle
import pytest
from small_weights import differences, small_weights

import ppldm
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.inference.export import export
from ppldm.utils.errors import ModelError
from ppldm.utils.files import write_json
from ppldm.weights.layouts.older import old_text_encoder_names
from ppldm.weights.names import rename
from ppldm.weights.source import open_model, read_component


def state_of(weights, older: bool = False, average=None) -> dict:
    """As its `LatentDiffusionModel.state_dict()`; older: by the names of ppdiffusers before 0.16."""
    state = {"alphas_cumprod": np.cumprod(1 - np.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype="f4") ** 2)}
    for kind, component in weights.components.items():
        for name, array in component.arrays.items():
            if older and kind == "text_encoder":
                if name.startswith("to_logits."):
                    continue
                name = rename(name, old_text_encoder_names(component.config))
            state[f"{'vqvae' if older and kind == 'vae' else kind}.{name}"] = array
    for name, array in (average.components["unet"].arrays if average else {}).items():
        state[f"model_ema.{name.replace('.', '')}"] = array
    return {name: paddle.to_tensor(array) for name, array in state.items()}


def write_state(folder, weights, **how):
    """The folder of a checkpoint of PaddleNLP's trainer, with its tokenizer, and the script's configs in `config/`."""
    folder.mkdir()
    paddle.save(state_of(weights, **how), str(folder / "model_state.pdparams"))
    CaptionTokenizer(build_vocab(["a red heart"]), 77).save(folder)
    (folder / "config").mkdir()
    for kind, name in (("unet", "unet"), ("text_encoder", "ldmbert"), ("vae", "vae")):
        write_json(folder / "config" / f"{name}.json", weights.components[kind].config)
    return folder


@pytest.mark.parametrize("older", [False, True])
def test_it_is_read_to_the_bit_as_a_file_and_by_its_folder(tmp_path, older):
    weights = small_weights()
    if older:
        for name in ("to_logits.weight", "to_logits.bias"):
            weights.components["text_encoder"].arrays[name][:] = 0
    folder = write_state(tmp_path / "checkpoint-3", weights, older=older)
    for place in (folder, folder / "model_state.pdparams"):
        model = open_model(place, config_file=folder / "config")
        assert differences(model.read(), weights) == [] and model.tokenizer == folder
        for kind in weights.components:
            found = read_component(kind, place, config_file=folder / "config")
            assert found.arrays.keys() == weights.components[kind].arrays.keys()
    export(
        str(folder), str(tmp_path / "out"), original_config_file=str(folder / "config"), prediction_type="v_prediction"
    )
    again = open_model(tmp_path / "out").read()
    assert differences(again, weights) == [] and again.scheduler["prediction_type"] == "v_prediction"
    assert json.loads((tmp_path / "out/scheduler/scheduler_config.json").read_text())["prediction_type"] != "epsilon"


def test_the_average_where_it_is_asked_for(tmp_path):
    weights, averaged = small_weights(), small_weights(seed=1)
    folder = write_state(tmp_path / "a", weights, average=averaged)
    assert differences(open_model(folder, config_file=folder / "config").read(), weights) == []
    weights.components["unet"] = averaged.components["unet"]
    assert differences(open_model(folder, config_file=folder / "config", ema=True).read(), weights) == []
    plain = write_state(tmp_path / "b", weights)
    with pytest.raises(ModelError, match="holds no averaged weights"):
        open_model(plain, config_file=plain / "config", ema=True).read()


def test_without_its_configs_it_is_taken_for_the_published_size_and_says_so(tmp_path):
    folder = write_state(tmp_path / "a", small_weights())
    vae = open_model(folder).read(("vae",)).components["vae"]
    assert vae.config["block_out_channels"] == [128, 256, 512, 512] and "vae.json" in vae.source
    with pytest.raises(ModelError, match=r"no (vqvae|bert|unet).json or .*taken for the published size\)"):
        ppldm.load(folder)


def test_the_weights_that_a_run_leaves_are_those_of_its_checkpoint(tmp_path):
    run = tmp_path / "run"
    checkpoint = write_state(run / "checkpoint-3", small_weights()) if run.mkdir() is None else None
    write_json(checkpoint / "manifest.json", {})
    write_json(run / "run.json", {"family": "ldm"})
    shutil.copy(checkpoint / "model_state.pdparams", run / "model_state.pdparams")
    for place in (run / "model_state.pdparams", checkpoint / "model_state.pdparams"):
        assert open_model(place).path == checkpoint
    (run / "model_state.pdparams").unlink()
    paddle.save(state_of(small_weights(seed=1)), str(run / "model_state.pdparams"))
    with pytest.raises(ModelError, match="is of none of the checkpoints beside it"):
        open_model(run / "model_state.pdparams").read()


def test_the_state_of_one_network_is_named(tmp_path):
    state = {name: paddle.to_tensor(array) for name, array in small_weights().components["unet"].arrays.items()}
    paddle.save(state, str(tmp_path / "model_state.pdparams"))
    with pytest.raises(ModelError, match=r"holds none of vae., .*give the folder that its config.json is in"):
        open_model(tmp_path).read()
