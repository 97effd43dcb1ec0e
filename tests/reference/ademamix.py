"""AdEMAMix, also inside an eigenbasis, transcribed in NumPy float64.

Paper: "The AdEMAMix Optimizer: Better, Faster, Older" (arXiv:2409.03137), Algorithm 1:
m1 <- b1 m1 + (1 - b1) g, m2 <- b3 m2 + (1 - b3) g, v <- b2 v + (1 - b2) g^2,
d = (m1 / (1 - b1^t) + alpha m2) / (sqrt(v / (1 - b2^t)) + eps): the slow moment m2 has no bias
correction. Warmups over T steps: alpha_t = min(t / T, 1) alpha, and b3 goes from b1 to its value
with a half-life that grows linearly. Code: NVIDIA-NeMo/Emerging-Optimizers,
`scalar_optimizers/update_functions/ademamix.py` lines 28-105.

In an eigenbasis (HomebrewML/HeavyBall, `heavyball/chainable.py` lines 1364-1385, SOAPAdEMAMix):
g is the rotated gradient Q_L' G Q_R, D = Q_L d Q_R', and when the bases change, both first moments
turn with them, m <- Q_new' Q_old m Q_old' Q_new, while v stays as it is or follows its columns.

Readings chosen:
- Statistics, order of a step, refreshes, the division and `carry_v` are those of `reference.soap`
  (basis first, then the moments in it). HeavyBall renews the basis after the step, and its first
  step only makes the basis.
- The moments are kept in the basis and are turned, to state what the method's name says. To keep
  them in the original space and rotate them at each step is the same.
- eps is outside the root.
- b3 and alpha are numbers or one number per step.
- `warm_b3` has t = 1, 2, ... and the value itself from t = T on, as the paper; the official code
  adds 1e-8 to b inside logarithms, which is left out.
"""

import numpy as np

from .lengths import per_step
from .soap import divide, eigenvectors, matching, qr_refresh


def warm_alpha(t, alpha, T):
    """alpha at step t."""
    return min(t / T, 1.0) * alpha


def warm_b3(t, b1, b3, T):
    """b3 at step t: the half-life log(1/2) / log(b) is linear in t up to T."""
    share = min(t / T, 1.0)
    half_life = (1 - share) * np.log(0.5) / np.log(b1) + share * np.log(0.5) / np.log(b3)
    return 0.5 ** (1 / half_life)


class Moments:
    """m1, m2 and v of one array, and its direction."""

    def __init__(self, shape, b1, b2, eps):
        self.m1, self.m2, self.v = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.b1, self.b2, self.eps = b1, b2, eps

    def direction(self, t, g, b3, alpha):
        self.m1 = self.b1 * self.m1 + (1 - self.b1) * g
        self.m2 = b3 * self.m2 + (1 - b3) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        mixed = self.m1 / (1 - self.b1**t) + alpha * self.m2
        return divide(mixed, self.v / (1 - self.b2**t), max(g.shape), self.eps)

    def state(self):
        return {"m1": self.m1, "m2": self.m2, "v": self.v}


def ademamix(gradients, *, b1=0.9, b2=0.999, b3=0.9999, alpha=5.0, eps=1e-8):
    """Run Algorithm 1 over the gradients. States: m1, m2, v."""
    moments = Moments(np.shape(gradients[0]), b1, b2, eps)
    slow, shares = per_step(b3, len(gradients)), per_step(alpha, len(gradients))
    directions, states = [], []
    for t, g in enumerate(gradients, start=1):
        directions.append(moments.direction(t, g, slow[t - 1], shares[t - 1]))
        states.append(moments.state())
    return directions, states


def soap_ademamix(
    gradients,
    *,
    b1=0.9,
    b2=0.95,
    b3=0.999,
    alpha=5.0,
    shampoo_b=0.95,
    K=10,
    eps=1e-8,
    refresh="eigh",
    carry_v="keep",
):
    """AdEMAMix in SOAP's bases over the gradients, each (m, n).

    States: m1, m2 and v (m, n) in the bases, L, R, Q_L, Q_R.
    """
    m, n = np.shape(gradients[0])
    moments = Moments((m, n), b1, b2, eps)
    L, R, Q_L, Q_R = np.zeros((m, m)), np.zeros((n, n)), np.eye(m), np.eye(n)
    slow, shares = per_step(b3, len(gradients)), per_step(alpha, len(gradients))

    def renewed(t, statistic, Q):
        if t > 1 and refresh == "qr":
            return qr_refresh(statistic, Q)
        new = eigenvectors(statistic)
        return new, matching(new, Q)

    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        L = shampoo_b * L + (1 - shampoo_b) * G @ G.T
        R = shampoo_b * R + (1 - shampoo_b) * G.T @ G
        if t == 1 or t % K == 0:
            (new_L, rows), (new_R, columns) = renewed(t, L, Q_L), renewed(t, R, Q_R)
            turn_L, turn_R = new_L.T @ Q_L, Q_R.T @ new_R
            moments.m1, moments.m2 = (turn_L @ x @ turn_R for x in (moments.m1, moments.m2))
            if carry_v == "permute":
                moments.v = moments.v[np.ix_(rows, columns)]
            Q_L, Q_R = new_L, new_R
        d = moments.direction(t, Q_L.T @ G @ Q_R, slow[t - 1], shares[t - 1])
        directions.append(Q_L @ d @ Q_R.T)
        states.append({**moments.state(), "L": L, "R": R, "Q_L": Q_L, "Q_R": Q_R})
    return directions, states
