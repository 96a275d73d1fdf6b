"""`ppldm watch RUN…`: a page on this machine that follows runs from their files, whoever started them and wherever.

It reads what training writes anyway, and with --control makes the files of `training/run_folder.py`; nothing
else connects it with a run. Whoever asks needs the token of the printed address for whatever changes something, and
where the page is not bound to this machine alone for all but the empty page too.

    GET  /now                    how each run stands       GET  /curves?share=0.5     charts and lists of pictures,
                                                              &runs=0,2 of these
    GET  /picture/RUN/FILE       one of them, or ?prompt=N that of a prompt          GET  /recipe/RUN
    POST /order {"run": 0, "order": "save_now"}            POST /prompts {"run": 0, "prompts": "one a line"}
"""

import io
import os
import secrets
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Annotated

from PIL import Image

from ..inference.prompts import check_prompt
from ..training.run_folder import CONTROL_DIR, MOST_PROMPTS, PROMPTS_FILE, Order
from ..utils.errors import ConfigError
from ..utils.files import local_path, write_text
from ..utils.machine.resources import available_memory_bytes, count_usable_cores, usable_memory_bytes
from ..utils.pictures import read_cells
from ..utils.stages import DONE
from ..utils.web.server import is_loopback, make_flask, render_page, serve
from ..weights.folders import find_runs, runs_in
from . import page as shown
from .read import follow

_Runs = Annotated[list[str], {"opt": False, "nargs": "+", "type": str, "metavar": "RUN"}]
_Names = Annotated[list[str], {"nargs": "+", "type": str, "metavar": "NAME"}]
_LOOK_SECONDS = 1.0
_SENTENCES = {500: "the page failed; the terminal of ppldm watch shows why"}


def watch(
    runs: _Runs,  # folders of runs (the --output_dir of training), or folders that hold runs, also those to come
    control: bool = False,  # buttons for sample now, save now and stop, and a field for the prompts that are drawn
    host: str = "127.0.0.1",  # address to listen at; at any that other machines reach, reading needs the token too
    port: int = 8090,  # of the page
    allow_host: _Names = (),  # further names under which browsers may ask for the page
):
    """Follow runs on a page of this machine: curves, pictures, time left; and steer them."""
    found: list = []
    places = [local_path(run) for run in runs]
    for place in places:
        _wait_for_run(place)
    follow(found, places)
    token = secrets.token_urlsafe(16)
    needed = control or not is_loopback(host)
    page = make_page(found, control, token, not is_loopback(host), [host, *allow_host], partial(follow, found, places))
    serve(page, host, port, f"#token={token}" if needed else "")


def _wait_for_run(place: Path) -> None:
    """Until a run has begun in a folder in which a quickstart has. Raises ConfigError where neither is there."""
    if (place / DONE).is_dir() and not find_runs(place):
        sys.stderr.write(f"no training has begun in {place} yet; waiting for it, Ctrl-C ends this\n")
        while not find_runs(place):
            time.sleep(_LOOK_SECONDS)
    runs_in(place)


def make_page(runs: list, control: bool = False, token: str = "", is_remote=False, hosts=(), find=lambda: None):
    """The Flask application of `RunFolder`s. is_remote: reading needs the token too. find: appends new runs."""
    from flask import Response, jsonify, request

    flask = make_flask(hosts, _SENTENCES, token=token, open_paths=("/",) if is_remote else None)
    finding = threading.Lock()

    @flask.get("/")
    def page():
        return render_page(shown.PAGE.read_text(encoding="utf-8"), title="ppldm watch", **shown.LOOK)

    @flask.get("/now")
    def now():
        found = []
        with finding:
            find()
        for one in runs:
            with one.lock:
                one.look()
                found.append(shown.now(one))
        total, free = usable_memory_bytes(), available_memory_bytes()
        memory = {"memory_gb": total / 1e9, "memory_free_gb": min(total, free) / 1e9} if total and free else {}
        load = {"host": os.uname().nodename, "load": os.getloadavg()[0], "cores": count_usable_cores()}
        return {"runs": found, "control": control, "machine": load | memory}

    @flask.get("/curves")
    def curves():
        share = min(1.0, max(0.0, request.args.get("share", 1.0, float)))
        wanted = {int(one) for one in request.args.get("runs", "").split(",") if one.isdecimal()}
        found = []
        for number, one in enumerate(runs):
            if "runs" in request.args and number not in wanted:
                found.append({"charts": {}, "pictures": {}})
                continue
            with one.lock:
                one.look()
                found.append({"charts": shown.charts(one, share), "pictures": one.pictures()})
        response = jsonify(found)
        response.add_etag()
        response.headers["Cache-Control"] = "no-cache"
        return response.make_conditional(request)

    @flask.get("/picture/<int:run>/<name>")
    def picture(run, name):
        path = _of(runs, run).picture(name)
        number = request.args.get("prompt", type=int)
        return Response(path.read_bytes() if number is None else cut(path, number), mimetype="image/png")

    @flask.get("/recipe/<int:run>")
    def recipe(run):
        return {"recipe": _of(runs, run).recipe()}

    @flask.post("/<any(order, prompts):name>")
    def steer(name):
        asked = request.get_json()
        folder = _control_of(runs, asked, control)
        (ask_for if name == "order" else keep_prompts)(folder, asked.get(name))
        return {"done": True}

    return flask


def _of(runs: list, run):
    if type(run) is not int or not 0 <= run < len(runs):
        raise ConfigError("there is no such run; reload the page")
    return runs[run]


def _control_of(runs: list, asked, control: bool) -> Path:
    if not control:
        raise ConfigError("the page only shows; start it with --control to steer")
    if not isinstance(asked, dict):
        raise ConfigError("send an object")
    run = _of(runs, asked.get("run"))
    if not shown.now(run)["takes_orders"]:
        raise ConfigError(f"{run.name} is not training, so nobody would do it; start it first")
    return run.folder / CONTROL_DIR


def ask_for(folder: Path, order) -> None:
    known = [one.file for one in Order]
    if order not in known:
        raise ConfigError(f"there is no order {order!r}; known: {', '.join(known)}")
    (folder / order).touch()


def keep_prompts(folder: Path, text) -> None:
    """Write the prompts that are to be drawn, one a line; without any, those of the recipe are drawn again."""
    check_prompt(text, "the prompts")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > MOST_PROMPTS:
        raise ConfigError(f"{len(lines)} prompts are too many; {MOST_PROMPTS} are drawn at most")
    if lines:
        write_text(folder / PROMPTS_FILE, "".join(f"{line}\n" for line in lines))
    else:
        (folder / PROMPTS_FILE).unlink(missing_ok=True)


def cut(path: Path, number: int) -> bytes:
    """The pictures of prompt `number` of a grid, as PNG."""
    cells = read_cells(path)
    if not 0 <= number < len(cells):
        raise ConfigError("there is no such prompt in this picture; reload the page")
    buffer = io.BytesIO()
    with Image.open(path) as grid:
        grid.crop(cells[number][1]).save(buffer, format="PNG")
    return buffer.getvalue()
