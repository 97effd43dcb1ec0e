"""SOAP's preconditioning in front of Muon's orthogonalization, transcribed in NumPy float64.

Source: the record of 2026-05-04 in the optimization track of modded-nanogpt (pull request 278), its
README: M <- mu M + (1 - mu) G, U = (1 - mu) G + mu M, L <- EMA(G G'), R <- EMA(G' G),
Q_r = eig(L), Q_c = eig(R), U_hat = Q_r' U Q_c, V <- b2 V + (1 - b2) U_hat^2,
U_tilde = Q_r (U_hat / (sqrt(V) + eps)) Q_c', U_tilde <- U_tilde ||U||_F / ||U_tilde||_F, and
NewtonSchulz(U_tilde). "SOAP-Muon" of later records is the same.

Readings chosen:
- The parts of that record that follow (Contra-Muon, the variance of rows, the floor for the length
  of an update) are other methods and are left out.
- The restored norm ||U||_F cancels in Newton-Schulz, which divides by a norm, but for its eps.
- second_moment="update" is the printed V, of the rotated U; "gradient" is SOAP's own (Algorithm 6
  of arXiv:2502.07752), of the rotated G. Both agree for mu = 0.
- The order is that of Algorithm 6: basis first, then V and the step in that new basis. The record
  renews statistics and basis after the step.
- nesterov=False has M in place of U. No bias correction.
- The basis of step t is renewed if t = 1 or t mod K = 0. refresh="eigh" decomposes each time and
  keeps V as it is; "qr" is the record's: sort the columns by diag(Q' L Q), V with them, and
  Q <- QR(L Q).
- side="smaller" (ours) rotates the side of smaller order only, the left of square matrices: where a
  statistic has no full rank yet, the basis of its null space is arbitrary.
- Division as in `reference.soap`: 0 where sqrt(V) is 0 up to rounding. In the first step on both
  sides, U_hat is diagonal up to rounding, and what is not 0 there is noise divided by noise.
- Newton-Schulz: the record has 12 iterations of (2, -1.5, 0.5), which converge; the defaults here
  are Muon's five.
"""

import numpy as np

from .muon import newton_schulz
from .soap import divide, eigenvectors, qr_refresh


def soap_muon(
    gradients,
    *,
    mu=0.95,
    b2=0.9,
    b3=0.9,
    K=10,
    eps=0.0,
    nesterov=True,
    second_moment="update",
    refresh="qr",
    side="both",
    ns_eps=1e-8,
):
    """Run the chain over the gradients, each (m, n). States: M, V, L, R, Q_r, Q_c."""
    m, n = np.shape(gradients[0])
    M, V = np.zeros((m, n)), np.zeros((m, n))
    L, R = np.zeros((m, m)), np.zeros((n, n))
    Q_r, Q_c = np.eye(m), np.eye(n)
    rotated = (side == "both" or m <= n, side == "both" or m > n)

    def renewed(t, statistic, Q, used):
        if not used or t == 1 or refresh == "eigh":
            return eigenvectors(statistic) if used else Q, np.arange(len(statistic))
        return qr_refresh(statistic, Q)

    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        M = mu * M + (1 - mu) * G
        U = mu * M + (1 - mu) * G if nesterov else M
        L, R = b3 * L + (1 - b3) * G @ G.T, b3 * R + (1 - b3) * G.T @ G
        if t == 1 or t % K == 0:
            Q_r, rows = renewed(t, L, Q_r, rotated[0])
            Q_c, columns = renewed(t, R, Q_c, rotated[1])
            V = V[rows][:, columns]
        U_hat = Q_r.T @ U @ Q_c
        moment = U_hat if second_moment == "update" else Q_r.T @ G @ Q_c
        V = b2 * V + (1 - b2) * moment**2
        U_tilde = Q_r @ divide(U_hat, V, max(m, n), eps) @ Q_c.T
        norm = np.linalg.norm(U_tilde)
        U_tilde = U_tilde * (np.linalg.norm(U) / norm) if norm > 0 else U_tilde
        directions.append(newton_schulz(U_tilde, eps=ns_eps))
        states.append({"M": M, "V": V, "L": L, "R": R, "Q_r": Q_r, "Q_c": Q_c})
    return directions, states
