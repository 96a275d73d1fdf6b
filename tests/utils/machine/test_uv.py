"""uv installs what pip would: each setting of pip is handed on, has no effect, or decides for pip."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ppldm.utils.machine import setup_plan as uv

# One value for every setting that is handed on: of pip, and the variables that uv reads.
HANDED_ON = [
    ("index-url", "https://mirror.example/simple", {"UV_DEFAULT_INDEX": "https://mirror.example/simple"}),
    ("find-links", "/wheels\n/more", {"UV_FIND_LINKS": "/wheels,/more"}),
    ("trusted-host", "a.example b.example:81", {"UV_INSECURE_HOST": "a.example b.example:81"}),
    ("timeout", "15.5", {"UV_HTTP_TIMEOUT": "15"}),
    ("default-timeout", "180", {"UV_HTTP_TIMEOUT": "180"}),
    ("retries", "9", {"UV_HTTP_RETRIES": "9"}),
    ("cert", "/etc/own.pem", {"SSL_CERT_FILE": "/etc/own.pem"}),
    ("cert", "/etc", {"SSL_CERT_DIR": "/etc"}),
    ("client-cert", "/etc/me.pem", {"SSL_CLIENT_CERT": "/etc/me.pem"}),
    ("proxy", "http://proxy.example:3128", dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY"), "http://proxy.example:3128")),
    ("cache-dir", "/big/pip", {"UV_CACHE_DIR": "/big/pip/uv"}),
    ("no-cache-dir", "0", {"UV_NO_CACHE": "1"}),
    ("constraint", "/etc/c.txt", {"UV_CONSTRAINT": "/etc/c.txt"}),
    (
        "extra-index-url",
        "https://a.example/ https://b.example/",
        {"UV_EXTRA_INDEX_URL": "https://a.example/ https://b.example/", "UV_INDEX_STRATEGY": "unsafe-best-match"},
    ),
]


@pytest.fixture
def bare(monkeypatch):
    """No certificates of the system, so that nothing is added for them."""
    monkeypatch.setattr(uv.ssl, "get_default_verify_paths", lambda: SimpleNamespace(cafile=None, capath=None))


@pytest.mark.parametrize(("name", "value", "variables"), HANDED_ON, ids=lambda one: one if isinstance(one, str) else "")
def test_a_setting_of_pip_is_handed_on_from_its_file_and_from_the_environment(bare, tmp_path, name, value, variables):
    file = tmp_path / "pip.conf"
    file.write_text("[global]\n" + f"{name} = {value}".replace("\n", "\n    "))
    for environ in ({"PIP_CONFIG_FILE": str(file)}, {f"PIP_{name.upper().replace('-', '_')}": value}):
        environ |= {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": str(tmp_path)}
        assert uv.translate(uv.read_pip_settings(environ, tmp_path / "venv"), environ)[0].items() >= variables.items()


def test_what_is_set_for_uv_stays_and_what_pip_puts_over_the_environment_does_so_here(bare):
    settings = {"index-url": "https://pip.example/", "cert": "/pip.pem"}
    environ = {"UV_DEFAULT_INDEX": "https://uv.example/", "SSL_CERT_FILE": "/other.pem"}
    assert uv.translate(settings, environ) == ({"SSL_CERT_FILE": "/pip.pem"}, [])
    assert uv.translate({}, {"REQUESTS_CA_BUNDLE": "/bundle.pem"}) == ({"SSL_CERT_FILE": "/bundle.pem"}, [])


def test_certificates_of_the_system_are_trusted_where_there_are_some(monkeypatch):
    for paths, trusted in [((None, None), False), (("/a.pem", None), True), ((None, "/etc"), True)]:
        found = SimpleNamespace(cafile=paths[0], capath=paths[1])
        monkeypatch.setattr(uv.ssl, "get_default_verify_paths", lambda found=found: found)
        assert ("UV_SYSTEM_CERTS" in uv.translate({}, {})[0]) == trusted


def test_every_option_of_pip_is_known_or_decides_for_pip(tmp_path):
    shown = subprocess.run([sys.executable, "-m", "pip", "install", "--help"], capture_output=True, text=True).stdout
    options = set(re.findall(r"(?<![\w-])--([a-z][a-z-]+)", shown))
    assert {"index-url", "only-binary", "no-index", "cert"} <= options
    known = uv.NO_EFFECT | {name for name, _, _ in HANDED_ON}
    for name in sorted(options - known):
        environ = {"PATH": "", "HOME": str(tmp_path), f"PIP_{name.upper().replace('-', '_')}": "1"}
        installer, variables, why = uv.choose_installer(environ, tmp_path)
        assert (installer, variables) == ("pip", {}) and name in why


OF_PIP = """
import json
from pip._internal.configuration import Configuration
read, merged = Configuration(isolated=False), {}
read.load()
for _, values in read.items():
    merged.update(values)
print(json.dumps(merged))
"""


@pytest.mark.parametrize("section", ["global", "install", "download"])
def test_pip_itself_reads_the_same(tmp_path, section):
    for name in ("b/pip/pip.conf", ".config/pip/pip.conf", "a/pip/pip.conf", ".pip/pip.conf", "named.conf"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        text = f"[global]\n--timeout = {name}\nfind-links =\n    /a\n    /b\n"
        (tmp_path / name).write_text(text + f"[{section}]\nretries = {name}\n" * (section != "global"))
    environ = {"HOME": str(tmp_path), "XDG_CONFIG_DIRS": f"{tmp_path}/a:{tmp_path}/b", "PIP_INDEX_URL": "https://a.b/"}
    for named in (None, str(tmp_path / "named.conf"), str(tmp_path / "none.conf"), os.devnull):
        variables = environ | ({"PIP_CONFIG_FILE": named} if named else {})
        done = subprocess.run([sys.executable, "-c", OF_PIP], env=variables, capture_output=True, check=True)
        of_pip = {}
        for part in ("global.", "install.", ":env:."):  # the later one counts
            names = [name for name in json.loads(done.stdout) if name.startswith(part)]
            of_pip |= {name.removeprefix(part): json.loads(done.stdout)[name] for name in names}
        assert uv.read_pip_settings(variables, Path(sys.prefix)) == of_pip


@pytest.mark.parametrize("on_path", [True, False])
def test_uv_is_that_of_path_else_that_of_pypi(tmp_path, on_path):
    program = tmp_path / "uv"
    if on_path:
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    environ = {"PATH": str(tmp_path), "HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    assert uv.choose_installer(environ, tmp_path)[0] == (str(program) if on_path else "uv")


def test_pip_installs_where_the_cache_of_uv_has_no_room_or_is_not_to_be_written(monkeypatch, tmp_path):
    environ = {"PATH": "", "HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    asked = []
    monkeypatch.setattr(uv.shutil, "disk_usage", lambda place: asked.append(place) or SimpleNamespace(free=1 << 30))
    for more, place in [
        ({}, tmp_path),
        ({"PIP_CACHE_DIR": "/usr"}, Path("/usr")),
        ({"UV_CACHE_DIR": "/var/uv"}, Path("/var")),
    ]:
        installer, _, why = uv.choose_installer(environ | more, tmp_path)
        assert installer == "pip" and f"{place} has 1 GiB free" in why and asked[-1] == place
    monkeypatch.setattr(uv.os, "access", lambda *_: False)
    assert "cannot be written" in uv.choose_installer(environ, tmp_path)[2]
