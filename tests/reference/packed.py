"""Packed storage of factors, inverse roots and bases in float64 NumPy, in Shampoo, SOAP and ASGO.

The storage is the library's own; no paper has it. This follows its published formulas, and the
methods' own transcriptions (`shampoo`, `soap`, `asgo` beside this file).

1. Codec of b bits on the strictly lower triangle, in tiles of `block * block`, each with a scale
   s = max |x|. Levels n_j = k|k|, k = 2j - (2^b - 1), but 0 for j = 2^(b-1) - 1; T = (2^b - 1)^2.
   The code of x is #{j : s ((1 - u) n_j + u n_{j+1}) < T x}; it decodes to s n_code / T. u = 1/2
   takes the nearest level.
2. Dither: u_ij(t) = (((i a_1 + j a_2 + t a_3) mod 2^32) >> 8) / 2^24, where
   a_p = floor(2^32 / 1.2207440846^p) | 1; t counts the updates of a factor from 1.
3. Factor X: C = chol(X + shift max(diag X) I), the codes of tril(C, -1) with dither, diag C.
4. Inverse root X: the codes of tril(X, -1) to the nearest, diag X.
5. Basis U: the reflectors of its QR decomposition, each divided by the largest of its entries below
   the diagonal, and signs.

Readings chosen where the formulas are silent:

- Tiles begin at the matrix's first row and column; ragged tiles have scales of their own, and a
  tile across the diagonal counts only its entries below it. A tile of zeros has scale 0, and for
  codes that of the level 0 (where the formula has code 0; both decode to 0). Codes on and above the
  diagonal are 0 here.
- `dtype` is that of the diagonals and of 1/l (float32 in the formulas); all else is float64.
- A method's root or basis is that of the *decoded* factor, and its direction uses the *decoded*
  root or basis. Roots and bases start at I, which the storage keeps exactly.
- The shifts of the retries are added to `X + shift max(diag X) I`. X = 0 gives C = 0. A factor that
  fails four times raises LinAlgError.
- SOAP's QR refresh starts from the decoded basis. M is kept in the original space (carrying it by
  the rotation between decoded bases, which are orthogonal, is the same); v follows `carry_v`, as
  in `soap`.
"""

from typing import Any, NamedTuple

import numpy as np

from .asgo import asgo
from .shampoo import shampoo_practical
from .soap import EPS64, soap


class Packing(NamedTuple):
    """What the storage is made with."""

    bits: int = 8
    block: int = 64
    shift: float = 0.0
    dtype: Any = np.float32


class Stored(NamedTuple):
    """Codes (d, d), scales (one per tile), diagonal (d,), signs (d,) of a basis."""

    codes: np.ndarray
    scales: np.ndarray
    diagonal: np.ndarray
    signs: Any = None


# 1. Codec


def levels(bits):
    """n_j and T: integers, as floats."""
    n = []
    for j in range(2**bits):
        k = 2 * j - (2**bits - 1)
        n.append(0 if j == 2 ** (bits - 1) - 1 else k * abs(k))
    return np.array(n, dtype=np.float64), float((2**bits - 1) ** 2)


def _tiles(d, block):
    """Row and column of each tile that has entries below the diagonal, and where they are."""
    for p in range(-(-d // block)):
        for q in range(p + 1):
            rows, columns = np.mgrid[
                p * block : min((p + 1) * block, d), q * block : min((q + 1) * block, d)
            ]
            below = rows > columns
            yield p, q, (rows[below], columns[below])


def encode(X, u, packing):
    """Codes and scales of the strictly lower triangle of X; `u` a number or one per entry."""
    d, (n, T) = len(X), levels(packing.bits)
    u = np.broadcast_to(u, X.shape)
    codes = np.zeros((d, d), dtype=int)
    scales = np.zeros((-(-d // packing.block),) * 2)
    for p, q, here in _tiles(d, packing.block):
        s = scales[p, q] = np.max(np.abs(X[here]), initial=0.0)
        between = (1 - u[here])[:, None] * n[:-1] + u[here][:, None] * n[1:]
        codes[here] = np.sum(s * between < T * X[here][:, None], axis=1)
        if s == 0:
            codes[here] = 2 ** (packing.bits - 1) - 1
    return codes, scales


def decode(codes, scales, packing):
    """D(codes): strictly lower triangular."""
    n, T = levels(packing.bits)
    X = np.zeros(codes.shape)
    for p, q, here in _tiles(len(codes), packing.block):
        X[here] = scales[p, q] * n[codes[here]] / T
    return X


# 2. Dither


def dither(d, t):
    """u(t) for a matrix of order d."""
    a = [int(2**32 / 1.2207440846**p) | 1 for p in (1, 2, 3)]
    u = [[((i * a[0] + j * a[1] + t * a[2]) % 2**32) >> 8 for j in range(d)] for i in range(d)]
    return np.array(u, dtype=np.float64) / 2**24


# 3. Factor


def shifted_cholesky(X, shift):
    """Cholesky factor, after up to three retries with growing shifts."""
    d, top = len(X), np.max(np.diag(X))
    if top == 0:
        return np.zeros((d, d))
    X = X + shift * top * np.eye(d)
    for retry in (0.0, 1e1, 1e2, 1e3):
        try:
            return np.linalg.cholesky(X + retry * d * EPS64 * top * np.eye(d))
        except np.linalg.LinAlgError:
            continue
    raise np.linalg.LinAlgError("four Cholesky decompositions failed")


def store_factor(X, t, packing):
    """The factor after its update number t."""
    C = shifted_cholesky(X, packing.shift)
    codes, scales = encode(C, dither(len(X), t), packing)
    return Stored(codes, scales, np.diag(C).astype(packing.dtype))


def first_factor(X, packing):
    """The diagonal X that a factor starts with."""
    codes, scales = encode(np.zeros(X.shape), 0.5, packing)
    return Stored(codes, scales, np.sqrt(np.diag(X)).astype(packing.dtype))


def load_factor(stored, packing):
    """L = C C'."""
    C = decode(stored.codes, stored.scales, packing) + np.diag(np.float64(stored.diagonal))
    return C @ C.T


# 4. Inverse root


def store_root(X, packing):
    """The symmetric X."""
    return Stored(*encode(X, 0.5, packing), np.diag(X).astype(packing.dtype))


def load_root(stored, packing):
    """Y + Y' + diag(X)."""
    Y = decode(stored.codes, stored.scales, packing)
    return Y + Y.T + np.diag(np.float64(stored.diagonal))


# 5. Basis


def householder(U):
    """V (unit lower triangular), signs to store; U = H_1 ... H_d R as LAPACK's geqrf has them."""
    R, d = np.array(U, dtype=np.float64), len(U)
    V, signs = np.eye(d), np.ones(d)
    for k in range(d):
        alpha, below = R[k, k], np.linalg.norm(R[k + 1 :, k])
        if below == 0:  # tau = 0: no reflector, where the decoded one flips
            signs[k] = -np.copysign(1.0, alpha)
            continue
        beta = -np.copysign(np.hypot(alpha, below), alpha)
        V[k + 1 :, k] = R[k + 1 :, k] / (alpha - beta)
        v = V[k:, k]
        R[k:] -= np.outer(v, 2 / (v @ v) * (v @ R[k:]))
        signs[k] = np.copysign(1.0, beta)
    return V, signs


def store_basis(U, packing):
    """The orthogonal U."""
    V, signs = householder(U)
    lengths = np.maximum(np.max(np.abs(np.tril(V, -1)), axis=0), 2.0**-20)
    codes, scales = encode(V / lengths, 0.5, packing)
    return Stored(codes, scales, (1 / lengths).astype(packing.dtype), signs)


def load_basis(stored, packing):
    """Orthogonal up to rounding, whatever the codes."""
    W = decode(stored.codes, stored.scales, packing) + np.diag(np.float64(stored.diagonal))
    U = np.diag(stored.signs)
    for w in W.T[::-1]:
        U = U - np.outer(w, 2 / (w @ w) * (w @ U))
    return U


# Methods


class Packed:
    """Gives back what is decoded of each matrix, and remembers what is stored."""

    def __init__(self, packing):
        self.packing, self.forms = packing, {}

    def __call__(self, X, kind, t):
        packing = self.packing
        if kind in ("start", "factor"):
            start = kind == "start"
            stored = first_factor(X, packing) if start else store_factor(X, t, packing)
            decoded = load_factor(stored, packing)
        elif kind == "root":
            stored = store_root(X, packing)
            decoded = load_root(stored, packing)
        else:
            stored = store_basis(X, packing)
            decoded = load_basis(stored, packing)
        self.forms[id(decoded)] = decoded, stored
        return decoded


def _packed(method, names, gradients, packing, options):
    kept = Packed(packing)
    directions, states = method(gradients, kept=kept, **options)
    stored = lambda X: kept.forms[id(X)][1]  # noqa: E731
    return directions, [s | {f"{name}_bar": stored(s[name]) for name in names} for s in states]


def shampoo_packed(gradients, packing, **options):
    """`shampoo_practical` (000 Algorithm 2) with factors and roots packed; options as there.

    States: the decoded L, R, L_hat, R_hat; what is stored under the same names with `_bar`.
    """
    return _packed(shampoo_practical, ("L", "R", "L_hat", "R_hat"), gradients, packing, options)


def soap_packed(gradients, packing, **options):
    """`soap` (001 Algorithm 6) with statistics and bases packed; options as there.

    States: M, v, the decoded L, R, U_L, U_R; what is stored under the same names with `_bar`.
    """
    return _packed(soap, ("L", "R", "U_L", "U_R"), gradients, packing, options)


def asgo_packed(gradients, packing, **options):
    """`asgo` (002 Algorithm 2) with V and its inverse root packed; options as there.

    States: M, the decoded V and Lambda_inv; what is stored under V_bar and Lambda_inv_bar.
    """
    return _packed(asgo, ("V", "Lambda_inv"), gradients, packing, options)
