"""Names of published models to local folders: downloaded once, only by rank 0, or not at all with `--offline`.

A name is `owner/model` or `owner/model/component`, with `@REVISION` (a branch, tag or commit) or without, on the
Hugging Face hub (or the mirror HF_ENDPOINT), or else on Paddle's own server. From the hub come configs, tokenizers and
safetensors, and pickles only where a component has nothing else; files are compared with the hub's SHA-256. Single
files from elsewhere have names in `find_weights`.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..utils.checksums import hash_file
from ..utils.errors import ModelError
from ..utils.files import atomic_write, is_address, make_output_dir, meant_path, refused_offline
from ..utils.log import get_logger, progress
from ..utils.processes.ranks import World, barrier
from ..utils.store.cache import input_path
from ..utils.variables import is_offline
from .folders import COMPONENT_FOLDERS, FOLDERS, FURTHER_FOLDERS, find_runs, holds_model, is_run

ALL_FOLDERS = FOLDERS | FURTHER_FOLDERS
_COMPONENTS = ("tokenizer", *(name for names in ALL_FOLDERS.values() for name in names))
_SMALL = ("*.json", "vocab.txt", "merges.txt", "spiece.model")
PACKAGED = Path(__file__).parents[1] / "config/weights"  # trained networks that come with the package, by name
SIDE_BY_SIDE = {"": ("",)}  # config, tokenizer and weights, without folders
RANDOM = "random"  # in place of a path, where random weights will do
_SECONDS, _BLOCK_BYTES = 30.0, 1 << 20


@dataclass(frozen=True)
class PublishedFile:
    """A file of weights. sha256: how the published SHA-256 begins; "" where none is published."""

    url: str
    sha256: str = ""


def locate_model(name_or_path, offline: bool = False, kinds: Iterable[str] = tuple(COMPONENT_FOLDERS)) -> Path:
    """The path itself, or the folder of a name in the cache, downloaded where it is missing. `kinds`: the wanted
    components; a text encoder comes with its tokenizer. Raises ModelError."""
    text = check_name(name_or_path)
    if is_offline(offline) and is_address(text):
        raise refused_offline(text)
    path = input_path(text).expanduser()
    if path.exists():
        return path
    world, (repository, subfolder) = World.detect(), split_name(text)
    folders = {kind: ALL_FOLDERS[kind] for kind in kinds}
    if world.is_main and not is_offline(offline):
        get_logger().info("there is no folder %s here (%s): fetching the model of this name", text, meant_path(text))
        folder = _fetch(repository, subfolder, folders, local_only=False)
        _check_sums(folder)
    barrier(world)
    if not world.is_main or is_offline(offline):
        folder = _fetch(repository, subfolder, folders, local_only=True)
    found = folder / subfolder
    if not found.is_dir():
        raise ModelError(f"the model {repository['repo_id']} has no folder {subfolder}; check the name")
    return found


def split_name(text: str) -> tuple[dict, str]:
    """(what huggingface_hub takes of a name owner/model/component@REVISION, the component or "")."""
    name, _, revision = text.partition("@")
    pieces = name.split("/")
    return {"repo_id": "/".join(pieces[:2]), "revision": revision or None}, "/".join(pieces[2:])


def packaged_or(name_or_path) -> Path | str:
    """The folder of a network that comes with the package, where this is its name and no path here; else the same."""
    text = str(name_or_path)
    own = PACKAGED / text
    return own if text.isidentifier() and own.is_dir() and not Path(text).exists() else text


def find_weights(name_or_path, files: Mapping[str, PublishedFile], offline: bool = False) -> Path:
    """The path itself; or the file of a name in `files`, or a hub's model of one folder. Raises ModelError."""
    path = Path(str(name_or_path)).expanduser()
    if path.exists():
        return path
    if str(name_or_path) in files:
        return _fetch_file(files[str(name_or_path)], is_offline(offline))
    try:
        check_name(name_or_path)
    except ModelError as error:
        names = f"a name ({', '.join(files)})" if files else "a name such as openai/clip-vit-base-patch32"
        raise ModelError(f"{error}, or give {names}") from error
    folder = _snapshot(split_name(str(name_or_path))[0], "", SIDE_BY_SIDE, is_offline(offline))
    _check_sums(folder)
    return folder


def _fetch_file(file: PublishedFile, offline: bool) -> Path:
    """The file in the folder ppldm of the hub's cache (HF_HOME)."""
    import requests
    from huggingface_hub import constants

    path = Path(constants.HF_HOME, "ppldm", file.url.rpartition("/")[2])
    if path.is_file():
        return path
    if offline:
        raise ModelError(f"{path} is not there and the network is not to be used; download {file.url} to that path")
    get_logger().info("fetching %s", file.url)
    make_output_dir(path.parent)
    try:
        with requests.get(file.url, stream=True, timeout=_SECONDS) as answer, atomic_write(path) as out:
            answer.raise_for_status()
            expected, digest = int(answer.headers.get("Content-Length", 0)), hashlib.sha256()
            with progress(total=expected or None, desc=path.name, unit="B", unit_scale=True) as bar:
                for block in answer.iter_content(_BLOCK_BYTES):
                    out.write(block)
                    digest.update(block)
                    bar.update(len(block))
            if expected and out.tell() != expected:
                raise ModelError(f"{file.url} ended after {out.tell()} of {expected} bytes; start again")
            if not digest.hexdigest().startswith(file.sha256):
                raise ModelError(f"{file.url} has another SHA-256 than is published ({file.sha256}…); start again")
    except requests.exceptions.RequestException as error:
        raise ModelError(
            f"{file.url} cannot be fetched ({str(error).splitlines()[0]}); start again, or download it to {path}"
        ) from error
    return path


def check_name(name_or_path) -> str:
    """The name, or its folder in the package. Raises ModelError for neither a place that is there nor such a name."""
    text = str(packaged_or(name_or_path))
    if is_address(text):
        return text  # the store says so where it is not there
    path = Path(text).expanduser()
    of_file = text.endswith((".ckpt", ".bin", ".safetensors", ".pdparams"))
    is_path = path.is_absolute() or text.startswith((".", "~")) or of_file
    first, *others = text.partition("@")[0].split("/")
    # A name of three pieces ends in a component, as vae or vae_1_0; where its first is a folder here, a path was meant.
    is_path |= len(others) == 2 and (Path(first).is_dir() or not others[1].startswith(_COMPONENTS))
    # One of two pieces may be of an owner of whom some models lie here; else, or where one is near, a path was meant.
    if len(others) == 1 and Path(first).is_dir() and not path.exists():
        of_owner = any(holds_model(one) and not is_run(one) for one in Path(first).iterdir())
        is_path |= meant_path(path, "") != "" or not of_owner
    if not path.exists() and (is_path or not 1 <= len(others) <= 2):
        runs = (f"name one that is there, as the run {run}" for run in find_runs(Path(), 3))  # outputs/mine/diffusion
        raise ModelError(f"no folder or file {path}; {meant_path(path, next(runs, 'check the path'))}")
    return text


def _fetch(repository: dict, subfolder: str, folders, local_only: bool) -> Path:
    """The model's folder in the cache of the hub, or else of Paddle's server."""
    try:
        folder = _snapshot(repository, subfolder, folders, local_only)
        names = [name for names in folders.values() for name in names]
        if not subfolder and len(folders) == 1 and not any((folder / name).is_dir() for name in names):
            return _snapshot(repository, "", SIDE_BY_SIDE, local_only)  # one network, as a CLIP is published
        return folder
    except ModelError:
        name, of_paddle = repository["repo_id"], repository["revision"] is None
        if of_paddle and (folder := _fetch_from_paddle(name, subfolder, folders, local_only)):
            return folder
        raise


def _fetch_from_paddle(repository: str, subfolder: str, folders, local_only: bool) -> Path | None:
    """The model's folder in PaddleNLP's cache, from Paddle's server; None where a component is missing."""
    from huggingface_hub.utils import EntryNotFoundError
    from paddlenlp.utils.download.bos_download import bos_download
    from paddlenlp.utils.env import MODEL_HOME

    from ..utils.machine.hub_names import network_errors

    folder = Path(MODEL_HOME, repository)

    def has(name: str, files) -> bool:
        try:
            for file in files:
                if not local_only:
                    bos_download(repo_id=repository, filename=file, subfolder=name)
        except (*network_errors(), EntryNotFoundError, AttributeError):  # the last: of a hub's error without an answer
            return False
        return all((folder / name / file).is_file() for file in files)

    wanted = [(subfolder,)] if subfolder else folders.values()
    if not all(any(has(name, ("config.json", "model_state.pdparams")) for name in names) for names in wanted):
        return None
    if not subfolder:
        has("scheduler", ("scheduler_config.json",))
    if "text_encoder" in folders and not has("tokenizer", ("vocab.txt", "tokenizer_config.json")):
        has("tokenizer", ("merges.txt", "vocab.json"))
    return folder


def _snapshot(repository: dict, subfolder: str, folders, local_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    wanted, patterns = patterns_of(subfolder, folders)
    with naming_hub_errors("/".join(filter(None, (repository["repo_id"], subfolder))), local_only):
        folder = Path(snapshot_download(**repository, allow_patterns=patterns, local_files_only=local_only))
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*")]
        if pickled := pickles_of(names, wanted):
            snapshot_download(**repository, allow_patterns=pickled, local_files_only=local_only)
    return folder


def patterns_of(subfolder: str, folders) -> tuple[list[str], list[str]]:
    """(how files of the wanted components begin, patterns of files without pickles)."""
    wanted = [subfolder] if subfolder else [name for names in folders.values() for name in names]
    readers = (name for name in folders if name.startswith("text_encoder"))
    extra = [name.replace("text_encoder", "tokenizer") for name in readers] + ["scheduler"] * (not subfolder)
    within = {name: f"{name}/" if name else "" for name in (*wanted, *extra)}
    patterns = [f"{folder}{small}" for folder in within.values() for small in _SMALL] + ["*.json"]
    places = [within[name] for name in wanted]
    return places, [*patterns, *(f"{place}*.safetensors" for place in places)]


def pickles_of(names: Iterable[str], places: list[str]) -> list[str]:
    """Patterns of pickles, of those places that have files, but no .safetensors right in them."""
    own = {place: [name.removeprefix(place) for name in names if name.startswith(place)] for place in places}
    lacking = (
        place for place, those in own.items() if not any(re.fullmatch(r"[^/]*\.safetensors", one) for one in those)
    )
    return [f"{place}*.bin" for place in lacking if own[place]]


@contextmanager
def naming_hub_errors(asked: str, local_only: bool) -> Iterator[None]:
    """What the hub answers within it is a ModelError."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from ..utils.machine.hub_names import network_errors

    try:
        yield
    except (HfHubHTTPError, HFValidationError, *network_errors(), OSError) as error:
        # An answer of the hub is an error of the network too; that nothing is in the cache is such an answer's kind.
        unreached = isinstance(error, network_errors()) and not isinstance(error, HfHubHTTPError)
        if unreached or isinstance(error, LocalEntryNotFoundError):
            raise ModelError(
                f"there is no folder {asked} here ({meant_path(asked)}), no model of that name in the cache, and the "
                f"{'network is not to be used' if local_only else 'hub cannot be reached'}; "
                "download the model first on every machine, where the network is, or name a mirror in HF_ENDPOINT"
            ) from error
        raise ModelError(
            f"there is no folder {asked} here ({meant_path(asked)}), and the hub gives no model of that name "
            f"({str(error).splitlines()[0]})"
        ) from error


def _check_sums(folder: Path) -> None:
    """Raises ModelError where a large file differs from the SHA-256 under which the hub names it."""
    for path in folder.rglob("*"):
        name = path.resolve().name
        if not path.is_file() or len(name) != 64:
            continue
        if hash_file(path) != name:
            raise ModelError(f"{path} is damaged: its SHA-256 is not the hub's; delete it and start again")
