"""Whether uv installs in place of pip, and pip's settings in uv's words. Needs only Python.

uv reads neither pip.conf nor variables such as PIP_INDEX_URL. Each setting of pip is translated, or has no effect on
what is installed, or pip installs.
"""

import configparser
import os
import shutil
import ssl
import tempfile
from collections.abc import Mapping
from pathlib import Path

NEEDED_GIB = 5  # for uv's cache, of which the environment has hard links
# Setting of pip to variable of uv, and what stands between several values of it.
COUNTERPARTS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "retries": ("UV_HTTP_RETRIES", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "constraint": ("UV_CONSTRAINT", " "),
}
NO_EFFECT = {
    *("config-file", "disable-pip-version-check", "user", "no-input", "progress-bar", "quiet", "verbose", "no-color"),
    *("require-virtualenv", "require-venv", "break-system-packages", "root-user-action", "prefer-binary", "log"),
    *("no-warn-script-location", "no-python-version-warning", "upgrade-strategy", "use-feature", "use-deprecated"),
}
UNSET = ("", "0", "f", "false", "n", "no", "off")  # what pip reads as no


def read_pip_settings(environ: Mapping[str, str], prefix: Path) -> dict[str, str]:
    """What pip would find in its files and in the environment, by the long names of its flags."""
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    own = [home / ".pip", Path(environ.get("XDG_CONFIG_HOME") or home / ".config", "pip")]
    folders = [Path(one, "pip") for one in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")]
    files = [folder / "pip.conf" for folder in (*folders, Path("/etc"), *own, prefix)]
    if named := environ.get("PIP_CONFIG_FILE"):  # in place of the user's own
        own_files = [folder / "pip.conf" for folder in own if os.path.exists(named)]
        files = [] if named == os.devnull else [*(one for one in files if one not in own_files), Path(named)]
    parser = configparser.RawConfigParser()
    parser.read(files, "utf-8")
    read = [parser[section] for section in ("global", "install") if parser.has_section(section)]
    names = {name: value for name, value in environ.items() if name.startswith("PIP_")}
    read.append({name.removeprefix("PIP_"): value for name, value in names.items()})
    return {name.lower().replace("_", "-").removeprefix("--"): value for one in read for name, value in one.items()}


def translate(settings: Mapping[str, str], environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Variables for uv, and the settings that it has no counterpart of. What is set for uv itself stays as it is."""
    variables, unknown = {}, []
    if bundle := environ.get("REQUESTS_CA_BUNDLE") or environ.get("CURL_CA_BUNDLE"):
        settings = {"cert": bundle, **settings}
    for name, value in settings.items():
        if name in COUNTERPARTS:
            variable, separator = COUNTERPARTS[name]
            variables[variable] = separator.join(value.split())
        elif name in ("timeout", "default-timeout"):
            variables["UV_HTTP_TIMEOUT"] = value.partition(".")[0]
        elif name == "cert":
            variables["SSL_CERT_DIR" if os.path.isdir(value) else "SSL_CERT_FILE"] = value
        elif name == "proxy":
            variables |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), value)
        elif name == "cache-dir":
            variables["UV_CACHE_DIR"] = os.path.join(value, "uv")
        elif name == "no-cache-dir":  # any value means yes
            variables["UV_NO_CACHE"] = "1"
        elif name not in NO_EFFECT and value.lower() not in UNSET:
            unknown.append(name)
    if "UV_EXTRA_INDEX_URL" in variables:
        variables["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip looks for a version in all of them
    paths = ssl.get_default_verify_paths()
    if paths.cafile or (paths.capath and os.listdir(paths.capath)):
        variables |= dict.fromkeys(("UV_SYSTEM_CERTS", "UV_NATIVE_TLS"), "1")  # the second is the older name
    own = {name for name in environ if name.startswith("UV_")}
    return {k: v for k, v in variables.items() if k not in own and environ.get(k) != v}, unknown


def choose_installer(environ: Mapping[str, str], venv: Path) -> tuple[str, dict[str, str], str]:
    """`pip`, `uv` (from PyPI) or the path of a uv that is there; variables for uv; why it is pip, if it is."""
    variables, unknown = translate(read_pip_settings(environ, venv), environ)
    if unknown:
        return "pip", {}, f"uv has no counterpart of pip's setting {', '.join(unknown)}"
    merged = {**environ, **variables}
    cache = Path(merged.get("XDG_CACHE_HOME") or Path(merged.get("HOME") or os.path.expanduser("~"), ".cache"), "uv")
    cache = Path(tempfile.gettempdir() if merged.get("UV_NO_CACHE") else merged.get("UV_CACHE_DIR") or cache).absolute()
    place = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if not os.access(place, os.W_OK):
        return "pip", {}, f"uv's cache {cache} cannot be written"
    if (free := shutil.disk_usage(place).free) < NEEDED_GIB << 30:
        return "pip", {}, f"{place} has {free >> 30} GiB free for uv's cache, which takes {NEEDED_GIB}"
    return shutil.which("uv", path=environ.get("PATH")) or "uv", variables, ""
