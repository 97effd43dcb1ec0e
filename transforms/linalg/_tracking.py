r"""Eigenbases that follow a changing matrix by products alone.

The state keeps an orthonormal basis $U$ and $H = U^\top L U$, which is nearly diagonal, of a
symmetric positive semi-definite matrix $L$ that changes a little at a time. A rotation of the basis
makes it more so: with $h = \mathrm{diag}(H)$,

$$K_{ij} = \frac{H_{ij} \Delta}{\Delta^2 + \tau^2 h_i h_j + (\nu h_{max})^2}, \quad
\Delta = h_j - h_i, \qquad W = f K + f^2 K^2 / 2, \qquad
U \leftarrow U (I + W), \quad H \leftarrow (I + W)^\top H (I + W)$$

$K$ is antisymmetric, so $I + W$ is a rotation up to $f^4 K^4 / 4$. To first order
$K_{ij} = H_{ij} / (h_j - h_i)$ would make $H_{ij}$ 0: Newton's method, and the refinement of Ogita
and Aishima (2018). Where eigenvalues are close it has no bound, while the entry says little: any
basis of an eigenspace will do. $\tau$ makes the step small there, and $\nu$ keeps rounding noise of
$H$ out. Without bounds on the angles' sum it diverges: rows $i$ of $K$ are scaled to a length of at
most 0.7, as $K_{ij} \min(r_i, r_j)$ with $r_i = \min(1, 0.7 / \|K_i\|)$, and
$f = \min(1, 0.6 / \ell)$ with $\ell \approx \|K\|_2$ from four steps of power iteration with $K^2$,
from the vector of the rows' lengths.

Rotations repeat until one was short, $\ell < 0.3$: the rest is then of order $\ell^2$
(`docs/performance.md` has how many it takes). A longer one is made orthonormal,
$R \leftarrow R - R (R^\top R - I) / 2$ for $R = I + W$, so that $H$ stays $U^\top L U$. Nothing is
sorted: columns keep their eigenvalues and moments. The defect $\|E x\| / \|x\|$,
$E = U^\top U - I$, for one vector of signs is about the root mean square of a column of $E$. Above
$10^{-3}$, $U \leftarrow U - U E / 2$.

*Cost* for order `d`: 4 products, `8 d³` FLOPs, for a refresh by one short rotation; 6 for each long
one before; two more where the basis is made orthonormal.

References:
  Ogita and Aishima, `Iterative refinement for symmetric eigenvalue decomposition
  <https://doi.org/10.1007/s13160-018-0310-3>`_, 2018.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ._eigh import eigh, with_fixed_signs
from ._numerics import magnitude, power_of_two
from ._platforms import by_platform
from ._products import exact_product

CLOSENESS = 0.3
"""τ: eigenvalues whose distance is below this share of their mean are close."""
NOISE = 1e-7
"""ν: entries of H below this share of the largest eigenvalue are rounding noise."""
LONGEST_ROW = 0.7
"""The longest row of a rotation's generator."""
LONGEST = 0.6
"""The largest spectral norm of a rotation's generator."""
SHORT = 0.3
"""A rotation shorter than this ends a refresh."""
LEAST_DEFECT = 1e-3
"""Bases with a smaller defect stay as they are."""
MOST_DEFECT = 0.5
"""Bases with a larger defect are damaged."""
FROM_IDENTITY = 80
"""Rotations from the identity to the eigenvectors of any matrix, at most."""


def followed(u: jax.Array, h: jax.Array, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A basis `u (d, d)` and `h = uᵀ L u` after at most so many rotations, and their product."""
    near_one, scale = _near_one(h)
    turn, near_one = _rotations(near_one, most, exactly=False)
    return orthonormalized(exact_product(u, turn)), near_one / scale, turn


def decomposed(h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvectors by descending eigenvalue, with fixed signs, and eigenvalues of `h (d, d)`.

    On a TPU by rotations from the identity, where the order of the eigenvalues is arbitrary.
    """

    def by_eigh(h: jax.Array) -> tuple[jax.Array, jax.Array]:
        q, d = eigh(h)
        return with_fixed_signs(q[:, ::-1]), jnp.maximum(d[::-1], 0)

    def by_rotations(h: jax.Array) -> tuple[jax.Array, jax.Array]:
        near_one, scale = _near_one(h)
        turn, near_one = _rotations(near_one, FROM_IDENTITY, exactly=True)
        return turn, jnp.maximum(jnp.diagonal(near_one), 0) / scale

    return by_platform(tpu=by_rotations, default=by_eigh)(h)


def _near_one(h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`h` times a power of two, so that its largest entry is near 1, and that power."""
    scale = jnp.ldexp(jnp.ones((), h.dtype), -power_of_two(magnitude(h)))
    return h * scale, scale


def orthonormalized(u: jax.Array) -> jax.Array:
    """`u (d, d)`, made orthonormal if its defect shows."""
    return _corrected(u, lambda steps, u: (steps < 4) & (_defect(u) > LEAST_DEFECT))


def orthonormal(u: jax.Array) -> jax.Array:
    """Whether `u (d, d)` is orthonormal, or near enough for `orthonormalized` to make it so."""
    return _defect(u) < MOST_DEFECT


def _defect(u: jax.Array) -> jax.Array:
    signs = jnp.where(jnp.arange(u.shape[-1]) % 3 == 0, -1, 1).astype(u.dtype)
    with jax.default_matmul_precision("highest"):
        change = (u @ signs) @ u - signs
    return jnp.linalg.norm(change) / u.shape[-1] ** 0.5


def _rotations(h: jax.Array, most: int, *, exactly: bool) -> tuple[jax.Array, jax.Array]:
    """The product of at most so many rotations, and `h (d, d)`, of entries near 1, after them.

    `exactly`: short rotations are made orthonormal too, and all of them up to rounding.
    """

    def rotated(h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        rotation, length = _rotation(h)
        needed = exactly | (length >= SHORT)
        change = _corrected(rotation, lambda r, _: (r < 1 + exactly) & needed) - _eye(h)
        h = h + exact_product(h, change)
        h = h + exact_product(change, h, transpose_a=True)
        return (h + h.mT) / 2, change, length

    def again(loop: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rounds, _, h, turn = loop
        h, change, length = rotated(h)
        return rounds + 1, length, h, turn + exact_product(turn, change)

    def unfinished(loop: tuple[jax.Array, ...]) -> jax.Array:
        rounds, length, *_ = loop
        return (rounds < most) & (length >= SHORT)

    h, change, length = rotated(h)
    start = jnp.int32(1), length, h, _eye(h) + change
    *_, h, turn = jax.lax.while_loop(unfinished, again, start)
    return turn, h


def _rotation(h: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`I + W`, and the length of its generator."""
    k = generator(h)
    square = exact_product(k, k)
    length = _length(k, square)
    f = LONGEST / jnp.maximum(length, LONGEST)
    return _eye(h) + f * k + f * f / 2 * square, length


def _corrected(u: jax.Array, needed: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Newton-Schulz steps `u - u (uᵀu - I) / 2` while `needed(steps, u)`.

    In a stack the loop ends when no matrix needs a step; a condition would compute all of them.
    """

    def step(loop: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        steps, u = loop
        defect = exact_product(u, u, transpose_a=True) - _eye(u)
        return steps + 1, u - exact_product(u, defect) / 2

    return jax.lax.while_loop(lambda loop: needed(*loop), step, (jnp.int32(0), u))[1]


def _eye(like: jax.Array) -> jax.Array:
    return jnp.eye(len(like), dtype=like.dtype)


def generator(h: jax.Array) -> jax.Array:
    """The generator `K (d, d)` of a rotation, with bounded rows."""
    d = jnp.maximum(jnp.diagonal(h), 0)
    apart = d[None, :] - d[:, None]
    noise = NOISE * jnp.max(d)
    below = apart**2 + CLOSENESS**2 * d[None, :] * d[:, None] + noise**2
    k = jnp.where(below > 0, h * apart / jnp.where(below > 0, below, 1), 0)
    k = (k - k.mT) / 2
    rows = jnp.linalg.norm(k, axis=1)
    shrink = jnp.minimum(1, LONGEST_ROW / jnp.maximum(rows, LONGEST_ROW))
    return k * jnp.minimum(shrink[:, None], shrink[None, :])


def _length(k: jax.Array, square: jax.Array) -> jax.Array:
    """About the spectral norm of antisymmetric `k (d, d)`, from below."""
    v = jnp.linalg.norm(k, axis=0)
    for _ in range(4):
        norm = jnp.linalg.norm(v)
        v = square @ (v / jnp.where(norm > 0, norm, 1))
    return jnp.sqrt(jnp.linalg.norm(v))
