"""A part is opened about once for each window of the order that reads from it, for any lists and weights."""

import pickle
import resource
from collections import Counter

import numpy as np
import pytest

from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats import open as module
from ppldm.data.formats.open import OpenParts, count_open_parts, count_parts_in_window
from ppldm.data.formats.part import write_part
from ppldm.data.order import RUN_LENGTH, WINDOW_RUNS, Mix, Order, bucket_window_runs

MIN = module._MIN_OPEN_PARTS


@pytest.fixture
def make_lists(tmp_path, make_rows):
    """Sources of `num_lists` lists of `num_parts` parts of 16 rows: links to one part, since only opens count."""

    def make(num_lists, num_parts, weights=None):
        write_part(tmp_path / "one.gz", make_rows(0, 16))
        lines = []
        for i in range(num_lists):
            names = [f"list{i}-part-{j:05}.gz" for j in range(num_parts)]
            for name in names:
                (tmp_path / name).symlink_to("one.gz")
                (tmp_path / f"{name}.idx").symlink_to("one.gz.idx")
            write_filelist(tmp_path / f"list{i}.filelist", names)
            lines.append(f"list{i}.filelist" + (f" {weights[i]}" if weights else ""))
        write_filelist(tmp_path / "train.filelist.list", lines)
        return read_sources(tmp_path / "train.filelist.list")

    return make


@pytest.mark.parametrize("num_lists, weights", [(2, (1, 3)), (2, None), (3, (1, 1, 0)), (1, None)])
def test_a_part_is_opened_once_for_each_window(make_lists, make_dataset, monkeypatch, num_lists, weights):
    dataset = make_dataset(make_lists(num_lists, 100, weights))
    opened, real = Counter(), module.open_part
    monkeypatch.setattr(module, "open_part", lambda path, source: opened.update([path]) or real(path, source))
    _, rows = Mix(dataset.list_sizes, dataset.weights, 0).samples(0, 1500)
    for row in rows.tolist():
        dataset.read_row(row)
    assert set(opened.values()) == {1} and len(opened) > 64


@pytest.mark.parametrize("rows_of_parts", [[300] * 256, [7] * 2560, [1000, 0, 0, 5, 2043, 24] * 40, [102_400], []])
def test_no_window_of_the_order_reads_from_more_parts_than_are_counted(rows_of_parts):
    count = count_parts_in_window(rows_of_parts)
    assert count <= np.count_nonzero(rows_of_parts)
    if not rows_of_parts:
        assert count == 0
        return
    total, ends = sum(rows_of_parts), np.cumsum(rows_of_parts)
    assert total % RUN_LENGTH == 0, "or windows begin elsewhere"
    most, window = 0, RUN_LENGTH * WINDOW_RUNS
    for seed in range(3):
        for start in range(0, total, window):
            rows = Order(total, seed).rows(0, start, min(start + window, total))
            most = max(most, len(np.unique(np.searchsorted(ends, rows, side="right"))))
    assert most <= count <= 3 * most


def test_lists_with_weights_need_the_sum_of_their_windows_and_those_without_one_window():
    parts, lists = [256 * 4] * 400, [200, 200]
    assert count_open_parts(parts, lists, None) == WINDOW_RUNS
    assert count_open_parts(parts, lists, (1, 5)) == 2 * WINDOW_RUNS
    assert count_open_parts(parts, lists, (1, 0)) == WINDOW_RUNS
    assert count_open_parts([10], [1], None) == MIN


def test_the_limit_on_open_files_bounds_the_count(monkeypatch):
    parts, lists = [256] * 1000, [100] * 10
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        for files, expected in {1024: 384, 400: 72, 100: MIN}.items():
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
            assert count_open_parts(parts, lists, [1] * 10) == expected
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_open_parts_go_to_another_process_without_their_files(make_lists):
    (source,) = make_lists(1, 2)
    parts = OpenParts([(path, source) for path in source.parts], 2)
    assert parts[1] is parts[1]
    again = pickle.loads(pickle.dumps(parts))
    assert again[1] is not parts[1] and again[1].read(3) == parts[1].read(3)


@pytest.mark.parametrize("num_buckets", [1, 3, 40])
def test_rows_of_several_shapes_need_the_sum_of_the_windows_of_their_buckets(num_buckets):
    rows = np.full((400, num_buckets), RUN_LENGTH * 4)
    runs = WINDOW_RUNS if num_buckets == 1 else bucket_window_runs(num_buckets)
    assert count_open_parts(rows, [400], None) == num_buckets * runs
    rows[:, 1:2] = 0
    fewer = max(num_buckets - 1, 1)
    runs = WINDOW_RUNS if fewer == 1 else bucket_window_runs(fewer)
    assert count_open_parts(rows, [400], None) == fewer * runs
    assert count_open_parts(rows, [200, 200], (0, 1)) == min(fewer * runs, 200), "no more than there are"


def test_windows_of_many_buckets_are_shorter_and_never_under_8_runs():
    assert [bucket_window_runs(count) for count in (1, 2, 4, 8, 32, 40, 255)] == [64, 64, 64, 32, 8, 8, 8]
