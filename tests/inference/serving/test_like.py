"""A picture that `ppldm serve` or `ppldm app` has drawn is drawn again by `ppldm generate --like`, to the bit."""

import base64
import io
import json
import time

import numpy as np
import pytest
from PIL import Image
from small_weights import small_weights

import ppldm
from ppldm.cli.main import run
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.inference.pictures.draw import describe_source
from ppldm.inference.serving.api import make_api
from ppldm.inference.serving.jobs import Pictures, Queue
from ppldm.inference.serving.paint import Painter
from ppldm.utils.errors import ConfigError
from ppldm.utils.pictures import as_png
from ppldm.weights.write import write_weights

FEW = {"num_inference_steps": 2, "num_samples": 2, "seed": 5}


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """A painter whose pictures say where their model lies, as the commands make it."""
    folder = tmp_path_factory.mktemp("told") / "model"
    weights = small_weights(4)
    weights.tokenizer = CaptionTokenizer(build_vocab(["a red heart"]), 77)
    write_weights(weights, "ppdiffusers", folder)
    name = str(folder)
    return Painter({name: ppldm.load(name)}, {name: describe_source(name, offline=True)})


@pytest.fixture
def server(told):
    queue = Queue(told.draw, Pictures())
    yield make_api(told, queue, page=True).test_client()
    queue.stop()


def draw(client, **asked) -> dict:
    """The job, once it is done."""
    job = client.post("/v1/pictures", json={"prompt": "a red heart", **FEW, **asked}).json
    while (now := client.get(f"/v1/jobs/{job['id']}").json)["state"] in ("waiting", "drawing"):
        time.sleep(0.02)
    assert now["state"] == "done"
    return now


def pixels(content) -> np.ndarray:
    return np.asarray(Image.open(content))


def test_pictures_of_a_server_are_drawn_again_to_the_bit(server, tmp_path):
    """Of nine, eight in one batch: the fourth, and the one that is drawn alone."""
    job = draw(server, num_samples=9, sampler="euler-ancestral", guidance_scale=4, negative_prompt="heart", width=48,
               guidance_rescale=0.25, guidance_interval=[0.3, 0.9], timestep_spacing="trailing",
               sigma_schedule="karras")  # fmt: skip
    for number in (3, 8):
        downloaded = tmp_path / f"{number}.png"
        downloaded.write_bytes(server.get(f"/v1/jobs/{job['id']}/pictures/{number}").data)
        run(["generate", "--like", str(downloaded), "--out", str(tmp_path / "again"), "--same-weights"])
        again = tmp_path / "again" / f"000-{number:02d}.png"
        assert (pixels(again) == pixels(downloaded)).all()
        assert Image.open(again).text == Image.open(downloaded).text


def test_what_was_drawn_over_a_picture_needs_that_picture(server, tmp_path):
    """It is not in the file: what is missing is said, and with it the bits are the same."""
    rng = np.random.default_rng(2)
    mask = np.zeros((64, 64, 3), np.uint8)
    mask[:, 24:] = 255
    files = {"image": as_png(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)), "mask": as_png(mask)}
    for name, content in files.items():
        (tmp_path / f"{name}.png").write_bytes(content)
    sent = {name: base64.b64encode(content).decode() for name, content in files.items()}
    job = draw(server, num_inference_steps=4, strength=0.75, **sent)
    downloaded = tmp_path / "drawn.png"
    downloaded.write_bytes(server.get(f"/v1/jobs/{job['id']}/pictures/1").data)
    assert json.loads(Image.open(downloaded).text["ppldm"])["strength"] == 0.75
    like = ["generate", "--like", str(downloaded), "--out", str(tmp_path / "again"), "--same-weights"]
    given = {name: [f"--{name}", str(tmp_path / f"{name}.png")] for name in files}
    with pytest.raises(ConfigError, match="was drawn over another picture; give it too: --image PICTURE"):
        run(like)
    with pytest.raises(ConfigError, match="was drawn through a mask; give it too: --mask PICTURE"):
        run([*like, *given["image"]])
    run([*like, *given["image"], *given["mask"]])
    assert (pixels(tmp_path / "again" / "000-01.png") == pixels(io.BytesIO(downloaded.read_bytes()))).all()
