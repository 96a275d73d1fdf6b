"""`ppldm app` and `ppldm serve`: one HTTP interface over one queue of drawings; the first with a page on top."""

import secrets
import time
from pathlib import Path
from typing import Annotated

from fastcore.meta import delegates

from ...networks.engine import Dtype, Engine
from ...utils.errors import ConfigError
from ...utils.files import local_path
from ...utils.log import get_logger
from ...weights.fetch import check_name
from ...weights.lora.flag import Loras, check_loras
from ..pictures.ask import GuideModel, require_positive

_Models = Annotated[list[str], {"opt": True, "required": True, "nargs": "+", "type": str, "metavar": "MODEL"}]
_Names = Annotated[list[str], {"nargs": "+", "type": str, "metavar": "NAME"}]
_LINGER_SECONDS = 5  # after the last drawing, in which its sender can still fetch it
_SHORTEST_TOKEN = 16


def _serve(
    models: list[str],
    port: int,
    page: bool,
    host: str = "127.0.0.1",  # address to listen at; at any that other machines reach, a token is asked for
    allow_host: _Names = (),  # further names under which browsers or programs may ask
    token_file: str = None,  # file with the token that is asked for; by default one is made where it is needed
    out: str = None,  # folder to keep the pictures in; by default they are forgotten
    max_waiting: int = 32,  # jobs that may wait
    max_pictures: int = 16,  # in a job
    max_side: int = 1024,  # of a picture, pixels
    max_steps: int = 250,  # of a sampler
    max_memory_mb: int = 256,  # of pictures that are kept without --out
    ema: bool = False,  # the averaged weights of a checkpoint, or of a .ckpt
    lora: Loras = None,
    guide_model: GuideModel = None,
    decoder: str = None,  # stage B of Stable Cascade, checkpoint or pipeline, where the model is its stage C
    tokenizer: str = None,  # tokenizer folder, where the model brings none
    engine: Engine = None,
    dtype: Dtype = None,
    device: str = None,  # what to compute on, as --device of train: cpu, gpu, npu …, gpu:1
    offline: bool = False,  # never touch the network
) -> None:
    from ...utils.entry import entry
    from ...utils.web.server import check_port, is_loopback, serve

    limits = {"max_pictures": max_pictures, "max_side": max_side, "max_steps": max_steps}
    require_positive(**limits, max_waiting=max_waiting, max_memory_mb=max_memory_mb)
    check_port(port)
    for name in models:
        if models.count(name) > 1:
            raise ConfigError(f"--model names {name} twice; name each once")
        if not name:
            raise ConfigError("--model has no name; give a folder, a file or a name")
        check_name(name)
    token = read_token(token_file) if token_file else "" if is_loopback(host) else secrets.token_urlsafe(16)
    told = {"ema": ema, "decoder": decoder, "tokenizer": tokenizer, "guide_model": guide_model}
    computed = {"lora": check_loras(lora), "engine": engine, "dtype": dtype}
    folder = local_path(out) if out else None
    queues = []
    with entry(is_computing=lambda: any(job.state not in ENDED for queue in queues for job in queue.jobs())):
        from ...utils.log import quiet_libraries
        from ...utils.machine.devices import use_device
        from ..load import load
        from ..pictures.draw import describe_source
        from .api import make_api
        from .jobs import ENDED, Pictures, Queue
        from .paint import Painter

        use_device(device)
        quiet_libraries()
        get_logger().info("loading %s; the address follows", ", ".join(models))
        pictures = Pictures(folder, max_memory_mb << 20)
        sources = {name: describe_source(name, offline, **told) for name in models}
        painter = Painter({name: load(name, offline=offline, **told, **computed) for name in models}, sources)
        queue = Queue(painter.draw, pictures, max_waiting)
        queues.append(queue)
        flask = make_api(painter, queue, [host, *allow_host], token, page, **limits)
        serve(flask, host, port, f"#token={token}" if token else "", lambda: _finish(queue))


@delegates(_serve, but=["page"])
def app(
    model: _Models,  # folders of pipelines or runs, checkpoints, single files or names; several are compared
    port: int = 8080,  # of the page
    **flags,
):
    """Draw with trained models on a web page: queue, previews, gallery, pictures side by side."""
    _serve(model, port, page=True, **flags)


@delegates(_serve, but=["page"])
def serve(
    model: _Models,  # folders of pipelines or runs, checkpoints, single files or names; a request says which draws
    port: int = 8081,  # of the interface
    **flags,
):
    """Draw with trained models for other programs: an HTTP interface with a queue (docs/drawing.md)."""
    _serve(model, port, page=False, **flags)


def _finish(queue) -> None:
    """Wait for the drawing that is under way, and for its sender."""
    if queue.stop():
        time.sleep(_LINGER_SECONDS)


def read_token(path: str) -> str:
    """The token in a file. Raises ConfigError."""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--token_file {path} cannot be read; write a line of {_SHORTEST_TOKEN} letters") from error
    if len(token) < _SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"--token_file {path} must hold one word of {_SHORTEST_TOKEN} ASCII letters or more; make one by "
            "`openssl rand -hex 16`"
        )
    return token
