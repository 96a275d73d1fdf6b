"""`ppldm app`: a small web page that draws. Prompt, sliders, pictures; one drawing at a time.

The page is one file of this module, without anything from elsewhere, served by Flask (which VisualDL brings). It takes
JSON and gives JSON, so that scripts can ask it too:

    POST /draw {"prompt": "a red heart", "num_samples": 2}   ->   {"pictures": ["data:image/png;base64,...", ...], ...}
"""

import base64
import io
import threading
from typing import Annotated

from ..utils.errors import ConfigError, PpldmError

LIMITS = {"num_samples": (1, 16), "num_inference_steps": (1, 1000), "seed": (0, 2**31 - 1), "guidance_scale": (0, 50)}
DEFAULTS = {"num_samples": 4, "num_inference_steps": 50, "seed": 23, "guidance_scale": 7.5, "sampler": "ddim"}
MAX_REQUEST_BYTES = 64 << 10


def app(
    model: Annotated[str, {"opt": True, "required": True}],  # pipeline folder, checkpoint, CompVis' .ckpt, or a name
    host: str = "127.0.0.1",  # address to listen at; 0.0.0.0 lets other machines draw too
    port: int = 8080,  # of the page
    ema: bool = False,  # the averaged weights of a checkpoint, or of a .ckpt
    tokenizer: str = None,  # tokenizer folder, where the model brings none
    offline: bool = False,  # never touch the network
):
    """Draw with a trained model on a small web page."""
    from ..models.weights.fetch import check_name
    from ..utils.entry import entry

    check_name(model)
    with entry():
        from werkzeug.serving import make_server

        from ..utils.log import get_logger, quiet_libraries
        from .pipeline import load

        quiet_libraries()
        page = make_app(load(model, ema=ema, tokenizer=tokenizer, offline=offline), model)
        try:
            if not 0 <= port < 1 << 16:
                raise ConfigError(f"--port {port} must be from 0 (any) to 65535")
            server = make_server(host, port, page, threaded=True)
        except (OSError, SystemExit) as error:
            raise ConfigError(f"cannot listen at {host}:{port}; choose another --port or --host") from error
        get_logger().info("http://%s:%d/ (Ctrl-C stops it)", host, server.port)
        server.serve_forever()


def make_app(pipeline, name: str):
    """The Flask application that draws with `pipeline`; `name` is shown as its title."""
    from flask import Flask, jsonify, render_template_string, request

    from .samplers import SAMPLERS

    flask = Flask("ppldm")
    flask.config["MAX_CONTENT_LENGTH"] = MAX_REQUEST_BYTES
    drawing = threading.Lock()

    @flask.get("/")
    def page():
        return render_template_string(
            _PAGE, name=name, defaults=DEFAULTS, limits=LIMITS, samplers=list(SAMPLERS), side=pipeline.resolution
        )

    @flask.post("/draw")
    def draw():
        # Only JSON: another site's form, which the browser would send unasked, is refused here.
        settings = read_settings(request.get_json())
        with drawing:
            pictures = pipeline.generate([settings.pop("prompt")], **settings)[0]
        return jsonify(pictures=[_data_url(picture) for picture in pictures], settings=settings)

    @flask.errorhandler(PpldmError)
    def refused(error):
        return jsonify(error=str(error)), 400

    return flask


def read_settings(asked) -> dict:
    """The keyword arguments of `generate`, and `prompt`, from a request's JSON. Raises ConfigError."""
    if not isinstance(asked, dict) or not isinstance(asked.get("prompt"), str):
        raise ConfigError('send an object with a "prompt"')
    known = {"prompt", "negative_prompt", *DEFAULTS}
    unknown = sorted(asked.keys() - known)
    if unknown:
        raise ConfigError(f"no setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
    settings = {**DEFAULTS, **asked}
    for key, (low, high) in LIMITS.items():
        kind = float if key == "guidance_scale" else int
        value = settings[key]
        if isinstance(value, bool) or not isinstance(value, (int, kind)) or not low <= value <= high:
            raise ConfigError(f"{key} {value!r} must be a number from {low} to {high}")
    if not isinstance(settings["sampler"], str):
        raise ConfigError("sampler must be a name")
    negative = settings.pop("negative_prompt", "")
    if not isinstance(negative, str):
        raise ConfigError("negative_prompt must be a text")
    return {**settings, "negative_prompts": negative}


def _data_url(picture) -> str:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>ppldm: {{ name }}</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
  h1 { font-size: 1.2rem; overflow-wrap: anywhere; }
  form { display: grid; grid-template-columns: 12rem 1fr 4rem; gap: .5rem 1rem; align-items: center; }
  input, select, button { font: inherit; } input[type=text] { grid-column: 2 / 4; padding: .3rem .5rem; }
  button { grid-column: 2 / 4; padding: .5rem; }
  #pictures { display: flex; flex-wrap: wrap; gap: .5rem; margin-top: 1rem; }
  #pictures img { width: max(8rem, {{ side }}px); image-rendering: auto; }
  #status { min-height: 1.5rem; margin-top: .5rem; } #status.error { color: #a00; }
</style>
</head>
<body>
<h1>{{ name }}</h1>
<form id="form">
  <label for="prompt">Prompt</label><input type="text" id="prompt" autofocus required>
  <label for="negative_prompt">Not in the picture</label><input type="text" id="negative_prompt">
  <label for="guidance_scale">Guidance</label>
  <input type="range" id="guidance_scale" min="1" max="20" step="0.5" value="{{ defaults.guidance_scale }}">
  <output for="guidance_scale"></output>
  <label for="num_inference_steps">Steps</label>
  <input type="range" id="num_inference_steps" min="1" max="250" value="{{ defaults.num_inference_steps }}">
  <output for="num_inference_steps"></output>
  <label for="num_samples">Pictures</label>
  <input type="range" id="num_samples" min="1" max="{{ limits.num_samples[1] }}" value="{{ defaults.num_samples }}">
  <output for="num_samples"></output>
  <label for="seed">Seed</label>
  <input type="number" id="seed" min="0" max="{{ limits.seed[1] }}" value="{{ defaults.seed }}"><span></span>
  <label for="sampler">Sampler</label>
  <select id="sampler">{% for one in samplers %}<option>{{ one }}</option>{% endfor %}</select><span></span>
  <button id="draw">Draw</button>
</form>
<div id="status" role="status"></div>
<div id="pictures"></div>
<script>
  const field = id => document.getElementById(id);
  const numbers = ["guidance_scale", "num_inference_steps", "num_samples", "seed"];
  for (const output of document.querySelectorAll("output")) {
    const slider = field(output.htmlFor.value);
    const show = () => { output.value = slider.value; };
    slider.addEventListener("input", show);
    show();
  }
  field("form").addEventListener("submit", async event => {
    event.preventDefault();
    const settings = {};
    for (const id of ["prompt", "negative_prompt", "sampler"]) settings[id] = field(id).value;
    for (const id of numbers) settings[id] = Number(field(id).value);
    field("draw").disabled = true;
    field("status").className = "";
    field("status").textContent = "drawing …";
    const started = performance.now();
    try {
      const answer = await fetch("draw", {
        method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify(settings),
      });
      const result = await answer.json();
      if (!answer.ok) throw new Error(result.error);
      field("pictures").replaceChildren(...result.pictures.map(url => {
        const picture = new Image();
        picture.src = url;
        picture.alt = settings.prompt;
        return picture;
      }));
      const seconds = ((performance.now() - started) / 1000).toFixed(1);
      field("status").textContent = `${result.pictures.length} pictures in ${seconds} s`;
    } catch (error) {
      field("status").className = "error";
      field("status").textContent = error.message;
    }
    field("draw").disabled = false;
  });
</script>
</body>
</html>
"""
