"""Preconditioning by inverse roots from tracked eigenbases, transcribed in NumPy float64.

Ours, from a specification and not from a paper. Shampoo whose statistics are kept in the bases,
H_L = U_L' L U_L and H_R = U_R' R U_R, as in `reference.tracked`; its rotations stand in for the
decompositions. With h = diag(H), the root of a side is X = U diag((max(h, 0) + e)^(-1/root)) U',
and D = X_L M X_R.

Readings chosen:
- Order of a step: M, statistics of both sides in the bases from before the step, refresh of the
  left side then the right, D. No bias correction.
- H is the whole turned matrix. What it has off its diagonal stays in H and is left out of X.
- Between refreshes X stays as it is, and so does U: H is then in the bases of the last refresh.
- Refreshes: at t = 1 and where t mod period = offset mod period. The first one decomposes H (signs
  as in `reference.soap`); rotations follow, at the first one as at all later ones.
- The pull back to orthonormal columns changes U alone, not H.
- The cutoff for rounding noise (2e-13 max h in float64) is left out of account: keep e above it.
"""

import numpy as np

from .tracked import refresh


def tracked_roots(
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

    States: M (m, n), and for each side H_L, U_L, X_L (m, m), H_R, U_R, X_R (n, n).
    """
    m, n = np.shape(gradients[0])
    kept, new = (1.0, 1.0) if b2 is None else (b2, 1 - b2)
    M = np.zeros((m, n))
    H_L, H_R = initial * np.eye(m), initial * np.eye(n)
    U_L, U_R = np.eye(m), np.eye(n)
    X_L, X_R = np.eye(m), np.eye(n)

    def rooted(t, H, U):
        """The new H, U and X of a side."""
        H, U, _ = refresh(t, H, U)
        h = np.diag(H)
        e = eps if damping == "absolute" else eps * np.max(h)
        return H, U, (U * (np.maximum(h, 0.0) + e) ** (-1.0 / root)) @ U.T

    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        M = G if b1 is None else b1 * M + (1 - b1) * G
        H_L = kept * H_L + new * (U_L.T @ G @ G.T @ U_L)
        H_R = kept * H_R + new * (U_R.T @ G.T @ G @ U_R)
        if t == 1 or t % period == offset % period:
            H_L, U_L, X_L = rooted(t, H_L, U_L)
            if sides == "both":
                H_R, U_R, X_R = rooted(t, H_R, U_R)
        directions.append(X_L @ M @ X_R)
        state = {"M": M, "H_L": H_L, "U_L": U_L, "X_L": X_L, "H_R": None, "U_R": None, "X_R": None}
        if sides == "both":
            state.update(H_R=H_R, U_R=U_R, X_R=X_R)
        states.append(state)
    return directions, states
