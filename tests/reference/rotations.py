"""SOAP and KL-Shampoo in bases that only rotations turn, transcribed in NumPy float64.

Ours, from a specification and not from a paper. SOAP (`reference.soap`) whose statistics are kept
in the bases, H_L = U_L' L U_L and H_R = U_R' R U_R: a gradient enters them as X = U_L' G U_R, in
the bases from before the step. A refresh is a few changes of basis, U <- U T and H <- T' H T:
rotations T = I + A + A^2 / 2 + A^3 / 8 with A = f K antisymmetric, which reduce what H has off its
diagonal and are orthonormal to sixth order (T' T = I - A^6 / 64), and pulls to orthonormal columns
where a test vector shows that U is crooked. Nothing is ever decomposed, at the first refresh
neither. M and v are both in the bases: M turns with a basis, v stays as it is. No bias correction,
no eps.

K has two cases. With h = max(0, diag(H)), gap_ij = h_j - h_i, tau = 0.3, nu = 1e-7 and s_ij the
sign of gap_ij, for each pair i != j and c_ij = tau^2 h_i h_j + (nu max h)^2

    K_ij = (pi / 4) s_ij sign(H_ij)   where gap_ij^2 < c_ij / 100 and H_ij^2 > c_ij,
    K_ij = H_ij gap_ij / (gap_ij^2 + c_ij)   elsewhere,

of which K takes the antisymmetric part, its rows then shortened to at most 0.7. The first case is
there because a large entry between (nearly) equal diagonal entries is no sign of close eigenvalues:
the pair is turned by Jacobi's angle, while the second formula would never turn it.

Readings chosen:
- Order of a step: X, statistics of both sides, refresh of the left side then the right (t = 1 and
  t mod period = 0), M and v with the turned X, D in the new bases.
- U is orthonormal only nearly, and nothing makes up for that: X X' has U_R U_R' in it, and D turns
  back by U, not by its inverse.
- M and X turn by the product of all T of a refresh, pulls included. A pull is a round, and only the
  80th round can end a refresh with one.
- Where gap_ij is 0, s_ij is +1 for i < j and -1 for i > j. Both conditions of the first case are
  strict; a pair that meets one with equality has the second formula.
- Where the estimated length of K is 0, f is 1, and the rotation is a short one.
- A round with a K shorter than 0.3 is the last; for roots, one shorter than 0.1.
- A side whose H is 0 is not refreshed. Before its first refresh every step tries again; after it,
  the next try is the next one of the schedule.
- side="left": the right side has no H and the identity as its basis (not in the states).
- kl=True whitens each side's statistics by the other one: b is b3, and both sides use diag(H) from
  before the step. H starts as s I at t = 1, s being the root of G's mean square; where that G is 0,
  H stays 0. D is then KL-Shampoo's form, M / sqrt(lambda_i mu_j), with lambda and mu the diagonals
  of H after this step's refresh; v is kept up, unused. With side="left" the diagonal of the right
  side's H is still used, in the identity as its basis.
- Rounding noise: 1 / x is 0 where x <= max(m, n) * 2^-52 * max x, for each side by itself, in the
  statistics and in D; M / sqrt(v) has the rule of `reference.soap`.
- The storage of the states (precision, packing) is not transcribed: all is kept in float64. Nor is
  the power of two by which H may be multiplied before the rounds.
"""

import numpy as np

from .soap import EPS64, divide

TAU, NU = 0.3, 1e-7
ROUNDS = 80
LONG, LONG_FOR_ROOTS = 0.3, 0.1  # from this length of K on another round follows
CROOKED = 3e-4  # the defect of U from which it is pulled to orthonormal columns


def generator(H):
    """The antisymmetric K whose I + K nearly diagonalizes H, no row longer than 0.7."""
    h = np.maximum(np.diag(H), 0.0)
    gap = h[None, :] - h[:, None]
    floor = TAU**2 * np.outer(h, h) + (NU * np.max(h)) ** 2
    bottom = gap**2 + floor
    K = np.divide(H * gap, bottom, out=np.zeros_like(H), where=bottom > 0)
    i = np.arange(len(H))
    sign = np.where(gap == 0, np.sign(i[None, :] - i[:, None]), np.sign(gap))  # 0 where i = j
    large = (gap**2 < floor / 100) & (floor < H**2)
    K = np.where(large, np.pi / 4 * sign * np.sign(H), K)
    K = (K - K.T) / 2
    rows = np.linalg.norm(K, axis=1)
    r = np.minimum(1.0, np.divide(0.7, rows, out=np.ones_like(rows), where=rows > 0))
    return K * np.minimum.outer(r, r)


def length(K):
    """The largest singular value of K, estimated by four steps of the power iteration."""
    x = np.linalg.norm(K, axis=0)
    for _ in range(4):
        x = K @ (K @ (x / (np.linalg.norm(x) or 1.0)))
    return np.sqrt(np.linalg.norm(x))


def change_of_basis(H, U, long):
    """The T of one round, and whether it is the last round."""
    d = len(H)
    E = U.T @ U - np.eye(d)
    x = np.where(np.arange(d) % 3 == 0, -1.0, 1.0)
    if np.linalg.norm(E @ x) / np.sqrt(d) > CROOKED:
        return np.eye(d) - E / 2, False
    K = generator(H)
    size = length(K)
    f = min(1.0, 0.6 / size) if size > 0 else 1.0
    A = f * K
    return np.eye(d) + A + A @ A / 2 + A @ A @ A / 8, size < long


def refresh(H, U, long=LONG_FOR_ROOTS):
    """At most 80 rounds. Returns the new H and U, and the T by which M and X turn."""
    total = np.eye(len(H))
    for _ in range(ROUNDS):
        T, last = change_of_basis(H, U, long)
        H, U, total = T.T @ H @ T, U @ T, total @ T
        H = (H + H.T) / 2
        if last:
            break
    return H, U, total


def rotated(gradients, *, b1=0.95, b2=0.95, b3=0.95, period=10, side="both", kl=False):
    """Run over the gradients, each (m, n).

    States: M (m, n) and v (m, n) in the bases, H_L (m, m), U_L (m, m), and for both sides H_R
    (n, n), U_R (n, n).
    """
    m, n = np.shape(gradients[0])
    M, v = np.zeros((m, n)), np.zeros((m, n))
    H_L, H_R = np.zeros((m, m)), np.zeros((n, n))
    U_L, U_R = np.eye(m), np.eye(n)
    begun_L = begun_R = False  # whether the side has had a refresh

    def inverse_eigenvalues(H):
        """1 / diag(H), and 0 where that is noise."""
        d = np.diag(H)
        noise = max(m, n) * EPS64 * np.max(d)
        return np.divide(1.0, d, out=np.zeros_like(d), where=d > noise)

    directions, states = [], []
    for t, G in enumerate(gradients, start=1):
        X = U_L.T @ G @ U_R
        new_L, new_R = X @ X.T, X.T @ X
        if kl:
            if t == 1:
                s = np.sqrt(np.mean(G**2))
                H_L, H_R = s * np.eye(m), s * np.eye(n)
            new_L = (X * inverse_eigenvalues(H_R)) @ X.T / n
            new_R = (X.T * inverse_eigenvalues(H_L)) @ X / m
        H_L = b3 * H_L + (1 - b3) * new_L
        H_R = b3 * H_R + (1 - b3) * new_R
        scheduled = t % period == 0  # t = 1 is due as nothing has begun
        if (scheduled or not begun_L) and H_L.any():
            H_L, U_L, T = refresh(H_L, U_L, LONG)
            M, X, begun_L = T.T @ M, T.T @ X, True
        if side == "both" and (scheduled or not begun_R) and H_R.any():
            H_R, U_R, T = refresh(H_R, U_R, LONG)
            M, X, begun_R = M @ T, X @ T, True
        M = b1 * M + (1 - b1) * X
        v = b2 * v + (1 - b2) * X**2
        if kl:
            ratio = M * np.sqrt(np.outer(inverse_eigenvalues(H_L), inverse_eigenvalues(H_R)))
        else:
            ratio = divide(M, v, max(m, n))
        directions.append(U_L @ ratio @ U_R.T)
        right = {"H_R": H_R, "U_R": U_R} if side == "both" else {}
        states.append({"M": M, "v": v, "H_L": H_L, "U_L": U_L} | right)
    return directions, states
