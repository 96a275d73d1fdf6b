"""`ppldm app`: a small web page that draws. Prompt, sliders, pictures; one drawing at a time.

The page is one file of this module, without anything from elsewhere, served by Flask (which VisualDL brings). It takes
JSON and gives JSON, so that scripts can ask it too:

    POST /draw {"prompt": "a red heart", "num_samples": 2}   ->   {"pictures": ["data:image/png;base64,...", ...], ...}
"""

import threading
from typing import Annotated

from ..utils.errors import ConfigError
from ..utils.web_server import MAX_REQUEST_BYTES, make_flask, render_page, serve
from ..weights.lora.flag import Loras, check_loras
from .generate import describe_unknown_words
from .prompts import check_prompt

LIMITS = {"num_samples": (1, 16), "num_inference_steps": (1, 1000), "seed": (0, 2**31 - 1), "guidance_scale": (0, 50)}
DEFAULTS = {"num_samples": 4, "num_inference_steps": 50, "seed": 23, "guidance_scale": 7.5, "sampler": None}
# What HTTP's own errors mean here, by status.
_SENTENCES = {
    400: "the request is not JSON; send an object with a prompt",
    405: "this page does not take that method; ask / with GET and /draw with POST",
    413: f"the request is larger than {MAX_REQUEST_BYTES >> 10} kB; shorten the prompt",
    500: "drawing failed; the terminal of ppldm app shows why",
}

_Names = Annotated[list[str], {"nargs": "+", "type": str, "metavar": "NAME"}]


def app(
    model: Annotated[str, {"opt": True, "required": True}],  # pipeline folder, checkpoint, CompVis' .ckpt, or a name
    host: str = "127.0.0.1",  # address to listen at; 0.0.0.0 lets other machines draw too
    port: int = 8080,  # of the page
    allow_host: _Names = (),  # further names under which browsers may ask for the page
    ema: bool = False,  # the averaged weights of a checkpoint, or of a .ckpt
    lora: Loras = None,  # LoRA files to draw with, each with its weight: FILE:0.8; their changes add up
    tokenizer: str = None,  # tokenizer folder, where the model brings none
    offline: bool = False,  # never touch the network
):
    """Draw with a trained model on a small web page."""
    from ..utils.entry import entry
    from ..weights.fetch import check_name

    check_name(model)
    lora = check_loras(lora)
    with entry():
        from ..utils.log import quiet_libraries
        from .load import load

        quiet_libraries()
        pipeline = load(model, ema=ema, tokenizer=tokenizer, lora=lora, offline=offline)
        serve(make_app(pipeline, " + ".join([model, *lora]), [host, *allow_host]), host, port)


def make_app(pipeline, name: str, hosts=()):
    """The Flask application that draws with `pipeline`; `name` is its title. `hosts`: names of this machine."""
    from flask import jsonify, request

    from ..diffusion.samplers import samplers_of
    from ..utils.web_page import as_png_url

    flask = make_flask(hosts, _SENTENCES)
    drawing = threading.Lock()

    @flask.get("/")
    def page():
        shown = {"name": name, "defaults": DEFAULTS, "limits": LIMITS, "side": pipeline.resolution}
        return render_page(_PAGE, samplers=samplers_of(pipeline.model.process), **shown)

    @flask.post("/draw")
    def draw():
        # Only JSON: another site's form, which the browser would send unasked, is refused here.
        settings = read_settings(request.get_json())
        prompt = settings.pop("prompt")
        with drawing:
            pictures = pipeline.generate([prompt], **settings)[0]
        warning = describe_unknown_words(pipeline, [prompt, settings["negative_prompts"]])
        return jsonify(pictures=[as_png_url(picture) for picture in pictures], settings=settings, warning=warning)

    return flask


def read_settings(asked) -> dict:
    """The keyword arguments of `generate`, and `prompt`, from a request's JSON. Raises ConfigError."""
    if not isinstance(asked, dict) or not isinstance(asked.get("prompt"), str):
        raise ConfigError('send an object with a "prompt"')
    check_prompt(asked["prompt"], "the prompt")
    if not asked["prompt"].strip():
        raise ConfigError("the prompt is empty; write what to draw")
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
    if not isinstance(settings["sampler"], str | None):
        raise ConfigError("sampler must be a name")
    negative = settings.pop("negative_prompt", "")
    check_prompt(negative, "negative_prompt")
    return {**settings, "negative_prompts": negative}


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>ppldm: {{ name }}</title>
<style nonce="{{ nonce }}">
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
  h1 { font-size: 1.2rem; overflow-wrap: anywhere; }
  form { display: grid; grid-template-columns: 12rem 1fr 4rem; gap: .5rem 1rem; align-items: center; }
  input, select, button { font: inherit; min-width: 0; } input[type=text] { grid-column: 2 / 4; padding: .3rem .5rem; }
  button { grid-column: 2 / 4; padding: .5rem; }
  #pictures { display: flex; flex-wrap: wrap; gap: .5rem; margin-top: 1rem; }
  #pictures img { width: max(8rem, {{ side }}px); max-width: 100%; image-rendering: auto; }
  #status { min-height: 1.5rem; margin-top: .5rem; overflow-wrap: anywhere; } #status.error { color: #a00; }
  @media (max-width: 36rem) {
    form { grid-template-columns: 1fr 4rem; gap: .2rem .5rem; }
    label { grid-column: 1 / 3; } input[type=text], button { grid-column: 1 / 3; } button { margin-top: .5rem; }
  }
</style>
</head>
<body>
<h1>{{ name }}</h1>
<form id="form">
  <label for="prompt">Prompt</label><input type="text" id="prompt" autofocus>
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
<script nonce="{{ nonce }}">
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
      const text = await answer.text();
      let result;
      try {
        result = JSON.parse(text);
      } catch {
        throw new Error(`no answer of ppldm: HTTP ${answer.status} ${answer.statusText}`);
      }
      if (!answer.ok) throw new Error(result.error);
      field("pictures").replaceChildren(...result.pictures.map(url => {
        const picture = new Image();
        picture.src = url;
        picture.alt = settings.prompt;
        return picture;
      }));
      const seconds = ((performance.now() - started) / 1000).toFixed(1);
      const done = `${result.pictures.length} pictures in ${seconds} s`;
      field("status").textContent = result.warning ? `${done}; ${result.warning}` : done;
    } catch (error) {
      field("status").className = "error";
      field("status").textContent =
        error instanceof TypeError ? "ppldm app does not answer; is it still running?" : error.message;
    }
    field("draw").disabled = false;
  });
</script>
</body>
</html>
"""
