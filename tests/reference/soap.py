"""SOAP, Eigen-Adam, AdaDiag and AdaDiag++, transcribed in NumPy float64.

Paper: "Towards Efficient Optimizer Design for LLM via Structured Fisher Approximation with a
Low-Rank Extension", Algorithm 6 (SOAP, Eq. 29), Algorithm 7 (Eigen-Adam, Eq. 13) and Section B.6
(AdaDiag and AdaDiag++ switch off the EMA of the statistics: b3 = 0). Algorithm 7 is Algorithm 6
with `side="left"`, where its Q and U_f are named L and U_L.

Readings chosen:
- Order of a step as printed: M, L and R, then the basis (t = 1 and t mod K = 0), then v and D in
  that new basis. All states start at 0; no bias correction, no eps. The paper prints no momenta and
  no period: these are the project's defaults.
- M is kept in the original space. v is kept as it is at a refresh, as printed.
- Division (ours): where sqrt(v) <= max(m, n) * 2^-52 * max sqrt(v), the quotient is 0; the
  maximum is over the matrix v of this step, so that bias correction does not change the rule. The
  option eps is added outside the root, after that test.
  The rule does not catch all the noise of two-sided SOAP at t = 1 (off the diagonal of U_L' G U_R
  it reaches ten times the cutoff or more, since L and R square the condition number of G): compare
  D at t = 1 on one side only.
- Bias correction (option): M / (1 - b1^t), v / (1 - b2^t).
- EVD: eigenvalues in descending order; the paper names none, and D does not depend on it (one
  order at all refreshes). Signs: entry of largest magnitude positive; D does not depend on them.
- Equal eigenvalues: the basis of their space is arbitrary (a statistic of rank below its order has
  such a space: R at t = 1 if m < n, and every statistic if b3 = 0), and D at later steps depends on
  it.
- A refresh by QR (ours, from the official code; the first refresh is an EVD): the columns of the
  old U are sorted by diag(U' L U), largest first (stable), and U <- the Q of the QR decomposition
  of L U.
- Permuted v (ours): v follows its columns, with QR by that sort, with an EVD by the
  assignment of new to old columns which maximizes the sum of (U_new' U_old)^2.
- skip_first (official code): t = 1 only sets the statistics and the basis; D = 0, M and v stay 0,
  and the bias correction counts t - 1. Refreshes keep their steps. The official code's other
  differences (a basis one step late, statistics with corrected bias) are not transcribed.
"""

import numpy as np
from scipy.optimize import linear_sum_assignment

from .shampoo import as_it_is

EPS64 = float(np.finfo(np.float64).eps)


def fix_signs(U):
    """Turn every column's entry of largest magnitude (the first such entry) positive."""
    largest = U[np.argmax(np.abs(U), axis=0), np.arange(U.shape[1])]
    return U * np.where(largest < 0, -1.0, 1.0)


def eigenvectors(A):
    """EVD(A) of a symmetric A: eigenvectors by descending eigenvalue, signs fixed."""
    return fix_signs(np.linalg.eigh((A + A.T) / 2)[1][:, ::-1])


def divide(numerator, v, size, eps=0.0):
    """numerator / (sqrt(v) + eps), 0 where sqrt(v) <= size * 2^-52 * max sqrt(v)."""
    root = np.sqrt(v)
    kept = root > size * EPS64 * np.max(root)
    quotient = np.zeros_like(numerator)
    quotient[kept] = numerator[kept] / (root[kept] + eps)
    return quotient


def qr_refresh(statistic, U, sort=True):
    """One step of the power iteration. Returns the new basis and the order of the old columns."""
    product = statistic @ U
    order = np.arange(U.shape[1])
    if sort:
        order = np.argsort(-np.sum(U * product, axis=0), kind="stable")
    return fix_signs(np.linalg.qr(product[:, order])[0]), order


def matching(U_new, U_old):
    """For every new column the old column it continues."""
    return linear_sum_assignment((U_new.T @ U_old) ** 2, maximize=True)[1]


def soap(
    gradients,
    *,
    b1=0.95,
    b2=0.95,
    b3=0.95,
    K=10,
    side="both",
    eps=0.0,
    bias_correction=False,
    refresh="eigh",
    carry_v="keep",
    skip_first=False,
    kept=as_it_is,
):
    """Run Algorithm 6 over the gradients, each (m, n).

    States: M (m, n), v (m, n) in the basis, and for each factor in use L (m, m), U_L (m, m), R
    (n, n), U_R (n, n); None for a side that is not rotated.
    """
    m, n = np.shape(gradients[0])
    left, right = side in ("both", "left"), side in ("both", "right")
    M, v = np.zeros((m, n)), np.zeros((m, n))
    L, R = (kept(np.zeros((order, order)), "start", 0) for order in (m, n))
    U_L, U_R = np.eye(m), np.eye(n)

    def renew(t, statistic, U):
        """The new basis and the order in which v follows it (at t = 1, v is 0)."""
        if t > 1 and refresh == "qr":
            return qr_refresh(statistic, U)
        U_new = eigenvectors(statistic)
        return U_new, matching(U_new, U)

    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        skipped = skip_first and t == 1
        if not skipped:
            M = b1 * M + (1 - b1) * G
        if left:
            L = kept(b3 * L + (1 - b3) * (G @ G.T), "factor", t)
        if right:
            R = kept(b3 * R + (1 - b3) * (G.T @ G), "factor", t)
        if t == 1 or t % K == 0:
            if right:
                U_R, order = renew(t, R, U_R)
                U_R = kept(U_R, "basis", t)
                v = v[:, order] if carry_v == "permute" else v
            if left:
                U_L, order = renew(t, L, U_L)
                U_L = kept(U_L, "basis", t)
                v = v[order] if carry_v == "permute" else v
        D = np.zeros((m, n))
        if not skipped:
            M_tilde = U_L.T @ M @ U_R
            v = b2 * v + (1 - b2) * (U_L.T @ G @ U_R) ** 2
            v_hat = v
            if bias_correction:
                steps = t - 1 if skip_first else t
                M_tilde, v_hat = M_tilde / (1 - b1**steps), v / (1 - b2**steps)
            D = U_L @ divide(M_tilde, v_hat, max(m, n), eps) @ U_R.T
        directions.append(D)
        state = {"M": M, "v": v, "L": None, "R": None, "U_L": None, "U_R": None}
        if left:
            state.update(L=L, U_L=U_L)
        if right:
            state.update(R=R, U_R=U_R)
        states.append(state)
    return directions, states


def eigen_adam(gradients, **options):
    """Algorithm 7: the left side only; options as in soap."""
    return soap(gradients, side="left", **options)


def adadiag(gradients, **options):
    """B.6: Eigen-Adam without the EMA of the statistic, b3 = 0."""
    return eigen_adam(gradients, b3=0.0, **options)
