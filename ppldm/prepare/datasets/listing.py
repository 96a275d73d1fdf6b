"""Which files a data set of a size consists of: names, addresses, and where the hub says them sizes and SHA-256.

A repository of the hub is read at one commit, which later runs of the same command keep; so its list is made once. Of a
list of links, only names are kept, as the links expire.
"""

import csv
from dataclasses import asdict, replace
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from urllib.parse import quote, urlsplit

from ...utils.errors import ConfigError, DataError, EnvironmentProblem
from .entry import Entry, Source, expand
from .fetch import RemoteFile, refusal

_SMALL_SHARE = 0.01


def list_files(entry: Entry, sources: tuple[Source, ...], size: str, links: str = "") -> list[RemoteFile]:
    """The files of sources, in order. links: the path of the list, where there is one. Raises ConfigError, DataError,
    EnvironmentProblem."""
    several = len({source.hub for source in sources}) > 1
    files = []
    for source in sources:
        folder = f"{source.hub.rpartition('/')[2]}/" if several else ""
        files += [replace(file, name=folder + file.name) for file in _list(entry, source, size, links)]
    if not files:
        raise DataError(f"{entry.name} has no files {', '.join(p for s in sources for p in s.all)}; see {entry.page}")
    for file in files:
        if not file.name or PurePosixPath(file.name).is_absolute() or ".." in PurePosixPath(file.name).parts:
            raise DataError(f"{entry.name} names the file {file.name!r}, which would lie elsewhere; see {entry.page}")
    return files


def as_record(files: list[RemoteFile]) -> list[dict]:
    """For a JSON file: without the links that expire."""
    return [asdict(file) | ({"url": ""} if file.is_link else {}) for file in files]


def from_record(stated: list[dict], links: str = "") -> list[RemoteFile]:
    """What `as_record` gave, with today's links where a list of them is given."""
    today = read_links(links) if links else {}
    return [RemoteFile(**one | ({"url": today[one["name"]]} if one["name"] in today else {})) for one in stated]


def read_links(path: str) -> dict[str, str]:
    """The addresses by name of a list: a header line, then name, tab, address. Raises ConfigError."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            lines = [line for line in csv.reader(file, delimiter="\t") if len(line) == 2]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--links {path} cannot be read ({error}); name the list of links as you got it") from error
    found = {name.strip(): url.strip() for name, url in lines if url.strip().startswith("http")}
    if not found:
        raise ConfigError(f"--links {path} has no lines of a name, a tab and a link; name the list as you got it")
    return found


def _list(entry: Entry, source: Source, size: str, links: str) -> list[RemoteFile]:
    if source.links:
        if not links:
            raise ConfigError(
                f"{entry.name} comes by a list of links that expire; get it at {entry.page} and add --links FILE"
            )
        known = {name: {"url": url} for name, url in read_links(links).items()}
        facts = {"page": entry.page, "is_link": True}
    elif source.hub:
        known, facts = _list_hub(entry, source), {"page": entry.page, "is_hub": True}
    else:
        known, facts = {}, {"page": entry.page}
    found = []
    for pattern in source.patterns(size):
        for name in expand(pattern):
            if not (source.links or source.hub):
                found.append(RemoteFile(urlsplit(name).path.rpartition("/")[2], name, **facts))
                continue
            names = [one for one in known if fnmatchcase(one, name)]
            if not names and "*" not in name:
                raise DataError(f"{entry.name}: {source.hub or links} has no {name}; see {entry.page}")
            found += [RemoteFile(one, **known[one], **facts) for one in sorted(names)]
    if size == "small" and not source.small and source.hub and len(found) > 1:
        found = found[: max(1, round(len(found) * _SMALL_SHARE))]
    return found


def _list_hub(entry: Entry, source: Source) -> dict[str, dict]:
    """Files of a repository by name. Raises DataError, EnvironmentProblem."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError
    from requests.exceptions import RequestException

    api = HfApi()
    try:
        commit = api.dataset_info(source.hub, revision=source.revision).sha
        files = api.list_repo_tree(source.hub, recursive=True, revision=commit, repo_type="dataset")
        sizes = {one.path: one for one in files if hasattr(one, "size")}
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (429, 500, 502, 503, 504):
            raise EnvironmentProblem(f"the hub answers {status}; give the same command again later") from error
        raise refusal(RemoteFile(source.hub, "", page=entry.page), status) from error
    except RequestException as error:
        raise EnvironmentProblem(
            f"the hub cannot be reached ({type(error).__name__}); check the network, or HF_ENDPOINT for a mirror"
        ) from error
    return {
        name: {
            "url": f"{api.endpoint}/datasets/{source.hub}/resolve/{commit}/{quote(name)}",
            "size": one.size,
            "sha256": one.lfs.sha256 if one.lfs else None,
        }
        for name, one in sizes.items()
    }
