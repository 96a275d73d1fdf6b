"""The HTTP interface of drawing, for programs and for the page of `ppldm app`. All but pictures is JSON.

POST   /v1/pictures {"prompt": "a red heart"}      202: a job           429: the queue is full
GET    /v1/jobs, /v1/jobs/ID                       how jobs stand       DELETE: cancelled; an ended one is forgotten
GET    /v1/jobs/ID/preview, …/pictures/0           PNG
GET    /v1/models, /v1/health, /v1/metrics (Prometheus' text), /v1/openapi.json (all of this, with every setting)
"""

import threading
import time
from contextlib import nullcontext
from importlib.resources import files

import numpy as np

from ... import __version__
from ...utils.errors import ConfigError, PpldmError
from ...utils.text import count_of
from ...utils.web.page import STYLE
from ...utils.web.server import ask_for_token, make_flask, render_page
from .jobs import DRAWING, ENDED, STATES, WAITING, Job, Queue, QueueFullError, StoppingError
from .paint import Painter
from .parameters import Limits, Parameter, make_parameters, read_request

MOST_BYTES = 12 << 20  # of a request: a picture and a mask in base64
_SENTENCES = {
    400: "the request is not JSON; send an object with a prompt",
    404: "there is no such address; /v1/openapi.json lists them",
    405: "this address does not take that method; /v1/openapi.json says what each takes",
    500: "the request failed; the terminal of ppldm shows why",
}
_OPEN = ("/", "/v1/health")  # without the token: the empty page, and whether it is there
_JOB = {
    "id": {"type": "string"},
    "state": {"type": "string", "enum": list(STATES)},
    "place": {"type": "integer", "description": "jobs before this one"},
    "step": {"type": "integer"},
    "num_steps": {"type": "integer"},
    "seconds": {"type": "number", "description": "of drawing so far"},
    "seconds_left": {"type": ["number", "null"]},
    "num_pictures": {"type": "integer", "description": "that can be fetched"},
    "has_preview": {"type": "boolean"},
    "error": {"type": "string", "description": "why it failed"},
    "warning": {"type": "string", "description": "words that the model does not know"},
    "settings": {"type": "object", "description": "what was asked for, without pictures, and the defaults"},
}
_MODEL = {
    "name": {"type": "string"},
    "resolution": {"type": "integer", "description": "side of its training pictures, pixels"},
    "lora": {"type": "array", "items": {"type": "string"}},
    "samplers": {"type": "array", "items": {"type": "string"}, "description": "that draw with it, its default first"},
    "guidance_scale": {"type": "number", "description": "by which it is drawn where a request says none"},
    "num_inference_steps": {"type": "integer", "description": "in which it is drawn where a request says none"},
    "example_prompt": {"type": "string", "description": "one that its training has shown, or empty"},
}
_PNG = {"image/png": {"schema": {"type": "string", "contentMediaType": "image/png"}}}
_NAME = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}, "description": "id of the job"}
_NUMBER = {"name": "number", "in": "path", "required": True, "schema": {"type": "integer", "minimum": 0}}
_NEWEST = {
    "name": "newest",
    "in": "query",
    "schema": {"type": "integer", "minimum": 1},
    "description": "only so many of them, the newest",
}
_REFUSALS = {
    "400": "wrong; the sentence says what",
    "401": "the token is missing",
    "403": "another site's page asks",
    "404": "not there",
    "413": "too large",
    "415": "not JSON",
    "429": "the queue is full",
    "500": "failed; the terminal of ppldm shows why",
    "503": "about to stop",
}
_ANYWHERE = ("401", "403", "500")


class _NotFoundError(PpldmError):
    """A job or a picture that is not there."""


_STATUSES = {_NotFoundError: 404, QueueFullError: 429, StoppingError: 503}


def make_api(painter: Painter, queue: Queue, limits: Limits | None = None, hosts=(), token: str = "", page=False):
    """The Flask application over a queue. token: that is asked for; "": none. page: whether / is the page."""
    from flask import jsonify

    flask = make_flask(hosts, _SENTENCES, MOST_BYTES)
    if token:
        ask_for_token(flask, token, lambda request: request.method in ("GET", "HEAD") and request.path in _OPEN)

    def refused(error):
        status = _STATUSES[type(error)]
        # Until there is room: as one drawing has taken on average.
        seconds = max(1, round(queue.seconds / max(1, sum(queue.counts[state] for state in ENDED))))
        return jsonify(error=str(error)), status, {"Retry-After": str(seconds)} if status in (429, 503) else {}

    for kind in _STATUSES:
        flask.register_error_handler(kind, refused)
    limits = limits or Limits()
    painter.limit(limits.max_steps)
    parameters = make_parameters(tuple(painter.models), limits)
    _take_jobs(flask, painter, queue, parameters)
    _give_pictures(flask, queue)
    _describe_itself(flask, painter, queue, parameters)
    if page:
        kinds = ("html", "css", "js")
        template, style, script = (files(__package__).joinpath(f"page.{kind}").read_text("utf-8") for kind in kinds)
        flask.add_url_rule("/", "page", lambda: render_page(template, style=STYLE + style, script=script))
    return flask


def _take_jobs(flask, painter: Painter, queue: Queue, parameters) -> None:
    from flask import jsonify, request

    decoder = threading.Lock()

    @flask.post("/v1/pictures")
    def add():
        # Only JSON: another site's form, which the browser would send unasked, is refused here.
        asked = request.get_json()
        queue.check_room()  # before a picture is decoded, which takes memory: one at a time
        has_picture = isinstance(asked, dict) and any(asked.get(name) is not None for name in ("image", "mask"))
        with decoder if has_picture else nullcontext():
            settings, num_steps, warning = painter.prepare(read_request(asked, parameters))
        job = queue.add(settings, num_steps, warning)
        return jsonify(describe_job(queue, job)), 202, {"Location": f"/v1/jobs/{job.id}"}

    @flask.get("/v1/jobs")
    def jobs():
        newest = request.args.get("newest", "")
        if newest and not (newest.isdecimal() and len(newest) < 10 and int(newest)):
            raise ConfigError(f"newest {newest[:20]!r} must be a whole number from 1")
        return jsonify(jobs=[describe_job(queue, job) for job in queue.jobs()[-int(newest or 0) :]])

    @flask.get("/v1/jobs/<name>")
    def job(name):
        return jsonify(describe_job(queue, _find(queue, name)))

    @flask.delete("/v1/jobs/<name>")
    def cancel(name):
        found = _find(queue, name)
        queue.cancel(found)
        return jsonify(describe_job(queue, found))


def _give_pictures(flask, queue: Queue) -> None:
    from flask import Response

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
        from ...utils.pictures import as_png

        job = _find(queue, name)
        if (small := job.preview) is None:
            raise _NotFoundError(f"job {job.id} has no preview: it is {job.state}")
        return Response(as_png(small), mimetype="image/png", headers={"Cache-Control": "no-store"})


def _describe_itself(flask, painter: Painter, queue: Queue, parameters) -> None:
    from flask import Response, jsonify

    document = make_document(parameters)

    @flask.get("/v1/models")
    def models():
        return jsonify(models=painter.describe(), parameters={one.name: one.schema() for one in parameters})

    @flask.get("/v1/health")
    def health():
        state = "stopping" if queue.is_stopping else "ok" if queue.is_alive else "failed"
        return jsonify(status=state), 200 if state == "ok" else 503

    @flask.get("/v1/metrics")
    def metrics():
        return Response(write_metrics(queue), content_type="text/plain; version=0.0.4; charset=utf-8")

    @flask.get("/v1/openapi.json")
    def openapi():
        return jsonify(document)


def _find(queue: Queue, name: str) -> Job:
    if job := queue.get(name):
        return job
    raise _NotFoundError(f"there is no job {name[:40]!r}; old jobs are forgotten after a while")


def describe_job(queue: Queue, job: Job) -> dict:
    """How a job stands, JSON-ready."""
    seconds = (job.ended or time.time()) - job.started if job.started else 0.0
    running = job.state == DRAWING and job.step
    own = {
        "place": queue.place(job),
        "seconds": round(seconds, 3),
        "seconds_left": round(seconds / job.step * (job.num_steps - job.step), 3) if running else None,
        "has_preview": job.preview is not None,
        "settings": {name: value for name, value in job.settings.items() if not isinstance(value, np.ndarray)},
    }
    return {name: own[name] if name in own else getattr(job, name) for name in _JOB}


def write_metrics(queue: Queue) -> str:
    """The numbers of a queue in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats)."""
    jobs = queue.jobs()
    by_state = [(f'{{state="{one}"}}', sum(job.state == one for job in jobs)) for one in (WAITING, DRAWING)]
    ended = [(f'{{state="{one}"}}', queue.counts[one]) for one in (*ENDED, "refused")]
    found = (
        ("ppldm_jobs", "gauge", "Jobs that wait or are drawn.", by_state),
        ("ppldm_jobs_total", "counter", "Jobs by how they ended.", ended),
        ("ppldm_pictures_total", "counter", "Pictures drawn.", [("", queue.counts["pictures"])]),
        ("ppldm_steps_total", "counter", "Steps of samplers.", [("", queue.counts["steps"])]),
        ("ppldm_drawing_seconds_total", "counter", "Time spent drawing.", [("", queue.seconds)]),
        ("ppldm_pictures_bytes", "gauge", "Pictures held in memory.", [("", queue.pictures.bytes)]),
    )
    lines = []
    for name, kind, words, values in found:
        lines += [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
        lines += [f"{name}{label} {value:g}" if isinstance(value, float) else f"{name}{label} {value}"
                  for label, value in values]  # fmt: skip
    return "\n".join(lines) + "\n"


def make_document(parameters: tuple[Parameter, ...]) -> dict:
    """The document, JSON-ready."""
    request = {
        "type": "object",
        "required": ["prompt"],
        "properties": {one.name: one.schema() for one in parameters},
        "additionalProperties": False,
    }
    draws = {"required": True, "content": {"application/json": {"schema": _ref("Request")}}}
    models = {"models": {"type": "array", "items": _ref("Model")}, "parameters": {"type": "object"}}
    health = _object({"status": {"type": "string", "enum": ["ok", "stopping", "failed"]}})
    is_well = _does("Whether jobs are taken", health, anywhere=("403", "500"))
    is_well["responses"]["503"] = {
        "description": "no jobs are taken",
        "content": is_well["responses"]["200"]["content"],
    }
    add = _does("Draw pictures", _ref("Job"), "202", ("400", "413", "415", "429", "503"))
    add["responses"]["202"]["headers"] = {"Location": {"schema": {"type": "string"}, "description": "of the job"}}
    for status in ("429", "503"):
        add["responses"][status]["headers"] = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ppldm", "version": __version__, "description": "Pictures of prompts, by a queue of jobs."},
        "security": [{}, {"bearer": []}],
        "components": {
            "schemas": {"Request": request, "Job": _object(_JOB), "Model": _object(_MODEL),
                        "Error": _object({"error": {"type": "string", "description": "a sentence"}})},
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "paths": {
            "/v1/pictures": {
                "post": add | {"requestBody": draws}
            },
            "/v1/jobs": {
                "parameters": [_NEWEST],
                "get": _does("All jobs that are known, oldest first",
                             _object({"jobs": {"type": "array", "items": _ref("Job")}}), refusals=("400",)),
            },
            "/v1/jobs/{name}": {
                "parameters": [_NAME],
                "get": _does("How a job stands", _ref("Job"), refusals=("404",)),
                "delete": _does("Cancel a job; an ended one is forgotten", _ref("Job"), refusals=("404",)),
            },
            "/v1/jobs/{name}/preview": {
                "parameters": [_NAME],
                "get": _does("What a drawing may become", _PNG, refusals=("404",)),
            },
            "/v1/jobs/{name}/pictures/{number}": {
                "parameters": [_NAME, _NUMBER],
                "get": _does("A picture with its settings in it", _PNG, refusals=("404",)),
            },
            "/v1/models": {"get": _does("The models, and what a request may say", _object(models))},
            "/v1/health": {"get": is_well},
            "/v1/metrics": {
                "get": _does("Numbers for Prometheus", {"text/plain": {"schema": {"type": "string"}}})
            },
            "/v1/openapi.json": {"get": _does("This document", {"type": "object"})},
        },
    }  # fmt: skip


def _ref(name: str) -> dict:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: dict) -> dict:
    """Of which all are always there."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _does(summary: str, gives: dict, status: str = "200", refusals=(), anywhere=_ANYWHERE) -> dict:
    content = gives if any("/" in key for key in gives) else {"application/json": {"schema": gives}}
    refused = {"application/json": {"schema": _ref("Error")}}
    answers = {status: {"description": "done", "content": content}}
    answers |= {one: {"description": _REFUSALS[one], "content": refused} for one in (*refusals, *anywhere)}
    return {"summary": summary, "responses": answers}
