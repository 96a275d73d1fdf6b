"""Names of published models to local folders: downloaded once, only by rank 0, or not at all with `--offline`.

A name is `owner/model` or `owner/model/component` on the Hugging Face hub (or the mirror that HF_ENDPOINT names), or
else on Paddle's own server. From the hub come configs, tokenizers and safetensors, and pickles only where a component
has nothing else; it names large files by their SHA-256, with which each is compared.
"""

import hashlib
from pathlib import Path

from ..utils.errors import ModelError
from ..utils.log import get_logger
from ..utils.offline import is_offline
from ..utils.processes.rank_watch import barrier
from ..utils.processes.world import World

_SMALL = ("*.json", "vocab.txt", "merges.txt")


def locate_model(name_or_path, folders: dict[str, tuple[str, ...]], offline: bool = False) -> Path:
    """The path itself, or the folder of a name in the cache, downloaded where it is missing.

    `folders`: the folders of the components that are wanted. Raises ModelError.
    """
    check_name(name_or_path)
    text = str(name_or_path)
    path = Path(text).expanduser()
    if path.exists():
        return path
    pieces = text.split("/")
    world = World.detect()
    repository, subfolder = "/".join(pieces[:2]), "/".join(pieces[2:])
    if world.is_main and not is_offline(offline):
        get_logger().info("there is no folder %s here: fetching the model of this name", text)
        folder = _fetch(repository, subfolder, folders, local_only=False)
        _check_sums(folder)
    barrier(world)
    if not world.is_main or is_offline(offline):
        folder = _fetch(repository, subfolder, folders, local_only=True)
    found = folder / subfolder
    if not found.is_dir():
        raise ModelError(f"the model {repository} has no folder {subfolder}; check the name")
    return found


def check_name(name_or_path) -> None:
    """Raises ModelError where this is neither a folder or file that is there, nor in the form of a name."""
    text = str(name_or_path)
    path = Path(text).expanduser()
    is_path = path.is_absolute() or text.startswith((".", "~")) or path.suffix in (".ckpt", ".bin")
    if not path.exists() and (is_path or not 2 <= len(text.split("/")) <= 3):
        raise ModelError(f"no folder or file {path}; check the path")


def _fetch(repository: str, subfolder: str, folders, local_only: bool) -> Path:
    """The model's folder in the cache of the hub, or else of Paddle's server."""
    try:
        return _snapshot(repository, subfolder, folders, local_only)
    except ModelError:
        folder = _fetch_from_paddle(repository, subfolder, folders, local_only)
        if folder is None:
            raise
        return folder


def _fetch_from_paddle(repository: str, subfolder: str, folders, local_only: bool) -> Path | None:
    """The model's folder in PaddleNLP's cache, from Paddle's server (PPNLP_ENDPOINT); None where a component is
    missing."""
    from paddlenlp.utils.download.bos_download import bos_download
    from paddlenlp.utils.env import MODEL_HOME
    from requests.exceptions import RequestException

    folder = Path(MODEL_HOME, repository)

    def has(name: str, files) -> bool:
        try:
            for file in files:
                if not local_only:
                    bos_download(repo_id=repository, filename=file, subfolder=name)
        except RequestException:
            return False
        return all((folder / name / file).is_file() for file in files)

    wanted = [(subfolder,)] if subfolder else folders.values()
    if not all(any(has(name, ("config.json", "model_state.pdparams")) for name in names) for names in wanted):
        return None
    if not subfolder:
        has("scheduler", ("scheduler_config.json",))
        has("tokenizer", ("vocab.txt", "tokenizer_config.json"))
    return folder


def _snapshot(repository: str, subfolder: str, folders, local_only: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    from requests.exceptions import RequestException

    wanted = [subfolder] if subfolder else [name for names in folders.values() for name in names]
    extra = [] if subfolder else ["scheduler", "tokenizer"]
    patterns = [f"{name}/{small}" for name in (*wanted, *extra) for small in _SMALL] + ["*.json"]
    try:
        folder = Path(
            snapshot_download(
                repository,
                allow_patterns=[*patterns, *(f"{name}/*.safetensors" for name in wanted)],
                local_files_only=local_only,
            )
        )
        pickled = [
            f"{name}/*.bin"
            for name in wanted
            if (folder / name).is_dir() and not any((folder / name).glob("*.safetensors"))
        ]
        if pickled:
            snapshot_download(repository, allow_patterns=pickled, local_files_only=local_only)
        return folder
    except LocalEntryNotFoundError as error:
        raise ModelError(
            f"there is no folder {repository} here, no model of that name in the cache, and the "
            f"{'network is not to be used' if local_only else 'hub cannot be reached'}; "
            "check the path, or download the model first on every machine (without --offline)"
        ) from error
    except (HfHubHTTPError, HFValidationError, RequestException, OSError) as error:
        raise ModelError(
            f"there is no folder {repository} here, and the hub gives no model of that name "
            f"({str(error).splitlines()[0]}); check the path or the name"
        ) from error


def _check_sums(folder: Path) -> None:
    """Raises ModelError where a large file differs from the SHA-256 under which the hub names it."""
    for path in folder.rglob("*"):
        name = path.resolve().name
        if not path.is_file() or len(name) != 64:
            continue
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != name:
            raise ModelError(f"{path} is damaged: its SHA-256 is not the hub's; delete it and start again")
