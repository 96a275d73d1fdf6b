"""Whatever a single file says of its noise schedule is what it draws with, or it is refused by name."""

import itertools
import json

import numpy as np
import pytest
from single_files import single_file_names, small_stable_diffusion, write_single_file
from small_weights import small_weights

import ppldm
from ppldm.cli.main import run
from ppldm.diffusion.process import NoiseSchedule
from ppldm.utils.errors import ModelError
from ppldm.weights.layouts import compvis
from ppldm.weights.source import open_model
from ppldm.weights.write import write_weights

ZERO = NoiseSchedule(rescale_betas_zero_snr=True).alphas_cumprod()
EMPTY = np.zeros(0, np.float32)


def without_tables(weights, layout="1.x"):
    tables = compvis.schedule_tables(weights.scheduler)
    return {name: array for name, array in single_file_names(weights, layout).items() if name not in tables}


@pytest.fixture(scope="module")
def plain():
    return without_tables(small_stable_diffusion("1.x"))


@pytest.fixture(scope="module")
def second():
    return without_tables(small_stable_diffusion("2.x"), "2.x")


def said(path, **asked):
    schedule = open_model(path, **asked).read().scheduler
    return schedule["prediction_type"], bool(schedule.get("rescale_betas_zero_snr"))


# What says the prediction, and what says that the last timestep is pure noise.
PREDICTS = {
    "": ({}, {}), "key": ({"v_pred": EMPTY}, {}), "header": ({}, {"modelspec.prediction_type": "v"}),
    "comfy": ({}, {"modelspec.predict_key": "v"}),
    "name": ({}, {"modelspec.architecture": "stable-diffusion-v2-768-v"}),
    "noise": ({}, {"modelspec.prediction_type": "epsilon"}),
}  # fmt: skip
TABLE = "alphas_cumprod"
ENDS = {"": {}, "key": {"ztsnr": EMPTY}, "table": {TABLE: ZERO}, "plain": {TABLE: NoiseSchedule().alphas_cumprod()}}


@pytest.mark.parametrize("predicts, ends", itertools.product(PREDICTS, ENDS))
@pytest.mark.parametrize("given", [None, "v_prediction", "epsilon"])
def test_prediction_by_end_of_the_schedule(tmp_path, plain, predicts, ends, given):
    keys, header = PREDICTS[predicts]
    path = write_single_file(tmp_path / "m.safetensors", {**plain, **keys, **ENDS[ends]}, metadata=header)
    kind = given or {"": None, "noise": "epsilon"}.get(predicts, "v_prediction")
    zero = ends in ("key", "table")
    if zero and kind != "v_prediction":
        with pytest.raises(ModelError, match="pure noise") as caught:
            open_model(path, prediction_type=given).read()
        assert "v_prediction" in str(caught.value) and "m.safetensors" in str(caught.value)
        return
    assert said(path, prediction_type=given) == (kind or "epsilon", zero)


@pytest.mark.parametrize("suffix", [".safetensors", ".ckpt"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["alphas_cumprod", "betas", "denoiser.sigmas"])
@pytest.mark.parametrize("zero", [False, True])
def test_tables_of_the_schedule(tmp_path, second, name, zero, dtype, suffix):
    bar = (ZERO if zero else NoiseSchedule().alphas_cumprod()).astype(np.float64)
    if zero and name == "denoiser.sigmas":
        bar = np.maximum(bar, 2e-8)  # as programs keep it finite
    made = {"alphas_cumprod": bar, "betas": 1 - bar / np.append(1, bar[:-1]), "denoiser.sigmas": (1 / bar - 1) ** 0.5}
    path = write_single_file(tmp_path / f"m{suffix}", {**second, "v_pred": EMPTY, name: made[name].astype("f4")}, dtype)
    assert said(path) == ("v_prediction", zero)


@pytest.mark.parametrize(
    "extra, header, words",
    [
        ({"edm_mean": EMPTY, "edm_std": EMPTY}, {}, "has edm_mean: .* noise levels of EDM"),
        ({"edm_vpred.sigma_max": EMPTY, "v_pred": EMPTY}, {}, "has edm_vpred.sigma_max"),
        ({}, {"modelspec.prediction_type": "edm"}, "says modelspec.prediction_type 'edm'"),
        ({}, {"modelspec.predict_key": "x0"}, "says modelspec.predict_key 'x0'"),
        ({"v_pred": EMPTY}, {"modelspec.prediction_type": "epsilon"}, "do not agree on what it predicts"),
        ({}, {"modelspec.prediction_type": "v", "modelspec.predict_key": "epsilon"}, "do not agree"),
        ({"alphas_cumprod": NoiseSchedule(beta_schedule="linear").alphas_cumprod()}, {}, "another noise schedule"),
        ({"alphas_cumprod": NoiseSchedule(beta_end=0.02).alphas_cumprod()}, {}, "another noise schedule"),
        ({"betas": np.full(1000, np.nan, "f4")}, {}, "table betas is of another"),
        ({"alphas_cumprod": np.ones(7, "f4")}, {}, "another noise schedule"),
    ],
)
def test_what_is_not_supported_or_does_not_agree_is_named(tmp_path, plain, extra, header, words):
    path = write_single_file(tmp_path / "m.safetensors", {**plain, **extra}, metadata=header)
    with pytest.raises(ModelError, match=words):
        open_model(path).read()
    assert open_model(path).read(("vae",)).components.keys() == {"vae"}  # which has no part in it


@pytest.mark.parametrize("own", [{}, {"zero_terminal_snr": True}, {"given_betas": [0.1]}, {"parameterization": "eps"}])
def test_a_yaml_file_beside_marks_in_the_file(tmp_path, own):
    weights = small_weights(prediction_type="v_prediction")
    write_weights(weights, "compvis", tmp_path / "c")
    from ppldm.weights.formats.files import read_arrays

    arrays = read_arrays(tmp_path / "c" / "model.ckpt")
    params = {**compvis.params_of(weights), **own}
    (tmp_path / "m.yaml").write_text(compvis.yaml_text(params))
    if "zero_terminal_snr" in own:
        arrays = {name: array for name, array in arrays.items() if "." in name}
    path = write_single_file(tmp_path / "m.safetensors", {**arrays, "v_pred": EMPTY})
    if own.keys() & {"given_betas", "parameterization"}:
        with pytest.raises(ModelError, match="given_betas" if "given_betas" in own else "do not agree"):
            open_model(path).read()
        return
    assert said(path) == ("v_prediction", "zero_terminal_snr" in own)


def test_a_flag_says_it_for_a_file_and_a_folder(tmp_path, plain):
    path = write_single_file(tmp_path / "m.safetensors", {**plain, "v_pred": EMPTY})
    assert said(path, zero_snr=True) == ("v_prediction", True)
    run(["export", str(path), "--rescale-betas-zero-snr", "--to", "diffusers", "--out", str(tmp_path / "d")])
    assert said(tmp_path / "d") == ("v_prediction", True)
    config = json.loads((tmp_path / "d" / "scheduler" / "scheduler_config.json").read_text())
    assert config["rescale_betas_zero_snr"] is True and config["timestep_spacing"] == "trailing"
    run(["export", str(path), "--to", "diffusers", "--out", str(tmp_path / "e")])
    assert said(tmp_path / "e", zero_snr=True) == ("v_prediction", True)
    with pytest.raises(ModelError, match="--prediction-type is for a single file"):
        open_model(tmp_path / "e", prediction_type="v_prediction").read()
    noise = write_single_file(tmp_path / "n.safetensors", plain)
    with pytest.raises(ModelError, match="rescale_betas_zero_snr with prediction_type epsilon"):
        ppldm.load(noise, rescale_betas_zero_snr=True)


@pytest.mark.parametrize(
    "zero, kind", [(True, "epsilon"), ("yes", "v_prediction"), (1, "v_prediction"), (None, "sample")]
)
def test_a_stored_scheduler_that_cannot_be(tmp_path, zero, kind):
    write_weights(small_weights(prediction_type="v_prediction"), "diffusers", tmp_path / "d")
    file = tmp_path / "d" / "scheduler" / "scheduler_config.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"rescale_betas_zero_snr": zero, "prediction_type": kind})
    )
    with pytest.raises(ModelError, match="scheduler_config.json: rescale_betas_zero_snr"):
        ppldm.load(tmp_path / "d")
