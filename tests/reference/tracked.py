"""SOAP and KL-Shampoo in tracked eigenbases, transcribed in NumPy float64.

Ours, from a specification and not from a paper. SOAP (`reference.soap`) whose statistics are kept
in the bases, H_L = U_L' L U_L and H_R = U_R' R U_R: a gradient enters them as X = U_L' G U_R, in
the bases from before the step. The first refresh is an eigendecomposition of H; the later ones are
a few rotations R = I + W that reduce what H has off its diagonal, with no decomposition; a long R
is made orthonormal by one Newton-Schulz step, a short one is used as it is. U is a product of these
and is pulled back to orthonormal columns where a test vector shows a defect. M and v are both in
the bases: M turns with a basis, v stays as it is. No bias correction, no eps.

Readings chosen:
- Order of a step: X, statistics of both sides, refresh of the left side then the right (t = 1 and
  t mod period = 0), M and v with the turned X, D in the new bases.
- An R is long where the estimated length of K, before f, is 0.3 or more. One step brings a long R
  near orthonormal columns, not onto them. The rotations end with a short one or after 16; they
  also follow the decomposition of the first refresh, in the same way.
- M and X turn by the rotations T as they were made, not by what the pull back adds to U.
- side="left": the right side has no H and the identity as its basis (None in the states).
- kl=True whitens each side's statistics by the other one: b is b3, and both sides use the
  eigenvalues from before the step. H starts as s I at t = 1, s being the root of G's mean square.
  D is then KL-Shampoo's form, M / sqrt(lambda_i mu_j), and v is kept up, unused.
- Rounding noise: 1 / x is 0 where x <= max(m, n) * 2^-52 * max x, for each side by itself, in the
  statistics and in D; M / sqrt(v) has the rule of `reference.soap`.
- Where the estimated length of K is 0, f is 1.
- The storage of the states (precision, packing) is not transcribed: all is kept in float64.
"""

import numpy as np

from .soap import EPS64, divide, eigenvectors

TAU, NU = 0.3, 1e-7
LONG = 0.3  # the length of K from which a rotation is long


def generator(H):
    """The antisymmetric K whose I + K nearly diagonalizes H, no row longer than 0.7."""
    h = np.maximum(np.diag(H), 0.0)
    gap = h[None, :] - h[:, None]
    bottom = gap**2 + TAU**2 * np.outer(h, h) + (NU * np.max(h)) ** 2
    K = np.divide(H * gap, bottom, out=np.zeros_like(H), where=bottom > 0)
    K = (K - K.T) / 2
    rows = np.linalg.norm(K, axis=1)
    r = np.minimum(1.0, np.divide(0.7, rows, out=np.ones_like(rows), where=rows > 0))
    return K * np.minimum.outer(r, r)


def length(K):
    """The largest singular value of K, estimated by four steps of the power iteration."""
    x = np.linalg.norm(K, axis=0)
    for _ in range(4):
        x = K @ (K @ (x / (np.linalg.norm(x) or 1.0)))
    return np.sqrt(np.linalg.norm(x))


def newton_schulz(U):
    """One Newton-Schulz step towards orthonormal columns."""
    return U - U @ (U.T @ U - np.eye(len(U))) / 2


def rotations(H):
    """At most 16 rotations of H, to a short one. Returns the turned H and their product T."""
    T = np.eye(len(H))
    for _ in range(16):
        K = generator(H)
        size = length(K)
        f = min(1.0, 0.6 / size) if size > 0 else 1.0
        turn = np.eye(len(H)) + f * K + f**2 * (K @ K) / 2
        if size >= LONG:
            turn = newton_schulz(turn)
        H = turn.T @ H @ turn
        H = (H + H.T) / 2
        T = T @ turn
        if size < LONG:
            break
    return H, T


def orthonormalize(U):
    """At most four Newton-Schulz steps, while a vector of signs shows a defect above 1e-3."""
    d = len(U)
    x = np.where(np.arange(d) % 3 == 0, -1.0, 1.0)
    for _ in range(4):
        if np.linalg.norm((U.T @ U - np.eye(d)) @ x) / np.sqrt(d) <= 1e-3:
            break
        U = newton_schulz(U)
    return U


def refresh(t, H, U):
    """The new H and U, and the T by which M and X turn."""
    Q = np.eye(len(H))
    if t == 1:
        Q = eigenvectors(H)
        H = np.diag(np.maximum(np.diag(Q.T @ H @ Q), 0.0))
    H, T = rotations(H)
    return H, orthonormalize(U @ Q @ T), Q @ T


def tracked(gradients, *, b1=0.95, b2=0.95, b3=0.95, period=10, side="both", kl=False):
    """Run over the gradients, each (m, n).

    States: M (m, n) and v (m, n) in the bases, H_L (m, m), U_L (m, m), and for both sides H_R
    (n, n), U_R (n, n).
    """
    m, n = np.shape(gradients[0])
    M, v = np.zeros((m, n)), np.zeros((m, n))
    H_L, H_R = np.zeros((m, m)), np.zeros((n, n))
    U_L, U_R = np.eye(m), np.eye(n)

    def inverse_eigenvalues(H):
        """1 / diag(H), and 0 where that is noise."""
        d = np.diag(H)
        noise = max(m, n) * EPS64 * np.max(d)
        return np.divide(1.0, d, out=np.zeros_like(d), where=d > noise)

    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        X = U_L.T @ G @ U_R
        new_L, new_R = X @ X.T, X.T @ X
        if kl:
            if t == 1:
                s = np.sqrt(np.mean(G**2))
                H_L, H_R = s * np.eye(m), s * np.eye(n)
            new_L = (X * inverse_eigenvalues(H_R)) @ X.T / n
            new_R = (X.T * inverse_eigenvalues(H_L)) @ X / m
        H_L = b3 * H_L + (1 - b3) * new_L
        H_R = b3 * H_R + (1 - b3) * new_R
        if t == 1 or t % period == 0:
            H_L, U_L, T = refresh(t, H_L, U_L)
            M, X = T.T @ M, T.T @ X
            if side == "both":
                H_R, U_R, T = refresh(t, H_R, U_R)
                M, X = M @ T, X @ T
        M = b1 * M + (1 - b1) * X
        v = b2 * v + (1 - b2) * X**2
        if kl:
            ratio = M * np.sqrt(np.outer(inverse_eigenvalues(H_L), inverse_eigenvalues(H_R)))
        else:
            ratio = divide(M, v, max(m, n))
        directions.append(U_L @ ratio @ U_R.T)
        right = {"H_R": H_R, "U_R": U_R} if side == "both" else {}
        states.append({"M": M, "v": v, "H_L": H_L, "U_L": U_L} | right)
    return directions, states
