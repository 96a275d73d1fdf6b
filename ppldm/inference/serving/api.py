"""The HTTP interface of drawing, for programs and for the page of `ppldm app`: /v1/openapi.json describes it."""

import threading
import time
from contextlib import nullcontext
from importlib.resources import files

import yaml

from ... import __version__
from ...utils.errors import ConfigError, PpldmError
from ...utils.pictures import as_png
from ...utils.text import count_of
from ...utils.web.page import STYLE
from ...utils.web.server import make_flask, render_page
from .jobs import DRAWING, ENDED, WAITING, Job, Queue, QueueFullError, StoppingError
from .paint import Painter
from .parameters import make_parameters, read_request

MOST_BYTES = 12 << 20  # of a request: a picture and a mask in base64
_SENTENCES = {
    400: "the request is not JSON; send an object with a prompt",
    404: "there is no such address; /v1/openapi.json lists them",
    405: "this address does not take that method; /v1/openapi.json says what each takes",
    500: "the request failed; the terminal of ppldm shows why",
}
_OPEN = ("/", "/v1/health")  # without the token: the empty page, and whether it is there


class _NotFoundError(PpldmError):
    """A job or a picture that is not there."""


_STATUSES = {_NotFoundError: 404, QueueFullError: 429, StoppingError: 503}


def make_api(painter: Painter, queue: Queue, hosts=(), token: str = "", page=False, **limits: int):
    """The Flask application. token: asked for, if any; page: whether / is the page; limits: of `make_parameters`."""
    flask = make_flask(hosts, _SENTENCES, MOST_BYTES, token or None, _OPEN)

    def refused(error):
        status = _STATUSES[type(error)]
        # Until there is room: as one drawing has taken on average.
        seconds = max(1, round(queue.seconds / max(1, sum(queue.counts[state] for state in ENDED))))
        return {"error": str(error)}, status, {"Retry-After": str(seconds)} if status in (429, 503) else {}

    for kind in _STATUSES:
        flask.register_error_handler(kind, refused)
    parameters = make_parameters(tuple(painter.models), **limits)
    painter.limit(parameters["num_inference_steps"]["maximum"])
    _answer_jobs(flask, painter, queue, parameters)
    _describe_itself(flask, painter, queue, parameters)
    if page:
        kinds = ("html", "css", "js")
        template, style, script = (files(__package__).joinpath(f"page.{kind}").read_text("utf-8") for kind in kinds)
        flask.add_url_rule("/", "page", lambda: render_page(template, style=STYLE + style, script=script))
    return flask


def _answer_jobs(flask, painter: Painter, queue: Queue, parameters) -> None:
    from flask import Response, request

    decoder = threading.Lock()

    @flask.post("/v1/pictures")
    def add():
        # Only JSON: another site's form, which the browser would send unasked, is refused here.
        asked = request.get_json()
        queue.check_room()  # before a picture is decoded, which takes memory: one at a time
        has_picture = isinstance(asked, dict) and any(asked.get(name) is not None for name in ("image", "mask"))
        with decoder if has_picture else nullcontext():
            job = queue.add(*painter.prepare(read_request(asked, parameters)))
        return describe_job(queue, job), 202, {"Location": f"/v1/jobs/{job.id}"}

    @flask.get("/v1/jobs")
    def jobs():
        newest = request.args.get("newest", "")
        if newest and not (newest.isdecimal() and len(newest) < 10 and int(newest)):
            raise ConfigError(f"newest {newest[:20]!r} must be a whole number from 1")
        return {"jobs": [describe_job(queue, job) for job in queue.jobs()[-int(newest or 0) :]]}

    @flask.get("/v1/jobs/<name>")
    def job(name):
        return describe_job(queue, _find(queue, name))

    @flask.delete("/v1/jobs/<name>")
    def cancel(name):
        found = _find(queue, name)
        queue.cancel(found)
        return describe_job(queue, found)

    @flask.get("/v1/jobs/<name>/pictures/<int:number>")
    def picture(name, number):
        job = _find(queue, name)
        if number >= job.num_pictures:
            count = count_of(job.num_pictures, "picture")
            raise _NotFoundError(f"job {job.id} has no picture {number}: {count} so far")
        content = queue.pictures.get(queue.picture_name(job, number))
        if content is None:
            raise _NotFoundError("this picture has made room for newer ones; keep all with --out FOLDER")
        return Response(content, mimetype="image/png")

    @flask.get("/v1/jobs/<name>/preview")
    def preview(name):
        job = _find(queue, name)
        if (small := job.preview) is None:
            raise _NotFoundError(f"job {job.id} has no preview: it is {job.state}")
        return Response(as_png(small), mimetype="image/png", headers={"Cache-Control": "no-store"})


def _describe_itself(flask, painter: Painter, queue: Queue, parameters) -> None:
    from flask import Response

    document = make_document(parameters)

    @flask.get("/v1/models")
    def models():
        return {"models": painter.describe(), "parameters": parameters}

    @flask.get("/v1/health")
    def health():
        state = "stopping" if queue.is_stopping else "ok" if queue.worker.is_alive() else "failed"
        return {"status": state}, 200 if state == "ok" else 503

    @flask.get("/v1/metrics")
    def metrics():
        # In Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats).
        jobs = queue.jobs()
        by_state = [(f'{{state="{one}"}}', sum(job.state == one for job in jobs)) for one in (WAITING, DRAWING)]
        ended = [(f'{{state="{one}"}}', queue.counts[one]) for one in (*ENDED, "refused")]
        found = (
            ("ppldm_jobs", "gauge", "Jobs that wait or are drawn.", by_state),
            ("ppldm_jobs_total", "counter", "Jobs by how they ended.", ended),
            ("ppldm_pictures_total", "counter", "Pictures drawn.", [("", queue.counts["pictures"])]),
            ("ppldm_steps_total", "counter", "Steps of samplers.", [("", queue.counts["steps"])]),
            ("ppldm_drawing_seconds_total", "counter", "Time spent drawing.", [("", f"{queue.seconds:g}")]),
            ("ppldm_pictures_bytes", "gauge", "Pictures held in memory.", [("", queue.pictures.bytes)]),
        )
        lines = []
        for name, kind, words, values in found:
            lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{label} {value}" for label, value in values]
        return Response("\n".join(lines) + "\n", content_type="text/plain; version=0.0.4; charset=utf-8")

    @flask.get("/v1/openapi.json")
    def openapi():
        return document


def _find(queue: Queue, name: str) -> Job:
    if job := queue.get(name):
        return job
    raise _NotFoundError(f"there is no job {name[:40]!r}; old jobs are forgotten after a while")


def describe_job(queue: Queue, job: Job) -> dict:
    """How a job stands, JSON-ready."""
    seconds = (job.ended or time.time()) - job.started if job.started else 0.0
    running = job.state == DRAWING and job.step
    left = round(seconds / job.step * (job.num_steps - job.step), 3) if running else None
    plain = ("id", "state", "step", "num_steps", "num_pictures", "error", "warning")
    found = {name: getattr(job, name) for name in plain} | {"place": queue.place(job), "seconds": round(seconds, 3)}
    return found | {"seconds_left": left, "has_preview": job.preview is not None, "settings": job.settings}


def make_document(parameters: dict[str, dict]) -> dict:
    """The document, JSON-ready."""
    document = yaml.safe_load(files(__package__).joinpath("openapi.yaml").read_text("utf-8"))
    document["info"]["version"] = __version__
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        schema["required"] = list(schema["properties"])
    request = {"type": "object", "required": ["prompt"], "properties": parameters, "additionalProperties": False}
    schemas["Request"] = request
    return document
