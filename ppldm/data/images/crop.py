"""From an encoded image to the pixels of a sample, with every random number handed in.

Crops are drawn anew for every sample; or, with `num_crops`, each row has that many places, and a sample draws one of
them. The places of a row are a function of its number in its part alone, so that what is made of each of them once
(cached latents) serves every epoch, seed and order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...utils.errors import ConfigError, RowError
from ...utils.rng import Stream, make_rng
from .decode import decode_pixels


@dataclass(frozen=True)
class DrawnCrop:
    """What a sample has drawn. corner: where its crop lies, two numbers of [0, 1) for x and y; None for the centre, or
    where `number` says it: which of the row's enumerated crops. mirrored: left for right."""

    corner: tuple[float, float] | None = None
    number: int = 0
    mirrored: bool = False


@dataclass(frozen=True)
class CropRule:
    """What of an image becomes the pixels of a sample.

    fraction: in (0, 1], the crop's share of the side by which the resized image covers it. random: the crop is drawn;
    else it is the centre's, or with `smart` where most edges are (`saliency`). flip: half of the samples are mirrored.
    interpolation: one of `resize.INTERPOLATIONS`. num_crops: of how many places a row's random crop is drawn; 0: any
    place. enlarge: images may be smaller than their crop.
    """

    fraction: float = 0.9
    random: bool = True
    flip: bool = False
    interpolation: str = "lanczos"
    num_crops: int = 0
    smart: bool = False
    enlarge: bool = False

    def __post_init__(self):
        if not 0 < self.fraction <= 1:
            raise ConfigError(f"crop_fraction is {self.fraction}; it must be over 0 and at most 1")
        from .resize import INTERPOLATIONS

        if self.interpolation not in INTERPOLATIONS:
            raise ConfigError(f"interpolation is {self.interpolation}; it must be one of {', '.join(INTERPOLATIONS)}")
        if self.num_crops < 0:
            raise ConfigError(f"num_crops is {self.num_crops}; it must be 0 or more")
        if self.smart and self.random:
            raise ConfigError("a crop that is drawn cannot be a smart one; choose one of them")

    @property
    def kind(self) -> str:
        """`center`, `smart`, the number of enumerated crops, or `random` for any place."""
        if self.random:
            return str(self.num_crops or "random")
        return "smart" if self.smart else "center"

    @property
    def num_variants(self) -> int:
        """Of a row: enumerated crops, each also mirrored with `flip`; 0 where crops are not enumerated."""
        crops = 1 if not self.random else self.num_crops
        return crops * (2 if self.flip else 1)

    def draw(self, generator: Callable[[Stream], np.random.Generator]) -> DrawnCrop:
        """The crop of a sample; `generator` gives the sample's random numbers of a purpose."""
        corner, number = None, 0
        if self.random and self.num_crops:
            number = int(generator(Stream.CROP_CHOICE).random() * self.num_crops)
        elif self.random:
            corner = tuple(generator(Stream.CROP).random(2))
        mirrored = self.flip and generator(Stream.FLIP).random() < 0.5
        return DrawnCrop(corner, number, bool(mirrored))

    def variant(self, crop: DrawnCrop) -> int:
        """The number of an enumerated crop among the `num_variants` of a row."""
        return crop.number * 2 + crop.mirrored if self.flip else crop.number

    def list_variants(self) -> list[DrawnCrop]:
        """All of a row, by `variant`."""
        flips = (False, True) if self.flip else (False,)
        crops = range(self.num_variants // len(flips))
        return [DrawnCrop(None, number, mirrored) for number in crops for mirrored in flips]

    def find_corner(self, crop: DrawnCrop, row: int) -> tuple[float, float] | None:
        """Where a crop of row number `row` of its part lies; None for the centre."""
        if self.random and self.num_crops:
            return tuple(make_rng(0, Stream.CROP_PLACE, crop.number, row).random(2))
        return crop.corner

    def find_place(
        self, crop: DrawnCrop, row: int, picture: tuple[int, int], shape: tuple[int, int]
    ) -> tuple[int, int]:
        """(top, left) in the resized picture of a crop of `shape` of a picture, both (height, width), as `load` gives
        it; not of a smart one, which depends on what is to be seen."""
        return place_crop(picture, shape, self.fraction, self.find_corner(crop, row))[1]

    def load(self, image: bytes, crop: DrawnCrop, row: int, pixels: np.ndarray) -> tuple[int, int]:
        """Fill `pixels`, uint8 [3, H, W], with a crop of an encoded image, that of row number `row` of its part. (top,
        left) of the crop in the resized picture, not mirrored. Raises RowError."""
        return self.cut(self.decode(image), crop, row, pixels)

    def decode(self, image: bytes) -> np.ndarray:
        """What `cut` takes of an encoded image. Raises RowError."""
        return decode_pixels(image, exact=self.interpolation != "area")

    def cut(self, image: np.ndarray, crop: DrawnCrop, row: int, pixels: np.ndarray) -> tuple[int, int]:
        """As `load`, of a decoded image, uint8 [height, width, 3]."""
        if self.smart:
            scaled = scale_to_cover(*image.shape[:2], *pixels.shape[1:], self.fraction)  # type: ignore[call-arg]
            from .saliency import find_corner

            corner = find_corner(image, scaled, pixels.shape)
        else:
            corner = self.find_corner(crop, row)
        place = crop_pixels(image, self.fraction, corner, self.interpolation, pixels, self.enlarge)
        if crop.mirrored:
            pixels[:] = pixels[:, :, ::-1].copy()
        return place


def crop_pixels(
    image: np.ndarray,
    crop_fraction: float,
    random: tuple[float, float] | None,
    interpolation: str,
    crop: np.ndarray,
    enlarge: bool = False,
) -> tuple[int, int]:
    """Fill `crop`, uint8 [3, H, W], with a rectangle of an RGB image, uint8 [height, width, 3]; (top, left) of it in
    the resized image.

    `place_crop` says where it lies. Only what the crop keeps is resized (`ppldm.data.images.resize`). Raises RowError
    "too_small" where a side is under the crop's, unless `enlarge`.
    """
    from .resize import resize_crop  # and with it numba, which takes as long to load as all else that `--help` needs

    height, width, _ = image.shape
    _, crop_height, crop_width = crop.shape
    if (height < crop_height or width < crop_width) and not enlarge:
        raise RowError(
            "too_small", f"the image has {width} x {height} pixels, a side under {crop_width} x {crop_height}"
        )
    scaled, (top, left) = place_crop((height, width), (crop_height, crop_width), crop_fraction, random)
    resize_crop(image, scaled, left, top, interpolation, crop)
    return top, left


def place_crop(
    picture: tuple[int, int], crop: tuple[int, int], crop_fraction: float, random: tuple[float, float] | None
) -> tuple[tuple[int, int], tuple[int, int]]:
    """((width, height) of a picture once resized, (top, left) of its crop in that), given both as (height, width).

    It is resized as `scale_to_cover` says, and cropped at the offset that `random`, two numbers of [0, 1) for x and y,
    chooses; in the centre where it is None.
    """
    scaled = scale_to_cover(*picture, *crop, crop_fraction)
    left, top = (
        int(where * (side - kept + 1))
        for where, side, kept in zip(random or (0.5, 0.5), scaled, crop[::-1], strict=True)
    )
    return scaled, (top, left)


def scale_to_cover(height: int, width: int, crop_height: int, crop_width: int, crop_fraction: float) -> tuple[int, int]:
    """(width, height) of an image once it is resized, never distorted by more than a pixel: the side that would be the
    first not to cover the crop is int(the crop's / crop_fraction), the other follows, rounded down."""
    if width * crop_height <= height * crop_width:
        scaled = int(crop_width / crop_fraction)
        return scaled, scaled * height // width
    scaled = int(crop_height / crop_fraction)
    return scaled * width // height, scaled
