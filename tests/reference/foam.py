"""FOAM in float64 NumPy, with its two ablations.

Paper 004 (3b28275a008bcb29): Algorithm 3 inside the loop of Algorithm 1; the proxy h of Section 6
(Eq. 3) as App. K.1 writes it out; the ablations of Section 7.3, Fig. 4. Each factor (L and R) runs
Algorithm 3 for itself, with its own eigenpairs `(Q, d)` and its own damping.

Readings chosen where the paper is silent or unclear:

- Proxy: `E = Q' L Q - diag(d)` with `d` the raw eigenvalues of the last refresh (App. K: `E` is the
  undamped change, `D = diag(lambda + eps)` damps only the whitening; Eq. 3 itself prints no eps).
  `eps` is the one of the step before. Clamping: `max(d, 0)` in powers, never in `E`.
- The root in use is always `Q (max(d, 0) + eps)^(-1/p) Q'`, at the step where `eps` or `(Q, d)`
  changed: no one-step lag (Alg. 1 alone has one). No rounding floor for h (Alg. 3 has none).
- Statistics every step, from 0, no bias correction; dampings are absolute.
- Grafting as in `shampoo.py`: "adam" (J.1, no formula given) or "norm" (ours) or None.
- Fig. 4's ablations are described in half a sentence each. "no_adaptive_damping" (ours): at a check
  step the factor is refreshed if and only if `h > tau`, `eps` stays `eps0`. "no_refresh" (ours):
  `eps = min(max(eps0, eps h / tau), eps_max)`, no eigendecomposition after t = 1.
- Equality: `eps_tilde <= eps_max` keeps the basis (line 11), `h = tau` keeps it in the ablation.

States hold, for each factor X in L, R: `X` (the statistic), `Q_X`, `d_X`, `eps_X`, `h_X` (nan at
steps without a check, t = 1 included), `alpha_X`, `RC_X` (likewise), `evds_X` (eigendecompositions
so far) and `X_hat` (the inverse root in use); further `G_hat`, Adam's `m` and `v`.
"""

import functools

import numpy as np

from .shampoo import shampoo_by


def foam_proxy(Q, d, L, eps, root):
    """Section 6.2, App. K.1: `(h, RC, alpha)`, with `h = RC alpha / p`."""
    E = Q.T @ L @ Q - np.diag(d)
    damped = np.maximum(d, 0.0) + eps
    RC = np.linalg.norm(E / np.sqrt(np.outer(damped, damped)))
    roots = damped ** (-1.0 / root)
    alpha = np.max(roots) / np.linalg.norm(roots)
    return RC * alpha / root, RC, alpha


def _foam_factor(S, L, t, *, f, tau, eps_max, eps0, p, mode):
    """One step of Algorithm 3 for one factor: S is its state before, the result the state after."""
    Q, d, eps, evds = S["Q"], S["d"], S["eps"], S["evds"]
    h = RC = alpha = np.nan
    if t == 1:  # line 1
        d, Q = np.linalg.eigh(L)  # lines 2, 5
        evds += 1
        eps = eps0  # line 3
    elif (t - 1) % f == 0:  # line 6
        h, RC, alpha = foam_proxy(Q, d, L, eps, p)  # line 8
        eps_tilde = max(eps0, eps * h / tau)  # line 10
        if mode == "foam":
            refresh = not eps_tilde <= eps_max  # line 11
        elif mode == "no_adaptive_damping":
            refresh, eps_tilde = h > tau, eps0
        else:  # "no_refresh"
            refresh, eps_tilde = False, min(eps_tilde, eps_max)
        if not refresh:
            eps = eps_tilde  # line 13; (Q, d) stay: line 15
        else:
            d, Q = np.linalg.eigh(L)  # lines 18, 21
            evds += 1
            eps = eps0  # line 19
    L_hat = (Q * (np.maximum(d, 0.0) + eps) ** (-1.0 / p)) @ Q.T  # lines 4, 14, 20, 24
    state = {"Q": Q, "d": d, "eps": eps, "evds": evds, "hat": L_hat}
    return state | {"h": h, "RC": RC, "alpha": alpha}


def foam(
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
    mode="foam",
):
    """004 Algorithms 1 + 3: f, tau, eps_max, eps0, p are the first five options."""
    options = dict(f=check_every, tau=threshold, eps_max=max_damping, eps0=base_damping, p=root)
    factor = functools.partial(_foam_factor, **options, mode=mode)
    first = {"Q": None, "d": None, "eps": base_damping, "evds": 0}
    return shampoo_by(factor, first, gradients, b1=b1, b2=b2, graft=graft)
