"""Lars as layer-wise normalization of the first moment, transcribed in NumPy float64.

Paper: "Towards Efficient Optimizer Design for LLM via Structured Fisher Approximation with a
Low-Rank Extension", Section B.10, Eq. 34: m <- b1 m + (1 - b1) G, D = phi(||theta||) m / ||m||.

Readings chosen:
- Both norms are Frobenius norms over the whole layer; the parameter may have any shape.
- phi is an argument. The default is the identity (the paper says only "a scaling function"); You et
  al. (2017) have `lambda z: eta * z` with the trust coefficient eta = 0.001.
- theta is the parameter before the step: the loop runs W <- W - rate * D from `parameter`.
- m starts at 0. Bias correction would cancel in m / ||m||, so there is none.
- m = 0 gives D = 0. theta = 0 gives D = phi(0) m / ||m||, so with the default a parameter that
  starts at 0 stays there (at_zero="formula"). With at_zero="one" the ratio phi(||theta||) / ||m||
  is 1 where either norm is 0: `optax.scale_by_trust_ratio` and `optax.lars` do that.
- The original Lars normalizes the gradient (with weight decay added) and takes the momentum of
  what comes out; here, as printed, the momentum is first. Both agree for b1 = 0.
"""

import numpy as np


def lars(gradients, parameter, *, learning_rates=0.0, b1=0.9, phi=lambda z: z, at_zero="formula"):
    """Run Eq. 34 over the gradients; learning_rates: one number, or one per step.

    With the default rate of 0 all steps see the same parameter. States: M, and W after the step.
    """
    if at_zero not in ("formula", "one"):
        raise ValueError(f"unknown at_zero {at_zero!r}")
    rates = np.broadcast_to(np.asarray(learning_rates, dtype=np.float64), (len(gradients),))
    W = np.asarray(parameter, dtype=np.float64)
    M = np.zeros(W.shape)
    directions, states = [], []
    for rate, G in zip(rates, gradients, strict=True):
        M = b1 * M + (1 - b1) * np.asarray(G, dtype=np.float64)
        norm_W, norm_M = np.sqrt(np.sum(W**2)), np.sqrt(np.sum(M**2))
        if at_zero == "one" and (norm_W == 0 or norm_M == 0):
            D = M
        else:
            D = phi(norm_W) * M / norm_M if norm_M > 0 else np.zeros(W.shape)
        W = W - rate * D
        directions.append(D)
        states.append({"M": M, "W": W})
    return directions, states
