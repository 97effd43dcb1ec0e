"""KL-Shampoo and KL-SOAP, transcribed in NumPy float64.

Paper: "Understanding and Improving Shampoo and SOAP via Kullback-Leibler Minimization"
(arXiv:2509.03378). Each factor's statistic is whitened by the other one, for G of shape (m, n):
L <- b L + (1 - b) / n G R^(-1) G', R <- b R + (1 - b) / m G' L^(-1) G, D = L^(-1/2) M R^(-1/2).
It has no grafting, and 2 is the only root.

Three functions:
- `kl_shampoo` is the idealized one, from roots of the factors, fresh or stale.
- `kl_shampoo_eigenbasis` is the practical one: bases Q_L, Q_R renewed every K steps, eigenvalues
  by moving average at every step in the current bases, d_L <- b d_L + (1 - b) / n
  diag(Q_L' G R^(-1) G' Q_L) with R^(-1) = Q_R diag(1 / d_R) Q_R', and so on; then
  D = Q_L ((Q_L' M Q_R) / sqrt(d_L d_R')) Q_R'.
- `kl_soap` is SOAP (`reference.soap`) in these bases, whitened by these eigenvalues.

Readings chosen:
- L and R are both whitened by the factors from before the step.
- Order of a step: statistics and eigenvalues, then the root or the basis, then D. The official code
  computes D first, from what the step before left.
- M is an EMA with b1 (0: the gradient, as in the paper's formulas; the official code has 0.9 and
  b = 0.98), without bias correction, as v in KL-SOAP.
- Steps that renew: t = 1 and t mod K = 0. The official code does not count its first step.
- Start of `kl_shampoo` (the paper prints none): L = R = `initial` I, since R^(-1) must exist; the
  first roots are those of these factors, or another multiple of I. Roots are (A + eps I)^(-1/2);
  R^(-1) is the square of the root in use, damped and stale as it is.
- Start of the other two: bases I, eigenvalues `initial`, L and R 0 or another multiple of I. The
  official code instead makes bases of the first gradient's statistics, not whitened, and D = 0.
- A refresh is one QR(L Q) (official) or an eigendecomposition, which step 1 always is. As an option
  it sorts the old columns by diag(Q' L Q) before QR, which the official code does not.
- M is kept in the original space; v and the averaged eigenvalues stay as they are when a basis
  changes, as in the official code, or move with their columns (by the sort of a QR refresh, or the
  best matching to the old basis).
- Inverses of 0 are 0. The other two have no eps (official code: 1e-8); the division by v is that
  of `reference.soap`.
"""

import numpy as np

from .soap import divide, eigenvectors, matching, qr_refresh


def _reciprocal(x):
    """1 / x, and 0 where x <= 0."""
    return np.divide(1.0, x, out=np.zeros_like(x), where=x > 0)


def _inverse_root(A, eps):
    """(A + eps I)^(-1/2)."""
    d, U = np.linalg.eigh((A + A.T) / 2)
    return (U * np.sqrt(_reciprocal(np.maximum(d, 0.0) + eps))) @ U.T


def kl_shampoo(gradients, *, b=0.95, b1=0.0, initial=1.0, initial_root=None, eps=0.0, K=1):
    """The idealized KL-Shampoo over the gradients, each (m, n).

    States: M (m, n), L, R and their roots L_hat, R_hat.
    """
    m, n = np.shape(gradients[0])
    M, L, R = np.zeros((m, n)), initial * np.eye(m), initial * np.eye(n)
    if initial_root is None:
        L_hat, R_hat = _inverse_root(L, eps), _inverse_root(R, eps)
    else:
        L_hat, R_hat = initial_root * np.eye(m), initial_root * np.eye(n)
    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        M = b1 * M + (1 - b1) * G
        L = b * L + (1 - b) / n * G @ (R_hat @ R_hat) @ G.T
        R = b * R + (1 - b) / m * G.T @ (L_hat @ L_hat) @ G
        if t == 1 or t % K == 0:
            L_hat, R_hat = _inverse_root(L, eps), _inverse_root(R, eps)
        directions.append(L_hat @ M @ R_hat)
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
        initial=0.1,
        initial_factor=0.0,
        refresh="qr",
        sort=False,
        at_refresh="keep",
        K=10,
    ):
        m, n = shape
        self.L, self.R = initial_factor * np.eye(m), initial_factor * np.eye(n)
        self.Q_L, self.Q_R = np.eye(m), np.eye(n)
        self.d_L, self.d_R = np.full(m, float(initial)), np.full(n, float(initial))
        self.b, self.refresh, self.sort, self.at_refresh, self.K = b, refresh, sort, at_refresh, K

    def update(self, t, G):
        """One step. Returns the orders of the old columns in which v follows the bases."""
        b = self.b
        left, right = _whitened(G, self.Q_R, self.d_R), _whitened(G.T, self.Q_L, self.d_L)
        self.L, self.R = b * self.L + (1 - b) * left, b * self.R + (1 - b) * right
        self.d_L = b * self.d_L + (1 - b) * _rayleigh(left, self.Q_L)
        self.d_R = b * self.d_R + (1 - b) * _rayleigh(right, self.Q_R)
        orders = np.arange(len(self.d_L)), np.arange(len(self.d_R))
        if t == 1 or t % self.K == 0:
            self.Q_L, order_L = self._renewed(t, self.L, self.Q_L)
            self.Q_R, order_R = self._renewed(t, self.R, self.Q_R)
            if self.at_refresh == "permute":
                orders = order_L, order_R
                self.d_L, self.d_R = self.d_L[order_L], self.d_R[order_R]
        return orders

    def _renewed(self, t, statistic, Q):
        if t > 1 and self.refresh == "qr":
            return qr_refresh(statistic, Q, self.sort)
        Q_new = eigenvectors(statistic)
        return Q_new, matching(Q_new, Q)

    def state(self):
        return {name: getattr(self, name) for name in ("L", "R", "Q_L", "Q_R", "d_L", "d_R")}


def kl_shampoo_eigenbasis(gradients, *, b1=0.0, **statistics):
    """The practical KL-Shampoo over the gradients, each (m, n); `statistics` as in `Factors`.

    States: M (m, n), L, R, Q_L, Q_R, d_L, d_R.
    """
    factors = Factors(np.shape(gradients[0]), **statistics)
    M = np.zeros(np.shape(gradients[0]))
    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        M = b1 * M + (1 - b1) * G
        factors.update(t, G)
        root = np.sqrt(_reciprocal(factors.d_L))[:, None] * np.sqrt(_reciprocal(factors.d_R))
        directions.append(factors.Q_L @ ((factors.Q_L.T @ M @ factors.Q_R) * root) @ factors.Q_R.T)
        states.append({"M": M, **factors.state()})
    return directions, states


def kl_soap(gradients, *, b1=0.95, b2=0.95, **statistics):
    """KL-SOAP over the gradients, each (m, n); `statistics` as in `Factors`.

    States: M (m, n), v (m, n) in the bases, L, R, Q_L, Q_R, d_L, d_R.
    """
    shape = np.shape(gradients[0])
    factors = Factors(shape, **statistics)
    M, v = np.zeros(shape), np.zeros(shape)
    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        M = b1 * M + (1 - b1) * G
        v = v[np.ix_(*factors.update(t, G))]
        Q_L, Q_R = factors.Q_L, factors.Q_R
        v = b2 * v + (1 - b2) * (Q_L.T @ G @ Q_R) ** 2
        directions.append(Q_L @ divide(Q_L.T @ M @ Q_R, v, max(shape)) @ Q_R.T)
        states.append({"M": M, "v": v, **factors.state()})
    return directions, states
