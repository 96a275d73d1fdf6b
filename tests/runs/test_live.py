"""`ppldm watch`: what a page shows of runs is what their files hold, also while they grow; who may steer, and how."""

import inspect
import io
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from browser import browser
from PIL import Image
from served import served

from ppldm.cli.main import run as run_command
from ppldm.runs import page as module
from ppldm.runs import read, watch
from ppldm.runs.page import charts, now, thin
from ppldm.runs.read import RunFolder, parse_lines
from ppldm.runs.watch import make_page
from ppldm.training.metrics import drop_after
from ppldm.training.run_folder import MOST_PROMPTS
from ppldm.training.validation import current_prompts
from ppldm.utils.errors import ConfigError
from ppldm.utils.files import is_held, write_json
from ppldm.utils.pictures import cells_as_text, prompt_grid, save_png
from ppldm.utils.processes.ranks import World
from ppldm.utils.web import server

HOSTILE = "</textarea><script>document.title='taken'</script><img src=x onerror=alert(1)>"
TOKEN = "the-token"


def record(step, **changes):
    return {"global_step": step, "time": 1e9 + 2.0 * step, "loss": 1 / step, "images_per_second": 8.0,
            "data_wait_share": 0.25, "skipped_rows": 3, "skipped_rows_image": 3, "skipped_updates": 1,
            "peak_memory_gb": 1.5, "data_crc32": 7, **changes}  # fmt: skip


def lines_of(records):
    return "".join(json.dumps(one) + "\n" for one in records).encode()


def draw_samples(folder, step, prompts):
    pictures = [[np.full((20, 30, 3), 12 * step % 250, np.uint8)] for _ in prompts]
    grid = prompt_grid(prompts, pictures)
    save_png(folder / f"samples/step-{step:06d}-ddim-samples-7.5.png", grid, cells_as_text(grid))


def make_run(folder, steps=40):
    """What training leaves in a run's folder, its words hostile."""
    (folder / "samples").mkdir(parents=True)
    (folder / "control").mkdir()
    write_json(folder / "run.json", {"family": "ldm", "validation": {"validation_prompts": ["a red heart", HOSTILE]}})
    (folder / "recipe.yaml").write_text(f"family: ldm  # {HOSTILE}\n")
    records = [record(step) for step in range(1, steps + 1)]
    records[4]["validation_loss"], records[9]["loss"] = 0.5, None
    (folder / "metrics.jsonl").write_bytes(lines_of(records))
    status = {"host": socket.gethostname(), "process": 1, "started": 0.0, "start_step": 0, "max_steps": 100}
    write_json(folder / "control/status.json", {**status, "device": "a CPU", "ranks": 2})
    evaluation = {"global_step": 20, "guidance_scale": 3.0, "fid": 5.0, "fid_low": 4.0, "fid_high": 6.0}
    (folder / "evaluation.jsonl").write_bytes(lines_of([evaluation]))
    for step in (10, 20, 30):
        draw_samples(folder, step, ["a red heart", HOSTILE] if step < 30 else ["一颗红心"])
        save_png(folder / f"samples/step-{step:06d}-reconstruction.png", np.full((20, 30, 3), step, np.uint8))
    return folder


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


@contextmanager
def training(folder):
    """Inside, another process holds the folder as a run does."""
    script = (
        "import sys, time; from ppldm.utils.files import lock_folder as f; x = f(sys.argv[1]); print(1, flush=True)"
    )
    holder = subprocess.Popen([sys.executable, "-c", f"{script}; time.sleep(600)", folder], stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        yield
    finally:
        holder.kill()
        holder.wait()


def series(follower):
    return {name: [list(steps), list(values)] for name, (steps, values) in follower.series.items()}


def expected(records):
    """Name -> steps and values, one number after the other."""
    found = {}
    for one in records:
        for name, value in one.items():
            if value is not None:
                steps, values = found.setdefault(name, [[], []])
                steps.append(float(one["global_step"]))
                values.append(float(value))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_growing_file_is_read_as_a_whole_one(run, seed):
    """Cut anywhere, and written again from an earlier update as a resumed run does it."""
    path, rng = run / "metrics.jsonl", np.random.default_rng(seed)
    path.write_bytes(b"")
    follower = RunFolder(run)
    for start in (0, 7, 3):
        follower.look()
        drop_after(path, start)
        content = lines_of(record(step, loss=None if step % 5 == 0 else rng.random()) for step in range(start + 1, 15))
        cuts = np.sort(rng.integers(0, len(content), 6))
        for piece in np.split(np.frombuffer(content, np.uint8), cuts):
            with open(path, "ab") as file:
                file.write(piece.tobytes())
            follower.look()
            whole = path.read_bytes().rpartition(b"\n")[0].splitlines()
            assert series(follower) == expected(map(json.loads, whole))
    assert follower.step == 14 and follower.damaged == 0
    path.unlink()
    follower.look()
    assert not follower.series and follower.step == 0


@pytest.mark.parametrize(
    "damaged",
    [b"{", b"\xff", b"[]", b'{"global_step": "3"}', b'{"loss": 1}', b"", b"[" * 9999, b'{"global_step": true}'],
)
def test_lines_that_are_none_are_counted_and_hide_no_others(damaged):
    records = [record(1), record(2)]
    content = lines_of(records[:1]) + damaged + b"\n" + lines_of(records[1:])
    assert parse_lines(content) == (records, 1)
    assert parse_lines(lines_of(records)) == (records, 0)
    assert parse_lines(b"") == ([], 0)


@pytest.mark.parametrize("count", [1, 2, 599, 600, 601, 1000, 1300, 100_000])
def test_thinned_curves_have_the_mean_the_least_and_the_most_of_groups(count):
    values = np.random.default_rng(count).random(count)
    steps, means, leasts, mosts = thin(np.arange(count), values, 600)
    assert len(steps) == min(count, 600) and (np.diff(steps) > 0).all()
    assert min(leasts) == values.min() and max(mosts) == values.max()
    assert (leasts <= means + 1e-12).all() and (means <= mosts + 1e-12).all()
    sizes = np.diff(np.flatnonzero(np.isin(np.arange(count), starts_of(steps, count))), append=count)
    assert sizes.max() - sizes.min() <= 1 and np.average(means, weights=sizes) == pytest.approx(values.mean())
    if count <= 600:
        assert (means == values).all() and (leasts == values).all()


def starts_of(middles, count):
    """Where groups begin, by the means of their places."""
    starts, begin = [], 0
    for middle in middles:
        starts.append(begin)
        begin = int(round(2 * middle)) - begin + 1
    assert begin == count
    return starts


def test_the_charts_of_a_run(run):
    follower = RunFolder(run)
    follower.look()
    found = charts(follower)
    assert list(found)[0] == "loss" and "data_crc32" not in found and "time" not in found
    loss, held_out = found["loss"]
    steps = [step for step in range(1, 41) if step != 10]
    assert loss["points"][0] == steps and loss["points"][1] == pytest.approx([1 / step for step in steps], rel=1e-5)
    assert held_out["points"][:2] == [[5], [0.5]]
    assert found["fid"] == [{"name": "fid at guidance 3", "points": [(20,), (5.0,), (4.0,), (6.0,)], "last": 5.0}]
    assert [line["name"] for line in found["skipped so far"]] == ["skipped_rows", "skipped_updates"]
    assert charts(follower, 0.5)["loss"][0]["points"][0] == list(range(20, 41))


def test_time_left_is_by_the_newest_lines_and_ends_at_none(run, monkeypatch):
    slow = [record(step, time=1e9 + 100.0 * step) for step in range(1, 58)]
    after_pause = [record(step, time=2e9 + 2.0 * step) for step in range(58, 65)]  # most of the newest lines
    (run / "metrics.jsonl").write_bytes(lines_of(slow + after_pause))
    follower = RunFolder(run)
    follower.look()
    monkeypatch.setattr(read.time, "time", lambda: 2e9 + 2.0 * 64 + 5)
    assert follower.seconds_left() == pytest.approx(36 * 2.0 - 5)
    monkeypatch.setattr(read.time, "time", lambda: 9e9)
    assert follower.seconds_left() == 0
    (run / "control/status.json").unlink()
    assert follower.seconds_left() is None


def test_the_first_update_of_a_start_is_not_in_the_time_left(run, monkeypatch):
    before = [record(step, time=1e9 + 2.0 * step) for step in range(1, 4)]
    write_json(run / "control/status.json", {"max_steps": 100, "start_step": 3})
    (run / "metrics.jsonl").write_bytes(lines_of([*before[-1:], record(4, time=2e9)]))  # a pause and a slow update
    follower = RunFolder(run)
    follower.look()
    assert follower.seconds_left() is None
    (run / "metrics.jsonl").write_bytes(lines_of([*before[-1:], record(4, time=2e9), record(5, time=2e9 + 3)]))
    follower.look()
    monkeypatch.setattr(read.time, "time", lambda: 2e9 + 3)
    assert follower.seconds_left() == pytest.approx(95 * 3)


@pytest.mark.parametrize("steps", [10, 599, 4001])
def test_the_newest_number_of_a_curve_is_that_of_the_head(tmp_path, steps):
    follower = RunFolder(make_run(tmp_path / "run", steps))
    follower.look()
    lines = [line for lines in charts(follower).values() for line in lines if line["name"] in follower.last]
    assert len(lines) >= 6 and all(line["last"] == follower.last[line["name"]] for line in lines)


def test_how_a_run_stands(run):
    follower = RunFolder(run)
    assert follower.state() == "stopped" and not is_held(run)
    with training(run):
        assert is_held(run) and follower.state() == "training" and now(follower)["takes_orders"]
    assert not is_held(run) and not now(follower)["takes_orders"]
    write_json(run / "control/status.json", {"host": "elsewhere"})
    assert follower.state() == "unknown" and now(follower)["takes_orders"]
    write_json(run / "start.json", {"job": None, "command": "x", "finished": True})
    assert follower.state() == "finished" and not now(follower)["takes_orders"]


def test_a_run_that_ends_while_it_is_looked_at_has_finished(run, monkeypatch):
    def end(folder) -> bool:
        """What the look at the lock sees of a run that ends just before it."""
        write_json(folder / "start.json", {"job": None, "command": "x", "finished": True})
        return False

    monkeypatch.setattr(read, "is_held", end)
    assert RunFolder(run).state() == "finished"


def test_pictures_are_found_by_prompt_and_an_earlier_runs_are_not(run):
    follower = RunFolder(run)
    found = follower.pictures()
    assert [one["step"] for one in found["reconstruction"]] == [10, 20, 30]
    assert [one["prompts"] for one in found["ddim-samples-7.5"]] == [["a red heart", HOSTILE]] * 2 + [["一颗红心"]]
    client = make_page([follower]).test_client()
    cell = client.get("/picture/0/step-000020-ddim-samples-7.5.png?prompt=1")
    size = Image.open(io.BytesIO(cell.data)).size
    assert cell.mimetype == "image/png" and size == (128, 85)
    write_json(run / "control/status.json", {"start_step": 10, "started": time.time() + 60})
    assert [one["step"] for one in follower.pictures()["reconstruction"]] == [10]  # begun anew from update 10
    (run / "samples/step-000010-ddim-samples-7.5.png").write_bytes(b"torn")
    assert "ddim-samples-7.5" not in follower.pictures()


@pytest.mark.parametrize(
    "path", ["..%2Frun.json", "step-000010-..%2F..%2Frun.json.png", "run.json", "step-1-x.png", "%00", "a" * 5000]
)
def test_no_other_file_is_given(run, path):
    answer = make_page([RunFolder(run)]).test_client().get(f"/picture/0/{path}")
    assert answer.status_code in (400, 404) and b"family" not in answer.data


def test_two_runs_and_what_is_not_there(run, tmp_path):
    other = make_run(tmp_path / HOSTILE.replace("/", "|"), steps=12)
    client = make_page([RunFolder(run), RunFolder(other)]).test_client()
    runs = client.get("/now").json["runs"]
    assert [one["step"] for one in runs] == [40, 12] and runs[0]["skipped"] == {"image": 3}
    assert runs[1]["name"] == other.name and runs[0]["own_prompts"][1] == HOSTILE
    assert runs[0]["machine"]["device"] == "a CPU"
    assert client.get("/recipe/1").json["recipe"].endswith(f"{HOSTILE}\n")
    assert len(client.get("/curves").json) == 2
    for path in ("/recipe/2", "/picture/2/x", "/picture/0/step-000010-ddim-samples-7.5.png?prompt=2"):
        answer = client.get(path)
        assert answer.status_code == 400 and "reload the page" in answer.json["error"]


def test_curves_that_have_not_changed_are_not_sent_again(run):
    client = make_page([RunFolder(run)]).test_client()
    first = client.get("/curves")
    again = client.get("/curves", headers={"If-None-Match": first.headers["ETag"]})
    assert again.status_code == 304 and not again.data
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(lines_of([record(41)]))
    assert client.get("/curves", headers={"If-None-Match": first.headers["ETag"]}).status_code == 200


POSTS = [("/order", {"run": 0, "order": "save_now"}), ("/prompts", {"run": 0, "prompts": "x"})]
READS = ["/now", "/curves", "/recipe/0", "/picture/0/step-000010-reconstruction.png"]


@pytest.mark.parametrize("control", [False, True])
@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("given", [None, "", "wrong", "the-tökén", TOKEN])
def test_who_may_read_and_who_may_steer(run, control, is_remote, given):
    client = make_page([RunFolder(run)], control, TOKEN, is_remote).test_client()
    headers = {} if given is None else {"X-Token": given.encode().decode("latin-1")}
    with training(run) if given == TOKEN else contextmanager(lambda: (yield))():
        for path in READS:
            assert client.get(path, headers=headers).status_code == (401 if is_remote and given != TOKEN else 200)
        assert client.get("/", headers=headers).status_code == 200
        for path, body in POSTS:
            answer = client.post(path, headers=headers, json=body)
            assert answer.status_code == (401 if given != TOKEN else 200 if control else 400), answer.data
    made = {path.name for path in (run / "control").iterdir()}
    assert made == {"status.json"} | ({"save_now", "prompts.txt"} if control and given == TOKEN else set())


def test_the_empty_page_tells_nothing_of_the_runs(run):
    page = make_page([RunFolder(run)], True, TOKEN, True).test_client().get("/")
    text = page.get_data(as_text=True)
    assert TOKEN not in text and str(run) not in text
    assert "//" not in re.sub(r"http://www.w3.org/2000/svg|\s// .*", "", text)  # no address of anything
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text
    policy = page.headers["Content-Security-Policy"]
    assert "img-src blob:;" in policy and "'unsafe" not in policy
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        assert make_page([RunFolder(run)], True, TOKEN).test_client().get("/now", headers=headers).status_code == 403


@pytest.mark.parametrize(
    "path, body, word",
    [
        ("/order", {"run": 0, "order": "rm"}, "no order 'rm'; known: sample_now, save_now, stop"),
        ("/order", {"run": 0, "order": "../stop"}, "no order"),
        ("/order", {"run": 0}, "no order None"),
        ("/order", {"run": 1, "order": "stop"}, "no such run"),
        ("/order", {"run": True, "order": "stop"}, "no such run"),
        ("/order", {"run": -1, "order": "stop"}, "no such run"),
        ("/order", [], "send an object"),
        ("/prompts", {"run": 0, "prompts": ["x"]}, "is not text"),
        ("/prompts", {"run": 0, "prompts": "a\ud800"}, "not UTF-8"),
        ("/prompts", {"run": 0, "prompts": "x\n" * (MOST_PROMPTS + 1)}, "65 prompts are too many"),
        ("/prompts", {"run": 0, "prompts": "x" * 70_000}, "larger than 64 kB"),
    ],
)
def test_bad_requests_get_words(run, path, body, word):
    client = make_page([RunFolder(run)], True, TOKEN).test_client()
    with training(run):
        answer = client.post(path, headers={"X-Token": TOKEN}, json=body)
    assert answer.status_code in (400, 413) and word in answer.json["error"]
    assert [one.name for one in (run / "control").iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    "text, prompts",
    [
        (f"a red heart\r\n\n  {HOSTILE} \n一颗红心", ["a red heart", HOSTILE, "一颗红心"]),
        ("x\n" * MOST_PROMPTS, ["x"] * MOST_PROMPTS),
        (" \n\n", []),
    ],
)
def test_prompts_that_are_sent_are_those_that_are_drawn(run, text, prompts):
    client = make_page([RunFolder(run)], True, TOKEN).test_client()
    (run / "control/prompts.txt").write_text("before\n")
    with training(run):
        assert client.post("/prompts", headers={"X-Token": TOKEN}, json={"run": 0, "prompts": text}).status_code == 200
    assert current_prompts(run, World()) == prompts
    assert client.get("/now").json["runs"][0]["prompts"].splitlines() == prompts


def test_nothing_is_asked_of_a_run_that_is_not_there(run):
    answer = (
        make_page([RunFolder(run)], True, TOKEN)
        .test_client()
        .post("/order", headers={"X-Token": TOKEN}, json={"run": 0, "order": "stop"})
    )
    assert answer.status_code == 400 and "is not training" in answer.json["error"]
    assert not (run / "control/stop").exists()


@pytest.mark.parametrize(
    "words, line",
    [
        (["FOLDER"], "is not a run's folder, nor holds one (no run.json); name a training's --output_dir"),
        (["RUN", "--port", "70000"], "--port 70000 must be from 0"),
        (["RUN", "--host", "203.0.113.7"], "cannot listen at 203.0.113.7:"),
    ],
)
def test_what_cannot_be_watched_is_one_line(run, words, line):
    words = [{"FOLDER": str(run / "samples"), "RUN": str(run)}.get(word, word) for word in words]
    with pytest.raises(ConfigError, match=re.escape(line)):
        run_command(["watch", *words])


def test_the_first_training_of_a_quickstart_is_waited_for(run, tmp_path, monkeypatch, capsys):
    """Its folder is there some half a minute before."""
    place, looks = tmp_path / "quickstart", []
    (place / ".done").mkdir(parents=True)

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            shutil.copytree(run, place / "diffusion")

    monkeypatch.setattr(watch, "time", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(watch, "serve", lambda *args: None)
    run_command(["watch", str(place)])
    assert len(looks) == 3 and "waiting for it" in capsys.readouterr().err


def shows(selector, words):
    """A script that is true where an element's text has these words."""
    return f"return document.querySelector({json.dumps(selector)})?.textContent.includes({json.dumps(words)})"


def table_of(page: str, name: str) -> str:
    """A table of the page, English and Chinese, as it stands there."""
    start = page.index(f"const {name} = {{")
    return page[start : page.index("\n};", start)]


def test_what_the_server_answers_is_there_in_chinese():
    page = Path(module.__file__).with_name("page.html").read_text("utf-8")
    answers = dict(re.findall(r'"([^"]+)": "([^"]+)"', table_of(page, "ANSWERS")))
    texts = [text for one in (read, watch)
             for text in re.findall(r'ConfigError\(f?"(.+?)"\)', inspect.getsource(one))]  # fmt: skip
    texts += re.findall(r'"(the token[^"]+|the request is larger[^"]+)"', inspect.getsource(server))
    texts += re.findall(r'"(ppldm does not[^"]+)"', Path(server.__file__).with_name("client.js").read_text("utf-8"))
    said = {re.sub(r"{[^}]*}", "{}", text) for text in texts} | {*watch._SENTENCES.values()}
    said -= {"send an object", "there is no order {}; known: {}"}  # which the page never causes
    assert answers.keys() == said
    for english, chinese in answers.items():
        assert english.count("{}") == chinese.count("{}")


def test_all_words_of_the_page_are_there_in_chinese_and_none_besides():
    page = Path(module.__file__).with_name("page.html").read_text("utf-8")
    table = table_of(page, "CHINESE")
    known = set(re.findall(r'"([^"]+)": "', table))
    body = re.sub(r"{%.*?%}|{{.*?}}", "", page[page.index("<body>") : page.index("<script")], flags=re.DOTALL)
    static = {text.strip() for text in re.findall(r">([^<>]+)<", body)} - {"", "()", "ppldm", "English", "中文"}
    static |= set(re.findall(r'aria-label="(.+?)"', body)) - {"Language"}
    rest = page.replace(table, "").replace(table_of(page, "ANSWERS"), "")
    dynamic = set(re.findall(r'said\("([^"]+)"', rest)) | set(re.findall(r'(?:fact|button)\("([^"]+)"', rest))
    dynamic |= set(re.findall(r'const ALL = "([^"]+)"', rest))
    dynamic |= {"training", "finished", "stopped", "unknown"}  # of RunFolder.state
    dynamic |= set(module.CHARTS) | set(re.findall(r'^        "([^"]+)": ', inspect.getsource(module.facts), re.M))
    assert known == static | dynamic
    for english, chinese in re.findall(r'"([^"]+)": "([^"]+)"', table):
        assert english.count("{}") == chinese.count("{}")


@pytest.mark.slow
@pytest.mark.needs("browser")
@pytest.mark.parametrize("width", [375, 1280])
def test_in_a_real_browser(run, tmp_path, width):
    """Read, filled in and pressed as a person does, on a phone and on a screen; hostile words stay words."""
    other = make_run(tmp_path / HOSTILE.replace("/", "|"), steps=4000)
    page_of = make_page([RunFolder(run), RunFolder(other)], True, TOKEN)
    with training(run), served(page_of) as url, browser(width, 900, tmp_path / "profile") as page:
        page.open(f"{url}#token={TOKEN}")
        page.wait_for('return document.querySelectorAll("#charts svg path").length > 10')
        assert page.run("return location.hash + document.title") == f"run, {other.name} - ppldm watch"
        assert page.run('return document.querySelectorAll("script, img[src=x]").length') == 1
        page.wait_for(shows(".run .state", "training"))
        page.wait_for(shows(".run", "Waiting for data25.0 % of the time"))
        page.wait_for(shows(".run", "3 rows (image 3), 1 updates"))
        page.wait_for(f'return document.querySelectorAll("#prompt option").length === 4 && innerWidth === {width}')
        # pictures by prompt, over time, by keys
        page.wait_for('return document.querySelectorAll("#pictures img").length === 2')
        assert page.run('return [...document.getElementById("prompt").options].map(one => one.value)') == [
            "all of them", "a red heart", HOSTILE, "一颗红心",
        ]  # fmt: skip
        page.run('const p = document.getElementById("prompt"); p.value = "a red heart";'
                 'p.dispatchEvent(new Event("input"))')  # fmt: skip
        page.wait_for(shows("#at", "Update 20"))
        page.run('document.getElementById("when").focus()')
        page.press("\ue012")  # left
        page.wait_for(shows("#at", "Update 10"))
        page.wait_for(shows("#pictures figcaption", "update 10"))  # below which the curves are at rest
        page.wait_for('return document.querySelector("#pictures img").naturalWidth === 128')
        # curves by keys, smoothing, axis
        page.run('document.querySelector("#charts svg").focus()')
        page.press("\ue011")  # Home
        page.wait_for(shows("#charts figcaption", "update 1 "))
        before = page.run('return document.querySelector("#charts svg").textContent')
        page.click("#log")
        page.wait_for(f'return document.querySelector("#charts svg").textContent !== {json.dumps(before)}')
        # what is new appears by itself
        with open(run / "metrics.jsonl", "ab") as file:
            file.write(lines_of([record(41, loss=123.0)]))
        page.wait_for(shows(".run", "update 41 of 100"))
        page.run("document.activeElement.blur()")
        page.press("\ue00c")  # Escape
        # only losses are smoothed: beside the strong line of the others there is no faint one
        faint = """return [...document.querySelectorAll(".chart")]
            .filter(one => one.querySelector('path[opacity="0.3"]')).map(one => one.querySelector("h3").textContent)"""
        assert page.run(faint) == ["loss"]
        # steering
        page.click(".buttons button:nth-child(2)")
        page.wait_for(shows(".note", "asked: save_now"))
        page.click(".buttons button:nth-child(3)")
        assert not (run / "control/stop").exists()  # asks once more
        page.wait_for(shows("button.sure", "Press again"))
        page.click("button.sure")
        page.wait_for(shows(".note", "asked: save_now, stop"))
        page.click(".control summary")
        page.write("textarea", f"a blue boat\n{HOSTILE}")
        page.click(".control details button")
        deadline = time.monotonic() + 120
        while not (run / "control/prompts.txt").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert current_prompts(run, World()) == ["a blue boat", HOSTILE]
        assert page.run('return document.querySelectorAll("article:nth-of-type(2) button:disabled").length') == 5
        assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
        assert page.run(
            "return [...document.querySelectorAll('button')].every(b => b.offsetHeight >= 38 || !b.offsetHeight)"
        )
        assert page.run("return document.title") == f"run, {other.name} - ppldm watch"
        page.save_screenshot(tmp_path / f"{width}.png")
        # in Chinese, also the next time
        page.run('const l = document.getElementById("language"); l.value = "zh"; l.dispatchEvent(new Event("input"))')
        page.wait_for(shows(".run", "更新 41，共 100"))
        assert page.run("return document.documentElement.lang") == "zh"
        page.open(url)
        page.wait_for(shows(".run", "等待数据占时间的 25.0 %"))
        page.wait_for(shows(".buttons", "现在保存"))
        page.save_screenshot(tmp_path / f"{width}-zh.png")
        page.run('localStorage.setItem("language", "en")')
        page.open(url)
        page.wait_for(shows(".buttons", "Save now"))
        # without its token a page shows, and cannot steer
        page.run("sessionStorage.clear()")
        page.click(".buttons button:nth-child(1)")
        page.wait_for(shows("#error", "the token is missing or wrong"))
        assert not (run / "control/sample_now").exists()
        page.run('localStorage.setItem("language", "zh")')
        page.open(url)
        page.wait_for(shows(".buttons", "现在画图"))
        page.click(".buttons button:nth-child(1)")
        page.wait_for(shows("#error", "令牌缺少或不对"))
    assert Image.open(tmp_path / f"{width}.png").width == width
