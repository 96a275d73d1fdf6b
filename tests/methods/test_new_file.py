"""A weight of the loss and a law of levels that nobody knows are one file each, and keep the laws of a training."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ppldm.methods.levels
import ppldm.methods.weights
from ppldm.config.option import options
from ppldm.families.ldm import LdmConfig
from ppldm.methods import names
from tests.families.test_laws import assert_close_run, assert_same_run, curve, train

PACKAGE = Path(ppldm.methods.__file__).parents[1]
RAMP = '''"""A weight that falls with the noise."""
from dataclasses import dataclass

@dataclass(frozen=True)
class Ramp:
    power: float = 2.0
    p2_k: float = 3.0  # a flag of another weight, which its setting tells

    def weights(self, signal, noise, prediction_type):
        return self.p2_k * (signal / (signal + noise)) ** self.power

METHOD = Ramp
'''
LATE = '''"""A law by which more noise is drawn more often."""
from dataclasses import dataclass

@dataclass(frozen=True)
class Late:
    def __call__(self, uniform):
        return uniform**0.5

METHOD = Late
'''
SETTINGS = {"loss_weighting": "ramp", "timestep_sampling": "late"}
ASKED = f"""
from ppldm.config.option import options
from ppldm.families.ldm import LdmConfig
config = LdmConfig(**{SETTINGS})
print(*(options(LdmConfig)[name].choices for name in {[*SETTINGS]}), config.weighting(), config.level_input(9).law)
"""


def write(folder: Path) -> None:
    for kind, name, text in (("weights", "ramp", RAMP), ("levels", "late", LATE)):
        (folder / kind).mkdir(parents=True, exist_ok=True)
        (folder / kind / f"{name}.py").write_text(text)


def test_a_file_in_its_folder_is_all_that_a_setting_needs(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "ppldm", copy_function=os.symlink, ignore=shutil.ignore_patterns("__pycache__"))
    write(tmp_path / "ppldm/methods")
    said = subprocess.run([sys.executable, "-c", ASKED], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True)  # fmt: skip
    known = [("none", "min_snr", "p2", "adaptive", "ramp"), ("uniform", "logit_normal", "biased", "late")]
    assert said.stdout.strip() == f"{known[0]} {known[1]} Ramp(power=2.0, p2_k=1.0) Late()", said.stderr


@pytest.mark.parametrize("folder", ["weights", "levels", "targets", "offsets"])
def test_names_are_those_of_the_files(folder):
    files = {path.stem for path in (PACKAGE / "methods" / folder).glob("*.py")} - {"__init__"}
    assert set(names(folder)) == files
    setting = {"weights": "loss_weighting", "levels": "timestep_sampling", "targets": "prediction_type"}.get(folder)
    assert not setting or set(options(LdmConfig)[setting].choices) - {"none", "uniform"} == files


@pytest.mark.slow
def test_a_new_weight_and_a_new_law_keep_the_laws(tiny, tmp_path, monkeypatch):
    write(tmp_path)
    for package, name, setting in ((ppldm.methods.weights, "ramp", "loss_weighting"),
                                   (ppldm.methods.levels, "late", "timestep_sampling")):  # fmt: skip
        folder = str(tmp_path / package.__name__.rpartition(".")[2])
        monkeypatch.setattr(package, "__path__", [*package.__path__, folder])
        monkeypatch.delitem(sys.modules, f"{package.__name__}.{name}", raising=False)
        stated = vars(options(LdmConfig)[setting])  # what a process has read at its start
        monkeypatch.setitem(stated, "choices", (*stated["choices"], name))
    plain = {"methods": None, "ema_posthoc": None, "ema_posthoc_every": None, "ema_posthoc_dtype": None}
    settings = {**plain, "prediction_type": "v_prediction", "adam_epsilon": 1e-6, **SETTINGS}
    model = train(tiny, "ldm", tmp_path / "straight", **settings).state.model
    powers = model.process.powers()
    np.testing.assert_allclose(model.loss_weights, powers[0] ** 2, rtol=1e-5)
    train(tiny, "ldm", tmp_path / "trainer", kind="trainer", **settings)
    assert_same_run(tmp_path / "trainer", tmp_path / "straight")
    micro = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    train(tiny, "ldm", tmp_path / "cut", **settings, **micro)
    assert_close_run(tmp_path / "cut", tmp_path / "straight", steps=2)
    shutil.copytree(tmp_path / "straight", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoint-4")
    assert train(tiny, "ldm", tmp_path / "again", **settings).start_step == 2
    assert_same_run(tmp_path / "again", tmp_path / "straight")
    train(tiny, "ldm", tmp_path / "other", **settings | dict.fromkeys(SETTINGS))
    assert curve(tmp_path / "other")[0] != curve(tmp_path / "straight")[0]
