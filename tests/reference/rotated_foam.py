"""FOAM in bases that only rotations turn, in float64 NumPy.

Ours, from a specification and not from a paper: FOAM (`reference.foam`) whose statistics are kept
in the bases, H_L = U_L' L U_L and H_R = U_R' R U_R, with the refreshes of `reference.rotations`.

Readings chosen:
- A gradient enters H in the bases from before the step: with Y = U_L' G U_R,
  H_L <- b2 H_L + (1 - b2) Y Y' and H_R <- b2 H_R + (1 - b2) Y' Y.
- Checks at t = 1, f + 1, 2 f + 1, ... The first refresh is at t = 1, a later one at a check with
  max(eps0, eps h / tau) > eps_max. It sets d = diag(H) and eps = eps0; in every other case U, H and
  d stay, and a check sets the new eps.
- The proxy h is FOAM's with E = H - diag(d), d from the last refresh: it has what the last refresh
  left off the diagonal.
- A side whose H is 0 is not refreshed. Before its first refresh every step tries again, without a
  proxy, d is 0 and its root is the identity; at a later check the new eps is then used.
- The root is U diag((max(d, 0) + eps)^(-1/p)) U' at every step. D = L_hat P R_hat is the same as
  U_L (diag(r_L) U_L' P U_R diag(r_R)) U_R', whatever U is; P, the gradient or its EMA, is in no
  basis here, and the norm of grafting is its norm there.

States hold for each factor X in L, R: `X` (the statistic, in no basis), `H_X`, `U_X`, `d_X`,
`eps_X`, `h_X` (nan at t = 1 and at steps without a check), `X_hat`; the others as in `foam`.
"""

import numpy as np

from .foam import foam_proxy
from .rotated_roots import inverse_root
from .rotations import refresh
from .shampoo import adam_step, graft_onto


def rotated_foam(
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

    def factor(S, new, t):
        """The state of a factor after a step: S is the one before, new is Y Y' or Y' Y."""
        U, d, eps, h = S["U"], S["d"], S["eps"], np.nan
        H = b2 * S["H"] + (1 - b2) * new
        due = first = not d.any()
        if not first and (t - 1) % check_every == 0:
            h, _, _ = foam_proxy(np.eye(len(H)), d, H, eps, root)
            eps = max(base_damping, eps * h / threshold)
            due = eps > max_damping
        if due and H.any():
            H, U, _ = refresh(H, U)
            d, eps = np.diag(H), base_damping
        return {"H": H, "U": U, "d": d, "eps": eps, "h": h}

    def start(n):
        return {"H": np.zeros((n, n)), "U": np.eye(n), "d": np.zeros(n), "eps": base_damping}

    m, n = np.shape(gradients[0])
    statistics = {"L": np.zeros((m, m)), "R": np.zeros((n, n))}
    factors = {"L": start(m), "R": start(n)}
    M, mu, nu = np.zeros((m, n)), np.zeros((m, n)), np.zeros((m, n))
    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        Y = factors["L"]["U"].T @ G @ factors["R"]["U"]
        hat, state = {}, {}
        for side, A, B in (("L", G, Y), ("R", G.T, Y.T)):
            statistics[side] = b2 * statistics[side] + (1 - b2) * (A @ A.T)
            own = factors[side] = factor(factors[side], B @ B.T, t)
            hat[side] = (own["U"] * inverse_root(own["d"], root, own["eps"])) @ own["U"].T
            state |= {side: statistics[side], f"{side}_hat": hat[side]}
            state |= {f"{name}_{side}": x for name, x in own.items()}
        M = b1 * M + (1 - b1) * G
        P = M if precondition == "momentum" else G
        G_hat = hat["L"] @ P @ hat["R"]
        mu, nu, step = adam_step(mu, nu, G, t, b1, b2)
        directions.append(graft_onto(graft, G_hat, P, step))
        states.append(state | {"G_hat": G_hat, "M": M, "m": mu, "v": nu})
    return directions, states
