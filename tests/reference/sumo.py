"""SUMO and its adapter extraction, transcribed in NumPy float64.

Paper: "SUMO: Subspace-Aware Moment-Orthogonalization for Accelerating Memory-Efficient LLM
Training" (003), Algorithm 1 and the text on its four blocks; the EMA from Definition C.1;
adapter extraction from Appendix B. Shown for m >= n, where Q (m, r) projects from the left and
M, O are (r, n). For m < n it projects from the right: Q (n, r), M and O (m, r),
G_hat = G Q, M <- M R^T, D = alpha O Q^T.

Readings chosen where the paper is silent or unclear:

- t counts from 1: "t mod K = 0" from t = 0 is a refresh at t = 1, K+1, 2K+1, ...
- The criterion ||G_hat|| <= sigma replaces the period, and takes G_hat = Q_old^T G (there is no
  other Q yet). At t = 1 the basis is always computed. Equality refreshes. No hysteresis: while
  the projected gradient stays small, every step refreshes.
- Block 2 prints M^(t) <- mu M^(t-1) + G_hat after Block 1.1 wrote M^(t) <- R M^(t-1): the moment
  that mu multiplies is the carried one; at t = 1 there is none.
- EMA (Definition C.1): M <- mu M + (1 - mu) G_hat, no bias correction. The rest of C.1 (a
  second projection R^(t) from the right, "W + eta ...") contradicts Algorithm 1 and is left out.
- The norm is Frobenius. Algorithm 1 prints the ratio ||O^(t)|| / ||O^(t)||; the text on Block 3
  has ||O^(t-1)|| below, taken after its own limit, and before alpha and the shape factor. The
  limiter is off at t = 1 and where ||O^(t-1)|| = 0, which would give 0 forever after.
- orth(M) = U V^T of the compact SVD, so zero singular values stay zero and ||O|| = sqrt(rank M),
  the reading of (M M^T)^(-1/2) M (Block 2) with a pseudo-inverse. The other definition in Block 2,
  the nearest O with O O^T = I or O^T O = I, fills them with ones, in directions that M does not
  determine. A singular value counts as zero at max(m, n) * 2^-52 * (the largest) or below, for the
  gradient's m and n, not the moment's. Where rank-deficient gradients nearly cancel in M, noise
  left by earlier, larger moments passes this cutoff and is raised to 1: test rank deficiency on
  gradients that do not cancel.
- "Newton-Schulz5" has no formula in the paper: the quintic of Jordan et al., as in `muon.py`.
- sqrt(max(m, n)) of Block 4 is not in Algorithm 1 and left out.
- Weight decay (Block 4) is not part of the direction; alpha is, the learning rate is not.
- The rank is at most min(m, n), whichever side is projected.
- Signs: in each column of Q (and of U in the adapter) the entry of largest magnitude is positive,
  the first such entry on ties. D does not depend on it, nor on the basis chosen in range(Q).
- Where rank(G) < r (or sigma_r = sigma_(r+1)) at a refresh, the last columns of Q are not
  determined by G but by LAPACK; so is every later direction that sees them.

Adapter (App. B prints A (n, r), B (r, m) for a difference of shape (n, m)): the minimum of
||Delta - A B||_F^2 is the truncated SVD. Ours: the balanced split A = U sqrt(S), B = sqrt(S) V^T
(only A B is determined); rank(Delta) counts singular values above tolerance * (the largest).
"""

import numpy as np

from .galore import singular_basis
from .muon import newton_schulz, orthogonal_factor
from .soap import EPS64, fix_signs


def sumo(
    gradients,
    *,
    rank,
    period=200,
    threshold=None,
    mu=0.95,
    momentum="trace",
    exact=True,
    limiter=False,
    gamma=1.1,
    alpha=1.0,
    side=None,
):
    """Run Algorithm 1 over the gradients, each (m, n).

    threshold: sigma of the criterion ||G_hat|| <= sigma, which then replaces `period`.
    momentum: "trace" (M <- mu M + G_hat) or "ema". exact=False: Newton-Schulz.
    side: "left" or "right"; None projects the larger dimension, "left" when m = n.

    Returns the directions (m, n) and the states {Q, M, O (after the limiter), refreshed}. Shapes
    on the left: Q (m, r), M and O (r, n); on the right: Q (n, r), M and O (m, r).
    """
    m, n = np.shape(gradients[0])
    if side is None:
        side = "left" if m >= n else "right"
    left = side == "left"
    r = min(rank, m, n)

    Q = M = np.zeros((0, 0))  # set at t = 1
    O_norm = 0.0
    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        # Block 1
        refresh = (t - 1) % period == 0
        if threshold is not None and t > 1:
            refresh = np.linalg.norm(Q.T @ G if left else G @ Q) <= threshold
        if refresh:
            Q_old, Q = Q, singular_basis(G if left else G.T, r)
            # Block 1.1
            if t == 1:
                M = np.zeros((r, n) if left else (m, r))
            else:
                R = Q.T @ Q_old
                M = R @ M if left else M @ R.T
        G_hat = Q.T @ G if left else G @ Q
        # Block 2
        M = mu * M + (G_hat if momentum == "trace" else (1 - mu) * G_hat)
        O = orthogonal_factor(M, max(m, n)) if exact else newton_schulz(M)
        # Block 3
        norm = np.linalg.norm(O)
        if limiter and t > 1 and O_norm > 0 and norm / O_norm > gamma:
            O = O / norm * gamma * O_norm
            norm = gamma * O_norm
        O_norm = norm
        # Block 4
        directions.append(alpha * (Q @ O if left else O @ Q.T))
        states.append({"Q": Q, "M": M, "O": O, "refreshed": bool(refresh)})
    return directions, states


def extract_adapter(before, after, *, rank=None, tolerance=None):
    """Appendix B: A (m, r), B (r, n) and ||Delta - A B||_F for Delta = after - before.

    Give `rank`, or `tolerance` (relative to the largest singular value), or neither: then the
    tolerance is max(m, n) * 2^-52. A rank above min(m, n) counts as min(m, n).
    """
    delta = np.float64(after) - np.float64(before)
    U, sigma, Vt = np.linalg.svd(delta, full_matrices=False)
    if rank is None:
        tolerance = max(delta.shape) * EPS64 if tolerance is None else tolerance
        rank = int(np.sum(sigma > tolerance * sigma[0]))
    U, sigma, Vt = U[:, :rank], sigma[:rank], Vt[:rank]
    signs = np.sign(np.sum(fix_signs(U) * U, axis=0))
    A, B = U * signs * np.sqrt(sigma), np.sqrt(sigma)[:, None] * (signs[:, None] * Vt)
    return A, B, np.linalg.norm(delta - A @ B)
