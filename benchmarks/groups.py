"""How long it takes to look up a group among many rows of several shapes:  python benchmarks/groups.py [--json OUT]

Makes `--rows` rows of `--buckets` shapes, whose shares fall from one to the next as those of photographs do, and looks
up groups of `--group_size` rows: one after the other, as training does, through `--steps` global batches; and at places
far from one another, each in a window that was never seen, as a run does that resumes, in the first epoch and in epoch
10,000. Times are of one look-up of one group, in milliseconds that the processor worked for it: beside other load those
on the clock are longer (`wall`). The first look-ups also permute the runs of each bucket.
"""

import argparse
import resource
import time

import numpy as np
from results import add_result_flags, save_results

from ppldm.data.order import Mix
from ppldm.data.shapes import BucketIndex


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000_000, help="rows of all shapes")
    parser.add_argument("--buckets", type=int, default=40, help="shapes")
    parser.add_argument("--group_size", type=int, default=32, help="rows of a group")
    parser.add_argument("--steps", type=int, default=2000, help="groups looked up in order")
    add_result_flags(parser, "groups")
    arguments = parser.parse_args()
    codes = make_codes(arguments.rows, arguments.buckets)
    began = time.perf_counter()
    buckets = BucketIndex([(64, 64 + code) for code in range(arguments.buckets)], codes, [arguments.rows])
    order, size = Mix([arguments.rows], None, 0, buckets, arguments.group_size), arguments.group_size
    result = {
        "rows": arguments.rows,
        "buckets": arguments.buckets,
        "group_size": size,
        "seconds_to_make_the_index": round(time.perf_counter() - began, 2),
        "bytes_a_row_beside_the_codes": round(buckets._before.nbytes / arguments.rows, 3),
        "ms_of_the_first": round(look_up(order, size, 0)[0], 2),
    }
    in_order = [look_up(order, size, group) for group in range(1, arguments.steps)]
    epoch = arguments.rows // size
    places = np.random.default_rng(0).integers(0, epoch, 500).tolist()
    far = [look_up(order, size, group) for group in places]
    later = [look_up(order, size, 10_000 * epoch + group) for group in places]
    for name, times in (("in_order", in_order), ("far_apart", far), ("far_apart_in_epoch_10000", later)):
        worked, wall = zip(*times, strict=True)
        result[f"ms_{name}"] = {
            "median": round(float(np.median(worked)), 3),
            "99_percent": round(float(np.percentile(worked, 99)), 2),
            "most": round(max(worked), 2),
            "median_wall": round(float(np.median(wall)), 3),
        }
    result["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    for name, value in result.items():
        print(f"{name:<32} {value}")
    save_results(arguments, result)


def make_codes(num_rows: int, num_shapes: int) -> np.ndarray:
    """The shape of each row, uint8, drawn with shares that fall by a tenth from one shape to the next."""
    shares = np.cumsum(0.9 ** np.arange(num_shapes))
    draw, codes = np.random.default_rng(0), np.empty(num_rows, dtype=np.uint8)
    for start in range(0, num_rows, 1 << 20):
        count = min(1 << 20, num_rows - start)
        codes[start : start + count] = np.searchsorted(shares, draw.random(count) * shares[-1])
    return codes


def look_up(order: Mix, size: int, group: int) -> tuple[float, float]:
    """Milliseconds, of the processor and on the clock."""
    began, wall = time.thread_time(), time.perf_counter()
    order.samples(group * size, group * size + size)
    return 1e3 * (time.thread_time() - began), 1e3 * (time.perf_counter() - wall)


if __name__ == "__main__":
    main()
