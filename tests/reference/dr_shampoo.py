"""DR-Shampoo in float64 NumPy: Shampoo refreshed by the diagonalization residual.

Paper 004 (3b28275a008bcb29), App. I (the criterion of Eschenhagen et al., 2026) and J.5 (refreshed
by a full eigendecomposition, not by QR iterations), inside the loop of Algorithm 1. The paper
prints no algorithm for it. Each factor decides for itself.

Readings chosen where the paper is silent or unclear:

- Schedule as in Algorithm 3: the first eigendecomposition at t = 1, checks when
  `(t - 1) mod f = 0`, refresh if and only if `residual > tau` (J.5: "when the diagonal-residual was
  greater than the threshold"). The damping is always `eps0`, absolute.
- Residual: `|S - diag(S)| / |S|` with `S = Q' L Q`, no damping inside (App. K.1 adds `eps I` in
  its comparison only; the counterexample of App. I divides by `|diag(S)|` instead: the definition
  is followed). `S = 0` has residual 0.
- At a check that does not refresh: `Q` stays and the eigenvalues become `diag(Q' L Q)` (App. I's
  `L_hat_t`, on which the criterion rests). `update_eigenvalues=False` leaves the old ones.
- Eigenvalues are clamped at 0 before damping is added; grafting as in `shampoo.py`; statistics
  every step from 0, no bias correction; no one-step lag.

States hold, for each factor X in L, R: `X`, `Q_X`, `d_X`, `residual_X` (nan at steps without a
check, t = 1 included), `evds_X` (eigendecompositions so far), `X_hat`; further `G_hat`, `m`, `v`.
"""

import functools

import numpy as np

from .shampoo import shampoo_by


def diagonal_residual(Q, L):
    """App. I: off-diagonal mass of L in the basis Q, relative."""
    S = Q.T @ L @ Q
    size = np.linalg.norm(S)
    return np.linalg.norm(S - np.diag(np.diag(S))) / size if size > 0 else 0.0


def _dr_factor(F, L, t, *, f, tau, eps0, p, update_eigenvalues):
    """One step for one factor: F is its state before, the result the state after."""
    Q, d, evds = F["Q"], F["d"], F["evds"]
    residual = np.nan
    if t == 1:
        d, Q = np.linalg.eigh(L)
        evds += 1
    elif (t - 1) % f == 0:
        residual = diagonal_residual(Q, L)  # App. I, second display
        if residual > tau:
            d, Q = np.linalg.eigh(L)  # J.5
            evds += 1
        elif update_eigenvalues:
            d = np.diag(Q.T @ L @ Q)  # App. I, first display
    L_hat = (Q * (np.maximum(d, 0.0) + eps0) ** (-1.0 / p)) @ Q.T
    return {"Q": Q, "d": d, "residual": residual, "evds": evds, "hat": L_hat}


def dr_shampoo(
    gradients,
    *,
    check_every,
    threshold,
    base_damping,
    root,
    b2,
    graft=None,
    b1=0.95,
    update_eigenvalues=True,
):
    """004 Algorithm 1 with the criterion of App. I: f, tau, eps0, p are the first four options."""
    options = dict(f=check_every, tau=threshold, eps0=base_damping, p=root)
    factor = functools.partial(_dr_factor, **options, update_eigenvalues=update_eigenvalues)
    first = {"Q": None, "d": None, "evds": 0}
    return shampoo_by(factor, first, gradients, b1=b1, b2=b2, graft=graft)
