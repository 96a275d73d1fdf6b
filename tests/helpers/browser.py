"""A Chromium that tests steer, by chromedriver's WebDriver interface (https://www.w3.org/TR/webdriver2/)."""

import base64
import json
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


class Page:
    """One window."""

    def __init__(self, url: str):
        self.url = url

    def ask(self, path: str, **body):
        """The value that the driver answers."""
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), method="POST")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{path}: {error.read().decode(errors='replace')[:2000]}") from error

    def open(self, url: str) -> None:
        """Load a page."""
        self.ask("/url", url=url)

    def run(self, script: str):
        """What a script returns."""
        return self.ask("/execute/sync", script=script, args=[])

    def _find(self, selector: str) -> str:
        return self.ask("/element", using="css selector", value=selector)[_ELEMENT]

    def write(self, selector: str, text: str) -> None:
        """Type into a field, in the place of what is there."""
        element = self._find(selector)
        self.ask(f"/element/{element}/clear")
        self.ask(f"/element/{element}/value", text=text)

    def click(self, selector: str) -> None:
        """Press a button."""
        self.ask(f"/element/{self._find(selector)}/click")

    def press(self, *keys: str) -> None:
        """A key, or several held together, by their characters in the standard's table, where the focus is."""
        actions = [{"type": "keyDown", "value": key} for key in keys]
        actions += [{"type": "keyUp", "value": key} for key in reversed(keys)]
        self.ask("/actions", actions=[{"type": "key", "id": "keys", "actions": actions}])

    def prefer(self, scheme: str) -> None:
        """Answer `prefers-color-scheme` with "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("/goog/cdp/execute", cmd="Emulation.setEmulatedMedia", params={"features": features})

    def wait_for(self, script: str, seconds: float = 120):
        """What a script returns, once it is true. Raises TimeoutError."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := self.run(script):
                return value
            time.sleep(0.1)
        raise TimeoutError(f"{script} is not true after {seconds} s")

    def save_screenshot(self, path: Path) -> None:
        """What the window shows, as PNG."""
        request = urllib.request.Request(f"{self.url}/screenshot")
        with urllib.request.urlopen(request, timeout=60) as answer:
            path.write_bytes(base64.b64decode(json.load(answer)["value"]))


@contextmanager
def browser(width: int, height: int, profile: Path):
    """A window of so many pixels, as a phone of that size has it; closed in the end."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        for line in driver.stdout:
            if "started successfully on port" in line:
                port = int(line.rstrip(".\n").split()[-1])
                break
        options = {
            "args": [*_ARGUMENTS, f"--user-data-dir={profile}"],
            "mobileEmulation": {"deviceMetrics": {"width": width, "height": height, "pixelRatio": 1}},
        }
        root = Page(f"http://127.0.0.1:{port}")
        session = _start_session(root, {"alwaysMatch": {"goog:chromeOptions": options}})
        try:
            yield Page(f"{root.url}/session/{session}")
        finally:
            urllib.request.urlopen(urllib.request.Request(f"{root.url}/session/{session}", method="DELETE"), timeout=60)
    finally:
        driver.terminate()
        driver.wait(timeout=30)


def _start_session(root: Page, capabilities: dict) -> str:
    """A browser's start is no test's subject, and on a busy machine the driver gives up waiting for it."""
    for _ in range(2):
        try:
            return root.ask("/session", capabilities=capabilities)["sessionId"]
        except RuntimeError as error:
            print(error)
    return root.ask("/session", capabilities=capabilities)["sessionId"]
