"""Preconditioning by inverse roots in bases that only rotations turn, in NumPy float64.

Ours, from a specification and not from a paper. Shampoo whose statistics are kept in the bases,
H_L = U_L' L U_L and H_R = U_R' R U_R, with the refreshes of `reference.rotations`. A side keeps no
root but the diagonal d of H as of its last refresh: with r = (max(d, 0) + e)^(-1/root) for each
side, D = U_L (diag(r_L) M diag(r_R)) U_R', where M is the momentum in the bases.

Readings chosen:
- Order of a step: X = U_L' G U_R and statistics of both sides in the bases from before the step,
  refresh of the left side then the right, M with the turned X, D. No bias correction.
- M is the EMA of X and turns with the bases, or is the turned X itself.
- H is the whole turned matrix. What it has off its diagonal stays in H and is left out of d.
- Between refreshes d stays as it is, and so does U: H is then in the bases of the last refresh.
- Refreshes: at t = 1 and where t mod period = offset mod period.
- A side whose H is 0 is not refreshed. Before its first refresh every step tries again, d is 0 and
  r is 1; after it, d stays.
- sides="left": the right side has the identity as its basis, and r is 1 (None in the states).
- The cutoff for rounding noise (2e-13 max d in float64) is left out of account: keep e above it.
"""

import numpy as np

from .rotations import refresh


def inverse_root(d, root, e):
    """r = (max(d, 0) + e)^(-1/root), and 1 before the first refresh, where d is 0."""
    return (np.maximum(d, 0.0) + e) ** (-1.0 / root) if d.any() else np.ones_like(d)


def rotated_roots(
    gradients,
    *,
    root=2,
    sides="both",
    period=1,
    b2=0.95,
    eps=1e-6,
    damping="absolute",
    initial=0.0,
    b1=None,
    offset=1,
):
    """Run over the gradients, each (m, n). b1=None: M is the gradient; b2=None: H is a sum.

    States: M (m, n) in the bases, and for each side H_L, U_L (m, m), d_L (m,), H_R, U_R (n, n),
    d_R (n,).
    """
    m, n = np.shape(gradients[0])
    kept, new = (1.0, 1.0) if b2 is None else (b2, 1 - b2)
    M = np.zeros((m, n))
    H_L, H_R = initial * np.eye(m), initial * np.eye(n)
    U_L, U_R = np.eye(m), np.eye(n)
    d_L, d_R = np.zeros(m), np.zeros(n)  # 0 up to the first refresh of the side

    def rooted(d):
        return inverse_root(d, root, eps if damping == "absolute" else eps * np.max(d))

    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        X = U_L.T @ G @ U_R
        H_L = kept * H_L + new * (X @ X.T)
        H_R = kept * H_R + new * (X.T @ X)
        scheduled = t % period == offset % period  # t = 1 is due as d is 0
        if (scheduled or not d_L.any()) and H_L.any():
            H_L, U_L, T = refresh(H_L, U_L)
            M, X, d_L = T.T @ M, T.T @ X, np.diag(H_L)
        if sides == "both" and (scheduled or not d_R.any()) and H_R.any():
            H_R, U_R, T = refresh(H_R, U_R)
            M, X, d_R = M @ T, X @ T, np.diag(H_R)
        M = X if b1 is None else b1 * M + (1 - b1) * X
        directions.append(U_L @ (rooted(d_L)[:, None] * M * rooted(d_R)) @ U_R.T)
        state = {"M": M, "H_L": H_L, "U_L": U_L, "d_L": d_L, "H_R": None, "U_R": None, "d_R": None}
        if sides == "both":
            state.update(H_R=H_R, U_R=U_R, d_R=d_R)
        states.append(state)
    return directions, states
