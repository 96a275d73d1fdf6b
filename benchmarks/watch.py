"""How soon `ppldm watch` shows a long run:  python benchmarks/watch.py [--lines N] [--json OUT]

Writes a run's folder with N lines of metrics (17 numbers each, as training writes them), starts the command, and
measures, in seconds from the start of its process: until the port answers; until both answers that the page asks for
have come, with all lines read; and, where chromium is installed, from a browser's navigation until the curves are
drawn; and what the command has computed until then, which other load on the machine lengthens less. Then a line is
added: how long the next answers take, which read that line alone.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from results import ROOT, add_result_flags, save_results

sys.path.insert(0, str(ROOT / "tests/helpers"))
PORT = 18090


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=100_000)
    add_result_flags(parser, "watch")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = {"lines": arguments.lines, **measure(Path(folder), arguments.lines)}
    for name, value in result.items():
        print(f"{name:<40} {value}")
    save_results(arguments, result)


def measure(folder: Path, lines: int) -> dict:
    run = folder / "run"
    run.mkdir()
    (run / "run.json").write_text("{}")
    with open(run / "metrics.jsonl", "w") as file:
        file.writelines(line(step) for step in range(1, lines + 1))
    began = time.perf_counter()
    page = subprocess.Popen([sys.executable, "-m", "ppldm", "watch", run, "--port", str(PORT)], cwd=ROOT)
    try:
        url = f"http://127.0.0.1:{PORT}/"
        wait_for(url)
        found = {"metrics_mb": round((run / "metrics.jsonl").stat().st_size / 1e6, 1), "s_to_answer": since(began)}
        if shutil.which("chromedriver"):
            from browser import browser

            with browser(1280, 900, folder / "profile") as window:
                opened = time.perf_counter()
                window.open(url)
                window.wait_for('return document.querySelectorAll("#charts svg path").length > 10')
                found["s_browser_navigation_to_curves"] = since(opened)
        else:
            read(url)
        found["s_to_all_read"] = since(began)
        found["cpu_s_of_the_command_until_then"] = cpu_seconds(page.pid)
        for name in ("s_again", "s_after_a_new_line"):
            if name == "s_after_a_new_line":
                with open(run / "metrics.jsonl", "a") as file:
                    file.write(line(lines + 1))
            again = time.perf_counter()
            found["kb_of_curves"] = round(read(url) / 1e3)
            found[name] = since(again)
        return found
    finally:
        page.terminate()
        page.wait()


def cpu_seconds(process: int) -> float:
    """What a process has computed so far, which other load on the machine does not lengthen by much."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def line(step: int) -> str:
    loss = 0.1 + 1 / step
    record = {"global_step": step, "time": 1e9 + step, "loss": loss}
    record |= {f"loss_quarter_{number}": loss / number for number in range(1, 5)}
    record |= {"grad_norm": 1.23456789012, "data_crc32": 2882400001, "images_per_second": 12.3456789,
               "images_per_second_per_device": 12.3456789, "data_wait_share": 0.0123456, "avg_reader_cost": 0.0123456,
               "avg_batch_cost": 0.123456, "skipped_updates": 0, "skipped_rows": step // 100,
               "peak_memory_gb": 12.3456789, "lr_abs": 1e-4}  # fmt: skip
    return json.dumps(record) + "\n"


def wait_for(url: str) -> None:
    while True:
        try:
            urllib.request.urlopen(url, timeout=60).close()
            return
        except OSError:
            time.sleep(0.02)


def read(url: str) -> int:
    """Bytes of the curves."""
    urllib.request.urlopen(f"{url}now", timeout=60).close()
    with urllib.request.urlopen(f"{url}curves", timeout=60) as answer:
        return len(answer.read())


def since(began: float) -> float:
    return round(time.perf_counter() - began, 2)


if __name__ == "__main__":
    main()
