"""The page of `ppldm app` in Chromium, used as a person does, on a phone and on a screen."""

import io
import json
from contextlib import contextmanager

import numpy as np
import pytest
from browser import browser
from legible import CONTRASTS, OVERFLOWS
from PIL import Image
from served import served

from ppldm.inference.serving.api import make_api
from ppldm.inference.serving.parameters import read_picture

HOSTILE = "</script><img src=x onerror=alert(1)>"
ENTER, LEFT, RIGHT, SPACE, ESCAPE = "\ue007", "\ue012", "\ue014", " ", "\ue00c"
TAB, CONTROL = "\ue004", "\ue009"
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
        page.wait_for(shows("#facts", "Guidance7.5"))
        page.wait_for(shows("#facts", "Number1"))
        page.press(LEFT)
        page.wait_for(shows("#facts", "Number0"))
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
        page.wait_for(shows(".side .note", "模型不认识的词：zebra"))
        page.run('document.querySelectorAll("#models input")[1].click()')
        page.write("#prompt", "a red heart")
        page.press(CONTROL, ENTER)
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


@contextmanager
def opened(application, width, tmp_path):
    """The page in a window of that width."""
    with served(application) as url, browser(width, 900, tmp_path / "profile") as page:
        page.open(url)
        yield page


@pytest.mark.slow
@pytest.mark.needs("browser")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_all_can_be_read_and_nothing_stands_out(painter, queue, models, tmp_path, monkeypatch, width, scheme):
    """Text has a contrast of 4.5 at least (WCAG 2.2, AA) in every state, and no page is wider than its window."""

    def look(state):
        page.save_screenshot(tmp_path / f"{state}.png")
        seen = page.run(CONTRASTS)
        assert len(seen) > 2
        assert ([one for one in seen if one[1] < 4.5], page.run(OVERFLOWS)) == ([], []), state

    with opened(make_api(painter, queue, page=True, token="0123456789abcdef"), width, tmp_path) as page:
        page.prefer(scheme)
        paper = page.run("return getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
        page.wait_for(shows("#error", "the token is missing or wrong"))
        assert page.run("return document.activeElement.id") == "token"
        look("token")
        page.write("#token", "0123456789abcdef")
        page.press(ENTER)
        page.wait_for(shows(".empty", "Nothing is drawn yet"))
        assert not page.run('return document.getElementById("error").textContent')
        look("empty")
        page.click("#draw")
        page.wait_for(shows("#error", "the prompt is empty"))
        look("error")
        page.write("#prompt", "a red zebra " + "long" * 40)
        for name, value in (("num_inference_steps", 1), ("num_samples", 3)):
            page.run(put(name, value))
        page.click("#draw")
        page.wait_for(DONE.format(6))
        page.wait_for('return [...document.querySelectorAll(".pictures img")].every(one => one.width >= 128)')
        look("two models")
        page.click(".pictures .one")
        page.wait_for(shows("#facts", "Seed"))
        look("large")
        page.click("#start")
        page.wait_for('return !document.getElementById("given").hidden')
        page.run('document.querySelectorAll("details").forEach(one => { one.open = true; })')
        look("mask")
        page.run("picture.drop()")
        page.run(put("language", "zh"))
        for name, value in (("num_inference_steps", 200), ("width", 256), ("height", 256)):
            page.run(put(name, value))
        page.click("#draw")
        page.wait_for('return [...document.querySelectorAll(".preview")].some(one => !one.hidden && one.naturalWidth)')
        look("drawing, in Chinese")
        for job in queue.jobs():
            queue.cancel(job)
        monkeypatch.setattr(models["first"], "draw", lambda *_, **__: 1 / 0)
        page.click("#draw")
        page.wait_for(shows(".side .bad", "drawing failed"))
        look("failed")


# What can be used by a click; each is marked once Tab has reached it and its focus could be seen.
USABLE = """
return [...document.querySelectorAll("button, input, select, textarea, summary, canvas, a[href]")]
  .filter(one => one.getClientRects().length && !one.disabled && !one.dataset.reached
    && one.closest("dialog") === document.querySelector("dialog[open]")).map(one => one.outerHTML.slice(0, 60))"""
MARK = """
const one = document.activeElement, style = getComputedStyle(one), box = one.getBoundingClientRect();
const seen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;
if (seen && box.bottom > 0 && box.top < innerHeight) one.dataset.reached = "1";
return one.localName"""


@pytest.mark.slow
@pytest.mark.needs("browser")
@pytest.mark.parametrize("width", [375, 1280])
def test_by_keys_alone(painter, queue, tmp_path, width):
    def reach_all():
        """Tab, until all is reached."""
        page.run('document.querySelectorAll("[data-reached]").forEach(one => { delete one.dataset.reached; })')
        for _ in range(80):
            page.press(TAB)
            if page.run(MARK) == "summary" and not page.run("return document.activeElement.parentElement.open"):
                page.press(ENTER)
        assert page.run(USABLE) == []

    def states():
        return [job.state for job in queue.jobs()]

    with opened(make_api(painter, queue, page=True), width, tmp_path) as page:
        page.wait_for('return document.activeElement.id === "prompt"')
        for name, value in (("num_inference_steps", 1), ("num_samples", 2)):
            page.run(put(name, value))
        for key in "a red heart":
            page.press(key)
        page.press(CONTROL, ENTER)
        page.wait_for(DONE.format(4))
        assert queue.jobs()[0].settings["prompt"] == "a red heart" and states() == ["done"] * 2
        # Enter draws from a field of one line
        page.run('document.getElementById("seed").focus()')
        page.press(ENTER)
        page.wait_for(DONE.format(8))
        page.run('picture.take(new Blob([Uint8Array.from(atob(document.createElement("canvas").toDataURL()'
                 '.split(",")[1]), one => one.charCodeAt(0))]))')  # fmt: skip
        page.wait_for('return !document.getElementById("given").hidden')
        reach_all()
        page.run("picture.drop()")
        # Escape closes what is large, and cancels what was asked for here, and nothing else
        for name, value in (("num_inference_steps", 200), ("width", 256), ("height", 256)):
            page.run(put(name, value))
        page.run('document.getElementById("prompt").focus()')
        page.press(CONTROL, ENTER)
        page.wait_for(shows(".state", "step"))
        page.run('document.querySelector(".pictures .one").focus()')
        page.press(ENTER)
        page.wait_for('return document.getElementById("large").open')
        reach_all()
        page.press(ESCAPE)
        page.wait_for('return !document.getElementById("large").open && document.activeElement.className === "one"')
        assert states()[-2:] == ["drawing", "waiting"]
        last = queue.jobs()[-1]
        other = queue.add(last.settings, 200, plan=last.plan)
        page.press(ESCAPE)
        page.wait_for('return [...document.querySelectorAll(".state")]'
                      '.filter(one => one.textContent.startsWith("cancelled")).length === 2')  # fmt: skip
        assert states()[-3:-1] == ["cancelled"] * 2 and other.state in ("waiting", "drawing")
        queue.cancel(other)
        # what is removed leaves the focus beside it
        page.wait_for(
            'return [...document.querySelectorAll(".state button")].every(one => one.textContent === "Remove")'
        )
        page.run('document.querySelector("article .state button").focus()')
        for left in range(len(queue.jobs()) - 1, 2, -1):
            page.press(ENTER)
            page.wait_for(f'return document.querySelectorAll(".side").length === {left}'
                          ' && document.activeElement.matches("#gallery button")')  # fmt: skip


@pytest.mark.slow
@pytest.mark.needs("browser")
def test_the_seed_that_is_shown_is_the_one_that_is_drawn(painter, queue, tmp_path):
    def shown(page):
        return page.run('return document.getElementById("seed").value')

    with served(make_api(painter, queue, page=True)) as url, browser(1280, 900, tmp_path / "profile") as page:
        page.open(url)
        page.wait_for('return document.querySelectorAll("#models input:checked").length === 2')
        assert shown(page) == ""
        page.write("#prompt", "a red heart")
        for name, value in (("num_inference_steps", 1), ("num_samples", 1), ("seed", 7)):
            page.run(put(name, value))
        page.click("#draw")
        page.wait_for(DONE.format(2))
        assert shown(page) == "7" and {job.settings["seed"] for job in queue.jobs()} == {7}
        page.click("#lock")
        assert shown(page) == ""
        page.click("#draw")
        page.wait_for(DONE.format(4))
        assert shown(page) != "" and {job.settings["seed"] for job in queue.jobs()} == {7, int(shown(page))}
