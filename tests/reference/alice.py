"""Alice and Alice-0 with their ablations, transcribed in NumPy float64.

Paper: "Towards Efficient Optimizer Design for LLM via Structured Fisher Approximation with a
Low-Rank Extension": Algorithm 4 (Alice), 2 (switching), 3 (compensation), 10 (subspace iteration);
Section 7.3 and F.7 (the alternatives). Defaults: Table 11; gamma = 1.01 (F.2).

Everything is written for the left side (m <= n in the paper): if the right side is projected, all
gradients are transposed before and the directions after, and all states are those of the transposed
matrices: U (m, r), Q_tilde (r, r), m and v (r, n), p (n,), phi. The smaller dimension is projected,
the left one if m = n.

Readings chosen:
- Line 6 of Algorithm 4 prints U_t before it exists: it is the U of the step before. m, v and
  Q_tilde are not rotated when U changes.
- At t = 1 (U_0 = 0: nothing to iterate from) the top r eigenvectors of Q_1, hence of G G', take the
  place of the subspace iteration, and the switch runs as at every refresh.
- Algorithm 10 must return U_T EVD(V) (printed: EVD(V), which is r x r); eigenvalues descending.
  Signs: entry of largest magnitude positive, in the columns of U'.
  The indices drawn from the complement give the columns of U in the order in which they come.
- The complement of U' is taken before U' loses its columns l + 1 ... r: these are in neither part
  of U. If the complement has fewer than r - l columns (r - l > m - r), all of it is drawn from and
  the leading part is max(l, 2r - m) columns (ours).
- full_basis: numbered for the draws are first the columns l + 1 ... r of U', then the complement's.
- gaussian: no U' is computed. The columns of a Gaussian matrix are normalized, not orthogonalized;
  sigma = U' G, the residual G - U sigma and p are then as printed, although U is not orthonormal.
- evd: the top r eigenvectors of Q (reconstructed, if tracking), no draws; none: U' itself.
- No tracking = Alice-0 = b3 = 0: Q = G G', no Q_tilde.
- omega = m / sqrt(v) without bias correction and eps (both options, as in soap.py); the division is
  0 where sqrt(v) <= max(m, n) dtype_eps max sqrt(v) (ours).
- p is stored as printed; in p^(-1/2) entries p <= 0 give 0. b of Algorithm 3 is b1 (line 16).
- Algorithm 3's norms are Frobenius.
- compensation="fira": C = (G - U sigma) diag(||omega_i|| / ||sigma_i||) through the limiter,
  D = alpha (U omega + C) without alpha_c, which F.7 introduces with Fira+; "fira+": after the
  limiter C <- alpha_c C ||U omega|| / ||C||, so that the limiter changes phi but never D. There is
  no p then, and no phi without compensation.

Random choices and arbitrary bases come from outside:
- draw(t, available, count) returns `count` different indices below `available`;
- gaussian(t, shape) returns N(0, 1) entries;
- complement(t, U_prime) returns the m - r orthonormal columns, used as they are.
"""

import numpy as np

from .galore import column_scales, limit_norm_growth, oriented, rescale_to
from .soap import divide, eigenvectors, fix_signs


def subspace_iteration(A, M):
    """Algorithm 10 with one step."""
    U = np.linalg.qr(A @ M)[0]
    V = U.T @ A @ U
    return fix_signs(U @ eigenvectors(V))


def gaussian_columns(gaussian, t, shape):
    """F.7: standard Gaussian columns, normalized."""
    X = gaussian(t, shape)
    return X / np.sqrt(np.sum(X**2, axis=0))


def switch(t, Q, r, l, U_previous, *, switching, draw, gaussian, complement):
    """Algorithm 2 and its alternatives: the new U, of shape (m, r)."""
    m = Q.shape[0]
    if switching == "gaussian":
        return gaussian_columns(gaussian, t, (m, r))
    if t == 1 or switching == "evd":
        U_prime = eigenvectors(Q)[:, :r]
    else:
        U_prime = subspace_iteration(Q, U_previous)  # line 2
    if switching in ("none", "evd"):
        return U_prime
    if switching == "gaussian_mix":
        if l == r:
            return U_prime
        return np.concatenate([U_prime[:, :l], gaussian_columns(gaussian, t, (m, r - l))], axis=1)
    U_c = complement(t, U_prime)
    if switching == "full_basis":
        rest = np.concatenate([U_prime[:, l:], U_c], axis=1)
    else:
        rest = U_c
        l = max(l, 2 * r - m)
    chosen = draw(t, rest.shape[1], r - l) if r > l else []  # line 4
    assert len(set(chosen)) == r - l
    return np.concatenate([U_prime[:, :l], rest[:, chosen]], axis=1)  # lines 3, 5


def compensate(G, U, p, phi, gamma, b):
    """Algorithm 3: C, p, phi."""
    m, r = U.shape
    sigma = U.T @ G
    p = b * p + (1 - b) * (np.sum(G**2, axis=0) - np.sum(sigma**2, axis=0))  # line 2
    scales = np.zeros_like(p)
    scales[p > 0] = p[p > 0] ** -0.5
    C = np.sqrt(m - r) * (G - U @ sigma) * scales  # line 3
    C, phi = limit_norm_growth(C, phi, gamma)  # lines 4-6
    return C, p, phi


def alice(
    gradients,
    *,
    rank,
    leading=40,
    K=200,
    b1=0.9,
    b2=0.9,
    b3=0.999,
    alpha=0.3,
    alpha_c=0.4,
    gamma=1.01,
    tracking=True,
    switching="complement",
    compensation="optimal",
    eps=0.0,
    bias_correction=False,
    draw,
    gaussian,
    complement,
):
    """Run Algorithm 4 over the gradients, each (m, n).

    States: U, Q_tilde (None if b3 = 0 or not tracking), m, v, p (None unless the compensation is
    optimal), phi (None without compensation).
    """
    gradients, transposed = oriented(gradients)
    rows, columns = gradients[0].shape
    r = rank
    b3 = b3 if tracking else 0.0
    choices = dict(draw=draw, gaussian=gaussian, complement=complement)
    U, Q_tilde = np.zeros((rows, r)), np.zeros((r, r))  # line 2
    m = v = np.zeros((r, columns))
    p, phi = np.zeros(columns), 0.0
    directions, states = [], []
    for t, G in enumerate(gradients, start=1):  # lines 3, 4
        if t == 1 or t % K == 0:  # line 5
            Q = b3 * U @ Q_tilde @ U.T + (1 - b3) * G @ G.T  # line 6
            U = switch(t, Q, r, leading, U, switching=switching, **choices)  # line 7
        sigma = U.T @ G  # line 11
        Q_tilde = b3 * Q_tilde + (1 - b3) * sigma @ sigma.T  # line 12
        m = b1 * m + (1 - b1) * sigma  # line 13
        v = b2 * v + (1 - b2) * sigma**2  # line 14
        m_hat, v_hat = m, v
        if bias_correction:
            m_hat, v_hat = m / (1 - b1**t), v / (1 - b2**t)
        omega = divide(m_hat, v_hat, max(rows, columns), eps)  # line 15
        D = U @ omega
        if compensation == "optimal":
            C, p, phi = compensate(G, U, p, phi, gamma, b1)  # line 16
            D = D + alpha_c * C  # line 17
        elif compensation in ("fira", "fira+"):
            C = (G - U @ sigma) * column_scales(omega, sigma)
            C, phi = limit_norm_growth(C, phi, gamma)
            if compensation == "fira+":
                C = alpha_c * rescale_to(C, D)
            D = D + C
        D = alpha * D
        directions.append(D.T if transposed else D)
        states.append(
            {
                "U": U,
                "Q_tilde": Q_tilde if b3 > 0 else None,
                "m": m,
                "v": v,
                "p": p if compensation == "optimal" else None,
                "phi": None if compensation == "none" else phi,
            }
        )
    return directions, states
