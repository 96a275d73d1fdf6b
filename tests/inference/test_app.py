"""The web page: what it draws is what `generate` draws; bad requests get words."""

import base64
import io
import json
import os
import subprocess
import threading

import numpy as np
import pytest
from PIL import Image
from small_weights import small_weights

import ppldm
from ppldm.data.tokenizer import CaptionTokenizer, build_vocab
from ppldm.inference.app import make_app
from ppldm.models.weights.write import write_weights

FEW = {"num_inference_steps": 2, "num_samples": 2, "seed": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("app") / "model"
    weights = small_weights(4)
    weights.tokenizer = CaptionTokenizer(build_vocab(["a red heart"]), 77)
    write_weights(weights, "ppdiffusers", folder)
    return ppldm.load(folder)


@pytest.fixture
def client(model):
    return make_app(model, "<my> model").test_client()


def test_pictures_are_those_of_generate(client, model):
    answer = client.post("/draw", json={"prompt": "a red heart", **FEW})
    assert answer.status_code == 200
    drawn = [np.asarray(Image.open(io.BytesIO(base64.b64decode(u.split(",")[1])))) for u in answer.json["pictures"]]
    assert (np.stack(drawn) == model.generate("a red heart", **FEW)[0]).all()


@pytest.mark.parametrize(
    "asked, word",
    [
        ({}, "prompt"),
        ([], "prompt"),
        ({"prompt": "x", "num_samples": 0}, "num_samples 0 must be"),
        ({"prompt": "x", "num_samples": True}, "num_samples True must be"),
        ({"prompt": "x", "guidance_scale": "high"}, "guidance_scale 'high'"),
        ({"prompt": "x", "seed": 1e300}, "seed"),
        ({"prompt": "x", "steps": 3}, "no setting 'steps'"),
        ({"prompt": "x", "sampler": "dream"}, "no sampler dream"),
        ({"prompt": "x", "negative_prompt": 3}, "negative_prompt must be a text"),
    ],
)
def test_bad_requests_get_words(client, asked, word):
    answer = client.post("/draw", json=asked)
    assert answer.status_code == 400 and word in answer.json["error"]


def test_other_sites_forms_and_big_requests_are_refused(client):
    assert client.post("/draw", data={"prompt": "x"}).status_code == 415
    assert client.post("/draw", json={"prompt": "x" * 100_000}).status_code == 413


def test_the_page_shows_the_name_as_text(client):
    page = client.get("/").get_data(as_text=True)
    assert "&lt;my&gt; model" in page and "<my>" not in page
    assert "http" not in page.replace("http-equiv", "")


@pytest.mark.slow
@pytest.mark.needs("browser")
def test_in_a_real_browser(model, tmp_path):
    """The page's own script, in Chromium: filled in and sent as a person does, by a few lines added at its end."""
    from werkzeug.serving import make_server

    application = make_app(model, "a model")
    fill = (
        'field("prompt").value = "a red heart"; field("num_inference_steps").value = 2; field("num_samples").value = 2;'
        'field("form").requestSubmit();'
    )

    @application.after_request
    def press(response):
        if response.mimetype == "text/html":
            response.set_data(response.get_data(as_text=True).replace("</script>", f"{fill}</script>"))
        return response

    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        found = subprocess.run(
            ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile",
             "--virtual-time-budget=20000", "--timeout=60000", "--dump-dom", f"http://127.0.0.1:{server.port}/"],
            capture_output=True, text=True, timeout=180, env=os.environ | {"HOME": str(tmp_path)},
        )  # fmt: skip
    finally:
        server.shutdown()
        server.server_close()
    assert "2 pictures in" in found.stdout, found.stdout[-600:] + found.stderr[-600:]
    assert found.stdout.count('<img src="data:image/png;base64,') == 2
    assert json.dumps("a red heart")[1:-1] in found.stdout
