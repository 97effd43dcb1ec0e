r"""Turns of a basis that diagonalize its statistic: exact, by QR, or by products alone.

A symmetric positive semi-definite matrix $L$ that changes a little at a time is kept in a basis
$U$, as $H = U^\top L U$, which is nearly diagonal. A refresh is a map from $H$ to a turn $T$, and
$U \leftarrow U T$, $H \leftarrow T^\top H T$:

* *exact*: $T$ has the eigenvectors of $H$ by descending eigenvalue;
* *QR*: $T R = H P$ with the columns sorted by $\mathrm{diag}(H)$. As $L U = U H$, this is a step of
  orthogonal iteration, $U T R = L U P$;
* *rotations*: with $h = \max(0, \mathrm{diag}(H))$ and $\Delta = h_j - h_i$,

$$K_{ij} = \frac{H_{ij} \Delta}{\Delta^2 + \tau^2 h_i h_j + (\nu h_{max})^2}, \qquad
T = I + f K + f^2 K^2 / 2 + f^3 K^3 / 8$$

Newton's step, $K_{ij} = H_{ij} / \Delta$, makes $H_{ij}$ 0 to first order (the refinement of `Ogita
and Aishima <https://doi.org/10.1007/s13160-018-0310-3>`_, 2018), but has no bound where eigenvalues
are close, while the entry says little there: any basis of an eigenspace will do. $\tau$ makes the
step small there, and $\nu$ where $\Delta$ is rounding noise. But between equal diagonal entries, as
those of gradients of signs, a large entry is no sign of close eigenvalues: where $\Delta^2 < c /
100$ and $H_{ij}^2 > c$ with $c = \tau^2 h_i h_j + (\nu h_{max})^2$, $K_{ij}$ is Jacobi's angle
$\frac\pi4 s\,\mathrm{sign}(H_{ij})$, with the sign $s$ of $\Delta$, or of $j - i$ if that is 0.

Without bounds on the angles' sum it diverges: rows $i$ are scaled to a length of at most 0.7,
$K_{ij} \min(r_i, r_j)$ with $r_i = \min(1, 0.7 / \|K_i\|)$ taking the place of $K_{ij}$. Then
$f = \min(1, 0.6 / \ell)$ with $\ell \approx \|K\|_2$, from four steps of power iteration with $K^2$
from the vector of the rows' lengths. $K$ is antisymmetric, so $T$ is a rotation up to $f^6 K^6 /
64$.

A rotation with $\ell < 0.3$ is the last: the rest is of order $\ell^2$, but for close eigenvalues,
which matter little. Roots need $\ell < 0.1$, because what is left between a large eigenvalue and a
small one is a large share of the small one. Nothing is sorted: columns keep their eigenvalues and
moments, which take the product of all turns once.

*Straight bases.* Rounding and long rotations leave a basis that is not quite orthonormal,
$U^\top U = I + E$. Where the defect $\|E x\| / \|x\|$ for one vector $x$ of signs, about the root
mean square of a column of $E$, is above $3 \cdot 10^{-4}$, a turn by $I - E / 2$ comes before a
rotation, or after an exact turn. $H$, moments and gradients take it as any other, so that $H$ stays
$U^\top L U$, and what the range of $L$ has does not leak into its null space.

*Cost* for order `d`: 6 products, `12 d³` FLOPs, for each rotation, and as many for a turn that
straightens, by default in three passes of bfloat16 on GPUs and TPUs (`HALVES` of `_products.py`).
An exact turn takes one product beside the decomposition.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._eigh import eigh, with_fixed_signs
from ._loops import while_at_most
from ._numerics import magnitude, ratio, safe_norm, safe_root, to_one
from ._platforms import by_platform, diagonals
from ._products import exact_product
from ._qr import qr

CLOSENESS = 0.3  # τ
NOISE = 1e-7  # ν
EQUAL = 0.1  # diagonal entries, in units of τ √(h_i h_j)
LONGEST_ROW = 0.7  # of K
LONGEST = 0.6  # the spectral norm of f K
SHORT, SHORT_FOR_ROOTS = 0.3, 0.1  # rotations that end a refresh
LEAST_DEFECT = 3e-4  # of bases that are straightened
MOST_DEFECT = 0.5  # of a basis that is not damaged
ROTATIONS = 80  # as many lead from the identity to the eigenvectors of any matrix


class Turn(NamedTuple):
    """What a refresh makes of a basis `U (d, d)` and its statistic `H (d, d)`."""

    matrix: jax.Array  # T
    basis: jax.Array  # U T
    statistic: jax.Array  # Tᵀ H T
    order: jax.Array | None  # of the old columns, int32 (d,), if it is another
    keeps: jax.Array  # bool: whether a kept spectrum stays as it is, as in papers


def by_default(u: jax.Array, h: jax.Array, short: float) -> Turn:
    """Exact in a program for a CPU, where it is cheap; by rotations on GPUs and TPUs."""
    rotated = functools.partial(by_rotations, most=ROTATIONS, short=short)
    return by_platform(cpu=by_eigh, default=rotated)(u, h)


def by_eigh(u: jax.Array, h: jax.Array) -> Turn:
    """The eigenvectors of `h`, and a diagonal statistic."""
    scale = to_one(magnitude(h))
    q, d = eigh(h * scale)  # EVD of SOAP's Algorithm 6 in Gong et al., arXiv:2502.07752
    q = with_fixed_signs(q[:, ::-1])
    u, turn, h = straightened(exact_product(u, q), q, jnp.diag(d[::-1] / scale))
    return Turn(turn, u, h, None, jnp.bool_(True))


def by_qr(u: jax.Array, h: jax.Array, most: int, again: Callable[[jax.Array], jax.Array]) -> Turn:
    """Up to `most` steps of orthogonal iteration, while `again(h)` is true after one."""

    def qr_step(h: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        order = jnp.argsort(-diagonals(h), stable=True)
        q = with_fixed_signs(qr(h[:, order])[0])  # T of T R = H P
        return q, turned(h, q), order

    def refine(loop: tuple[Any, ...]) -> tuple[Any, ...]:
        count, q, h, order = loop
        r, h, then = qr_step(h)
        return count + 1, exact_product(q, r), h, order[then]

    state = (jnp.int32(1), *qr_step(h))
    if most > 1:
        # The QR algorithm from a warm start, of Eschenhagen et al., arXiv:2506.03595.
        state = while_at_most(most - 1, lambda x: (x[0] < most) & again(x[2]), refine, state)
    _, q, h, order = state
    u, turn, h = straightened(exact_product(u, q), q, h)
    return Turn(turn, u, h, order, jnp.bool_(True))


def by_rotations(u: jax.Array, h: jax.Array, most: int, short: float = SHORT) -> Turn:
    """At most so many rotations, until one is shorter than `short`, and turns that straighten."""
    scale, eye = to_one(magnitude(h)), _eye(h)

    def again(loop: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        rounds, _, straight, u, h, turn = loop
        # Products of a lower level leave a defect that no turn removes: one turn before a rotation.
        crooked = (_defect(u) > LEAST_DEFECT) & ~straight
        k = generator(h)
        factor = jnp.where(crooked, u, k)
        square = exact_product(factor, factor, transpose_a=True)  # I + E, or -K²
        length = _length(k, square)
        f = LONGEST / jnp.maximum(length, LONGEST)  # min(1, 0.6 / ℓ)
        k = f * k
        rotation = exact_product(k, eye + k / 2 - f * f / 8 * square)  # T - I
        change = jnp.where(crooked, (eye - square) / 2, rotation)  # or -E / 2
        turn, u, h = (x + exact_product(x, change) for x in (turn, u, h))
        h = h + exact_product(change, h, transpose_a=True)
        return rounds + 1, jnp.where(crooked, jnp.inf, length), crooked, u, (h + h.mT) / 2, turn

    def unfinished(loop: tuple[jax.Array, ...]) -> jax.Array:
        rounds, length, *_ = loop
        return (rounds < most) & (length >= short)

    start = jnp.int32(0), jnp.full((), jnp.inf, h.dtype), jnp.bool_(False), u, h * scale, eye
    *_, u, h, turn = while_at_most(most, unfinished, again, start)
    return Turn(turn, u, h / scale, None, jnp.bool_(False))


def turned(h: jax.Array, turn: jax.Array) -> jax.Array:
    """`turnᵀ h turn`, symmetric."""
    h = exact_product(turn, exact_product(h, turn), transpose_a=True)
    return (h + h.mT) / 2


def orthonormal(u: jax.Array) -> jax.Array:
    """Whether `u (d, d)` is near enough to orthonormal to be made so; a NaN is not."""
    lengths = jnp.sum(u * u, axis=0)
    return (_defect(u) < MOST_DEFECT) & (jnp.max(jnp.abs(lengths - 1)) < MOST_DEFECT)


def straightened(u: jax.Array, turn: Any = None, h: Any = None) -> tuple[jax.Array, Any, Any]:
    """`u (d, d)` orthonormal by Newton-Schulz steps if its defect shows; `turn` and `h` follow."""

    def straightening_step(loop: tuple[Any, ...]) -> tuple[Any, ...]:
        steps, u, turn, h = loop
        change = (3 * _eye(u) - exact_product(u, u, transpose_a=True)) / 2  # I - E / 2
        u, turn = (x if x is None else exact_product(x, change) for x in (u, turn))
        return steps + 1, u, turn, h if h is None else turned(h, change)

    def crooked(loop: tuple[Any, ...]) -> jax.Array:
        return (loop[0] < 4) & (_defect(loop[1]) > LEAST_DEFECT)

    _, u, turn, h = while_at_most(4, crooked, straightening_step, (jnp.int32(0), u, turn, h))
    return u, turn, h


def _defect(u: jax.Array) -> jax.Array:
    signs = jnp.where(jnp.arange(u.shape[-1]) % 3 == 0, -1, 1).astype(u.dtype)
    with jax.default_matmul_precision("highest"):
        change = (u @ signs) @ u - signs
    return safe_norm(change) / u.shape[-1] ** 0.5


def _eye(like: jax.Array) -> jax.Array:
    return jnp.eye(len(like), dtype=like.dtype)


def generator(h: jax.Array) -> jax.Array:
    """The generator `K (d, d)` of a rotation, with bounded rows."""
    d = jnp.maximum(diagonals(h), 0)
    apart = d[None, :] - d[:, None]
    noise = NOISE * jnp.max(d)
    close = CLOSENESS**2 * d[None, :] * d[:, None] + noise**2
    k = ratio(h * apart, apart**2 + close)  # K; with τ = ν = 0 the step of Ogita and Aishima
    place = jnp.arange(len(h))
    order = jnp.where(place[:, None] < place[None, :], 1, -1)
    side = jnp.where(apart == 0, order, jnp.sign(apart))
    large = (h**2 > close) & (apart**2 < EQUAL**2 * close)
    k = jnp.where(large, jnp.pi / 4 * side * jnp.sign(h), k)
    k = (k - k.mT) / 2
    rows = safe_norm(k, axis=1)
    shrink = jnp.minimum(1, LONGEST_ROW / jnp.maximum(rows, LONGEST_ROW))  # r
    return k * jnp.minimum(shrink[:, None], shrink[None, :])


def _length(k: jax.Array, square: jax.Array) -> jax.Array:
    """About the spectral norm of antisymmetric `k (d, d)`, with `square` = ±k², from below."""
    v = safe_norm(k, axis=0)
    for _ in range(3):
        v = square @ v  # rows of k are at most 0.7 long, so nothing overflows
    norm = safe_norm(v)
    return safe_root(safe_norm(square @ v) / jnp.where(norm > 0, norm, 1))
