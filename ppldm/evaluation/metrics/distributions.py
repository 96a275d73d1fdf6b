"""How far apart two distributions of features are: Fréchet distance, KID, CMMD, sliced Wasserstein distance.

The Fréchet distance is that of Gaussians fitted to the sets; on InceptionV3's features it is the FID.

    |m1 - m2|² + tr(S1 + S2 - 2 (S1 S2)^½)

(Dowson and Landau 1982; Heusel et al. 2017, arXiv:1706.08500). With factors S = RᵀR the last trace is the sum of the
singular values of R1 R2ᵀ. No root of a product is taken, so covariances of fewer pictures than features, which are
singular, need no offset on their diagonals, and two equal sets are at distance 0 up to rounding.

First-order terms, by the derivative of that trace: with R1 R2ᵀ = U s Vᵀ the optimal transport from the first Gaussian
to the second is T = R2ᵀ V s⁻¹ Vᵀ R2, and a picture x of the first contributes
|x - m1|² - (x - m1)ᵀ T (x - m1) + 2 (m1 - m2)ᵀ (x - m1).

The maximum mean discrepancies: MMD² = E k(x, x') + E k(y, y') - 2 E k(x, y) (Gretton et al. 2012). First-order terms: a
picture x contributes twice its mean kernel with the generated ones less that with the real ones.

Sliced Wasserstein distance: the mean over directions, drawn from the seed, of the W1 distance of what two sets project
to, the area between the two distribution functions (Rabin et al. 2011; Bonneel et al. 2015). It needs no covariance,
and so few samples. Terms: a value x of the first set adds the area to its left where the second function is above, less
that where it is below.

The same between patches of Laplacian pyramids (Karras et al. 2018, arXiv:1710.10196, section 5): levels from the
pictures' own size down to 16 pixels; of each picture 128 patches of 7 x 7 pixels a level; each set's patches brought to
mean 0 and deviation 1 in every channel; 512 directions, times 1000. A picture's term is the mean of its patches', less
what it adds by way of its set's mean and deviation: z of a channel moves that mean by z and that deviation by
(z² - 1) / 2.
"""

from collections.abc import Sequence

import numpy as np
from scipy.linalg import svd
from scipy.ndimage import correlate1d

from ...utils.errors import DataError
from ...utils.rng import Stream, make_rng
from .bootstrap import Measured, measure
from .neighbours import block_slices

BLOCK = 4096  # rows at a time
SUBSETS, SUBSET_SIZE, SUBSET_SEED = 100, 1000, 2020
SIGMA, SCALE = 10.0, 1000.0
DIRECTIONS = 512
_AT_ONCE = 16
PATCHES, PATCH, LEAST, CHANNELS = 128, 7, 16, 3
MOST_PICTURES = 16_384  # as published; of more, so many are taken evenly
_BINOMIAL = np.array([1, 4, 6, 4, 1], np.float32) / 16


def frechet_distance(generated: np.ndarray, real: np.ndarray | tuple, *, seed: int) -> Measured:
    """Between features [N, D] and [M, D], in float64. It depends on N and M: compare only values of the same. real: or
    mean and root of such features; the interval is that of drawing the others."""
    means, roots = zip(*(one if isinstance(one, tuple) else _moments(one) for one in (generated, real)), strict=True)
    if len(means[0]) != len(means[1]):
        raise DataError(
            f"statistics are of {len(means[1])} numbers, and the features have {len(means[0])}; name others"
        )
    left, singular, right = svd(roots[0] @ roots[1].T, full_matrices=False)
    step = means[0] - means[1]
    of_means = float(step @ step)
    of_covariances = float(np.sum(roots[0] ** 2) + np.sum(roots[1] ** 2) - 2 * singular.sum())
    kept = singular > singular.max(initial=0) * 1e-10
    maps = [
        (roots[1].T @ right[kept].T) / np.sqrt(singular[kept]),  # its product with its transpose is T
        (roots[0].T @ left[:, kept]) / np.sqrt(singular[kept]),
    ]
    terms = [
        _terms(rows, mean, one, direction)
        for rows, mean, one, direction in zip((generated, real), means, maps, (step, -step), strict=True)
        if not isinstance(rows, tuple)
    ]
    details = {"means": of_means, "covariances": of_covariances}
    return measure(max(0.0, of_means + of_covariances), *terms, seed=seed, details=details, bounds=(0, np.inf))


def _moments(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean [D], R [min(N, D), D] with RᵀR the covariance of `rows`: a QR decomposition's triangle, block by block)."""
    mean = rows.mean(axis=0, dtype=np.float64)
    root = np.empty((0, rows.shape[1]))
    for start in range(0, len(rows), BLOCK):
        root = np.linalg.qr(np.concatenate([root, rows[start : start + BLOCK] - mean]), mode="r")
    return mean, root / np.sqrt(max(1, len(rows) - 1))


def _terms(rows: np.ndarray, mean: np.ndarray, transport: np.ndarray, step: np.ndarray) -> np.ndarray:
    terms = []
    for start in range(0, len(rows), BLOCK):
        centred = rows[start : start + BLOCK] - mean
        moved = centred @ transport
        terms.append(np.sum(centred**2, axis=1) - np.sum(moved**2, axis=1) + 2 * centred @ step)
    return np.concatenate(terms)


def kernel_distance(generated: np.ndarray, real: np.ndarray, *, seed: int) -> Measured:
    """KID (Bińkowski et al. 2018, arXiv:1801.01401): k(x, y) = (xy / D + 1)³, without bias: a value may be below 0. The
    mean over 100 subsets of 1000 features of each set, all where there are fewer, drawn as torch-fidelity does whatever
    `seed`, so that the value is its value. details: `std` over the subsets, and their `subset_size`."""
    size = min(SUBSET_SIZE, len(generated), len(real))
    sets = [rows.astype(np.float64) for rows in (generated, real)]
    sums, seen = [np.zeros(len(rows)) for rows in sets], [np.zeros(len(rows)) for rows in sets]
    legacy = np.random.RandomState(SUBSET_SEED)  # part of the published estimator
    values = []
    for _ in range(SUBSETS):
        chosen = [legacy.choice(len(rows), size, replace=False) for rows in sets]
        value, terms = _cubic_mmd(*(rows[numbers] for rows, numbers in zip(sets, chosen, strict=True)))
        values.append(value)
        for own_sums, own_seen, numbers, own in zip(sums, seen, chosen, terms, strict=True):
            own_sums[numbers] += own
            own_seen[numbers] += 1
        if size == len(generated) == len(real):
            break  # each subset is all of them
    terms = [own_sums[count > 0] / count[count > 0] for own_sums, count in zip(sums, seen, strict=True)]
    details = {"std": float(np.std(values)), "subset_size": size}
    # The choice of subsets adds to the variance what their own says.
    return measure(float(np.mean(values)), *terms, np.array(values), seed=seed, details=details)


def _cubic_mmd(left: np.ndarray, right: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """(unbiased MMD² of two sets of one length, terms of both)."""
    count = len(left)
    across = _cubic(left, right)
    within = []
    for rows in (left, right):
        kernel = _cubic(rows, rows)
        within.append((kernel.sum(axis=1) - np.diagonal(kernel)) / (count - 1))
    others = [across.mean(axis=1), across.mean(axis=0)]
    value = within[0].mean() + within[1].mean() - 2 * across.mean()
    return float(value), [2 * (own - other) for own, other in zip(within, others, strict=True)]


def _cubic(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return (left @ right.T / left.shape[1] + 1) ** 3


def clip_mmd(generated: np.ndarray, real: np.ndarray, *, seed: int) -> Measured:
    """CMMD (Jayasumana et al. 2023, arXiv:2401.09603): k(x, y) = exp(-|x - y|² / (2 · 10²)) of embeddings of length 1,
    all pairs and each with itself too (biased, as published), times 1000."""
    sets = [rows / np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True) for rows in (generated, real)]
    within = [_mean_kernel(one, one)[0] for one in sets]
    rows, columns = _mean_kernel(*sets)
    value = SCALE * (within[0].mean() + within[1].mean() - 2 * rows.mean())
    terms = [2 * SCALE * (within[0] - rows), 2 * SCALE * (within[1] - columns)]
    return measure(max(0.0, float(value)), *terms, seed=seed, bounds=(0, np.inf))


def _mean_kernel(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mean of each row, mean of each column) of the kernel less 1, which is small: the ones cancel anyway."""
    rows, columns = np.zeros(len(left)), np.zeros(len(right))
    for block in block_slices(len(left), len(right)):
        kernel = np.expm1((left[block] @ right.T - 1) / SIGMA**2)  # |x - y|² is 2 - 2xy
        rows[block] = kernel.mean(axis=1)
        columns += kernel.sum(axis=0)
    return rows, columns / len(left)


def sliced_wasserstein(generated: np.ndarray, real: np.ndarray, *, seed: int) -> Measured:
    """Of features [N, D] and [M, D], in their unit, over 512 directions."""
    distances, terms, _ = sliced_distances(generated, real, seed)
    return measure(distances.mean(), *terms, seed=seed, bounds=(0, np.inf))


def sliced_distances(
    left: np.ndarray, right: np.ndarray, seed: int, groups: int = 0
) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
    """(W1 in each direction [512], mean terms of both sets [N] and [M], slopes [2, groups, 2]). groups: that the D
    numbers belong to in turn, as colours of pixels; slopes: of each set's mean W1 as one is shifted and stretched."""
    directions = make_rng(seed, Stream.EVALUATION, 1).standard_normal((DIRECTIONS, left.shape[1]))
    directions = (directions / np.linalg.norm(directions, axis=1, keepdims=True)).astype(np.float32).T
    distances, terms = np.empty(DIRECTIONS), [np.zeros(len(left)), np.zeros(len(right))]
    changes = np.zeros((2, groups, 2))
    for start in range(0, DIRECTIONS, _AT_ONCE):
        some, slopes = directions[:, start : start + _AT_ONCE], ([], [])
        for number, (first, second) in enumerate(zip((left @ some).T, (right @ some).T, strict=True), start):
            distances[number], own, own_slopes = _wasserstein(first, second)
            for total, more in zip(terms, own, strict=True):
                total += more / DIRECTIONS
            for several, more in zip(slopes, own_slopes, strict=True):
                several.append(more)
        for group in range(groups):
            weights = some[group::groups]
            for rows, several, change in zip((left, right), slopes, changes, strict=True):
                slope, along = np.array(several).T / (len(rows) * DIRECTIONS), rows[:, group::groups] @ weights
                change[group] += slope.sum(axis=0) @ weights.sum(axis=0), np.sum(slope * along)
    return distances, terms, changes


def _wasserstein(left: np.ndarray, right: np.ndarray) -> tuple[float, list[np.ndarray], list[np.ndarray]]:
    """W1 of two sets of numbers, their terms, and the slopes of these."""
    values = np.concatenate([left, right]).astype(np.float64)
    order = np.argsort(values, kind="stable")
    steps = np.diff(values[order])
    weights = np.concatenate([np.full(len(left), 1 / len(left)), np.full(len(right), -1 / len(right))])
    ahead = np.cumsum(weights[order])[:-1]  # between two values: the first distribution function less the second
    ahead[np.abs(ahead) < 1e-12] = 0
    terms = np.empty(len(values))
    terms[order] = np.concatenate([[0], np.cumsum(-np.sign(ahead) * steps)])
    around = -np.sign(np.concatenate([[0], ahead, [0]]))  # left and right of a value, where the slope may jump
    slopes = np.empty(len(values))
    slopes[order] = (around[:-1] + around[1:]) / 2
    both_terms, both_slopes = ([one[: len(left)], -one[len(left) :]] for one in (terms, slopes))
    return float(np.abs(ahead) @ steps), both_terms, both_slopes


def pyramid_distance(generated: Sequence[np.ndarray], real: Sequence[np.ndarray], *, seed: int) -> Measured:
    """Mean over levels; details: each one's value by its shorter side. Raises DataError for unlike or small sizes."""
    shape = generated[0].shape
    if shape != real[0].shape:
        sizes = " and ".join(f"{width} x {height}" for height, width, _ in (shape, real[0].shape))
        raise DataError(f"swd compares pictures of one size, and these are {sizes}; give --resolution")
    if min(shape[:2]) < LEAST:
        raise DataError(f"swd compares pictures of {LEAST} pixels and more, and these are {shape[1]} x {shape[0]}")
    values, terms, details = [], [0.0, 0.0], {}
    for level in range(levels := int(np.log2(min(shape[:2]) / LEAST)) + 1):
        patches = [_describe(pictures, level, seed) for pictures in (generated, real)]
        distances, own, slopes = sliced_distances(*patches, seed, CHANNELS)  # type: ignore[call-arg]
        values.append(SCALE * distances.mean())
        details[str(-(-min(shape[:2]) // 2**level))] = values[-1]
        for number, (more, rows, change) in enumerate(zip(own, patches, slopes, strict=True)):
            of_patches = more - _by_normalising(rows, change)
            terms[number] = terms[number] + SCALE / levels * of_patches.reshape(-1, PATCHES).mean(axis=1)
    return measure(np.mean(values), *terms, seed=seed, details=details, bounds=(0, np.inf))


def _by_normalising(patches: np.ndarray, change: np.ndarray) -> np.ndarray:
    """What each of the patches [n, 147] adds by way of the mean and deviation of each channel; see the module."""
    added = np.zeros(len(patches))
    for channel, (shift, stretch) in enumerate(change):
        own = patches[:, channel::CHANNELS].astype(np.float64)
        added += shift * own.mean(axis=1) + stretch * (np.mean(own**2, axis=1) - 1) / 2
    return added


def _describe(pictures: Sequence[np.ndarray], level: int, seed: int) -> np.ndarray:
    """Patches of one level of all pictures, normalised: float32 [N · 128, 147]."""
    numbers = np.linspace(0, len(pictures) - 1, min(len(pictures), MOST_PICTURES)).round().astype(int)
    patches = np.empty((len(numbers), PATCHES, PATCH, PATCH, 3), np.float32)
    size = None
    for place, number in enumerate(numbers):
        picture = pictures[number]
        if picture.shape != (size := size or picture.shape):
            raise DataError(f"swd compares pictures of one size, and number {number} is of another; give --resolution")
        band = laplacian(picture.astype(np.float32), level)
        windows = np.lib.stride_tricks.sliding_window_view(band, (PATCH, PATCH), axis=(0, 1))  # type: ignore[call-overload]
        rng = make_rng(seed, Stream.EVALUATION, 2 + level, place)
        tops, lefts = (rng.integers(side, size=PATCHES) for side in windows.shape[:2])
        patches[place] = windows[tops, lefts].transpose(0, 2, 3, 1)
    deviation = patches.std(axis=(0, 1, 2, 3), dtype=np.float64)
    patches -= patches.mean(axis=(0, 1, 2, 3), dtype=np.float64).astype(np.float32)
    patches /= np.where(deviation > 0, deviation, 1).astype(np.float32)
    return patches.reshape(len(numbers) * PATCHES, -1)


def laplacian(picture: np.ndarray, level: int) -> np.ndarray:
    """A level of the Laplacian pyramid of float32 [H, W, C], its sides halved `level` times. The last level too is a
    band there is a smaller picture under, unless its shorter side would be below 16: that one is the picture itself."""
    for _ in range(level):
        picture = _blur(picture)[::2, ::2]
    if min(picture.shape[:2]) < 2 * LEAST:
        return picture
    raised = np.zeros_like(picture)
    raised[::2, ::2] = _blur(picture)[::2, ::2]
    return picture - 4 * _blur(raised)


def _blur(picture: np.ndarray) -> np.ndarray:
    return correlate1d(correlate1d(picture, _BINOMIAL, axis=0, mode="mirror"), _BINOMIAL, axis=1, mode="mirror")
