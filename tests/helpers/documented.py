"""A client that holds every answer against the server's own OpenAPI document."""

from flask.testing import FlaskClient
from jsonschema import Draft202012Validator
from werkzeug.exceptions import MethodNotAllowed, NotFound


class DocumentedClient(FlaskClient):
    """Fails at an answer that the document does not have: its status, its content type, or its JSON."""

    checked = 0  # answers of addresses that the document has

    def open(self, *words, **settings):
        answer = super().open(*words, **settings)
        self._check(answer)
        return answer

    def _check(self, answer) -> None:
        with self.application.test_request_context():
            document = self.application.view_functions["openapi"]()
        try:
            rule, _ = self.application.url_map.bind("").match(
                answer.request.path, method=answer.request.method, return_rule=True
            )
        except (NotFound, MethodNotAllowed):  # of no address: an error all the same
            return _hold(document, "#/components/schemas/Error", answer.json)
        if str(rule) == "/":
            return None
        path = str(rule).replace("<int:number>", "{number}").replace("<name>", "{name}")
        said = document["paths"][path][answer.request.method.lower()]["responses"][str(answer.status_code)]
        assert answer.mimetype in said["content"]
        assert all(name in answer.headers for name in said.get("headers", ()))
        self.checked += 1
        if answer.mimetype == "application/json":
            place = f"{path}/{answer.request.method.lower()}/responses/{answer.status_code}/content/application~1json"
            _hold(document, "#/paths/" + path.replace("/", "~1") + place.removeprefix(path) + "/schema", answer.json)
        return None


def _hold(document: dict, place: str, value) -> None:
    """Against the schema at that place, whose objects have no further keys."""
    Draft202012Validator({**_closed(document), "$ref": place}).validate(value)


def _closed(schema):
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: _closed(one) for name, one in schema.items()}
    return found | {"additionalProperties": False} if "required" in found and "properties" in found else found
