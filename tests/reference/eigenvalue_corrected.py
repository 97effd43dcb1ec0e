"""Eigenvalue-corrected Shampoo without grafting, transcribed in NumPy float64.

Paper: "Purifying Shampoo: Investigating Shampoo's Heuristics by Decomposing its Preconditioner"
(arXiv:2506.03595): L <- b3 L + (1 - b3) G G', R alike, bases Q_L and Q_R, corrected eigenvalues
v <- b2 v + (1 - b2) (Q_L' G Q_R)^2, D = Q_L (Q_L' M Q_R / sqrt(v)) Q_R' with M the EMA of G.

Its criterion for the basis Q of a factor A: with B = Q' A Q, Q is kept as long as
||B - diag(B)||_F <= tolerance ||A||_F, the relative error of Q diag(B) Q' as an approximation of A.
Otherwise QR iterations start from B: B = S T, B <- T S, Q <- Q S, until the criterion holds.
Each factor has its own test, so that bases are renewed at different steps.

Readings chosen:
- Order of a step: M, L and R, the tests and bases, then v and D in the new bases. All states start
  at 0. v stays as it is when a basis changes.
- Step 1 is an eigendecomposition (first="eigh"; descending, signs fixed): there is no basis to
  start from. first="identity" starts the QR iterations from I.
- The test runs at t = 1 and when t mod K = 0; K = 1 by default (each step). tolerance=None renews
  the bases at these steps without a test.
- method="qr" stops after max_iterations at the latest (official code: 1 by default; None is
  without end); method="eigh" decomposes A anew where the test fails.
- A = 0 meets the criterion. The bias correction of L and R would cancel in it and in the bases.
- One QR iteration is QR(A Q) up to the signs of columns, the refresh of the official SOAP.
- sort: "descending" or "ascending" by diag(B) (stable) after QR iterations, None as they come. The
  official code sorts ascending, also when Q is kept; v does not follow there (carry_v="keep");
  "permute" makes it follow. Eigendecompositions are descending and never carry v.
- Bias correction of M and v, as Adam (bias_correction=True). eps inside the root by default:
  (v + eps)^(-1/2), as in the official code (1e-12); eps_inside=False adds it outside. With eps = 0
  the division of `reference.soap` gives 0 where sqrt(v) is negligible.
- No grafting and no scale by the norm.
- A factor of rank below its order has an arbitrary basis of its null space; see `reference.soap`.
  `basis(t, "left" | "right", A, previous)` replaces eigendecompositions and QR iterations, used as
  it is where the criterion fails.
"""

import numpy as np

from .soap import EPS64, divide, eigenvectors, fix_signs


def off_diagonal(A, Q):
    """||B - diag(B)||_F and ||A||_F, for B = Q' A Q."""
    B = Q.T @ A @ Q
    return np.sqrt(np.sum((B - np.diag(np.diag(B))) ** 2)), np.sqrt(np.sum(A**2))


def holds(A, Q, tolerance):
    """The criterion: the basis Q is still good enough for A."""
    off, norm = off_diagonal(A, Q)
    return off <= tolerance * norm


def warm_qr(A, Q, tolerance, max_iterations=None):
    """QR iterations from Q until the criterion holds. Returns the basis and how many they were."""
    B, iterations = Q.T @ A @ Q, 0
    while not holds(B, np.eye(len(B)), tolerance) and iterations != max_iterations:
        S, T = np.linalg.qr(B)
        B, Q = T @ S, Q @ S
        iterations += 1
    return Q, iterations


def _order(A, Q, sort):
    values = np.sum(Q * (A @ Q), axis=0)
    if sort is None:
        return np.arange(len(values))
    return np.argsort(values if sort == "ascending" else -values, kind="stable")


def eigenvalue_corrected(
    gradients,
    *,
    b1=0.9,
    b2=0.999,
    b3=0.999,
    tolerance=0.1,
    max_iterations=1,
    K=1,
    method="qr",
    first="eigh",
    sort=None,
    carry_v="keep",
    eps=1e-12,
    eps_inside=True,
    bias_correction=True,
    dtype_eps=EPS64,
    basis=None,
):
    """Run it over the gradients, each (m, n).

    States: M and v (m, n), L, R, Q_L, Q_R, and for each side whether its basis was renewed at this
    step and by how many QR iterations (0 for an eigendecomposition).
    """
    if method not in ("qr", "eigh") or first not in ("eigh", "identity"):
        raise ValueError(f"unknown method {method!r} or first {first!r}")
    if sort not in (None, "ascending", "descending") or carry_v not in ("keep", "permute"):
        raise ValueError(f"unknown sort {sort!r} or carry_v {carry_v!r}")
    m, n = np.shape(gradients[0])
    M, v = np.zeros((m, n)), np.zeros((m, n))
    L, R = np.zeros((m, m)), np.zeros((n, n))
    Q_L, Q_R = np.eye(m), np.eye(n)

    def renew(t, side, A, Q):
        """The basis, the order of the old columns, whether it is new, and the QR iterations."""
        kept = np.arange(len(A))
        initial = t == 1 and first == "eigh"
        if not initial and tolerance is not None and holds(A, Q, tolerance):
            return Q, kept, False, 0
        if basis is not None:
            return np.asarray(basis(t, side, A, None if t == 1 else Q), np.float64), kept, True, 0
        if initial or method == "eigh":
            return eigenvectors(A), kept, True, 0
        Q, iterations = warm_qr(A, Q, -1.0 if tolerance is None else tolerance, max_iterations)
        order = _order(A, Q, sort)
        return fix_signs(Q[:, order]), order, True, iterations

    if tolerance is None and max_iterations is None:
        raise ValueError("QR iterations without a tolerance need max_iterations")
    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        G = np.asarray(G, dtype=np.float64)
        M = b1 * M + (1 - b1) * G
        L = b3 * L + (1 - b3) * G @ G.T
        R = b3 * R + (1 - b3) * G.T @ G
        new_L = new_R = False
        steps_L = steps_R = 0
        if t == 1 or t % K == 0:
            Q_L, order_L, new_L, steps_L = renew(t, "left", L, Q_L)
            Q_R, order_R, new_R, steps_R = renew(t, "right", R, Q_R)
            v = v[np.ix_(order_L, order_R)] if carry_v == "permute" else v
        v = b2 * v + (1 - b2) * (Q_L.T @ G @ Q_R) ** 2
        M_hat, v_hat = Q_L.T @ M @ Q_R, v
        if bias_correction:
            M_hat, v_hat = M_hat / (1 - b1**t), v / (1 - b2**t)
        if eps_inside and eps > 0:
            quotient = M_hat / np.sqrt(v_hat + eps)
        else:
            quotient = divide(M_hat, v_hat, max(m, n), dtype_eps, eps)
        directions.append(Q_L @ quotient @ Q_R.T)
        state = {"M": M, "v": v, "L": L, "R": R, "Q_L": Q_L, "Q_R": Q_R}
        state.update(new_L=new_L, new_R=new_R, iterations_L=steps_L, iterations_R=steps_R)
        states.append(state)
    return directions, states
