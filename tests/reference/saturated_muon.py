"""Muon behind a saturated inverse root, transcribed in NumPy float64.

Source: marin-community/marin, pull request 6588, comments of 2026-06-24 (`inner_only` with q_k):
U = polar(q_k(H) M), H = EMA(G G'), where q_k takes the place of H^(-1/2). It is the product of the
factors of k Newton-Schulz iterations with Muon's coefficients, on the eigenvalues of H over the
largest one:
    w_0 = w / max w, f_i = a + b w_i + c w_i^2, w_{i+1} = f_i^2 w_i, q_k(w) = f_0 f_1 ... f_{k-1}.
As matrices: P_0 = H / lambda_max, B = b P + c P^2, P <- (a I + B) P (a I + B), X <- (a I + B) X
from X = M. q_k tends to w^(-1/2) where w is not small, and to a^k, not infinity, at w = 0: the
inverse root saturates. k = 5. Momentum, Newton-Schulz and the EMA: Marin's
`lib/levanter/src/levanter/optim/left_precond_muon.py` (M <- b1 M + G, G + b1 M, H from the raw
gradients, beta 0.95, no outer factor).

Readings chosen:
- The code with q_k is not among the files that could be read; the formulas are those of the
  comment. Of lambda_max it says "lambda_max-normalized"; the coupled iteration of Marin's Mudam
  divides by sqrt(trace(P^2)) instead: normalize="frobenius".
- H's bias correction (Mudam's) cancels in the normalization and is left out.
- side="left" is the source's, outputs of weights outputs by inputs.
- The scale of q_k(H) M cancels in Newton-Schulz but for its eps. H = 0 gives q_k = a^k I.
- coefficients=(1.5, -0.5, 0) is the classical coupled iteration, which converges to w^(-1/2).
- The polar factor: Marin's `zeropower_via_newtonschulz5` with its "quintic" coefficients, five
  triples (`lib/levanter/src/levanter/optim/util.py`), eps = 1e-7. The outer scale
  sqrt(max(1, outputs / inputs)) is not in the direction.
"""

import numpy as np

from .lengths import frobenius
from .muon import COEFFICIENTS, momenta, newton_schulz, triples_of

QUINTIC = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)


def saturated(w, coefficients=COEFFICIENTS, steps=5):
    """q_k of numbers w, which are at most 1."""
    q = np.ones_like(w)
    for a, b, c in triples_of(coefficients, steps):
        factor = a + b * w + c * w**2
        q, w = factor * q, factor**2 * w
    return q


def saturated_inverse_root(H, coefficients=COEFFICIENTS, steps=5, normalize="spectral"):
    """q_k(H / lambda_max) of a symmetric positive semidefinite H, by its eigenvalues."""
    w, U = np.linalg.eigh((H + H.T) / 2)
    w = np.maximum(w, 0.0)
    largest = {"spectral": np.max(w), "frobenius": frobenius(w)}[normalize]
    return (U * saturated(w / largest if largest > 0 else w, coefficients, steps)) @ U.T


def saturated_muon(
    gradients,
    *,
    b1=0.95,
    b2=0.95,
    nesterov=True,
    momentum="trace",
    side="left",
    root_coefficients=COEFFICIENTS,
    root_steps=5,
    normalize="spectral",
    coefficients=QUINTIC,
    eps=1e-7,
):
    """Run it over the gradients, each (m, n). States: M, H of the side's order."""
    order = np.shape(gradients[0])[0 if side == "left" else 1]
    H = np.zeros((order, order))
    directions, states = [], []
    moments = momenta(gradients, b1, nesterov, momentum, bias_correction=False)
    for G, (M, M_hat) in zip(gradients, moments, strict=True):
        H = b2 * H + (1 - b2) * (G @ G.T if side == "left" else G.T @ G)
        root = saturated_inverse_root(H, root_coefficients, root_steps, normalize)
        whitened = root @ M_hat if side == "left" else M_hat @ root
        directions.append(newton_schulz(whitened, coefficients, eps=eps))
        states.append({"M": M, "H": H})
    return directions, states
