import base64
import gzip
import itertools
import pickle
import zlib
from collections import Counter

import numpy as np
import pytest

from ppldm.data.filelist import read_sources, write_filelist
from ppldm.data.formats.part import Part, write_part
from ppldm.data.formats.row import BadRows, Row, encode_row
from ppldm.data.images import CropRule, crop_pixels, decode_pixels
from ppldm.data.kernels import INTERPOLATIONS
from ppldm.data.order import Mix
from ppldm.data.text.captions import CaptionRule
from ppldm.utils.errors import ConfigError, DataError, RowError


def same(a, b, leave_out=()):
    assert a.keys() == b.keys()
    return all(np.array_equal(a[key], b[key]) for key in a if key not in leave_out)


def test_rows_are_numbered_through_all_parts_and_lists(make_dataset):
    dataset = make_dataset()
    assert len(dataset) == 24 and dataset.list_sizes == [14, 10] and dataset.weights is None
    assert [dataset.read_row(row).caption for row in range(24)] == [f"picture {row} 图" for row in range(24)]
    for outside in (-1, 24):
        with pytest.raises(IndexError):
            dataset.read_row(outside)


def test_weights_are_those_of_the_list(make_dataset, make_sources):
    assert make_dataset(make_sources([2], [3], weights=[1, 0.5])).weights == [1.0, 0.5]


def test_a_sample_has_the_documented_keys_shapes_and_dtypes(make_dataset):
    sample = make_dataset()[(1, 5)]
    skipped = sample.pop("skipped")
    assert skipped == [] and {key: (value.shape, value.dtype.name) for key, value in sample.items()} == {
        "pixel_values": ((3, 16, 16), "uint8"),
        "input_ids": ((8,), "int64"),
        "timesteps": ((), "int64"),
        "sizes": ((6,), "int64"),
        "noise": ((4, 2, 2), "float32"),
        "posterior_noise": ((4, 2, 2), "float32"),
        "row_ids": ((), "int64"),
        "checksums": ((), "int64"),
    }
    assert sample["row_ids"] == 5
    read = [np.int64(5), sample["pixel_values"], sample["input_ids"]]
    assert sample["checksums"] == zlib.crc32(b"".join(one.tobytes() for one in read))


def test_a_sample_depends_on_seed_epoch_and_row_alone(make_dataset, make_sources):
    sources = make_sources([5, 9], [10])
    dataset = make_dataset(sources)
    samples = {row: dataset[(2, row)] for row in range(24)}
    np.random.seed(1)
    again = pickle.loads(pickle.dumps(make_dataset(sources)))
    for row in reversed(range(24)):
        assert same(again[(2, row)], samples[row])
    assert not same(dataset[(3, 4)], samples[4]) and not same(make_dataset(sources, seed=8)[(2, 4)], samples[4])
    noises = np.array([samples[row][key] for row in samples for key in ("noise", "posterior_noise")])
    assert len(np.unique(noises)) == noises.size


def test_a_batch_is_its_samples_stacked(make_dataset, make_sources):
    sources = make_sources([5, 9])
    keys = [(0, 3), (2, 13), (2, 0), (0, 3)]
    changes = {"crops": {"flip": True}, "inputs": {"noise_offset": 0.5}, "captions": {"drop_probability": 0.5}}
    for settings in ({}, changes, {"inputs": {"pixels_only": True}}):
        dataset = make_dataset(sources, **settings)
        batch, samples = dataset.make_batch(keys), [dataset[key] for key in keys]
        assert all(sample["skipped"] == [] == batch["skipped"] for sample in samples)
        stacked = {name: np.stack([sample[name] for sample in samples]) for name in batch if name != "skipped"}
        assert same(stacked | {"skipped": []}, batch)
        assert all(stacked[name].dtype == batch[name].dtype for name in stacked)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_pixels_are_resized_as_asked(make_dataset, make_sources, interpolation):
    dataset = make_dataset(make_sources([5]), crops={"random": False, "interpolation": interpolation})
    expected = np.empty((3, 16, 16), np.uint8)
    crop_pixels(decode_pixels(dataset.read_row(3).image), 0.9, None, interpolation, expected)
    assert (dataset[(0, 3)]["pixel_values"] == expected).all()


def test_noise_offset_is_one_more_normal_a_channel(make_dataset):
    plain, offset, double = (make_dataset(inputs={"noise_offset": strength}) for strength in (0.0, 0.5, 1.0))
    shifts = np.array([offset[(1, row)]["noise"] - plain[(1, row)]["noise"] for row in range(24)])
    assert np.abs(shifts - shifts.mean(axis=(2, 3), keepdims=True)).max() < 1e-6
    values = shifts[:, :, 0, 0]
    assert abs(values.std() / 0.5 - 1) < 0.25 and len(np.unique(values.round(6))) == values.size
    np.testing.assert_allclose(double[(1, 3)]["noise"] - plain[(1, 3)]["noise"], 2 * shifts[3], atol=1e-6)


def test_pixels_only_are_the_same_pixels_without_captions(make_dataset, make_sources):
    sources = make_sources([5])
    full, pixels = make_dataset(sources)[(0, 3)], make_dataset(sources, inputs={"pixels_only": True})[(0, 3)]
    assert set(pixels) == {"pixel_values", "posterior_noise", "row_ids", "checksums", "skipped"}
    assert same(pixels, {key: full[key] for key in pixels} | {"checksums": pixels["checksums"]})


def test_captions_are_dropped_with_their_probability(make_dataset, make_sources):
    sources = make_sources([5])
    draws = 2000
    for probability in (0.0, 0.1, 1.0):
        dataset = make_dataset(sources, captions={"drop_probability": probability})
        empty = dataset.tokenizer.encode([""])[0]
        dropped = sum(np.array_equal(dataset[(epoch, 2)]["input_ids"], empty) for epoch in range(draws))
        # Five standard deviations of the binomial distribution.
        assert abs(dropped - draws * probability) <= 5 * (draws * probability * (1 - probability)) ** 0.5


def test_timesteps_cover_their_range_evenly(make_dataset):
    dataset = make_dataset(inputs={"levels": 4})
    counts = np.bincount([int(dataset[(epoch, 2)]["timesteps"]) for epoch in range(1000)])
    assert len(counts) == 4 and counts.min() > 180


def test_crop_and_flip_can_be_turned_off_and_on(make_dataset, make_sources):
    sources = make_sources([5])
    fixed = make_dataset(sources, crops={"random": False})
    pixels = [fixed[(epoch, 2)]["pixel_values"] for epoch in range(20)]
    assert all(np.array_equal(p, pixels[0]) for p in pixels)
    assert len({make_dataset(sources)[(epoch, 2)]["pixel_values"].tobytes() for epoch in range(20)}) > 5
    flipping = make_dataset(sources, crops={"random": False, "flip": True})
    seen = {flipping[(epoch, 2)]["pixel_values"].tobytes() for epoch in range(20)}
    assert seen == {pixels[0].tobytes(), pixels[0][:, :, ::-1].tobytes()}


def test_one_of_several_captions_is_drawn_by_seed_epoch_and_row(make_dataset, tmp_path, make_image):
    columns = ["x", "pic|ture|0", "x", "x", "x", base64.b64encode(make_image()).decode()]
    (tmp_path / "p").write_text(("\t".join(columns) + "\n") * 3)
    write_filelist(tmp_path / "p.filelist", ["p"])
    write_filelist(tmp_path / "l.list", ["p.filelist layout=image_search_key_201810"])
    dataset = make_dataset(read_sources(tmp_path / "l.list"), captions={"drop_probability": 0})
    drawn = [[tuple(dataset[epoch, row]["input_ids"]) for epoch in range(300)] for row in range(3)]
    assert drawn[0] != drawn[1] and drawn[0] == [tuple(dataset[epoch, 0]["input_ids"]) for epoch in range(300)]
    counts = Counter(ids for row in drawn for ids in row)
    assert set(counts) == {tuple(dataset.tokenizer.encode([text])[0]) for text in ("pic", "ture", "0")}
    # Five standard deviations of the binomial distribution.
    assert all(abs(count - 300) < 5 * (900 * 2 / 9) ** 0.5 for count in counts.values())


def test_which_caption_is_drawn_says_nothing_of_whether_it_is_dropped(make_dataset, tmp_path, make_image):
    columns = ["x", "pic|ture", "x", "x", "x", base64.b64encode(make_image()).decode()]
    (tmp_path / "p").write_text("\t".join(columns) + "\n")
    write_filelist(tmp_path / "p.filelist", ["p"])
    write_filelist(tmp_path / "l.list", ["p.filelist layout=image_search_key_201810"])
    dataset = make_dataset(read_sources(tmp_path / "l.list"), captions={"drop_probability": 0.5})
    drawn = Counter(tuple(dataset[epoch, 0]["input_ids"]) for epoch in range(600))
    counts = [drawn[tuple(dataset.tokenizer.encode([text])[0])] for text in ("", "pic", "ture")]
    # Five standard deviations of the binomial distribution.
    assert sum(counts) == 600 and abs(counts[1] - 150) < 5 * (600 * 3 / 16) ** 0.5 > abs(counts[2] - 150)


@pytest.mark.parametrize("inputs", [{}, {"input_perturbation": 0.1}, {"pixels_only": True}])
def test_sample_bytes_are_those_of_its_inputs(make_dataset, inputs):
    dataset = make_dataset(inputs={"factor": 2, **inputs})
    sample = dataset[(0, 3)]
    assert dataset.sample_bytes == sum(sample[name].nbytes for name in dataset.inputs)
    for name, wanted in dataset.inputs.items():
        assert sample[name].shape == wanted.shape(16, 16) and sample[name].dtype == wanted.dtype


@pytest.fixture
def bad_sources(tmp_path, make_rows, make_image):
    """Rows 1 (no base64), 3 (no image), 4 (too small) and 9 (no columns) of ten are bad."""
    lines = [encode_row(row) for row in make_rows(0, 10)]
    lines[1] = b"caption\t\t!!!!\n"
    lines[3] = encode_row(Row("caption", b"no image"))
    lines[4] = encode_row(Row("caption", make_image(size=(15, 40))))
    lines[9] = b"caption\n"
    (tmp_path / "bad.gz").write_bytes(gzip.compress(b"".join(lines)))
    write_filelist(tmp_path / "bad.filelist", ["bad.gz"])
    return read_sources(tmp_path / "bad.filelist")


REASONS = {1: "base64", 3: "image", 4: "too_small", 9: "columns"}


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_a_bad_row_is_replaced_by_the_next_of_the_order_and_counted(make_dataset, bad_sources, epoch):
    dataset = make_dataset(bad_sources, captions={"drop_probability": 0}, crops={"random": False})
    order = Mix([10], None, 7).samples(epoch * 10, epoch * 10 + 10)[1].tolist()
    for position, row in enumerate(order):
        following = order[position:] + order[:position]
        skipped = list(itertools.takewhile(REASONS.__contains__, following))
        used = following[len(skipped)]
        sample, stand_in = dataset[(epoch, row)], dataset[(epoch, used)]
        assert sample["row_ids"] == used and sample["skipped"] == [REASONS[bad] for bad in skipped]
        for key in ("pixel_values", "input_ids"):
            assert np.array_equal(sample[key], stand_in[key])
        assert (row == used) == np.array_equal(sample["noise"], stand_in["noise"])


@pytest.mark.parametrize("weights", [None, [1, 0], [0, 1], [1, 1]])
def test_the_stand_in_is_of_the_same_list_wherever_the_sample_is_made(make_dataset, make_sources, weights, monkeypatch):
    sizes = [20, 10]
    dataset = make_dataset(make_sources(*([size] for size in sizes), weights=weights))
    read, bad = Part.read, {*range(12, 30)} - {22, 25}  # the first list ends, the second begins with bad rows

    def read_some(part, number):
        if number + (20 if part.path.name.startswith("list1") else 0) in bad:
            raise RowError("made", "made bad")
        return read(part, number)

    monkeypatch.setattr(Part, "read", read_some)
    epochs, places = Mix(sizes, weights, 7).samples(0, 60)
    keys = list(zip(epochs.tolist(), places.tolist(), strict=True))
    whole = dataset.make_batch(keys)
    alone = [dataset[key] for key in reversed(keys)][::-1]  # another order, one at a time, as ranks and resumes have it
    assert [int(sample["row_ids"]) for sample in alone] == whole["row_ids"].tolist()
    assert [reason for sample in alone for reason in sample["skipped"]] == whole["skipped"] != []
    for (_, place), row in zip(keys, whole["row_ids"].tolist(), strict=True):
        assert row not in bad and (place < 20) == (row < 20) and (place in bad or row == place)


def test_a_bad_row_can_stop_the_run_with_its_place(make_dataset, bad_sources):
    dataset = make_dataset(bad_sources, bad_rows=BadRows("raise"))
    with pytest.raises(DataError, match=r"too_small.*bad.gz row 4: .*15 x 40"):
        dataset[(0, 4)]
    with pytest.raises(RowError, match="bad.gz row 9"):
        dataset.read_row(9)


def test_nothing_but_bad_rows_is_an_error_with_examples(make_dataset, tmp_path, make_image):
    write_part(tmp_path / "part-0.gz", [Row("small", make_image(size=(4, 4)))] * 200)
    write_filelist(tmp_path / "small.filelist", ["part-0.gz"])
    with pytest.raises(DataError, match=r"100 bad rows in a row.*part-0.gz row 7: .*row \d+: .*row \d+: ") as caught:
        make_dataset(read_sources(tmp_path / "small.filelist"))[(0, 7)]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "setting", "named"),
    [
        (CropRule, {"fraction": 0}, "crop_fraction"),
        (CropRule, {"fraction": 1.1}, "crop_fraction"),
        (CropRule, {"interpolation": "nearest"}, "interpolation"),
        (CaptionRule, {"drop_probability": -0.1}, "caption_drop_probability"),
    ],
)
def test_settings_out_of_range_are_refused(rule, setting, named):
    with pytest.raises(ConfigError, match=named):
        rule(**setting)


def test_the_perturbation_comes_on_top_of_the_offset(make_dataset):
    settings = [{"input_perturbation": 0.25}, {"input_perturbation": 0.25, "noise_offset": 0.5}]
    plain, offset = (make_dataset(inputs=setting)[(1, 3)] for setting in settings)
    seconds = [sample["input_noise"] - sample["noise"] for sample in (plain, offset)]
    np.testing.assert_allclose(*seconds, atol=1e-6)
    assert not np.allclose(plain["noise"], offset["noise"], atol=0.01)


def test_perturbed_noise_is_the_noise_and_a_second_one(make_dataset):
    plain, dataset = make_dataset()[(0, 3)], make_dataset(inputs={"input_perturbation": 0.25})
    assert same({**dataset[(0, 3)], "input_noise": 0}, {**plain, "input_noise": 0})
    rows = [dataset[(epoch, row)] for epoch in range(8) for row in range(24)]
    seconds = np.array([(row["input_noise"] - row["noise"]) / 0.25 for row in rows])
    assert seconds.dtype == np.float32 and np.unique(seconds[:, 0, 0, 0]).size == len(rows)
    assert abs(seconds.mean()) < 0.05 and abs(seconds.std() - 1) < 0.05
    assert abs(np.corrcoef(seconds.ravel(), np.array([row["noise"] for row in rows]).ravel())[0, 1]) < 0.05


def test_enumerated_crops_are_the_same_in_every_epoch_and_run(make_dataset, make_sources):
    sources, crops = make_sources([2], [3]), {"num_crops": 2, "flip": True, "fraction": 0.5}
    one, other = (make_dataset(sources, crops=crops, seed=seed) for seed in (1, 2))
    for row, number_in_part in ((1, 1), (3, 1)):
        variants = []
        for variant in one.crops.list_variants():
            pixels = np.empty((3, 16, 16), np.uint8)
            one.crops.cut(one.crops.decode(one.read_row(row).image), variant, number_in_part, pixels)
            variants.append(pixels.tobytes())
        for dataset in (one, other):
            drawn = {dataset[epoch, row]["pixel_values"].tobytes() for epoch in range(40)}
            assert drawn == {*variants} and len(drawn) == 4
