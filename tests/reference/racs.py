"""RACS, row and column scaled SGD, transcribed in NumPy float64.

Paper: "Towards Efficient Optimizer Design for LLM via Structured Fisher Approximation with a
Low-Rank Extension", Algorithm 1 (lines 2-12), Eq. 16 and Proposition 3. With P = G*G
(elementwise; the 1-sample estimate of E[G^2]), Diag(G^T Q G) = P^T q, Diag(G S G^T) = P s,
||Q||_F = ||q||_2 and ||S||_F = ||s||_2. Defaults: Table 9 and F.2 (gamma = 1.01).

Readings chosen:
- "5 steps of Eq. 16": each step computes s from q and then q from this new s (not both from
  the old pair): only q is initialized (q = 1).
- No state is carried inside Eq. 16: every optimizer step starts again from q = 1.
- No bias correction (none is printed), so b = 0.9 makes the first direction 10 times larger.
- The norm of lines 9-10 (no subscript in the paper) is Frobenius.
- Zero rows and columns (Prop. 3 assumes a positive E[G^2]): 0/0 in Eq. 16 and 0^(-1/2) in
  line 8 are taken as 0.
- Line 9 divides by phi_{t-1}. Where that is 0 (all gradients so far zero, or a zero gradient
  just before), eta = 1; the printed formula would give eta = 0 forever after.
- The direction holds eta and alpha of line 11 and leaves out the learning rate lambda.
"""

import numpy as np


def _over(numerator, denominator):
    """numerator / denominator for a scalar denominator, with x/0 = 0."""
    return numerator / denominator if denominator > 0 else np.zeros_like(numerator)


def _inverse_sqrt(x):
    """x^(-1/2) elementwise, with 0^(-1/2) = 0."""
    root = np.zeros_like(x)
    root[x > 0] = x[x > 0] ** -0.5
    return root


def fixed_point(gradient, iterations=5):
    """`iterations` steps of Eq. 16 from q = 1; returns s of shape (n,) and q of shape (m,)."""
    P = np.asarray(gradient, np.float64) ** 2
    q = np.ones(P.shape[0])
    for _ in range(iterations):
        s = _over(P.T @ q, np.sum(q**2))  # Eq. 16, left
        q = _over(P @ s, np.sum(s**2))  # Eq. 16, right
    return s, q


def racs(gradients, *, b=0.9, iterations=5, alpha=0.05, gamma=1.01):
    """Run Algorithm 1 over the gradients, each (m, n).

    Returns the directions eta * alpha * G~ of line 11 and the states {s (n,), q (m,), phi}
    after each step.
    """
    m, n = np.shape(gradients[0])
    s, q, phi = np.zeros(n), np.zeros(m), 0.0  # line 2
    directions, states = [], []
    for t, G in enumerate(gradients, start=1):  # line 3
        S, Q = fixed_point(G, iterations)  # lines 4, 5
        s = b * s + (1 - b) * S  # line 6
        q = b * q + (1 - b) * Q  # line 7
        G_tilde = _inverse_sqrt(q)[:, None] * G * _inverse_sqrt(s)[None, :]  # line 8
        norm = np.sqrt(np.sum(G_tilde**2))
        eta = gamma / max(norm / phi, gamma) if t > 1 and phi > 0 else 1.0  # line 9
        phi = eta * norm  # line 10
        directions.append(eta * alpha * G_tilde)  # line 11
        states.append({"s": s, "q": q, "phi": phi})
    return directions, states
