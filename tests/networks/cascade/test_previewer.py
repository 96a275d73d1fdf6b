"""The previewer is the published network, and looking by it leaves no trace in the training."""

import numpy as np
import paddle
import pytest
from command_line import parse_arguments
from PIL import Image
from safetensors.numpy import save_file
from tiny_cascade import flags

from ppldm.families.base import get_family
from ppldm.networks.cascade.previewer import Previewer, load_previewer
from ppldm.training.metrics import read_metrics
from ppldm.training.prepare import prepare
from ppldm.training.train import run_loop
from ppldm.utils.errors import ModelError
from ppldm.weights.formats.files import read_arrays


def write(path, hidden: int = 16) -> dict[str, np.ndarray]:
    """A small one in a file as published, of drawn numbers; those."""
    numbers, found = np.random.default_rng(1), {}
    for name, one in Previewer(16, hidden).state_dict().items():
        values = numbers.standard_normal(one.shape, dtype=np.float32)
        name = name.replace("_mean", "running_mean").replace("_variance", "running_var")
        scale = np.float32(max(one.shape[:2]) ** -0.5)
        found[name] = np.abs(values) + 0.5 if name.endswith("running_var") else scale * values
        if name.endswith("running_var"):
            found[name.replace("running_var", "num_batches_tracked")] = np.int64([7])
    save_file(found, path)
    return found


def read(path, latent_channels: int = 16):
    return load_previewer(read_arrays(path), latent_channels, str(path))


@pytest.mark.needs("parity")
@pytest.mark.parametrize("hidden", [16, 64])
def test_it_computes_what_the_published_one_does(tmp_path, hidden):
    import torch
    from torch import nn

    arrays = write(tmp_path / "previewer.safetensors", hidden)
    half, quarter = hidden // 2, hidden // 4
    layers = [
        *(nn.Conv2d(16, hidden, 1), nn.Conv2d(hidden, hidden, 3, padding=1)),
        *(nn.ConvTranspose2d(hidden, half, 2, 2), nn.Conv2d(half, half, 3, padding=1)),
        *(nn.ConvTranspose2d(half, quarter, 2, 2), nn.Conv2d(quarter, quarter, 3, padding=1)),
        *(nn.ConvTranspose2d(quarter, quarter, 2, 2), nn.Conv2d(quarter, quarter, 3, padding=1)),
    ]
    steps = [one for layer in layers for one in (layer, nn.GELU(), nn.BatchNorm2d(layer.out_channels))]
    theirs = nn.Sequential(*steps, nn.Conv2d(quarter, 3, 1)).eval()
    own = {name.removeprefix("blocks."): torch.from_numpy(array).squeeze(0) if array.dtype == np.int64 else
           torch.from_numpy(array) for name, array in arrays.items()}  # fmt: skip
    theirs.load_state_dict(own)
    latents = np.random.default_rng(2).standard_normal((2, 16, 5, 3), dtype=np.float32)
    with torch.no_grad():
        wanted = theirs(torch.from_numpy(latents)).numpy()
    found = read(tmp_path / "previewer.safetensors")(paddle.to_tensor(latents)).numpy()
    assert found.shape == (2, 3, 40, 24)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def test_another_file_is_refused_in_one_line(tmp_path):
    arrays = write(tmp_path / "previewer.safetensors")
    with pytest.raises(ModelError, match="is not a previewer of latents of 4 channels .blocks.0.weight differs.; give"):
        read(tmp_path / "previewer.safetensors", 4)
    save_file({f"other.{name}": array for name, array in arrays.items()}, tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="is not a previewer"):
        read(tmp_path / "other.safetensors")


def train(tiny, folder, **changes):
    settings = {
        **{"max_steps": 2, "save_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": "none"},
        "resolution": 32,
        **{"image_logging_steps": 2, "num_inference_steps": 1, "dataloader_num_workers": 0, "learning_rate": 1e-3},
    }
    words = flags(tiny, folder, **settings, **changes)
    run = prepare(*parse_arguments([*words, "--do_train"], True, get_family("cascade_prior").Config))
    run_loop(run)
    return run


@pytest.mark.slow
def test_samples_are_shown_by_it_and_nothing_else_changes(tiny, tmp_path):
    arrays = write(tmp_path / "previewer.safetensors")
    plain = train(tiny, tmp_path / "plain")
    shown = train(tiny, tmp_path / "shown", previewer_name_or_path=tmp_path / "previewer.safetensors")
    curves = [[one["loss"] for one in read_metrics(tmp_path / name / "metrics.jsonl")] for name in ("plain", "shown")]
    assert curves[0] == curves[1] and len(curves[0]) == 2
    states = [paddle.load(str(tmp_path / name / "checkpoint-2/model_state.pdparams"), return_numpy=True)
              for name in ("plain", "shown")]  # fmt: skip
    assert states[0].keys() == states[1].keys() and not [name for name in states[0] if "previewer" in name]
    assert all((states[0][name] == states[1][name]).all() for name in states[0])
    for path in (tmp_path / "plain/samples").iterdir():
        one, other = (
            np.asarray(Image.open(folder / path.name)) for folder in (path.parent, tmp_path / "shown/samples")
        )
        assert one.shape == other.shape and (one != other).any()
    latents = paddle.randn([1, 16, 2, 3])
    made = shown.state.model.decode(latents)
    assert made.shape == plain.state.model.decode(latents).shape == [1, 3, 64, 96] and arrays
    wanted = read(tmp_path / "previewer.safetensors")(latents).clip(0, 1) * 2 - 1
    assert (made.numpy()[:, :, ::4, ::4] == wanted.numpy()).all()
