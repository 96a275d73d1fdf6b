"""The web page: what it draws is what `generate` draws; bad requests get words."""

import base64
import io

import numpy as np
import pytest
from browser import browser
from PIL import Image
from served import served
from small_weights import small_weights

import ppldm
from ppldm.data.text.tokenizer import CaptionTokenizer, build_vocab
from ppldm.inference.app import make_app
from ppldm.weights.write import write_weights

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
        ({"prompt": "x", "negative_prompt": 3}, "negative_prompt 3 is not text"),
    ],
)
def test_bad_requests_get_words(client, asked, word):
    answer = client.post("/draw", json=asked)
    assert answer.status_code == 400 and word in answer.json["error"]


def test_every_error_is_a_sentence_in_json(client, model, monkeypatch):
    cases = [
        (client.post("/draw", data={"prompt": "x"}), 415, "send it with Content-Type"),
        (client.post("/draw", json={"prompt": "x" * 100_000}), 413, "larger than 64 kB"),
        (client.post("/draw", data="{", content_type="application/json"), 400, "the request is not JSON"),
        (client.get("/draw"), 405, "does not take that method"),
        (client.get("/nowhere"), 404, "no such page"),
        (client.post("/draw", json={"prompt": " \t"}), 400, "the prompt is empty"),
        (client.post("/draw", json={"prompt": ""}), 400, "the prompt is empty"),
        (client.post("/draw", json={"prompt": "a\ud800"}), 400, "the prompt is not UTF-8"),
    ]
    monkeypatch.setattr(model, "generate", lambda *_, **__: 1 / 0)
    cases.append((client.post("/draw", json={"prompt": "x"}), 500, "drawing failed; the terminal"))
    for answer, status, sentence in cases:
        assert (answer.status_code, answer.mimetype) == (status, "application/json")
        assert sentence in answer.json["error"]


def test_unknown_words_are_named(client):
    assert client.post("/draw", json={"prompt": "a red heart", **FEW}).json["warning"] == ""
    said = client.post("/draw", json={"prompt": "a red zebra", "negative_prompt": "horse", **FEW}).json["warning"]
    assert said == "words that the model does not know: zebra, horse"


@pytest.mark.parametrize(
    "host, own",
    [
        *(
            (host, True)
            for host in ("127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:8080", "192.168.7.7", "gpu.lan")
        ),
        *((host, False) for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "[::1", "")),
    ],
)
def test_only_names_of_this_machine_are_answered(model, host, own):
    client = make_app(model, "m", ["gpu.lan"]).test_client()
    for answer in (client.get("/", headers={"Host": host}), client.post("/draw", headers={"Host": host}, json={})):
        assert (answer.status_code == 403) == (not own)
    assert own or "not this machine" in answer.json["error"]


@pytest.mark.parametrize("origin, status", [("http://localhost:80", 403), ("http://evil.example", 403), ("null", 403),
                                            ("http://localhost", 400), (None, 400)])  # fmt: skip
def test_only_its_own_page_may_ask(client, origin, status):
    headers = {"Origin": origin} if origin else {}
    assert client.post("/draw", json={}, headers=headers).status_code == status


def test_nothing_of_others_runs_in_the_page_or_around_it(client):
    first, second = client.get("/"), client.get("/")
    policy = first.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'nonce-") and "frame-ancestors 'none'" in policy
    assert policy != second.headers["Content-Security-Policy"]
    nonce = policy.split("'nonce-")[1].split("'")[0]
    page = first.get_data(as_text=True)
    assert page.count(f'nonce="{nonce}"') == page.count("<style") + page.count("<script") == 2
    for answer in (first, client.get("/nowhere")):
        assert answer.headers["X-Frame-Options"] == "DENY" and "Content-Security-Policy" in answer.headers


def test_the_page_shows_the_name_as_text(client):
    page = client.get("/").get_data(as_text=True)
    assert "&lt;my&gt; model" in page and "<my>" not in page
    assert "http" not in page.replace("http-equiv", "")


STATUS = 'return document.getElementById("status").textContent'


@pytest.mark.slow
@pytest.mark.needs("browser")
@pytest.mark.parametrize("width", [375, 1280])
def test_in_a_real_browser(model, tmp_path, monkeypatch, width):
    """The page's own script, in Chromium: filled in and sent as a person does, on a phone and on a screen."""
    with served(make_app(model, "a-model-" * 20)) as url, browser(width, 900, tmp_path / "profile") as page:
        page.open(url)
        page.click("#draw")
        page.wait_for(f'{STATUS} === "the prompt is empty; write what to draw"')
        page.write("#prompt", "a red zebra")
        page.run('document.getElementById("num_inference_steps").value = 2')
        page.click("#draw")
        done = page.wait_for(
            'return document.querySelectorAll("#pictures img").length === 4 &&' + STATUS.removeprefix("return")
        )
        assert done.startswith("4 pictures in ") and done.endswith("words that the model does not know: zebra")
        assert page.run("return [...document.images].every(one => one.complete && one.naturalWidth === 64)")
        assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
        assert page.run("return window.innerWidth") == width
        page.save_screenshot(tmp_path / f"{width}.png")
        monkeypatch.setattr(model, "generate", lambda *_, **__: 1 / 0)
        page.click("#draw")
        page.wait_for(STATUS + '.startsWith("drawing failed; the terminal")')
        page.run(f'document.getElementById("prompt").value = "x".repeat({70 << 10})')
        page.click("#draw")
        page.wait_for(STATUS + '.startsWith("the request is larger than 64 kB")')
    assert Image.open(tmp_path / f"{width}.png").width == width
