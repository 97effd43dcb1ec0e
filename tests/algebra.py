"""The twin of an optimizer, which shows how errors in its state change its updates.

Quantization perturbs the state by a relative error. The resulting error of the updates depends on
the method, damping, eigenvalues, gaps between them, and time, and no formula covers all methods.
The twin therefore runs the method itself: dense, in float64, with every field that a quantized run
would quantize perturbed after each step by the size of the quantization error, in random
directions. The updates of the quantized run may differ from the exact ones about as much as those
of the twin. Without perturbation the twin is exact.

The size of the quantization error is measured on the state of the exact run, with an independent
quantizer in NumPy, so that a mistake in the library's quantizer cannot loosen its own bound.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import curvax
from curvax.transforms._counts import Counts
from curvax.transforms.storage._cholesky import Cholesky
from curvax.transforms.storage._packed import Packed
from curvax.transforms.storage._quantized import Quantized
from tests.reference.packed import Packing, load_basis, load_root, store_basis, store_root
from tests.reference.shampoo_4bit import linear2_codebook

ROUNDING = 8 * float(jnp.finfo(jnp.float32).eps)
"""Relative float32 rounding per step: matrix products of order 6 to 8, decompositions."""

FACTORS, ROOTS = ("correlation",), ("inverse_root", "basis")  # fields that a storage encodes
# First moments, and second moments, by whose roots updates are divided.
SIGNED, POSITIVE = ("mu", "trace"), ("nu", "rows", "columns")
FIELDS = (*FACTORS, *ROOTS, *SIGNED, *POSITIVE, "refreshes")


class Errors(NamedTuple):
    """Sizes of perturbations, relative to Frobenius norms."""

    gradients: Any = 0.0
    factors: Any = 0.0
    triangles: Any = 0.0  # the factors' Cholesky factors, below the diagonal
    roots: Any = 0.0
    signed: Any = 0.0
    positive: Any = 0.0  # of the square roots, which updates are divided by


def field(path: tuple[Any, ...]) -> str:
    """The innermost field on the path to a leaf of a state."""
    names = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    return names[-1] if names else ""


def leaves_in(state: Any, names: Sequence[str]) -> dict[str, list[Any]]:
    """The leaves of a state whose fields have these names."""
    found = {name: [] for name in names}
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=lambda x: isinstance(x, Counts))
    for path, x in leaves:
        counted = isinstance(x, Counts)
        for name in found.keys() & set(x.names if counted else [field(path)]):
            found[name].append(x.of(name) if counted else x)
    return found


def trajectory(
    optimizer: Any,
    params: Any,
    state: Any,
    gradients: Any,
    names: Sequence[str] = ("refreshes",),
    after: Callable[[Any], Any] = lambda state: state,
) -> tuple[Any, dict[str, list[Any]]]:
    """Updates and state fields at all steps, time first, with constant parameters."""

    def step(state: Any, gradient: Any) -> Any:
        updates, state = optimizer.update(gradient, state, params)
        state = after(state)
        return state, (updates, leaves_in(state, names))

    return jax.lax.scan(step, state, gradients)[1]


class Twin:
    """An optimizer in float64, compiled once for all perturbations."""

    def __init__(self, make: Callable[[Any], Any], params: Any, gradients: Any):
        """Compiles the optimizer that `make` builds from a storage."""

        def moved(errors: Errors, draws: jax.Array, params: Any, gradients: Any) -> Any:
            optimizer = make(Moving(errors, draws))
            shift = jax.vmap(functools.partial(_shifted, error=errors.gradients, draws=draws))
            after = functools.partial(_shifted_moments, errors=errors, draws=draws)
            gradients = jax.tree.map(shift, gradients)
            state = make(Moving(Errors(), draws)).init(params)
            return trajectory(optimizer, params, state, gradients, FIELDS, after)

        self._moved = jax.jit(moved)
        with jax.enable_x64(True):
            self._given = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (params, gradients))
        self.updates, self.states = self.run(Errors(), np.ones((4, 8, 8)))

    def run(self, errors: Errors, draws: np.ndarray) -> Any:
        """The trajectory with perturbations along `draws (N, d, d)`, standard normal numbers."""
        with jax.enable_x64(True):
            errors, draws = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (errors, draws))
            return jax.tree.map(np.asarray, self._moved(errors, draws, *self._given))


@dataclasses.dataclass(frozen=True)
class Moving(curvax.Storage):
    """A storage of plain arrays that perturbs its input, as one that rounds."""

    errors: Errors
    draws: jax.Array

    def decodes_singly(self, order: int) -> bool:
        del order
        return False

    def describe(self, order: int) -> str:
        return f"dense of order {order}"

    def encode_factor(self, x: jax.Array, previous: Any) -> jax.Array:
        if previous is None:
            return x
        c = jnp.linalg.cholesky(x)
        d = _shifted(c, self.errors.triangles, jnp.tril(self.draws, -1))
        change = jnp.where(self.errors.triangles > 0, d @ d.mT - c @ c.mT, 0)
        return _shifted(x + change, self.errors.factors, self.draws + self.draws.mT)

    def decode_factor(self, stored: jax.Array) -> jax.Array:
        return stored

    def encode_root(self, x: jax.Array) -> jax.Array:
        return _shifted(x, self.errors.roots, self.draws)

    def decode_root(self, stored: jax.Array) -> jax.Array:
        return stored

    def encode_basis(self, x: jax.Array, previous: Any) -> jax.Array:
        return x if previous is None else _shifted(x, self.errors.roots, self.draws)

    def decode_basis(self, stored: jax.Array) -> jax.Array:
        return stored


def _shifted(x: jax.Array, error: Any, draws: jax.Array) -> jax.Array:
    """Perturbs each matrix of `x (…, m, n)` by `error` times its norm."""
    n = draws[(0,) * (3 - x.ndim) + tuple(slice(d) for d in x.shape)]
    axes = tuple(range(x.ndim))[-2:]
    size, unit = (jnp.sqrt(jnp.sum(y * y, axes, keepdims=True)) for y in (x, n))
    return x + (error * size / jnp.where(unit > 0, unit, 1) * n).astype(x.dtype)


def _shifted_moments(state: Any, errors: Errors, draws: jax.Array) -> Any:
    def shifted(path: Any, x: jax.Array) -> jax.Array:
        if field(path) in SIGNED:
            return _shifted(x, errors.signed, draws)
        if field(path) in POSITIVE:
            return jnp.square(_shifted(jnp.sqrt(x), errors.positive, draws))
        return x

    return jax.tree_util.tree_map_with_path(shifted, state)


def coding_errors(states: Any, storage: Any, moments: tuple[int, int] | None) -> Errors:
    """The relative errors of quantization along a trajectory, at least the rounding of float32.

    Args:
      states: the states of all steps, time first.
      storage: the storage of factors and roots; None if there are none.
      moments: bits per quantized moment entry and the width of the tiles; None without
        quantization.
    """

    found: dict[str, float] = {}
    if isinstance(storage, Quantized):
        factors, roots = (list(_matrices(states, *names)) for names in (FACTORS, ROOTS))
        read = _packed if isinstance(storage, Packed) else _coded_squares
        found["roots"] = _largest((read(x, storage), x) for x in roots)
        if isinstance(storage, Packed):  # dither: twice the error of the nearest code
            found["factors"] = 2 * _largest((_packed(x, storage), x) for x in factors)
        elif isinstance(storage, Cholesky):
            found["triangles"] = _largest(_coded_triangles(x, storage) for x in factors)
        else:
            found["factors"] = _largest((_coded_squares(x, storage), x) for x in factors)
    if moments is not None:
        bits, block = moments
        table, unsigned = linear2_codebook(bits), ((np.arange(2**bits) + 1) / 2**bits) ** 2
        signed, positive = (list(_matrices(states, *names)) for names in (SIGNED, POSITIVE))
        found["signed"] = _largest((coded(x, table, block), x) for x in signed)
        found["positive"] = _largest(
            (np.sqrt(coded(x, unsigned, block)), np.sqrt(x)) for x in positive
        )
    rounding = Errors(*[ROUNDING] * len(Errors._fields))._replace(triangles=0.0)
    return rounding._replace(**found)


def coded(x: np.ndarray, table: np.ndarray, block: int) -> np.ndarray:
    """Quantizes each element to the nearest table entry times its tile's largest magnitude."""
    m, n = x.shape[-2:]
    padded = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, -m % block), (0, -n % block)])
    rows, columns = (d // block for d in padded.shape[-2:])
    tiles = padded.reshape(*x.shape[:-2], rows, block, columns, block)
    scales = np.abs(tiles).max((-3, -1), keepdims=True)
    shares = tiles / np.where(scales > 0, scales, 1)
    nearest = table[np.argmin(np.abs(shares[..., None] - table), axis=-1)]
    return (nearest * scales).reshape(padded.shape)[..., :m, :n]


def _coded_squares(x: np.ndarray, storage: Quantized) -> np.ndarray:
    """Square matrices, quantized except for the diagonal."""
    diagonal = np.eye(x.shape[-1]) * x
    table = linear2_codebook(storage.codec.bits)
    return diagonal + coded(x - diagonal, table, storage.codec.block)


def _packed(x: np.ndarray, storage: Packed) -> np.ndarray:
    """Symmetric matrices or bases of which a triangle is quantized."""
    packing = Packing(storage.codec.bits, storage.codec.block, dtype=np.float64)
    if np.allclose(x, x.swapaxes(-1, -2)):
        return np.stack([load_root(store_root(root, packing), packing) for root in x])
    return np.stack([load_basis(store_basis(basis, packing), packing) for basis in x])


def _coded_triangles(x: np.ndarray, storage: Any) -> tuple[np.ndarray, np.ndarray]:
    """Quantized Cholesky factors, with error feedback if the storage has it, and exact ones."""
    exact = np.linalg.cholesky(x)  # ignores the storage's tiny diagonal shift
    decay, error, found = getattr(storage, "error_feedback", None), np.zeros_like(x[0]), []
    for target in exact:
        target = target + error
        found.append(_coded_squares(target, storage))
        if decay is not None:
            error = _coded_squares(decay * error + (1 - decay) * (target - found[-1]), storage)
    return np.stack(found), exact


def _matrices(states: Any, *names: str) -> Iterator[np.ndarray]:
    """The trajectory `(T, m, n)` of every matrix; a vector counts as a matrix with one row."""
    for x in itertools.chain(*(states[name] for name in names)):
        x = x[:, None] if x.ndim == 2 else x
        yield from x.reshape(len(x), -1, *x.shape[-2:]).swapaxes(0, 1)


def _largest(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> float:
    """The largest error over all steps, relative to the exact matrix; at least `ROUNDING`."""
    errors = [ROUNDING]
    for x, exact in pairs:
        error, size = (np.sqrt(np.sum(np.square(y), (-2, -1))) for y in (x - exact, exact))
        errors += list(error / np.where(size > 0, size, 1))
    return max(errors)
