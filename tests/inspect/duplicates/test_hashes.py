"""What a hash survives, and what it tells apart."""

import numpy as np
import pytest
from pictures import draw, encode
from PIL import Image, ImageOps

from ppldm.inspect.duplicates.hashes import NUM_HASHES, hash_picture, look_alike
from ppldm.utils.errors import RowError


def bits(one: int, other: int) -> int:
    return ((int(one) ^ int(other)) & (2**64 - 1)).bit_count()


@pytest.mark.parametrize("seed", range(6))
def test_copies_are_near_and_strangers_far(seed):
    picture = draw(seed)
    whole, mirrored, *crops = hash_picture(encode(picture))[0]
    smaller = picture.resize((72, 54), Image.LANCZOS)
    for copy in (encode(smaller), encode(picture, "JPEG", quality=40), encode(picture.convert("L"))):
        assert bits(hash_picture(copy)[0][0], whole) <= 4
    assert bits(hash_picture(encode(ImageOps.mirror(picture)))[0][0], mirrored) <= 2
    for box in ((6, 0, 120, 90), (0, 4, 114, 90), (3, 2, 117, 88), (0, 0, 114, 86)):
        cropped = hash_picture(encode(picture.crop(box)))[0][0]
        assert min(bits(cropped, crop) for crop in crops) <= 4
    others = [hash_picture(encode(draw(100 * seed + other)))[0][0] for other in range(7, 27)]
    assert min(bits(other, crop) for other in others for crop in (whole, *crops)) > 8


def test_hashes_are_of_the_picture_as_it_is_shown():
    picture = draw(1)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    turned = hash_picture(encode(picture.transpose(Image.Transpose.ROTATE_90), "JPEG", quality=95, exif=exif))
    assert bits(turned[0][0], hash_picture(encode(picture))[0][0]) <= 2


def test_a_picture_without_structure_has_no_hash():
    noise = np.random.default_rng(0).normal(200, 1, (90, 120, 1)).clip(0, 255).astype(np.uint8)
    for flat in (Image.new("RGB", (50, 40), "white"), Image.fromarray(noise.repeat(3, axis=2))):
        assert hash_picture(encode(flat)) is None
    assert hash_picture(encode(draw(0)))[0].shape == (NUM_HASHES,)


def test_what_cannot_be_decoded_is_a_bad_row():
    with pytest.raises(RowError):
        hash_picture(encode(draw(0))[:200])


@pytest.mark.parametrize("seed", range(4))
def test_thumbnails_tell_copies_from_strangers(seed):
    picture = draw(seed)

    def alike(copy: Image.Image, mirrored=False, crops=False) -> bool:
        one, other = (hash_picture(encode(shown, "JPEG", quality=60))[1][None] for shown in (picture, copy))
        found = [look_alike(*pair, mirrored, crops)[0] for pair in ((one, other), (other, one))]
        assert found[0] == found[1]
        return bool(found[0])

    assert alike(picture.resize((70, 50)))
    assert alike(picture.crop((6, 0, 120, 86)), crops=True)
    assert alike(ImageOps.mirror(picture), mirrored=True) and not alike(ImageOps.mirror(picture))
    assert not alike(draw(seed + 50), mirrored=True, crops=True)
    red, green, blue = picture.split()
    assert not alike(Image.merge("RGB", (blue, red, green)), mirrored=True, crops=True)
