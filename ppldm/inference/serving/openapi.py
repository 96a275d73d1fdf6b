"""The OpenAPI 3.1 document of the HTTP interface, from the table of parameters that checks requests."""

from ... import __version__
from .jobs import STATES
from .parameters import Parameter

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
