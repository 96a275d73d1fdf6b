import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ppldm.utils.rng import Generators, Stream, make_rng


def test_the_draws_of_a_key_never_change():
    """A later version that fails here would change every run in the world: bump nothing, find out why."""
    assert make_rng(23, Stream.NOISE, 2, 12345).bit_generator.random_raw(4).tolist() == [
        0xC1A88330E0D2D4C5,
        0xEEC403CB9449EEED,
        0xAA33C05636FCC214,
        0x5E50A6CD53248C5F,
    ]
    assert make_rng(23, Stream.ORDER).bit_generator.random_raw(2).tolist() == [
        15060088184103363820,
        5430341342746607840,
    ]
    assert make_rng(23, Stream.CROP, 1, 7).random(2).tolist() == [0.4075651103047392, 0.6924546598299202]
    normal = make_rng(23, Stream.NOISE, 1, 7).standard_normal(4, dtype=np.float32)
    assert normal.tolist() == [-0.19250832498073578, 1.5122065544128418, -0.5246798396110535, 0.1733514964580536]


def test_the_numbers_of_streams_are_part_of_the_format():
    names = ["ORDER", "CROP", "FLIP", "CAPTION_DROP", "TIMESTEP", "NOISE", "POSTERIOR", "MIX", "INIT", "SAMPLE"]
    assert [stream.name for stream in sorted(Stream)][: len(names)] == names
    assert [int(stream) for stream in sorted(Stream)][: len(names)] == list(range(len(names)))
    assert Stream.DROPOUT == 13 and Stream.CROP_CHOICE == 14 and Stream.CROP_PLACE == 19 and Stream.GROUP == 20
    assert (Stream.CAPTION_TAGS, Stream.CAPTION_WILDCARD, Stream.CAPTION_TAG_DROP) == (15, 16, 17)


def test_each_key_has_draws_of_its_own():
    keys = list(itertools.product([0, 1, 2**64 - 1], [Stream.ORDER, Stream.NOISE], [0, 1, 2**40], [0, 1, 2**63]))
    draws = {tuple(make_rng(*key).bit_generator.random_raw(2).tolist()) for key in keys}
    assert len(draws) == len(keys)
    assert all(make_rng(*key).random() == make_rng(*key).random() for key in keys)


WORDS = st.integers(0, 2**64 - 1)


@given(WORDS, st.lists(st.tuples(st.sampled_from(Stream), WORDS, WORDS), max_size=12))
def test_generators_that_are_used_again_draw_as_new_ones(seed, keys):
    """Whatever was drawn before, 32 bits at a time too; and those of other streams stay as they were."""
    generators, latest = Generators(seed), {}
    for stream, epoch, row in keys:
        rng = generators(stream, (epoch, row))
        latest[stream] = (rng, make_rng(seed, stream, epoch, row))
        for ours, new in latest.values():
            assert ours.random(dtype=np.float32) == new.random(dtype=np.float32)
            assert ours.random(3).tolist() == new.random(3).tolist()
            assert (ours.permutation(9) == new.permutation(9)).all()
