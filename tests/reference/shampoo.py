"""Shampoo in float64 NumPy: the original, the practical one, and the stale one.

Papers. 001 (5aae00e9785908af), Algorithm 5: the original. 000 (daed924f843711ab), Algorithm 2 and
Eq. 2: practical 32-bit Shampoo. 004 (3b28275a008bcb29), Algorithms 1 + 2: Shampoo with stale roots.
Every function returns `(directions, states)`, two lists with one entry per gradient; the update
is `W <- W - lr * D`.

Readings chosen where a paper is silent or unclear:

- 001 Alg. 5 prints `W + lr ...`: a slip, the sign is minus. `L = eps I + sum G G'` is at least
  `eps I`, so an eigenvalue below `eps` is rounding and is floored at `eps` (no other damping).
- 000 Alg. 2 writes `L-bar_k` in lines 4-5 and `L_k` in line 10: one and the same variable.
  Statistics come before the root within one step. Every T1, T2 is counted by `k mod T = 0`, k from
  1, so that the first statistic falls on step T1 and the first root on step T2; `I` before.
- `lambda_max` (maximum singular value, power iteration) and the root (Schur-Newton) are computed
  exactly, by one eigendecomposition. Damping is `eps * lambda_max`, inside the root. The paper's
  root is 4; `root` is ours. Eigenvalues are clamped at 0 before damping is added.
- 004 Algs 1 + 2 as printed use at step t the root made at t - 1. Algorithm 3 and the proofs do not:
  no lag here. Statistics every step from 0, no bias correction; `eps0` is absolute.
  `root` (p) is not stated for the paper's runs. Section 4.1 puts refreshes at `t = 0 mod f`, Alg. 2
  at `(t - 1) mod f = 0`: the algorithm is followed.
- Grafting. "norm": `D = G_hat |P| / |G_hat|`, P being the matrix that is preconditioned (the
  gradient, or its EMA). "adam" (004 J.1 names it without a formula): the norm of Adam's step from
  the raw gradient with `b1`, `b2` (the factors' b2), bias corrected, 1e-8 outside the root. `G_hat
  = 0` gives 0.
- Momentum in place of the gradient (an option, ours): `M = EMA_b1(M, G)`, no bias correction.
"""

import numpy as np


def inverse_root(A, root, damping):
    """`(A + damping I)^(-1/root)`, eigenvalues of A clamped at 0."""
    d, Q = np.linalg.eigh(A)
    return (Q * (np.maximum(d, 0.0) + damping) ** (-1.0 / root)) @ Q.T


def rescale(G_hat, norm):
    """`G_hat * norm / |G_hat|`, and 0 where `G_hat` is 0."""
    own = np.linalg.norm(G_hat)
    return G_hat * (norm / own) if own > 0 else np.zeros_like(G_hat)


def adam_step(m, v, G, t, b1, b2, eps=1e-8):
    """Adam's moments after step t (from 1) and its step."""
    m = b1 * m + (1 - b1) * G
    v = b2 * v + (1 - b2) * G**2
    return m, v, (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)


def shampoo_original(gradients, *, eps):
    """001 Algorithm 5."""
    m, n = gradients[0].shape
    L, R = eps * np.eye(m), eps * np.eye(n)  # input line
    directions, states = [], []
    for G in gradients:
        L = L + G @ G.T
        R = R + G.T @ G
        d_L, Q_L = np.linalg.eigh(L)
        d_R, Q_R = np.linalg.eigh(R)
        L_hat = (Q_L * np.maximum(d_L, eps) ** -0.25) @ Q_L.T  # L^(-1/4)
        R_hat = (Q_R * np.maximum(d_R, eps) ** -0.25) @ Q_R.T  # R^(-1/4)
        directions.append(L_hat @ G @ R_hat)
        states.append({"L": L, "R": R, "L_hat": L_hat, "R_hat": R_hat})
    return directions, states


def as_it_is(X, kind, t):
    """What a method gets back of a matrix X that it keeps: all of it, unless it is packed."""
    return X


def shampoo_practical(
    gradients,
    *,
    b=0.95,
    eps=1e-6,
    root=4,
    statistics_every,
    refresh_every,
    graft="norm",
    kept=as_it_is,
):
    """000 Algorithm 2; `statistics_every` is T1, `refresh_every` is T2."""
    m, n = gradients[0].shape
    L, R = (kept(eps * np.eye(order), "start", 0) for order in (m, n))  # input line
    L_hat, R_hat = (kept(np.eye(order), "root", 0) for order in (m, n))
    directions, states = [], []
    for k, G in enumerate(gradients, start=1):  # line 1
        if k % statistics_every == 0:  # line 3
            L = kept(b * L + (1 - b) * G @ G.T, "factor", k // statistics_every)  # line 4
            R = kept(b * R + (1 - b) * G.T @ G, "factor", k // statistics_every)  # line 5
        if k % refresh_every == 0:  # line 9
            lambda_L = np.linalg.eigvalsh(L)[-1]  # line 10
            lambda_R = np.linalg.eigvalsh(R)[-1]
            L_hat = kept(inverse_root(L, root, lambda_L * eps), "root", k)  # line 11
            R_hat = kept(inverse_root(R, root, lambda_R * eps), "root", k)
        G_hat = L_hat @ G @ R_hat  # line 15
        D = rescale(G_hat, np.linalg.norm(G)) if graft == "norm" else G_hat
        directions.append(D)
        states.append({"L": L, "R": R, "L_hat": L_hat, "R_hat": R_hat, "G_hat": G_hat})
    return directions, states


def shampoo_stale(
    gradients, *, b2, eps0, root, period, graft=None, b1=0.95, precondition="gradient"
):
    """004 Algorithms 1 + 2, without the lag; `period` is f."""

    def factor_step(F, L, t):
        due = (t - 1) % period == 0  # Alg. 2 line 1
        return {"hat": inverse_root(L, root, eps0) if due else F["hat"]}  # Alg. 2 lines 3 to 6

    options = dict(b1=b1, b2=b2, graft=graft, precondition=precondition)
    return shampoo_by(factor_step, {"hat": None}, gradients, **options)


def graft_onto(graft, G_hat, P, adam):
    """None, "norm" (the norm of P) or "adam" (the norm of Adam's step; 004 J.1)."""
    if graft is None:
        return G_hat
    return rescale(G_hat, np.linalg.norm({"norm": P, "adam": adam}[graft]))


def shampoo_by(factor_step, first, gradients, *, b1, b2, graft, precondition="gradient"):
    """004 Algorithm 1 with roots from factor_step(state of a factor, its statistic, t).

    A factor's state begins as `first`; under "hat" it has the root in use.
    """
    m, n = gradients[0].shape
    X = {"L": np.zeros((m, m)), "R": np.zeros((n, n))}  # line 1
    factors = {"L": first, "R": first}
    M, mu, nu = np.zeros((m, n)), np.zeros((m, n)), np.zeros((m, n))
    directions, states = [], []
    for t, G in enumerate(gradients, start=1):  # line 2
        for side, gram in (("L", (1 - b2) * G @ G.T), ("R", (1 - b2) * G.T @ G)):
            X[side] = b2 * X[side] + gram  # lines 5, 6
            factors[side] = factor_step(factors[side], X[side], t)  # line 8
        M = b1 * M + (1 - b1) * G
        P = M if precondition == "momentum" else G
        G_hat = factors["L"]["hat"] @ P @ factors["R"]["hat"]  # line 10
        mu, nu, step = adam_step(mu, nu, G, t, b1, b2)
        directions.append(graft_onto(graft, G_hat, P, step))
        state = {**X, "G_hat": G_hat, "M": M, "m": mu, "v": nu}
        for side, own in factors.items():
            state |= {f"{name}_{side}": x for name, x in own.items() if name != "hat"}
            state[f"{side}_hat"] = own["hat"]
        states.append(state)
    return directions, states
