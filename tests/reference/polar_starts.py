"""Starts of Newton-Schulz and its iteration on the Gram matrix, transcribed in NumPy float64.

Sources: AOL: Prach and Lampert, "Almost-Orthogonal Layers ..." (arXiv:2208.03160), used for Muon
by "Turbo-Muon" (arXiv:2512.04632). Gram Newton-Schulz: Zhang, Amsel, Chen and Dao, "Gram
Newton-Schulz: A Fast, Hardware-Aware Newton-Schulz Algorithm for Muon" (2026), the listing of its
README.

Starts X_0, all with ||X_0||_2 <= 1:
- "frobenius", "schatten", "spectral": X / ||X||_p with the Schatten norm (sum sigma_i^p)^(1/p),
  p = 2, p (4 by default: ||X' X||_F^(1/2)), infinity. Larger p start closer to 1.
- "aol": X D with D = diag(sum_j |X' X|_ij)^(-1/2) ("columns"), or D X with X X' ("rows").
  side="smaller" takes the rows of a wide or square matrix and the columns of a tall one, as
  Turbo-Muon does.

Readings chosen:
- AOL's D is not undone: the iteration goes to the polar factor of X D, which is not that of X
  unless D is a multiple of I or the columns are orthogonal. Turbo-Muon accepts that; `aol_target`
  is what comes out.
- eps is added to the norms ("frobenius" alone has it in the sources); AOL clamps its sums from
  below at eps (official code: 1e-7). With eps = 0, what is 0 stays 0.
- An older version of the official code, which Emerging-Optimizers has as "aol", begins with
  (4.0098, -7.0585, 2.4635); it turns singular values above 0.88 negative, and is not taken.
- safety divides the start once more: Polar Express has 1.01 for half precision. It is 1 here.
- The listing counts t = 1 ... 5 and restarts at t = 3: restarts=(2,), the iterations after which X
  becomes Q X. Its last line says Q_4 X; it must be Q_5 X. Its lines for R and Q keep the order of
  the factors; all of them are polynomials of R and commute.
- With no restart the result is p(X X') X by one product alone. The iterated R may leave the
  positive semidefinite matrices by rounding, which the coefficients amplify; restarts are there
  for that. In exact arithmetic restarts change nothing, nor does the Gram form.
- Square matrices go through the Gram matrix too (the official code takes the plain form there).
  Matrices with more rows than columns are transposed before and after.
"""

import numpy as np

from .muon import COEFFICIENTS, momenta, orthogonal_factor

TURBO_MUON = (  # official code, for AOL's start: the last four of Jiacheng You's five
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def schatten_norm(X, p):
    sigma = np.linalg.svd(X, compute_uv=False)
    if np.isinf(p) or sigma[0] == 0:
        return sigma[0]
    return sigma[0] * np.sum((sigma / sigma[0]) ** p) ** (1 / p)


def aol_scales(X, side="smaller", eps=0.0):
    """D as a matrix that broadcasts against X: (1, n) for the columns, (m, 1) for the rows."""
    if side == "smaller":
        side = "columns" if X.shape[0] > X.shape[1] else "rows"
    if side == "rows":
        return aol_scales(X.T, "columns", eps).T
    sums = np.maximum(np.sum(np.abs(X.T @ X), axis=0, keepdims=True), eps)
    return np.divide(1.0, np.sqrt(sums), out=np.zeros_like(sums), where=sums > 0)


def start_of(X, start="frobenius", *, p=4, side="smaller", eps=0.0, safety=1.0):
    """X_0 of the iteration."""
    X = np.asarray(X, dtype=np.float64)
    if start == "aol":
        return X * aol_scales(X, side, eps) / safety
    norm = schatten_norm(X, {"frobenius": 2, "schatten": p, "spectral": np.inf}[start]) + eps
    return X / (norm * safety) if norm > 0 else X


def aol_target(X, side="smaller", cutoff=None):
    """What Newton-Schulz from AOL's start converges to: the polar factor of X D or D X."""
    return orthogonal_factor(start_of(X, "aol", side=side), cutoff)


def _triples(coefficients, steps):
    return [coefficients] * steps if np.ndim(coefficients) == 1 else list(coefficients)


def newton_schulz_from(X, coefficients=COEFFICIENTS, steps=5):
    """The quintic iteration from X as it is; a list of triples gives one iteration per triple."""
    transposed = X.shape[0] > X.shape[1]
    X = X.T if transposed else X
    for a, b, c in _triples(coefficients, steps):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    return X.T if transposed else X


def gram_newton_schulz(X, coefficients=COEFFICIENTS, steps=5, restarts=(2,)):
    """The same iteration on R = X X' from X as it is, restarted after the iterations `restarts`."""
    transposed = X.shape[0] > X.shape[1]
    X = X.T if transposed else X
    R, Q = X @ X.T, np.eye(X.shape[0])
    for t, (a, b, c) in enumerate(_triples(coefficients, steps), start=1):
        if t - 1 in restarts:
            X = Q @ X
            R, Q = X @ X.T, np.eye(X.shape[0])
        Z = b * R + c * R @ R
        Q = Q @ Z + a * Q
        RZ = R @ Z + a * R
        R = Z @ RZ + a * RZ
    X = Q @ X
    return X.T if transposed else X


def muon_from(
    gradients,
    *,
    start="frobenius",
    p=4,
    side="smaller",
    eps=0.0,
    safety=1.0,
    coefficients=COEFFICIENTS,
    steps=5,
    gram=False,
    restarts=(2,),
    b1=0.95,
    nesterov=True,
    momentum="ema",
    bias_correction=True,
):
    """Muon (`reference.muon`) with another start, on the Gram matrix or not. States: M, X_0."""
    options = dict(b1=b1, nesterov=nesterov, momentum=momentum, bias_correction=bias_correction)
    directions, states = [], []
    for M, M_hat in momenta(gradients, **options):
        X_0 = start_of(M_hat, start, p=p, side=side, eps=eps, safety=safety)
        if gram:
            D = gram_newton_schulz(X_0, coefficients, steps, restarts)
        else:
            D = newton_schulz_from(X_0, coefficients, steps)
        directions.append(D)
        states.append({"M": M, "X_0": X_0})
    return directions, states
