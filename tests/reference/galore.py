"""GaLore, Fira, Fira+ and Apollo (random, svd, mini), transcribed in NumPy float64.

Paper: "Towards Efficient Optimizer Design for LLM via Structured Fisher Approximation with a
Low-Rank Extension", Algorithm 8 (GaLore), Algorithm 9 with the note below it (Apollo), Sections
B.12 and F.7 (Fira+). The paper prints no formula for Fira and refers to its official code (F.1);
the project's reading of it (SPEC.md) stands below. Defaults: Table 7 (alpha = 0.3, K = 200),
Table 8 (b1 = 0.9, b2 = 0.999, bias correction), F.2 (gamma = 1.01), Table 11 (alpha_c = 0.4).

Everything is written for the left side (m <= n in the paper): if the right side is projected, all
gradients are transposed before and the directions after, and the states U (m, r), m and v (r, n)
are those of the transposed matrices. The smaller dimension is projected, the left one if m = n.

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
  s. The official code differs: it subtracts alpha U U' G, leaves C without alpha,
  and limits C before the bias correction (not transcribed).
- Fira+: C <- alpha_c C ||U Delta|| / ||C|| after the limiter (0 if C = 0), so that the limiter
  changes phi but never D.
- Apollo: no limiter, alpha = 1 (ours), D = alpha G diag(s); the official code multiplies by
  sqrt(alpha) instead. The random U has entries N(0, 1/r) and comes from outside, with r columns at
  each refresh step, and is used as it is. APOLLO-Mini is the one scalar ||Delta||
  / ||sigma|| and r = 1; r = 1 alone keeps one scale for each column.
"""

import numpy as np

from .shampoo import adam_step
from .soap import fix_signs


def oriented(gradients):
    """The gradients for the left side, and whether they were transposed for it."""
    transposed = gradients[0].shape[0] > gradients[0].shape[1]
    return [G.T if transposed else G for G in gradients], transposed


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


def _projected_adam(gradients, rank, K, b1, b2, eps, new_basis):
    """The part that all methods here share: t, G, U, sigma, Delta and Adam's moments."""
    U = np.zeros((gradients[0].shape[0], rank))
    m = v = np.zeros((rank, gradients[0].shape[1]))
    for t, G in enumerate(gradients, start=1):
        if t == 1 or t % K == 0:
            U = new_basis(t, G)
        sigma = U.T @ G
        m, v, Delta = adam_step(m, v, sigma, t, b1, b2, eps)
        yield G, U, sigma, Delta, m, v


def galore(gradients, *, rank, K=200, alpha=0.3, b1=0.9, b2=0.999, eps=1e-8):
    """Run Algorithm 8 over the gradients, each (m, n). States: U, m, v."""
    gradients, transposed = oriented(gradients)
    new_basis = lambda t, G: singular_basis(G, rank)  # noqa: E731
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
    basis=None,
):
    """Run Fira (plus=True: Fira+, with alpha_c) over the gradients. States: U, m, v, phi."""
    gradients, transposed = oriented(gradients)
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
):
    """Run Algorithm 9 over the gradients, each (m, n). States: U, m, v, phi (0 without limiter).

    U is projection(t), or without one from the SVD of G. mini=True has rank 1.
    """
    gradients, transposed = oriented(gradients)
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
