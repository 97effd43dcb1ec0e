"""Lemma 3.2 of SUMO: the error of cubic Newton-Schulz, in NumPy float64.

Paper: "SUMO: Subspace-Aware Moment-Orthogonalization ..." (003), Lemma 3.2 with its proof in
Appendix A: ||E_i||_F <= sqrt(r) (1 - 1/kappa)^(2^i), E_i = X_i - U V^T after i iterations, with
kappa the condition number of A A^T.

Here X_0 = A / ||A||_2, X <- (3 X - X X^T X) / 2, kappa over the nonzero singular values,
r = rank(A). Then the bound holds: every nonzero singular value x of X stays in (0, 1], its
residual e = 1 - x^2 becomes (3 e^2 + e^3) / 4 <= e^2 and starts at most at 1 - 1/kappa, and
1 - x <= 1 - x^2.

Readings chosen, and where they differ from the paper:
- The paper prints no iteration ("Newton-Schultz", "converges quadratically"): cubic. Muon's
  quintic does not converge to 1, and the lemma does not speak of it.
- The proof takes B = A A^T in place of A: X_0 = B / ||B||_2 and U V^T of B. That contradicts the
  definition E = orth(M) - Newton-Schulz(M) before Lemma 3.3, and there the bound is false: the
  error e = 1 - x becomes e^2 (3 - e) / 2 > e^2. (To see it, compare `lemma_table(B, i)` with
  `lemma_bound(A, i)`; its own bound, with the kappa of B B^T, does hold.)
- The printed kappa = sigma_1 / sigma_m is infinite for a rank-deficient A, and the printed r (the
  largest index with sigma_r > sigma_(r+1) = ... = sigma_m) fails on diag(1, .01, .01). Both are
  here as `lemma_bound(..., printed=True)`.
- A singular value of A counts as zero at max(m, n) * 2^-52 * (the largest) or below. In floating
  point the iteration lifts such noise by 1.5 each time: it reaches 1e-10 after about 34
  iterations.
- The residual is P - X X^T with P = U U^T the projector on range(A), which is I - X X^T for A of
  full row rank; any shape is allowed (the paper: m <= n).
"""

import numpy as np


def compact_svd(A):
    """U (m, r), sigma (r,), V^T (r, n) of the singular values that are not zero."""
    U, sigma, Vt = np.linalg.svd(np.asarray(A, dtype=np.float64), full_matrices=False)
    rank = np.sum(sigma > max(np.shape(A)) * np.finfo(np.float64).eps * sigma[0])
    return U[:, :rank], sigma[:rank], Vt[:rank]


def newton_schulz_cubic(A, iterations):
    """The iterates X_0, ..., X_iterations; A must not be zero."""
    A = np.asarray(A, dtype=np.float64)
    X = A / np.linalg.norm(A, 2)
    iterates = [X]
    for _ in range(iterations):
        gram = X @ X.T if X.shape[0] <= X.shape[1] else X.T @ X
        cubed = gram @ X if X.shape[0] <= X.shape[1] else X @ gram
        X = (3 * X - cubed) / 2
        iterates.append(X)
    return iterates


def lemma_bound(A, i, *, printed=False):
    """sqrt(r) (1 - 1/kappa)^(2^i); printed=True takes r and kappa as the lemma prints them."""
    _, sigma, _ = compact_svd(A)
    r = len(sigma)
    inverse_kappa = (sigma[-1] / sigma[0]) ** 2
    if printed:
        sigma = np.linalg.svd(np.asarray(A, dtype=np.float64), compute_uv=False)
        noise = max(np.shape(A)) * np.finfo(np.float64).eps * sigma[0]
        sigma[sigma <= noise] = 0.0
        r = np.sum(sigma - sigma[-1] > noise)
        inverse_kappa = (sigma[-1] / sigma[0]) ** 2
    return np.sqrt(r) * (1 - inverse_kappa) ** (2.0**i)


def lemma_table(A, iterations):
    """One dict for each i = 0, ..., iterations.

    error, error_2: ||X_i - U V^T|| in the Frobenius and the spectral norm; residual, residual_2:
    ||P - X_i X_i^T|| likewise; bound: the lemma's (Frobenius); bound_2: the same without sqrt(r).
    error_2 <= residual_2 <= bound_2 and error <= residual <= bound, up to rounding.
    """
    U, _, Vt = compact_svd(A)
    exact, projector = U @ Vt, U @ U.T
    rows = []
    for i, X in enumerate(newton_schulz_cubic(A, iterations)):
        error, residual = X - exact, projector - X @ X.T
        bound = lemma_bound(A, i)
        rows.append(
            {
                "X": X,
                "error": np.linalg.norm(error),
                "error_2": np.linalg.norm(error, 2),
                "residual": np.linalg.norm(residual),
                "residual_2": np.linalg.norm(residual, 2),
                "bound": bound,
                "bound_2": bound / np.sqrt(U.shape[1]),
            }
        )
    return rows
