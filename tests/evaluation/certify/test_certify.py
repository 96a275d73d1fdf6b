"""`ppldm certify`: what is compared, and that a fault is seen."""

import json
from types import SimpleNamespace

import numpy as np
import paddle
import pytest
from paddle import nn

from ppldm.cli.main import run
from ppldm.evaluation.certify import report as report_module
from ppldm.evaluation.certify.report import BAR, Operation, compare, difference, drift, list_layers, list_networks
from ppldm.utils.machine import devices


class Scaled(nn.Layer):
    """x times a weight, whose second computation, on the device that is certified, is faulty as is told."""

    def __init__(self, output=1.0, gradient=1.0):
        super().__init__()
        self.weight = self.create_parameter([4], default_initializer=nn.initializer.Constant(2.0))
        self.faults, self.calls = (output, gradient), [0]

    def __deepcopy__(self, memo):
        return self  # so that it counts

    def forward(self, x):
        self.weight.clear_gradient()
        self.calls[0] += 1
        output, gradient = self.faults if self.calls[0] > 1 else (1.0, 1.0)
        made = x * self.weight * gradient
        return made + (made * (output / gradient - 1)).detach()


def scaled(*faults) -> dict:
    ones = np.linspace(1, 2, 8, dtype=np.float32).reshape(2, 4)
    return compare(Operation("here", "scaled", Scaled(*faults), lambda net, x: net(x), (ones,)), "cpu")


@pytest.mark.parametrize("size", [0.0, BAR / 10, 2 * BAR, 0.1, np.inf, np.nan])
@pytest.mark.parametrize("which", ["forward", "gradient"])
def test_a_fault_of_either_is_seen_and_measured(which, size):
    found = scaled(1 + size, 1.0) if which == "forward" else scaled(1.0, 1 + size)
    assert found["ok"] == bool(size < BAR)
    expected = size if np.isfinite(size) else np.inf
    assert found[which] == pytest.approx(expected, rel=0.01, abs=1e-6)


def test_what_a_device_cannot_compute_is_told():
    def fail(_net, x):
        if len(calls) > 0:
            raise RuntimeError("(NotFound) no such kernel\nat some place")
        calls.append(x)
        return x * 2

    calls = []
    found = compare(Operation("here", "it", None, fail, (np.ones([2], np.float32),)), "cpu")
    assert found == {"network": "here", "what": "it", "error": "(NotFound) no such kernel", "ok": False}
    doubled = Operation("here", "it", None, lambda _net, x: x * 2, (np.ones([2], np.float32),))
    assert drift(doubled, "cpu", "bfloat16") == {"network": "here", "forward": 0.0, "gradient": 0.0}


def test_missing_arrays_are_an_infinite_difference():
    one = np.ones([3], np.float32)
    assert difference([one], [one]) == 0 == difference([], []) and difference([one], []) == np.inf
    assert difference([one * 3], [one * 2]) == pytest.approx(0.5)


def test_every_layer_that_a_network_runs_is_compared_alone_and_all_get_gradients():
    networks = {one.network: one for one in list_networks()}
    assert networks.keys() == {"clip", "ldmbert", "uvit", "dit", "unet", "vae", "cascade"}
    network = networks["clip"]
    layers = list(list_layers(network))
    kinds = {type(one.layer) for one in layers}
    assert kinds == {type(one) for one in network.layer.sublayers() if not one.sublayers()}
    for one in layers:
        output, gradients = report_module.compute(one, "cpu")
        floats = [array for array in one.inputs if array.dtype == np.float32]
        assert output.dtype == np.float32 and len(gradients) == len(floats) + len(one.layer.parameters())
        assert any(np.abs(gradient).max() > 0 for gradient in gradients)
    assert paddle.get_device() == "cpu"


def train_here(command, **_):
    """A training that is to be a process of its own, in this one."""
    assert command[1:4] == ["-m", "ppldm", "train"]
    run(command[3:])
    return SimpleNamespace(returncode=0)


@pytest.mark.slow
def test_the_cpu_is_certified_and_one_file_says_so(tmp_path, monkeypatch, capsys):
    out = tmp_path / "cpu.json"
    monkeypatch.setattr(report_module, "SIDE", 64)
    monkeypatch.setattr(report_module, "PICTURES", (1, 8, 16, 16))
    monkeypatch.setattr(report_module, "subprocess", SimpleNamespace(run=train_here))
    run(["certify", "--device", "cpu", "--out", str(out), "--by", "a test"])
    report = json.loads(out.read_text())
    assert report["passed"] and report["by"] == "a test" and capsys.readouterr().out.splitlines()[-1] == "certified"
    assert report["device"]["kind"] == "cpu" and report["half_precision"] == {"bfloat16": None, "float16": None}
    assert {one["forward"] for one in report["operations"]} == {0.0} and len(report["operations"]) > 150
    found = report["resume"]
    assert found["equal"] and len(found["losses"]) == report_module.STEPS - report_module.MIDDLE == len(
        set(found["losses"])
    )
    assert found["losses"] == found["resumed"] and not found["different_weights"]
    assert report["speed"]["float32"]["matmul"] > 1e-3 and devices.KINDS[report["device"]["kind"]]
