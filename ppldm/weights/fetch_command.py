"""`ppldm fetch`: a published model into the cache, by what `locate_model` fetches for commands that take its name."""

import shutil
from fnmatch import fnmatch
from pathlib import Path

from ..utils.errors import ConfigError, ModelError
from ..utils.files import atomic_dir, is_address
from ..utils.text import count_of, print_report
from ..utils.variables import is_offline
from .fetch import (
    ALL_FOLDERS,
    SIDE_BY_SIDE,
    check_name,
    locate_model,
    naming_hub_errors,
    patterns_of,
    pickles_of,
    split_name,
)
from .folders import COMPONENT_FOLDERS


def fetch(
    name: str,  # owner/model[/component][@REVISION], on the hub or the mirror in HF_ENDPOINT
    out: str = "",  # copy it to this folder, which must not be there
    dry_run: bool = False,  # say which files these are and how large, and write nothing
    offline: bool = False,  # never touch the network: only say where it lies
    json: bool = False,  # print the report as JSON
):
    """Fetch a published model, or a component of one, ahead of the commands that take its name.

    Prints where it lies and how large it is; what is there already is not fetched again. Later commands find it by its
    name in the same cache (HF_HOME), with --offline too.
    """
    if out and Path(out).exists():
        raise ConfigError(f"--out {out} is there already; name a new folder")
    text, kinds, published = check_name(name), [*COMPONENT_FOLDERS], dict[str, int]()
    repository, subfolder = split_name(text)
    is_here = is_offline(offline) or is_address(text) or Path(text).expanduser().exists()
    if not is_here:
        try:
            published = _list_published(repository)
        except ModelError:  # Paddle's server, which gives no list, may have it
            if dry_run:
                raise
    if published:
        starts = {subfolder} if subfolder else {file.partition("/")[0] for file in published}
        kinds = [kind for kind, names in ALL_FOLDERS.items() if starts & {*names}] or ["text_encoder"]
    if dry_run and not is_here:
        folder, files = None, choose_files(published, subfolder, kinds)
    else:
        folder = locate_model(name, offline, kinds)
        if out and folder.is_dir():
            with atomic_dir(Path(out)) as made:
                shutil.copytree(folder, made, dirs_exist_ok=True)
            folder = Path(out)
        paths = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.is_file())
        files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
    report = {"name": text, "folder": folder and str(folder), "files": files, "bytes": sum(files.values())}
    print_report(report, _describe, json)


def choose_files(published: dict[str, int], subfolder: str, kinds: list[str]) -> dict[str, int]:
    """Of the files of a model, with their bytes, those that `locate_model` would fetch."""
    places, patterns = patterns_of(subfolder, {kind: ALL_FOLDERS[kind] for kind in kinds})
    if not subfolder and not any(file.startswith(tuple(places)) for file in published):
        places, patterns = patterns_of("", SIDE_BY_SIDE)
    patterns += pickles_of(published, places)
    return {file: size for file, size in published.items() if any(fnmatch(file, one) for one in patterns)}


def _list_published(repository: dict) -> dict[str, int]:
    """The files of a model on the hub, with their bytes. Raises ModelError."""
    from huggingface_hub import HfApi

    with naming_hub_errors(repository["repo_id"], local_only=False):
        found = HfApi().model_info(**repository, files_metadata=True).siblings or ()
    return {file.rfilename: file.size or 0 for file in found}


def _describe(report: dict) -> str:
    lines = [f"{size / 1e6:12,.1f} MB  {name}" for name, size in report["files"].items() if not report["folder"]]
    total = f"{report['name']}: {count_of(len(report['files']), 'file')}, {report['bytes'] / 1e6:,.1f} MB"
    return "\n".join([*lines, f"{total}; " + (f"in {report['folder']}" if report["folder"] else "nothing was written")])
