"""The page of `ppldm app` in Chromium, used as a person does, on a phone and on a screen."""

import io
import json

import numpy as np
import pytest
from browser import browser
from PIL import Image
from served import served

from ppldm.inference.serving.api import make_api
from ppldm.inference.serving.parameters import read_picture

HOSTILE = "</script><img src=x onerror=alert(1)>"
ENTER, LEFT, RIGHT, SPACE, ESCAPE = "\ue007", "\ue012", "\ue014", " ", "\ue00c"
DONE = 'return [...document.querySelectorAll(".pictures img")].filter(one => one.naturalWidth).length === {}'


def shows(selector, text):
    return (
        f"return [...document.querySelectorAll({json.dumps(selector)})].some(one => "
        f"one.textContent.includes({json.dumps(text)}))"
    )


def put(field, value):
    return (
        f"const f = document.getElementById({json.dumps(field)}); f.value = {json.dumps(value)};"
        'f.dispatchEvent(new Event("input")); f.dispatchEvent(new Event("change"))'
    )


@pytest.mark.slow
@pytest.mark.needs("browser")
@pytest.mark.parametrize("width", [375, 1280])
def test_in_a_real_browser(models, painter, queue, tmp_path, monkeypatch, width):
    with served(make_api(painter, queue, page=True)) as url, browser(width, 900, tmp_path / "profile") as page:
        page.open(url)
        page.wait_for('return document.querySelectorAll("#models input:checked").length === 2')
        assert page.run("return document.documentElement.lang") == "en"
        page.click("#draw")
        page.wait_for(shows("#error", "the prompt is empty; write what to draw"))
        # two models side by side, words that are markup, words that are unknown
        page.write("#prompt", f"a red zebra {HOSTILE}")
        for name, value in (("num_inference_steps", 2), ("num_samples", 2)):
            page.run(put(name, value))
        page.click("#draw")
        page.wait_for(DONE.format(4))
        page.wait_for(shows(".side .note", "words that the model does not know: zebra"))
        assert page.run('return [...document.querySelectorAll(".side h3")].map(one => one.textContent)') == list(models)
        assert page.run('return document.querySelector("article h2").textContent') == f"a red zebra {HOSTILE}"
        assert page.run('return document.querySelectorAll("img[src=x]").length') == 0
        seed = page.run('return document.getElementById("seed").value')
        assert [job.settings["seed"] for job in queue.jobs()] == [int(seed)] * 2
        # one picture large, by keys; its settings again
        page.run('document.querySelector(".pictures .one").focus()')
        page.press(RIGHT)
        page.press(ENTER)
        page.wait_for(shows("#facts", "guidance scale7.5"))
        page.wait_for(shows("#facts", "index1"))
        page.press(LEFT)
        page.wait_for(shows("#facts", "index0"))
        assert page.run('return document.getElementById("download").href.startsWith("blob:")')
        page.save_screenshot(tmp_path / f"{width}-large.png")
        page.run('document.getElementById("seed").value = 1')
        page.click("#again")
        assert page.run('return document.getElementById("seed").value') == seed
        # drawn over, where a mask is painted by keys
        page.click(".pictures .one")
        page.click("#start")
        page.wait_for('return !document.getElementById("given").hidden')
        page.run('document.getElementById("canvas").focus()')
        page.press(LEFT)
        page.press(SPACE)
        page.save_screenshot(tmp_path / f"{width}-mask.png")
        sent = page.run("return picture.asked()")
        image, mask = (read_picture(sent[name], name) for name in ("image", "mask"))
        first = queue.pictures.get(queue.picture_name(queue.jobs()[0], 0))
        assert (image == np.asarray(Image.open(io.BytesIO(first)))).all()
        rows, columns = np.nonzero(mask[..., 0] > 127)
        assert abs(rows.mean() - 31.5) < 1 and abs(columns.mean() - 29.5) < 1 and 40 < len(rows) < 120
        page.run("picture.drop()")
        # Chinese; a locked seed; Ctrl + Enter
        page.run(put("language", "zh"))
        page.wait_for(shows("#draw", "生成"))
        page.run('document.querySelectorAll("#models input")[1].click()')
        page.write("#prompt", "a red heart")
        page.run('document.getElementById("prompt").dispatchEvent(new KeyboardEvent("keydown", '
                 '{key: "Enter", ctrlKey: true, bubbles: true}))')  # fmt: skip
        page.wait_for(DONE.format(6))
        assert queue.jobs()[-1].settings["seed"] == int(seed)
        assert (queue.jobs()[-1].settings["model"], len(queue.jobs())) == ("first", 3)
        # progress, a preview, the queue, cancelling
        for name, value in (("num_inference_steps", 200), ("width", 256), ("height", 256)):
            page.run(put(name, value))
        page.click("#draw")
        page.click("#draw")
        page.wait_for(shows(".state", "排队中，前面还有 1 个"))
        page.wait_for('return [...document.querySelectorAll(".preview")].some(one => one.naturalWidth)')
        page.wait_for(shows(".state", "步，共 200 步"))
        page.save_screenshot(tmp_path / f"{width}.png")
        for place in (1, 2):
            page.click(f"article:nth-child({place}) .state button")
            page.wait_for(shows(f"article:nth-child({place}) .state", "已取消"))
        assert [job.state for job in queue.jobs()] == ["done"] * 3 + ["cancelled"] * 2
        # what fails says so; the page bears it
        monkeypatch.setattr(models["first"], "draw", lambda *_, **__: 1 / 0)
        page.run(put("num_inference_steps", 1))
        page.click("#draw")
        page.wait_for(shows(".side .bad", "drawing failed; the terminal of ppldm shows why"))
        assert page.run("return document.documentElement.scrollWidth <= window.innerWidth")
        assert page.run("return window.innerWidth") == width
        assert page.run(
            "return [...document.querySelectorAll('button:not(.one)')]"
            ".every(one => one.offsetHeight >= 38 || !one.offsetHeight)"
        )
    assert Image.open(tmp_path / f"{width}.png").width == width
