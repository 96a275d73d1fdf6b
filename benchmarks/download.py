"""How fast URLs become shards:  python benchmarks/download.py [--quick] [--json OUT]

`ppldm download` beside bare img2dataset, on the same photographs (`photographs.py`) from a server of this machine, so
that the processor is the limit and not the network: one process, 16 threads, with the settings of the published recipe
(short side 512: these photographs pass as they are) and with a short side of 256 (all are decoded, shrunk and encoded).
`ppldm on Spark` is `--distributor pyspark` on this machine, with one task at once. All times are of the whole command,
its start included. img2dataset alone needs wandb and albumentations, which ppldm does without: pip install wandb
'albumentations<2'; where they are missing, it is left out.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from commands import measure_command
from photographs import make_rows

THREADS = 16
CONTENDERS = ["ppldm", "ppldm on Spark"]
CONTENDERS += ["img2dataset"] * all(map(find_spec, ("img2dataset", "wandb", "albumentations")))
COMMON = ["--thread_count", str(THREADS), "--processes_count", "1", "--number_sample_per_shard", "10000"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000, help="URLs to download")
    parser.add_argument("--photographs", type=int, default=100, help="different photographs among them")
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 256], help="short sides kept, pixels")
    parser.add_argument("--quick", action="store_true", help="a few rows: to see that it runs")
    parser.add_argument("--json", help="also write the results here")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.photographs, arguments.sizes = 20, 4, [512]
    with tempfile.TemporaryDirectory() as folder:
        photographs = [row.image for row in make_rows(arguments.photographs)]
        ports = multiprocessing.Queue()
        server = multiprocessing.Process(target=serve, args=(photographs, ports), daemon=True)
        server.start()
        table = write_metadata(Path(folder, "part_1.parquet"), ports.get(), arguments.rows)
        results = [
            measure(name, table, Path(folder, f"{name}-{size}"), size)
            for size in arguments.sizes
            for name in CONTENDERS
        ]
        server.terminate()
    for result in results:
        sys.stdout.write(
            f"{result['name']:<14} size {result['size']:<4} {result['rows_per_sec']:>6.0f} rows/s, per 1,000 rows "
            f"{result['sec_per_1000']:.1f} s, {result['cpu_sec_per_1000']:.1f} s of a core, "
            f"{result['mb_per_1000']:.1f} MB\n"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=2) + "\n")


def measure(name: str, metadata: Path, out: Path, size: int) -> dict:
    """Wall-clock and processor time of a whole download, per 1,000 rows, and the bytes of its pictures."""
    flags = [*COMMON, "--image_size", str(size)]
    if name == "img2dataset":
        words = ["--url_list", metadata, "--input_format", "parquet", "--url_col", "URL", "--caption_col", "TEXT",
                 "--output_folder", out, "--resize_only_if_bigger", "True", "--resize_mode", "keep_ratio",
                 "--skip_reencode", "True", *flags]  # fmt: skip
        cost = measure_command("img2dataset.main", words, NO_ALBUMENTATIONS_UPDATE="1", WANDB_MODE="disabled")
    else:
        flags += ["--distributor", "pyspark"] if name == "ppldm on Spark" else []
        cost = measure_command("ppldm", ["download", metadata, "--out", out, "--preflight", "0", "--no-refuse-private",
                                         "--requests-per-host", "0", *flags])  # fmt: skip
    pictures = list(out.rglob("*.jpg"))
    rows = pq.read_metadata(metadata).num_rows
    if len(pictures) != rows:
        raise SystemExit(f"{name} kept {len(pictures)} of {rows} pictures; the server of this machine is overloaded")
    return {
        "name": name,
        "size": size,
        "rows": rows,
        "rows_per_sec": rows / cost.seconds,
        "sec_per_1000": cost.seconds / rows * 1000,
        "cpu_sec_per_1000": cost.cpu_seconds / rows * 1000,
        "mb_per_1000": sum(path.stat().st_size for path in pictures) / 1e6 / rows * 1000,
    }


def write_metadata(path: Path, port: int, num_rows: int) -> Path:
    urls = [f"http://127.0.0.1:{port}/{number}" for number in range(num_rows)]
    pq.write_table(pa.table({"URL": urls, "TEXT": [f"picture {number}" for number in range(num_rows)]}), path)
    return path


def serve(photographs: list[bytes], ports: multiprocessing.Queue) -> None:
    """Answer GET /N with photograph N modulo their number, for ever."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            body = photographs[int(self.path[1:]) % len(photographs)]
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        request_queue_size = 256

    with Server(("127.0.0.1", 0), Handler) as server:
        ports.put(server.server_port)
        server.serve_forever()


if __name__ == "__main__":
    main()
