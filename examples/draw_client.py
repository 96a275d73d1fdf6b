"""A client of `ppldm serve`, with Python's standard library alone:

    python examples/draw_client.py "a red heart" --out pictures [--url http://127.0.0.1:8081] [--token TOKEN]
        [--set num_samples=4 sampler=euler …]

Sends a drawing, shows its progress, and saves its pictures. Waits and asks again where the queue is full.
"""

import argparse
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def ask(url: str, token: str, asked: dict | None = None):
    """What the server answers. Raises urllib.error.HTTPError."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    request = urllib.request.Request(url, json.dumps(asked).encode() if asked else None, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        content = answer.read()
        return json.loads(content) if answer.headers.get_content_type() == "application/json" else content


def send(url: str, token: str, asked: dict) -> dict:
    """A new job, as soon as the queue takes it."""
    while True:
        try:
            return ask(f"{url}/v1/pictures", token, asked)
        except urllib.error.HTTPError as error:
            if error.code != 429:
                raise
            time.sleep(int(error.headers["Retry-After"]))


def draw(url: str, token: str, asked: dict, out: Path) -> list[Path]:
    """The files of the pictures."""
    job = send(url, token, asked)
    while job["state"] in ("waiting", "drawing"):
        print(f"\r{job['state']}, step {job['step']} of {job['num_steps']} ", end="", file=sys.stderr, flush=True)
        time.sleep(0.3)
        job = ask(f"{url}/v1/jobs/{job['id']}", token)
    print(f"\r{job['state']} after {job['seconds']} s; {job['error'] or job['warning']}", file=sys.stderr)
    if job["state"] != "done":
        sys.exit(1)
    out.mkdir(parents=True, exist_ok=True)
    files = [out / f"{job['id']}-{number:02d}.png" for number in range(job["num_pictures"])]
    for number, file in enumerate(files):
        file.write_bytes(ask(f"{url}/v1/jobs/{job['id']}/pictures/{number}", token))
    return files


def read_value(text: str):
    """A setting's value: a number where it is one."""
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--out", default="pictures")
    parser.add_argument("--url", default="http://127.0.0.1:8081")
    parser.add_argument("--token", default="")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE")
    flags = parser.parse_args()
    settings = {name: read_value(value) for name, _, value in (one.partition("=") for one in flags.set)}
    try:
        for path in draw(flags.url.rstrip("/"), flags.token, {"prompt": flags.prompt, **settings}, Path(flags.out)):
            print(path)
    except urllib.error.HTTPError as error:
        sys.exit(f"error: {json.load(error)['error']}")
    except urllib.error.URLError as error:
        sys.exit(f"error: {flags.url} cannot be reached ({error.reason}); is ppldm serve running there?")
