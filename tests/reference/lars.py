"""Lars as layer-wise normalization of the first moment, transcribed in NumPy float64.

Paper: "Towards Efficient Optimizer Design for LLM via Structured Fisher Approximation with a
Low-Rank Extension", Section B.10, Eq. 34: m <- b1 m + (1 - b1) G, D = phi(||theta||) m / ||m||.

Readings chosen:
- Both norms are Frobenius norms over the whole layer; the parameter may have any shape.
- phi is an argument. The default is the identity (the paper says only "a scaling function"); You et
  al. (2017) have `lambda z: eta * z` with the trust coefficient eta = 0.001.
- m starts at 0. Bias correction would cancel in m / ||m||, so there is none.
- The ratio phi(||theta||) / ||m|| is 1 where either norm is 0, as in `optax.lars`: by the formula a
  parameter that starts at 0 would stay there.
- The original Lars normalizes the gradient (with weight decay added) and takes the momentum of
  what comes out; here, as printed, the momentum is first. Both agree for b1 = 0.
"""

import numpy as np


def lars(gradients, W, *, b1=0.9, phi=lambda z: z):
    """Run Eq. 34 over the gradients of a parameter W that stays as it is. States: M."""
    M = np.zeros(W.shape)
    directions, states = [], []
    for G in gradients:
        M = b1 * M + (1 - b1) * G
        norm_W, norm_M = np.sqrt(np.sum(W**2)), np.sqrt(np.sum(M**2))
        directions.append(phi(norm_W) * M / norm_M if norm_W > 0 and norm_M > 0 else M)
        states.append({"M": M})
    return directions, states
