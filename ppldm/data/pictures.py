"""What becomes of the pictures of a batch: pixels, moments of those of which these are cached, or some of each."""

import numpy as np

from .inputs import Control, Moments, Pixels, Uncached


class Pictures:
    """Filled row by row. size: (height, width). moments: None where none are cached. whole: rows with moments are black
    pictures among the others, so that what is computed of a row, and kept, does not depend on how many there are.
    control: None where a batch has no control images."""

    def __init__(
        self,
        count: int,
        size: tuple[int, int],
        moments: Moments | None = None,
        whole: bool = False,
        control: Control | None = None,
    ):
        # Memory that is not written to takes none.
        self.pixels = (np.zeros if whole else np.empty)((count, *Pixels().shape(*size)), dtype=np.uint8)
        self.size, self._whole = size, whole
        self._moments = None if moments is None else np.zeros((count, *moments.shape(*size)), dtype=np.float32)
        self._uncached: dict[int, tuple[int, int, int]] = {}
        self.sizes = np.zeros((count, 6), np.int64)  # `inputs.Sizes`
        self.control = None if control is None else np.empty((count, *control.shape(*size)), dtype=np.uint8)

    def put_moments(self, place: int, moments: np.ndarray) -> None:
        """Of the row at `place` in the batch."""
        self._moments[place] = moments
        self._uncached.pop(place, None)

    def note_pixels(self, place: int, key: tuple[int, int, int]) -> None:
        """The row at `place` has pixels. key: its part, its number in that, its variant."""
        self._uncached[place] = key

    def array(self, wanted: Pixels | Moments | Uncached | Control) -> np.ndarray | None:
        """The array of an input; None where the batch has none."""
        if isinstance(wanted, Control):
            return self.control
        if self._moments is None:
            return self.pixels
        if isinstance(wanted, Moments):
            return self._moments
        if not self._uncached:
            return None
        places = sorted(self._uncached)
        if isinstance(wanted, Pixels):
            return self.pixels if self._whole else self.pixels[places]
        return np.array([(place, *self._uncached[place]) for place in places], dtype=np.int64)
