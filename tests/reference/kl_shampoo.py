"""KL-Shampoo and KL-SOAP, transcribed in NumPy float64.

Paper: "Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization"
(arXiv:2509.03378). Each factor's statistic is whitened by the other one, for G of shape (m, n):
L <- b L + (1 - b) / n G R^(-1) G', R <- b R + (1 - b) / m G' L^(-1) G, D = L^(-1/2) M R^(-1/2).
There is no grafting and no root but 2.

Three functions:
- `kl_shampoo` is the idealized one, from roots of the factors, fresh or stale.
- `kl_shampoo_eigenbasis` is the practical one: bases Q_L, Q_R renewed every K steps, eigenvalues
  by moving average at every step in the current bases, d_L <- b d_L + (1 - b) / n
  diag(Q_L' G R^(-1) G' Q_L) with R^(-1) = Q_R diag(1 / d_R) Q_R', and so on; then
  D = Q_L ((Q_L' M Q_R) / sqrt(d_L d_R')) Q_R'.
- `kl_soap` is SOAP (`reference.soap`) in these bases, whitened by these eigenvalues.

Readings chosen:
- L and R are both whitened by the factors from before the step; sequential=True whitens R by the
  new L (or by the new d_L, in the basis from before the step).
- Order of a step: statistics and eigenvalues, then the root or the basis, then D. lag=True (the
  official code) computes D first, from what the step before left.
- M is an EMA with b1 (0: the gradient, as in the paper's formulas; the official code has 0.9 and
  b = 0.98), without bias correction, which is an option, like that of v in KL-SOAP.
- Steps that renew: t = 1 and (t - offset) mod K = 0. The official code does not count its first
  step: offset=1.
- M is kept in the original space; v and the averaged eigenvalues stay as they are when a basis
  changes, as in the official code. at_refresh: "keep" that; "permute" eigenvalues and v with their
  columns (by the sort of a QR refresh, or the best matching to the old basis); "rayleigh" sets the
  eigenvalues to diag(Q' L Q) and keeps v.

Start of `kl_shampoo` (the paper prints none): L = R = `initial` I, 1 by default, since R^(-1) must
exist; the first roots are those of these factors, or `initial_root` I, which initial=0 needs. Roots
are (A + eps I)^(-1/2), eps absolute or times the largest eigenvalue (relative=True). R^(-1) is the
square of the root in use, damped and stale as it is (whiten="roots"), or is made from the factor
anew (whiten="factors"); the two are the same if K = 1. Eigenvalues are floored at 0 before damping,
and at most cutoff * (the largest) afterwards gives 0 in the inverses. correct_factors=True takes
roots of L / (1 - b^t), for initial=0.

Start of the other two:
- start="gradient" is the official code: step 1 sets L to (1 - b) / n G G' and R to
  (1 - b) / m G' G, not whitened, each added to b `initial_factor` I (0 there); the bases are their
  eigenvectors, all eigenvalues are `initial` (0.1 there), and D = 0, M and v untouched
  (skip_first=True; the bias corrections then count t - 1).
- start="identity": bases I, eigenvalues `initial`, L and R `initial_factor` I, and step 1 is like
  any other (skip_first=False goes with it).
- refresh="qr" (official) is one QR(L Q), refresh="eigh" an eigendecomposition, which step 1 always
  is. sort=True sorts the old columns by diag(Q' L Q) before QR, which the official code does not.
- eigenvalues="rayleigh" has no averages: d_L = diag(Q_L' L Q_L), after every update and refresh.
- The eigenvalues are not less than `floor` (official: clamped so that d^(-1/2) is at most
  max(10, min(order, 4000))). Inverses of 0 are 0. eps is added to sqrt(d_L d_R') in KL-Shampoo and
  to sqrt(v) in KL-SOAP (1e-8 in the official code); the division by v is that of `reference.soap`.
- Equal eigenvalues and null spaces leave bases arbitrary; `basis(t, "left" | "right", statistic,
  previous)` supplies them then, used as it is.
"""

import numpy as np
from scipy.optimize import linear_sum_assignment

from .soap import EPS64, divide, eigenvectors, qr_refresh


def _reciprocal(x, cutoff=0.0):
    """1 / x, and 0 where x <= cutoff * max x."""
    return np.divide(1.0, x, out=np.zeros_like(x), where=x > cutoff * np.max(x))


def inverse_root(A, eps, relative=False, cutoff=0.0):
    """(A + eps I)^(-1/2)."""
    d, U = np.linalg.eigh((A + A.T) / 2)
    d = np.maximum(d, 0.0)
    d = d + (eps * d.max() if relative else eps)
    return (U * np.sqrt(_reciprocal(d, cutoff))) @ U.T


def _moment(M, G, b1):
    return b1 * M + (1 - b1) * G


def kl_shampoo(
    gradients,
    *,
    b=0.95,
    b1=0.0,
    initial=1.0,
    initial_root=None,
    eps=0.0,
    relative=False,
    cutoff=0.0,
    whiten="roots",
    sequential=False,
    lag=False,
    K=1,
    offset=0,
    bias_correction=False,
    correct_factors=False,
):
    """The idealized KL-Shampoo over the gradients, each (m, n).

    States: M (m, n), L, R and their roots L_hat, R_hat.
    """
    if whiten not in ("roots", "factors"):
        raise ValueError(f"unknown whiten {whiten!r}")
    m, n = np.shape(gradients[0])
    M, L, R = np.zeros((m, n)), initial * np.eye(m), initial * np.eye(n)

    def root_of(A, t):
        correction = 1 - b**t if correct_factors and t > 0 else 1.0
        return inverse_root(A / correction, eps, relative, cutoff)

    def inverse(A, A_hat, t):
        half = A_hat if whiten == "roots" else root_of(A, t)
        return half @ half

    if initial_root is None:
        L_hat, R_hat = root_of(L, 0), root_of(R, 0)
    else:
        L_hat, R_hat = initial_root * np.eye(m), initial_root * np.eye(n)
    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        G = np.asarray(G, dtype=np.float64)
        M = _moment(M, G, b1)
        M_hat = M / (1 - b1**t) if bias_correction else M
        before = L_hat @ M_hat @ R_hat
        due = t == 1 or (t - offset) % K == 0
        L_old, L_hat_old, t_old = L, L_hat, t - 1
        L = b * L + (1 - b) / n * G @ inverse(R, R_hat, t - 1) @ G.T
        if due:
            L_hat = root_of(L, t)
        if sequential:
            L_old, L_hat_old, t_old = L, L_hat, t
        R = b * R + (1 - b) / m * G.T @ inverse(L_old, L_hat_old, t_old) @ G
        if due:
            R_hat = root_of(R, t)
        directions.append(before if lag else L_hat @ M_hat @ R_hat)
        states.append({"M": M, "L": L, "R": R, "L_hat": L_hat, "R_hat": R_hat})
    return directions, states


def _whitened(G, Q, d):
    """G Q diag(1 / d) Q' G' over the number of columns of G: the left statistic of G."""
    Y = (G @ Q) * np.sqrt(_reciprocal(d))
    return Y @ Y.T / G.shape[1]


def _rayleigh(A, Q):
    return np.maximum(np.sum(Q * (A @ Q), axis=0), 0.0)


class Factors:
    """L and R with bases and eigenvalues: the estimation that `kl_soap` shares with KL-Shampoo."""

    def __init__(
        self,
        shape,
        *,
        b=0.95,
        start="gradient",
        initial=0.1,
        initial_factor=0.0,
        eigenvalues="average",
        refresh="qr",
        sort=False,
        at_refresh="keep",
        sequential=False,
        floor=0.0,
        K=10,
        offset=0,
        basis=None,
    ):
        for name, value, known in (
            ("start", start, ("gradient", "identity")),
            ("eigenvalues", eigenvalues, ("average", "rayleigh")),
            ("refresh", refresh, ("qr", "eigh")),
            ("at_refresh", at_refresh, ("keep", "permute", "rayleigh")),
        ):
            if value not in known:
                raise ValueError(f"unknown {name} {value!r}")
        m, n = shape
        self.L, self.R = initial_factor * np.eye(m), initial_factor * np.eye(n)
        self.Q_L, self.Q_R = np.eye(m), np.eye(n)
        self.d_L, self.d_R = np.full(m, float(initial)), np.full(n, float(initial))
        self.b, self.start, self.eigenvalues = b, start, eigenvalues
        self.refresh, self.sort, self.at_refresh = refresh, sort, at_refresh
        self.sequential, self.floor, self.K, self.offset = sequential, floor, K, offset
        self.basis = basis

    def update(self, t, G):
        """One step. Returns the orders of the old columns in which v follows the bases."""
        unwhitened = t == 1 and self.start == "gradient"
        d_R = np.ones_like(self.d_R) if unwhitened else self.d_R
        d_L = np.ones_like(self.d_L) if unwhitened else self.d_L
        left = _whitened(G, self.Q_R, d_R)
        self.L = self.b * self.L + (1 - self.b) * left
        if not unwhitened:
            self.d_L = self._average(self.d_L, left, self.L, self.Q_L)
            d_L = self.d_L if self.sequential else d_L
        right = _whitened(G.T, self.Q_L, d_L)
        self.R = self.b * self.R + (1 - self.b) * right
        if not unwhitened:
            self.d_R = self._average(self.d_R, right, self.R, self.Q_R)
        orders = np.arange(len(self.d_L)), np.arange(len(self.d_R))
        if t == 1 or (t - self.offset) % self.K == 0:
            self.Q_L, self.d_L, order_L = self._renew(t, "left", self.L, self.Q_L, self.d_L)
            self.Q_R, self.d_R, order_R = self._renew(t, "right", self.R, self.Q_R, self.d_R)
            orders = (order_L, order_R) if self.at_refresh == "permute" else orders
        return orders

    def _average(self, d, increment, statistic, Q):
        if self.eigenvalues == "rayleigh":
            d = _rayleigh(statistic, Q)
        else:
            d = self.b * d + (1 - self.b) * _rayleigh(increment, Q)
        return np.maximum(d, self.floor)

    def _renew(self, t, side, statistic, Q, d):
        if self.basis is None and t > 1 and self.refresh == "qr":
            Q_new, order = qr_refresh(statistic, Q, self.sort)
        else:
            if self.basis is None:
                Q_new = eigenvectors(statistic)
            else:
                Q_new = np.asarray(self.basis(t, side, statistic, None if t == 1 else Q), float)
            order = linear_sum_assignment((Q_new.T @ Q) ** 2, maximize=True)[1]
        keeps_initial = t == 1 and self.start == "gradient"
        if "rayleigh" in (self.eigenvalues, self.at_refresh) and not keeps_initial:
            d = np.maximum(_rayleigh(statistic, Q_new), self.floor)
        elif self.at_refresh == "permute":
            d = d[order]
        return Q_new, d, order

    def state(self):
        return {name: getattr(self, name) for name in ("L", "R", "Q_L", "Q_R", "d_L", "d_R")}


def kl_shampoo_eigenbasis(
    gradients, *, b1=0.0, eps=0.0, lag=False, skip_first=True, bias_correction=False, **statistics
):
    """The practical KL-Shampoo over the gradients, each (m, n); `statistics` as in `Factors`.

    States: M (m, n), L, R, Q_L, Q_R, d_L, d_R.
    """
    factors = Factors(np.shape(gradients[0]), **statistics)
    M = np.zeros(np.shape(gradients[0]))
    directions, states = [], []

    def direction(M_hat):
        root = np.sqrt(_reciprocal(factors.d_L))[:, None] * np.sqrt(_reciprocal(factors.d_R))
        scaled = (factors.Q_L.T @ M_hat @ factors.Q_R) * root / (1 + eps * root)
        return factors.Q_L @ scaled @ factors.Q_R.T

    for t, G in enumerate(gradients, start=1):
        G = np.asarray(G, dtype=np.float64)
        skipped = skip_first and t == 1
        M = M if skipped else _moment(M, G, b1)
        count = t - 1 if skip_first else t
        M_hat = M / (1 - b1**count) if bias_correction and count else M
        D = direction(M_hat) if lag else None
        factors.update(t, G)
        D = direction(M_hat) if D is None else D
        directions.append(np.zeros_like(M) if skipped else D)
        states.append({"M": M, **factors.state()})
    return directions, states


def kl_soap(
    gradients,
    *,
    b1=0.95,
    b2=0.95,
    eps=0.0,
    lag=False,
    skip_first=True,
    bias_correction=False,
    dtype_eps=EPS64,
    **statistics,
):
    """KL-SOAP over the gradients, each (m, n); `statistics` as in `Factors`.

    States: M (m, n), v (m, n) in the bases, L, R, Q_L, Q_R, d_L, d_R.
    """
    shape = np.shape(gradients[0])
    factors = Factors(shape, **statistics)
    M, v = np.zeros(shape), np.zeros(shape)
    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        G = np.asarray(G, dtype=np.float64)
        skipped = skip_first and t == 1
        count = t - 1 if skip_first else t
        M = M if skipped else _moment(M, G, b1)
        D = np.zeros(shape)
        for part in ("direction", "statistics") if lag else ("statistics", "direction"):
            if part == "statistics":
                v = v[np.ix_(*factors.update(t, G))]
            elif not skipped:
                Q_L, Q_R = factors.Q_L, factors.Q_R
                v = b2 * v + (1 - b2) * (Q_L.T @ G @ Q_R) ** 2
                M_hat, v_hat = Q_L.T @ M @ Q_R, v
                if bias_correction:
                    M_hat, v_hat = M_hat / (1 - b1**count), v / (1 - b2**count)
                D = Q_L @ divide(M_hat, v_hat, max(shape), dtype_eps, eps) @ Q_R.T
        directions.append(D)
        states.append({"M": M, "v": v, **factors.state()})
    return directions, states
