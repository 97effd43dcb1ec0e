"""The few-bit storages, Shampoo with them, and what they store, read without the library."""

from typing import Any

import jax
import numpy as np
import pytest

import curvax
from curvax.transforms.storage._quantized import Square
from tests.helpers import scanned
from tests.reference.shampoo_4bit import linear2_codebook, load

STEPS, T1, T2, B2, BE, EPS = 30, 2, 5, 0.9, 0.8, 1e-6
MODES = ("vq", "cq", "cq_ef")
HALF_GAP = float(np.diff(linear2_codebook(4)).max()) / 2
EPS32 = float(np.finfo(np.float32).eps)
every_mode = pytest.mark.parametrize("mode", MODES)


def storage_of(mode: str, block: int = 64, min_elements: int = 1, be=BE, **settings):
    settings |= {"block": block, "min_elements": min_elements}
    if mode == "vq":
        return curvax.quantized(**settings)
    feedback = be if mode == "cq_ef" else None
    return curvax.cholesky(error_feedback=feedback, damping_mode="absolute", **settings)


def shampoo(storage, **settings):
    """With statistics and roots in the gradient's coordinates, as the papers store them."""
    stored = {"method": curvax.eigenbases.stored_roots()}
    defaults = stored | {"b2": B2, "eps": EPS, "refresh": T2, "statistics_every": T1}
    return curvax.scale_by_shampoo(storage=storage, **{**defaults, **settings})


def trajectories(transformation, *runs) -> Any:
    """Directions and states of all steps, time first, from one program for all runs."""
    results = [scanned(transformation)(gradients) for gradients in runs]
    return results if len(runs) > 1 else results[0]


def drifting_gradients(shapes, steps=STEPS, seed=0) -> dict[str, np.ndarray]:
    """Gradients that drift; the second of a batch is of rank 1. Exact in float32."""
    generator, gradients = np.random.default_rng(seed), {}
    for name, shape in shapes.items():
        fixed, g = generator.standard_normal(shape), generator.standard_normal((steps, *shape))
        g = g + generator.choice([-1.0, 1.0], (steps, *[1] * len(shape))) * fixed
        if len(shape) > 2:
            g[:, 1] = g[:, 1, :, :1] @ g[:, 1, :1]
        gradients[name] = np.float64(np.float32(g))
    return gradients


def same(a, b) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in pairs]
    return all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in pairs
    )


# The stored form, read without the library


def halves(packed) -> np.ndarray:
    packed = np.asarray(packed)
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def as_triples(stored, order: int):
    """The transcription's (codes, scales, diagonal) of X or C, and those of E if it is there."""
    wide = lambda x: np.asarray(x, np.float64)  # noqa: E731
    lower = np.tri(order, k=-1, dtype=bool)
    if isinstance(stored, Square):
        codes = halves(stored.codes)[..., :order]
        return [(codes, wide(stored.scales), wide(stored.diagonal))]
    codes = halves(stored.codes)[..., :order]
    if len(stored.scales) < stored.scales.shape[1]:  # folded, as codes are
        square, scales = _unfolded(codes, 7), _unfolded(wide(stored.scales), 0)
        return [(np.where(lower, square, 7), _of_tiles(scales), wide(stored.diagonal))]
    scales = wide(stored.scales)
    c = (np.where(lower, codes, 7), _of_tiles(scales), wide(stored.diagonal))
    e = (np.where(lower, codes.T, 7), _of_tiles(scales.T), np.zeros(order))
    return [c, e]


def _unfolded(rows: np.ndarray, empty: float) -> np.ndarray:
    """The square of which the strictly lower triangle is folded in `rows`."""
    order = rows.shape[1]
    square = np.full((order, order), empty, rows.dtype)
    for i, row in enumerate(rows):
        r, mirrored = order // 2 + i, order - 1 - (order // 2 + i)
        square[mirrored, :mirrored] = row[::-1][:mirrored]
        square[r, :r] = row[:r]  # the row in the middle is its own mirror image
    return square


def _of_tiles(scales: np.ndarray) -> np.ndarray:
    """Scales of the tiles on and below the diagonal; 0 above."""
    return np.tril(scales[1:, :-1])


def decode_stored(stored, order: int, block: int) -> np.ndarray:
    """The statistic or root that a stored form stands for, in float64."""
    first = load(as_triples(stored, order)[0], block)
    return first if isinstance(stored, Square) else first @ first.T


def as_packed(stored, order: int, bits: int):
    """The transcription's codes, scales and diagonal of a packed triangle."""
    rows = _six_bits(stored.codes) if bits == 6 else np.asarray(stored.codes)
    rows = (halves(rows) if bits == 4 else rows)[..., :order]
    scales = _of_tiles(_unfolded(np.asarray(stored.scales, np.float64), 0))
    codes = np.where(np.tri(order, k=-1, dtype=bool), _unfolded(rows, 0), 0)
    return codes, scales, np.asarray(stored.diagonal, np.float64)


def _six_bits(packed) -> np.ndarray:
    """Four codes from three bytes, as the codec's docstring says."""
    parts = np.split(np.asarray(packed), 3, axis=-1)
    last = sum((part >> 6) << 2 * i for i, part in enumerate(parts))
    return np.concatenate([*(part & 63 for part in parts), last], axis=-1)
