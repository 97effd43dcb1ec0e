"""FOAM whose eigenbases are tracked, in float64 NumPy.

Ours, from a specification and not from a paper: FOAM (`reference.foam`) whose statistics are kept
in the bases, H = U' L U for the left side, as in `reference.tracked`; its rotations (at most 16)
stand in for the decompositions.

Readings chosen:
- A gradient enters H in the basis U from before the step: H <- b2 H + (1 - b2) U' G G' U. Here
  G G' (1 - b2) is the statistic after the step less b2 times that before.
- Checks at t = 1, f + 1, 2 f + 1, ... At the first one H is decomposed (signs as in
  `reference.soap`) and rotated; at a later one with max(eps0, eps h / tau) > eps_max rotated only.
  Then d = diag(H) and eps = eps0; in every other case U, H and d stay.
- The proxy h is FOAM's with E = H - diag(d), d from the last refresh: it has what the last refresh
  left off the diagonal.
- The root is U diag((max(d, 0) + eps)^(-1/p)) U' at every step.

States hold for each factor X in L, R: `X` (the statistic, in no basis), `H_X`, `U_X`, `d_X`,
`eps_X`, `h_X` (nan at t = 1 and at steps without a check), `X_hat`; the others as in `foam`.
"""

import numpy as np

from .foam import foam_proxy
from .shampoo import shampoo_by
from .tracked import refresh


def foam_tracked(
    gradients,
    *,
    check_every,
    threshold,
    max_damping,
    base_damping,
    root,
    b2,
    graft=None,
    b1=0.95,
    precondition="gradient",
):
    """f, tau, eps_max, eps0, p are the first five options."""

    def factor(S, L, t):
        if t == 1:
            n = len(L)
            S = {"U": np.eye(n), "H": np.zeros((n, n)), "d": np.zeros(n), "eps": base_damping}
            S["before"] = S["H"]
        U, d, eps, h = S["U"], S["d"], S["eps"], np.nan
        H = b2 * S["H"] + U.T @ (L - b2 * S["before"]) @ U
        if (t - 1) % check_every == 0:
            if t > 1:
                h, _, _ = foam_proxy(np.eye(len(H)), d, H, eps, root)
                eps = max(base_damping, eps * h / threshold)
            if t == 1 or eps > max_damping:
                H, U, _ = refresh(t, H, U)
                d, eps = np.diag(H), base_damping
        hat = (U * (np.maximum(d, 0.0) + eps) ** (-1.0 / root)) @ U.T
        return {"H": H, "U": U, "d": d, "eps": eps, "h": h, "before": L, "hat": hat}

    options = dict(b1=b1, b2=b2, graft=graft, precondition=precondition)
    return shampoo_by(factor, {}, gradients, **options)
