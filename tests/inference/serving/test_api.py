"""The HTTP interface: it draws what `generate` draws, answers what is wrong in a sentence, and bears many at once."""

import base64
import io
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image
from sampling import ALL

import ppldm
from ppldm.inference.pictures.draw import SETTINGS_CHUNK
from ppldm.inference.serving.api import make_api, make_document
from ppldm.inference.serving.jobs import Pictures, Queue
from ppldm.inference.serving.parameters import check, make_parameters
from ppldm.utils.pictures import as_png

MANY = 200 if ALL else 60  # requests at once
SMALL = {"width": 16, "height": 16, "guidance_scale": 1.0}
FEW = {"num_inference_steps": 2, "num_samples": 2, "seed": 5}
HOSTILE = "</script><img src=x onerror=alert(1)>"


def follow(client, job, seconds=120):
    """The job once it has ended."""
    end = time.monotonic() + seconds
    while (now := client.get(f"/v1/jobs/{job['id']}").json)["state"] in ("waiting", "drawing"):
        assert time.monotonic() < end
        time.sleep(0.01)
    return now


def draw(client, **asked):
    answer = client.post("/v1/pictures", json={"prompt": "a red heart", **FEW, **asked})
    assert answer.status_code == 202 and answer.headers["Location"] == f"/v1/jobs/{answer.json['id']}"
    return follow(client, answer.json)


def fetch(client, job):
    contents = [client.get(f"/v1/jobs/{job['id']}/pictures/{n}").data for n in range(job["num_pictures"])]
    return np.stack([np.asarray(Image.open(io.BytesIO(content))) for content in contents])


@pytest.mark.parametrize("name", ["first", HOSTILE])
def test_pictures_are_those_of_generate(client, models, name):
    job = draw(client, model=name, sampler="euler", guidance_scale=3, negative_prompt="red")
    assert (job["state"], job["step"], job["num_steps"], job["num_pictures"]) == ("done", 2, 2, 2)
    own = models[name].generate(
        "a red heart", sampler="euler", guidance_scale=3.0, negative_prompt="red", **FEW
    )  # fmt: skip
    assert (fetch(client, job) == own[0]).all()


def test_a_picture_says_how_it_was_drawn(client, models):
    job = draw(client, sampler="euler", eta=0)
    for index in range(2):
        picture = Image.open(io.BytesIO(client.get(f"/v1/jobs/{job['id']}/pictures/{index}").data))
        said = json.loads(picture.text[SETTINGS_CHUNK])
        known = {"prompt": "a red heart", "seed": 5, "index": index, "sampler": "euler", "num_inference_steps": 2}
        assert known.items() <= said.items() and said["weights"] == models["first"].fingerprint
        assert said["source"] == {"model": "first", "batch": [2, index]}
        assert picture.text["parameters"].startswith("a red heart\nSteps: 2, Sampler: Euler")


def as_text(pixels):
    return base64.b64encode(as_png(pixels)).decode()


@pytest.mark.parametrize("url", ["", "data:image/png;base64,"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_picture_is_drawn_over(client, models, masked, url):
    rng = np.random.default_rng(7)
    image = rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)
    mask = np.zeros((64, 64, 3), np.uint8)
    mask[:, 32:] = 255
    sent = {"image": url + as_text(image), **({"mask": url + as_text(mask)} if masked else {})}
    job = draw(client, **sent, strength=0.5, num_inference_steps=4)
    assert "image" not in job["settings"] and job["settings"]["strength"] == 0.5
    own = models["first"].generate("a red heart", image=image, mask=mask if masked else None, strength=0.5,
                                   **FEW | {"num_inference_steps": 4})  # fmt: skip
    assert (fetch(client, job) == own[0]).all()


def test_more_pictures_than_a_batch(client, models):
    job = draw(client, num_samples=9, width=32, height=16)
    assert (job["step"], job["num_steps"], job["num_pictures"]) == (4, 4, 9)
    own = models["first"].generate("a red heart", width=32, height=16, **FEW | {"num_samples": 9})
    assert (fetch(client, job) == own[0]).all() and own.shape[2:] == (16, 32, 3)


NUMBERS = {"num_samples": (1, 16), "seed": (0, 2**64 - 1), "width": (8, 1024), "height": (8, 1024), "eta": (0, 1),
           "num_inference_steps": (1, 250), "guidance_scale": (0, 50), "guidance_rescale": (0, 1)}  # fmt: skip
CHOICES = ("model", "sampler", "timestep_spacing", "sigma_schedule")
BAD = [
    *[(name, value) for name, (low, high) in NUMBERS.items()
      for value in (low - 1, high + 1, "1", True, [], {}, 1e300, float("nan"), float("-inf"))],
    *[(name, 1.5) for name in ("num_samples", "seed", "width", "height", "num_inference_steps")],
    *[(name, value) for name in CHOICES for value in ("dream", "", 3, [], True)],
    *[(name, value) for name in ("prompt", "negative_prompt") for value in (3, [], {}, "a\ud800", "x" * 10_001)],
    *[("prompt", value) for value in (None, "", " \t\n")],
    *[(name, 1) for name in ("steps", "Prompt", "", HOSTILE, "promt", "x" * 500)],
    *[(name, value) for name in ("image", "mask") for value in (3, "x", "data:,", "", "AAAA", ["x"], {})],
    *[("guidance_interval", value) for value in (0.5, "0 1", [], [0.2], [0.2, 1.5], [0.8, 0.2], [0, None], {})],
    *[("cfg_zero", value) for value in (1, "yes", [], True)],
    *[("strength", value) for value in (-0.1, 1.1, "x", True, 0.5, 1)],
    *[("width", 63), ("height", 12), ("num_inference_steps", 251), ("sampler", "flow-euler"), ("eta", 0.5)],
]  # fmt: skip


@pytest.mark.parametrize("name, value", BAD, ids=range(len(BAD)))
def test_each_bad_request_is_refused_in_a_sentence(client, queue, name, value):
    asked = {"prompt": "x", **({"sampler": "euler"} if name == "eta" else {}), name: value}
    answer = client.post("/v1/pictures", json=asked)
    assert (answer.status_code, answer.mimetype, list(answer.json)) == (400, "application/json", ["error"])
    said = answer.json["error"]
    assert name[:60] in said and "\n" not in said and len(said) < 400 and "--" not in said
    assert not queue.jobs()


def test_there_are_a_hundred_of_them():
    assert len(BAD) >= 100


def test_every_error_is_a_sentence_in_json(client):
    cases = [
        (client.post("/v1/pictures", data={"prompt": "x"}), 415, "send it with Content-Type"),
        (client.post("/v1/pictures", json={"prompt": "x" * (13 << 20)}), 413, "larger than 12288 kB"),
        (client.post("/v1/pictures", data="{", content_type="application/json"), 400, "the request is not JSON"),
        (client.post("/v1/pictures", data="[" * 10**5, content_type="application/json"), 400, "nested"),
        (client.post("/v1/pictures", json=[]), 400, 'an object with a "prompt"'),
        (client.post("/v1/pictures", json={}), 400, 'an object with a "prompt"'),
        (client.get("/v1/pictures"), 405, "does not take that method"),
        (client.post("/v1/jobs/x"), 405, "does not take that method"),
        (client.get("/nowhere"), 404, "no such address"),
        (client.get("/v1/jobs/x"), 404, "no job 'x'"),
        (client.delete("/v1/jobs/..%2f..%2fetc"), 404, "no such address"),
        (client.get("/v1/jobs/x/pictures/0"), 404, "no job 'x'"),
        (client.get("/v1/jobs/x/pictures/-1"), 404, "no such address"),
        (client.get("/v1/jobs/x/preview"), 404, "no job 'x'"),
        *((client.get(f"/v1/jobs?newest={n}"), 400, "newest") for n in ("0", "-1", "x", "9" * 5000)),
    ]
    for answer, status, sentence in cases:
        assert (answer.status_code, answer.mimetype, sentence in answer.json["error"]) == (
            status,
            "application/json",
            True,
        )


def test_a_failure_says_where_to_look(client, models, monkeypatch):
    monkeypatch.setattr(models["first"], "draw", lambda *_, **__: 1 / 0)
    job = draw(client)
    assert (job["state"], job["error"]) == ("failed", "drawing failed; the terminal of ppldm shows why")
    assert client.get("/v1/health").json == {"status": "ok"}


def test_unknown_words_are_named(client):
    assert draw(client)["warning"] == ""
    said = draw(client, prompt="a red zebra", negative_prompt="horse")["warning"]
    assert said == "words that the model does not know: zebra, horse"


def test_a_preview_of_a_drawing_and_its_end(client, queue, painter, models, monkeypatch):
    seen, go_on = threading.Event(), threading.Event()
    own = models["first"].draw

    def slow(*words, callback, **settings):
        def told(step, num_steps, latents):
            callback(step, num_steps, latents)
            seen.set()
            assert go_on.wait(30)

        return own(*words, callback=told, **settings)

    monkeypatch.setattr(models["first"], "draw", slow)
    job = client.post("/v1/pictures", json={"prompt": "a red heart", **FEW}).json
    assert seen.wait(60)
    now = client.get(f"/v1/jobs/{job['id']}").json
    assert (now["state"], now["step"], now["num_steps"], now["has_preview"]) == ("drawing", 1, 2, True)
    small = Image.open(io.BytesIO(client.get(f"/v1/jobs/{job['id']}/preview").data))
    assert small.size == (32, 16)
    answer = client.get(f"/v1/jobs/{job['id']}/pictures/0")
    assert answer.status_code == 404 and "0 pictures so far" in answer.json["error"]
    client.delete(f"/v1/jobs/{job['id']}")
    go_on.set()
    assert follow(client, job)["state"] == "cancelled"
    assert client.get(f"/v1/jobs/{job['id']}/preview").status_code == 404
    assert client.delete(f"/v1/jobs/{job['id']}").status_code == 200
    assert client.get(f"/v1/jobs/{job['id']}").status_code == 404


@pytest.mark.slow
def test_many_at_once_keep_their_order(painter, queue, models):
    """Each by a connection of its own; what is drawn is what was asked."""
    flask, order = make_api(painter, queue), []
    own = queue._draw
    queue._draw = lambda job, tell: (order.append(job.id), *own(job, tell))[1:]

    def ask(number):
        asked = {"prompt": f"a red {number}", "num_inference_steps": 1, "seed": number, **SMALL}
        return number, flask.test_client().post("/v1/pictures", json=asked).json

    with ThreadPoolExecutor(50) as pool:
        asked = list(pool.map(ask, range(MANY)))
    places = [job.id for job in queue.jobs()]
    assert sorted(places) == sorted(job["id"] for _, job in asked) and len(places) == MANY
    client = flask.test_client()
    for _, job in asked:
        assert follow(client, job)["state"] == "done"
    assert order == places
    for number, job in asked[:: MANY // 5]:
        settings = {"num_inference_steps": 1, "seed": number, **SMALL}
        assert (fetch(client, follow(client, job)) == models["first"].generate(f"a red {number}", **settings)[0]).all()


def test_a_full_queue_says_when_to_come_back(painter):
    begun, held = threading.Event(), threading.Event()
    queue = Queue(lambda job, tell: [begun.set() or held.wait() and b""], Pictures(), most_waiting=1)
    client = make_api(painter, queue).test_client()
    answers = []
    for _ in range(3):  # one is drawn, one waits, and one is too many
        answers.append(client.post("/v1/pictures", json={"prompt": "x"}))
        begun.wait()
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    assert int(answers[-1].headers["Retry-After"]) >= 1 and "the queue is full" in answers[-1].json["error"]
    held.set()
    queue.stop()
    answer = client.post("/v1/pictures", json={"prompt": "x"})
    assert answer.status_code == 503 and "about to stop" in answer.json["error"]
    assert (client.get("/v1/health").status_code, client.get("/v1/health").json) == (503, {"status": "stopping"})


def test_metrics_count_what_happened(client):
    draw(client)
    lines = client.get("/v1/metrics").get_data(as_text=True).splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert found['ppldm_jobs_total{state="done"}'] == "1" and found["ppldm_pictures_total"] == "2"
    assert found["ppldm_steps_total"] == "2" and float(found["ppldm_drawing_seconds_total"]) > 0
    assert found['ppldm_jobs{state="waiting"}'] == "0" and int(found["ppldm_pictures_bytes"]) > 0


def test_the_document_says_what_the_server_does(client):
    flask = client.application
    document = client.get("/v1/openapi.json").json
    served = {
        (str(rule).replace("<int:number>", "{number}").replace("<name>", "{name}"), method.lower())
        for rule in flask.url_map.iter_rules()
        for method in rule.methods - {"HEAD", "OPTIONS"}
        if str(rule).startswith("/v1")
    }
    said = {
        (path, method) for path, methods in document["paths"].items() for method in methods if method != "parameters"
    }
    assert said == served
    job = draw(client)
    schema = document["components"]["schemas"]
    assert list(job) == schema["Job"]["required"]
    assert schema["Request"]["properties"].keys() - {"image", "mask"} == job["settings"].keys()


@pytest.mark.parametrize("limits", [(), (2, 64, 5)])
def test_what_the_document_allows_is_what_is_taken(limits):
    parameters = make_parameters(("a", "b"), *limits)
    schema = make_document(parameters)["components"]["schemas"]["Request"]["properties"]
    assert schema.keys() == parameters.keys()
    for name, said in schema.items():
        if "minimum" in said:
            for end in (said["minimum"], said["maximum"]):
                assert check(name, end, parameters) == end
            for wrong in (said["minimum"] - 1, said["maximum"] + 1):
                with pytest.raises(ppldm.utils.errors.ConfigError, match=name):
                    check(name, wrong, parameters)
        if "default" in said:
            assert check(name, said["default"], parameters) == said["default"] == check(name, None, parameters)
        for choice in said.get("enum", ()):
            assert check(name, choice, parameters) == choice


@pytest.mark.parametrize(
    "host, own",
    [
        *((h, True) for h in ("127.0.0.1:8080", "localhost", "LOCALHOST:1", "[::1]:8080", "192.168.7.7", "gpu.lan")),
        *((h, False) for h in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "[::1", "")),
    ],
)
def test_only_names_of_this_machine_are_answered(painter, queue, host, own):
    client = make_api(painter, queue, hosts=["gpu.lan"], page=True).test_client()
    for path in ("/", "/v1/jobs", "/v1/health", "/v1/metrics", "/v1/openapi.json", "/v1/models"):
        answer = client.get(path, headers={"Host": host})
        assert (answer.status_code == 403) == (not own)
    assert own or "not this machine" in answer.json["error"]
    assert client.post("/v1/pictures", headers={"Host": host}, json={}).status_code == (400 if own else 403)


@pytest.mark.parametrize("origin, status", [("http://localhost:80", 403), ("http://evil.example", 403), ("null", 403),
                                            ("http://localhost", 400), (None, 400)])  # fmt: skip
def test_only_its_own_page_may_ask(client, origin, status):
    headers = {"Origin": origin} if origin else {}
    assert client.post("/v1/pictures", json={}, headers=headers).status_code == status
    assert client.delete("/v1/jobs/x", headers=headers).status_code == (403 if status == 403 else 404)


def test_with_a_token_only_the_empty_page_and_health_are_open(painter, queue):
    client = make_api(painter, queue, token="a-token-of-ours", page=True).test_client()
    paths = ("/v1/jobs", "/v1/jobs/x", "/v1/metrics", "/v1/openapi.json", "/v1/models", "/nowhere")
    for wrong in ({}, {"X-Token": "a"}, {"X-Token": "ä"}, {"Authorization": "Bearer"}, {"Authorization": "Basic x"}):
        assert {client.get(path, headers=wrong).status_code for path in paths} == {401}
        assert client.post("/v1/pictures", json={"prompt": "x"}, headers=wrong).status_code == 401
        assert client.delete("/v1/jobs/x", headers=wrong).status_code == 401
    assert client.get("/").status_code == client.get("/v1/health").status_code == 200
    for right in ({"X-Token": "a-token-of-ours"}, {"Authorization": "Bearer a-token-of-ours"}):
        assert client.get("/v1/jobs", headers=right).status_code == 200
        assert client.post("/v1/pictures", json={}, headers=right).status_code == 400


def test_nothing_of_others_runs_in_the_page_or_around_it(client):
    first, second = client.get("/"), client.get("/")
    policy = first.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'nonce-") and "frame-ancestors 'none'" in policy
    assert policy != second.headers["Content-Security-Policy"]
    nonce = policy.split("'nonce-")[1].split("'")[0]
    page = first.get_data(as_text=True)
    assert page.count(f'nonce="{nonce}"') == page.count("<style") + page.count("<script") == 2
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "") and "innerHTML" not in page
    for answer in (first, client.get("/nowhere"), client.get("/v1/jobs")):
        assert answer.headers["X-Frame-Options"] == "DENY" and "Content-Security-Policy" in answer.headers


def test_serve_has_no_page(painter, queue):
    assert make_api(painter, queue).test_client().get("/").status_code == 404


def test_pictures_are_decoded_one_at_a_time(client, monkeypatch):
    """Of twelve clients at once; a request without a picture does not wait for them."""
    from ppldm.inference.serving import parameters

    entered, leave, now, most = threading.Semaphore(0), threading.Semaphore(0), [], []
    read = parameters.read_picture

    def slow(*given):
        now.append(None)
        most.append(len(now))
        entered.release()
        assert leave.acquire(timeout=60)
        now.pop()
        return read(*given)

    monkeypatch.setattr(parameters, "read_picture", slow)
    sent = {**FEW, **SMALL, "prompt": "a red heart", "image": as_text(np.zeros((16, 16, 3), np.uint8))}
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(client.application.test_client().post, "/v1/pictures", json=sent) for _ in range(12)]
        assert entered.acquire(timeout=60)
        assert client.post("/v1/pictures", json={"prompt": "a red heart", **FEW, **SMALL}).status_code == 202
        leave.release(12)
        assert {one.result().status_code for one in answers} == {202}
    assert most == [1] * 12


def test_a_full_queue_decodes_nothing(painter, monkeypatch):
    from ppldm.inference.serving import parameters

    queue = Queue(painter.draw, Pictures(), most_waiting=0)
    monkeypatch.setattr(parameters, "read_picture", None)
    sent = {"prompt": "a red heart", "image": as_text(np.zeros((16, 16, 3), np.uint8))}
    answer = make_api(painter, queue).test_client().post("/v1/pictures", json=sent)
    queue.stop()
    assert answer.status_code == 429 and queue.counts["refused"] == 1


@pytest.mark.parametrize("max_side", [8, 256, 1024])
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("name", ["image", "mask"])
def test_pictures_far_larger_than_what_is_drawn_are_refused_before_they_are_decoded(max_side, kind, name, monkeypatch):
    from PIL import ImageFile

    from ppldm.inference.serving.parameters import read_request
    from ppldm.utils.errors import ConfigError

    table = make_parameters(("m",), max_side=max_side)
    most = max(1 << 20, 16 * max_side**2)
    buffer = io.BytesIO()
    Image.new("RGB", (8192, most // 8192 + 1)).save(buffer, kind)
    text = base64.b64encode(buffer.getvalue()).decode()

    def decode(*_):
        raise AssertionError("it was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decode)
    with pytest.raises(ConfigError, match=f"{name} has 8192 x {most // 8192 + 1} pixels; make it smaller"):
        read_request({"prompt": "p", name: text}, table)
