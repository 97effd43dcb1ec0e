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
- Step 1 is an eigendecomposition (descending, signs fixed): it has no basis to start from. From
  then on the test runs at each step.
- method="qr" iterates until the criterion holds (official code: once); method="eigh" decomposes A
  anew where the test fails.
- A = 0 meets the criterion. The bias correction of L and R would cancel in it and in the bases.
- One QR iteration is QR(A Q) up to the signs of columns, the refresh of the official SOAP.
- QR iterations end with a sort of the columns, descending by diag(B) (stable), and v follows. The
  official code sorts ascending, also when Q is kept, and v does not follow there.
  Eigendecompositions never carry v.
- Bias correction of M and v, as Adam. eps outside the root and the division of `reference.soap`
  (official code: (v + eps)^(-1/2)).
- No grafting and no scale by the norm.
"""

import numpy as np

from .soap import divide, eigenvectors, fix_signs


def holds(A, Q, tolerance):
    """The criterion: the basis Q is still good enough for A."""
    B = Q.T @ A @ Q
    return np.linalg.norm(B - np.diag(np.diag(B))) <= tolerance * np.linalg.norm(A)


def warm_qr(A, Q, tolerance):
    """QR iterations from Q until the criterion holds. Returns the basis and how many they were."""
    B, iterations = Q.T @ A @ Q, 0
    while not holds(B, np.eye(len(B)), tolerance):
        S, T = np.linalg.qr(B)
        B, Q = T @ S, Q @ S
        iterations += 1
    return Q, iterations


def eigenvalue_corrected(
    gradients, *, b1=0.9, b2=0.999, b3=0.999, tolerance=0.1, method="qr", eps=1e-12
):
    """Run it over the gradients, each (m, n).

    States: M and v (m, n), L, R, Q_L, Q_R, and for each side whether its basis was renewed at this
    step and by how many QR iterations (0 for an eigendecomposition).
    """
    m, n = np.shape(gradients[0])
    M, v = np.zeros((m, n)), np.zeros((m, n))
    L, R = np.zeros((m, m)), np.zeros((n, n))
    Q_L, Q_R = np.eye(m), np.eye(n)

    def renew(t, A, Q):
        """The basis, the order of the old columns, whether it is new, and the QR iterations."""
        kept = np.arange(len(A))
        if t > 1 and holds(A, Q, tolerance):
            return Q, kept, False, 0
        if t == 1 or method == "eigh":
            return eigenvectors(A), kept, True, 0
        Q, iterations = warm_qr(A, Q, tolerance)
        order = np.argsort(-np.sum(Q * (A @ Q), axis=0), kind="stable")
        return fix_signs(Q[:, order]), order, True, iterations

    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        M = b1 * M + (1 - b1) * G
        L = b3 * L + (1 - b3) * G @ G.T
        R = b3 * R + (1 - b3) * G.T @ G
        Q_L, order_L, new_L, steps_L = renew(t, L, Q_L)
        Q_R, order_R, new_R, steps_R = renew(t, R, Q_R)
        v = b2 * v[np.ix_(order_L, order_R)] + (1 - b2) * (Q_L.T @ G @ Q_R) ** 2
        M_hat, v_hat = Q_L.T @ M @ Q_R / (1 - b1**t), v / (1 - b2**t)
        directions.append(Q_L @ divide(M_hat, v_hat, max(m, n), eps) @ Q_R.T)
        state = {"M": M, "v": v, "L": L, "R": R, "Q_L": Q_L, "Q_R": Q_R}
        state.update(new_L=new_L, new_R=new_R, iterations_L=steps_L, iterations_R=steps_R)
        states.append(state)
    return directions, states
