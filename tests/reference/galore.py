"""GaLore, Fira, Fira+ and Apollo (random, svd, mini), transcribed in NumPy float64.

Paper: "Towards Efficient Optimizer Design for LLM via Structured Fisher Approximation with a
Low-Rank Extension", Algorithm 8 (GaLore), Algorithm 9 with the note below it (Apollo), Sections
B.12 and F.7 (Fira+). The paper prints no formula for Fira and refers to its official code (F.1);
the project's reading of it (SPEC.md) stands below. Defaults: Table 7 (alpha = 0.3, K = 200),
Table 8 (b1 = 0.9, b2 = 0.999, bias correction), F.2 (gamma = 1.01), Table 11 (alpha_c = 0.4).

Everything is written for the left side (m <= n in the paper): if the right side is projected, all
gradients are transposed before and the directions after, and the states U (m, r), m and v (r, n)
are those of the transposed matrices. side="smaller" takes the smaller dimension, the left one if
m = n.

Readings chosen:
- U is set at t = 1 and when t mod K = 0 (official code: t = 1, K + 1, 2K + 1).
- Algorithm 8's last line forgets U, and its "+" is a slip (so is Algorithm 9's): D = alpha U Delta.
- Adam: eps 1e-8 outside the root, t counts all steps, moments stay as they are when U changes.
- Singular vectors: descending, entry of largest magnitude positive. For a gradient of rank below r
  the last ones are arbitrary; `basis(t, G)` supplies U then, used as it is.
- s_i = ||Delta_i|| / ||sigma_i|| over columns (Algorithm 9 numbers them 0 ... m; there are n), and
  s_i = 0 where ||sigma_i|| = 0. The official codes add 1e-8 to the denominators; not here.
- Norm-growth limiter, of Algorithm 3: eta = gamma / max(||C|| / phi, gamma) if phi > 0 else 1,
  phi <- eta ||C||. It takes C (or G diag(s) in Apollo) before alpha.
- Fira: D = alpha (U Delta + C), C = limit((G - U U' G) diag(s)), with the bias-corrected Delta in
  s. The official code differs: it subtracts alpha U U' G (residual="scaled"), leaves C without
  alpha (scale_compensation=False), and limits C before the bias correction (not transcribed).
- Fira+: C <- alpha_c C ||U Delta|| / ||C|| after the limiter (0 if C = 0), so that the limiter
  changes phi but never D.
- Apollo: no limiter, alpha = 1 (ours), D = alpha G diag(s); sqrt_scale=True (official code)
  multiplies by sqrt(alpha) instead. The random U has entries N(0, 1/r) and comes from
  `projection(t)`, called at the refresh steps with r columns expected, used as it is. mini=True is
  the one scalar ||Delta|| / ||sigma|| and r = 1; r = 1 alone keeps one scale for each column.
"""

import numpy as np

from .soap import fix_signs


def adam(m, v, sigma, t, b1, b2, eps):
    """Adam's moments after step t (from 1) and its step."""
    m = b1 * m + (1 - b1) * sigma
    v = b2 * v + (1 - b2) * sigma**2
    return m, v, (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)


def is_transposed(shape, side):
    """Whether the right side is projected."""
    if side not in ("smaller", "left", "right"):
        raise ValueError(f"unknown side {side!r}")
    return side == "right" or (side == "smaller" and shape[0] > shape[1])


def singular_basis(G, r):
    """SVD(G, r): the leading left singular vectors of G."""
    return fix_signs(np.linalg.svd(G, full_matrices=False)[0][:, :r])


def limit_norm_growth(C, phi, gamma):
    """Algorithm 3, lines 4-6: the limited C and its norm."""
    norm = np.sqrt(np.sum(C**2))
    eta = gamma / max(norm / phi, gamma) if phi > 0 else 1.0
    return eta * C, eta * norm


def column_scales(Delta, sigma):
    """||Delta_i|| / ||sigma_i|| for every column i, 0 where sigma_i = 0."""
    above, below = np.sqrt(np.sum(Delta**2, axis=0)), np.sqrt(np.sum(sigma**2, axis=0))
    scales = np.zeros_like(above)
    scales[below > 0] = above[below > 0] / below[below > 0]
    return scales


def rescale_to(C, low_rank):
    """Fira+ (F.7): C with the norm of the low-rank update, 0 if C = 0."""
    norm = np.sqrt(np.sum(C**2))
    return C * (np.sqrt(np.sum(low_rank**2)) / norm) if norm > 0 else C


def _orient(gradients, side):
    transposed = is_transposed(np.shape(gradients[0]), side)
    gradients = [np.asarray(G, dtype=np.float64) for G in gradients]
    return [G.T for G in gradients] if transposed else gradients, transposed


def _check_rank(rank, shape):
    if not 1 <= rank <= min(shape):
        raise ValueError(f"rank {rank} for a matrix of shape {shape}")


def _projected_adam(gradients, rank, K, b1, b2, eps, new_basis):
    """The part that all methods here share: t, G, U, sigma, Delta and Adam's moments."""
    U = np.zeros((gradients[0].shape[0], rank))
    m = v = np.zeros((rank, gradients[0].shape[1]))
    for t, G in enumerate(gradients, start=1):
        if t == 1 or t % K == 0:
            U = np.asarray(new_basis(t, G), dtype=np.float64)
            if U.shape != (G.shape[0], rank):
                raise ValueError(f"basis of shape {U.shape} for {G.shape} and rank {rank}")
        sigma = U.T @ G
        m, v, Delta = adam(m, v, sigma, t, b1, b2, eps)
        yield G, U, sigma, Delta, m, v


def galore(
    gradients,
    *,
    rank,
    K=200,
    alpha=0.3,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    side="smaller",
    basis=None,
):
    """Run Algorithm 8 over the gradients, each (m, n). States: U, m, v."""
    gradients, transposed = _orient(gradients, side)
    _check_rank(rank, gradients[0].shape)
    new_basis = basis or (lambda t, G: singular_basis(G, rank))
    directions, states = [], []
    for _, U, _, Delta, m, v in _projected_adam(gradients, rank, K, b1, b2, eps, new_basis):
        D = alpha * U @ Delta
        directions.append(D.T if transposed else D)
        states.append({"U": U, "m": m, "v": v})
    return directions, states


def fira(
    gradients,
    *,
    rank,
    K=200,
    alpha=0.3,
    gamma=1.01,
    limiter=True,
    plus=False,
    alpha_c=0.4,
    residual="complement",
    scale_compensation=True,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    side="smaller",
    basis=None,
):
    """Run Fira (plus=True: Fira+, with alpha_c) over the gradients. States: U, m, v, phi."""
    if residual not in ("complement", "scaled"):
        raise ValueError(f"unknown residual {residual!r}")
    gradients, transposed = _orient(gradients, side)
    _check_rank(rank, gradients[0].shape)
    new_basis = basis or (lambda t, G: singular_basis(G, rank))
    phi = 0.0
    directions, states = [], []
    for G, U, sigma, Delta, m, v in _projected_adam(gradients, rank, K, b1, b2, eps, new_basis):
        back = alpha * U @ sigma if residual == "scaled" else U @ sigma
        C = (G - back) * column_scales(Delta, sigma)
        if limiter:
            C, phi = limit_norm_growth(C, phi, gamma)
        if plus:
            C = alpha_c * rescale_to(C, U @ Delta)
        D = alpha * U @ Delta + (alpha * C if scale_compensation else C)
        directions.append(D.T if transposed else D)
        states.append({"U": U, "m": m, "v": v, "phi": phi})
    return directions, states


def apollo(
    gradients,
    *,
    rank,
    variant="random",
    projection=None,
    mini=False,
    K=200,
    alpha=1.0,
    limiter=False,
    gamma=1.01,
    sqrt_scale=False,
    b1=0.9,
    b2=0.999,
    eps=1e-8,
    side="smaller",
):
    """Run Algorithm 9 over the gradients, each (m, n). States: U, m, v, phi (0 without limiter).

    variant="random" takes U from projection(t), variant="svd" from the SVD of G (or from
    projection(t), if given); mini=True wants rank=1.
    """
    if variant not in ("random", "svd"):
        raise ValueError(f"unknown variant {variant!r}")
    if variant == "random" and projection is None:
        raise ValueError("the random variant needs its projection")
    if mini and rank != 1:
        raise ValueError("Apollo-mini has rank 1")
    gradients, transposed = _orient(gradients, side)
    _check_rank(rank, gradients[0].shape)
    scale = np.sqrt(alpha) if sqrt_scale else alpha
    phi = 0.0

    def new_basis(t, G):
        return singular_basis(G, rank) if projection is None else projection(t)

    directions, states = [], []
    for G, U, sigma, Delta, m, v in _projected_adam(gradients, rank, K, b1, b2, eps, new_basis):
        if mini:
            scaled = G * column_scales(Delta.reshape(-1, 1), sigma.reshape(-1, 1))
        else:
            scaled = G * column_scales(Delta, sigma)
        if limiter:
            scaled, phi = limit_norm_growth(scaled, phi, gamma)
        D = scale * scaled
        directions.append(D.T if transposed else D)
        states.append({"U": U, "m": m, "v": v, "phi": phi})
    return directions, states
