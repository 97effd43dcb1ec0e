"""4-bit Shampoo in float64 NumPy: vanilla (VQ), Cholesky (CQ), Cholesky with error feedback.

Paper 000 (daed924f843711ab): linear-2 codec (Eqs 3, 4), VQ (Eqs 5, 6), CQ (Eqs 7, 8), CQ+EF
(Eqs 10, 11), inverse roots (Eqs 6, 12), the loop of Algorithm 1.

Readings chosen where the paper is silent or unclear:

- Codec: ties go to the lower code; ragged blocks keep scales of their own; an all-zero block has
  scale 0 and decodes to 0. Where the diagonal is kept apart (everywhere but in Table 9) it is set
  to 0 before a block's maximum is taken. Scales and diagonals are float64 here (32-bit there).
- Only the lower triangles of C and E are coded; each has its own scales (Fig. 2 puts both in one
  square and says nothing of scales).
- Eq. 7's eps (inside the Cholesky) is absolute, Eq. 12's relative to lambda_max (exact here); one
  constant eps serves both. C0 = sqrt(eps) I, E0 = 0; VQ starts from L0 = eps I (Alg. 2's input
  line). Roots start at I. Statistic before root in one step; `k mod T = 0`, k from 1.
- lambda_max and the root belong to the *decoded* factor (Eqs 6, 12). VQ's may be indefinite:
  eigenvalues are clamped at 0 before the damping is added (so that no damped eigenvalue lies below
  `lambda_max eps`); `indefinite_X` counts the roots at which that happened beyond rounding (lowest
  below `-m 2e-16 lambda_max`).
- Alg. 1 line 8 carries C over; E is carried over with it.
- "Tensors with fewer than 4096 elements" (C.3): the factor's `m * m` is counted, not the gradient.
  Such a factor and its root stay in full precision. Ours: it is then the plain factor of Alg. 2 in
  every mode; or, as an option, Alg. 1 with Q and D the identity, in which Eq. 7 adds `eps I` at
  each statistic (`E` stays 0).
- Alg. 1 has no grafting; Alg. 2 and the text have it, and so it is here. G_hat = 0 gives 0.
- The root's power is 4 in the paper; `root` is ours.

States hold, for each factor X in L, R: `X_hat` (the decoded root), `X` (the factor that the stored
state stands for), `indefinite_X`, and the stored triples `(codes, scales, diagonal)` under
`X_hat_bar` and `X_bar` (VQ) or `C_bar_X`, `E_bar_X` (the Cholesky modes), with their decodings
`C_X`, `E_X`. A triple with codes None is the matrix itself.
"""

import numpy as np

from .shampoo import rescale


def linear2_codebook(bits):
    """Eq. 4: the value of each of the `2**bits` codes."""
    x = [-1 + 2 * j / (2**bits - 1) for j in range(2**bits)]
    zero = 2 ** (bits - 1) - 1
    return np.array(
        [-(x[j] ** 2) if j < zero else 0.0 if j == zero else x[j] ** 2 for j in range(2**bits)]
    )


def quantize_blockwise(x, block, bits):
    """Section 3.2, Eq. 3: codes (the shape of x) and scales (one per block)."""
    book = linear2_codebook(bits)
    codes = np.zeros(x.shape, dtype=int)
    scales = np.zeros((-(-x.shape[0] // block), -(-x.shape[1] // block)))
    for p in range(scales.shape[0]):
        for q in range(scales.shape[1]):
            here = np.s_[p * block : (p + 1) * block, q * block : (q + 1) * block]
            N = scales[p, q] = np.max(np.abs(x[here]))
            unit = x[here] / (N if N > 0 else 1.0)
            codes[here] = np.argmin(np.abs(unit[..., None] - book), axis=-1)  # first = lower code
    return codes, scales


def dequantize(codes, scales, block, bits):
    """Section 3.2, "Dequantization": scale times the code's value."""
    wide = np.repeat(np.repeat(scales, block, axis=0), block, axis=1)
    return wide[: codes.shape[0], : codes.shape[1]] * linear2_codebook(bits)[codes]


def store(X, block, bits=4, keep_diagonal=True):
    """Q(X) = (codes, scales, diagonal); `block=None` keeps X as it is."""
    if block is None:
        return None, None, X
    diagonal = np.diag(X) if keep_diagonal else np.zeros(len(X))
    return *quantize_blockwise(X - np.diag(diagonal), block, bits), diagonal


def load(stored, block, bits=4):
    """D(stored)."""
    codes, scales, diagonal = stored
    return diagonal if codes is None else dequantize(codes, scales, block, bits) + np.diag(diagonal)


def vq(L_bar, gram, *, b, block, bits=4, keep_diagonal=True):
    """Eq. 5: L_bar -> L_bar; `gram` is G G' or G' G."""
    L = b * load(L_bar, block, bits) + (1 - b) * gram
    return store(L, block, bits, keep_diagonal)


def _cholesky(C_bar, gram, b, eps, block, bits):
    C = load(C_bar, block, bits)
    L = C @ C.T  # Eq. 7, first line
    L = b * L + (1 - b) * gram  # Eq. 7, second line
    return np.linalg.cholesky(L + eps * np.eye(len(L)))  # Eq. 7, third line


def cq(C_bar, gram, *, b, eps, block, bits=4, keep_diagonal=True):
    """Eqs 7, 8: C_bar -> C_bar."""
    return store(_cholesky(C_bar, gram, b, eps, block, bits), block, bits, keep_diagonal)


def cq_ef(C_bar, E_bar, gram, *, b, be, eps, block, bits=4):
    """Eqs 7, 10, 11: (C_bar, E_bar) -> (C_bar, E_bar)."""
    C = _cholesky(C_bar, gram, b, eps, block, bits)
    E = load(E_bar, block, bits)  # Eq. 10
    C_bar = store(C + E, block, bits)  # Eq. 10; E has a zero diagonal
    E = be * E + (1 - be) * (C + E - load(C_bar, block, bits))  # Eq. 11
    return C_bar, store(E, block, bits)


def _factor(X, gradients, mode, b, be, eps, root, T1, T2, block, bits, small):
    """Algorithm 1 lines 3-14 for one factor, X = "L" or "R" (of G.T): one state per step."""
    order = len(gradients[0])
    if block is None and small == "factor":
        mode = "vq"  # nothing is coded: the plain factor of Alg. 2
    L_bar = store(eps * np.eye(order), block, bits)
    C_bar = store(np.sqrt(eps) * np.eye(order), block, bits)
    E_bar = store(np.zeros((order, order)), block, bits)
    root_bar, indefinite, states = store(np.eye(order), block, bits), 0, []
    for k, G in enumerate(gradients, start=1):
        if k % T1 == 0:  # line 3
            if mode == "vq":
                L_bar = vq(L_bar, G @ G.T, b=b, block=block, bits=bits)
            elif mode == "cq":
                C_bar = cq(C_bar, G @ G.T, b=b, eps=eps, block=block, bits=bits)  # line 4
            else:  # lines 4, 5, 6
                C_bar, E_bar = cq_ef(
                    C_bar, E_bar, G @ G.T, b=b, be=be, eps=eps, block=block, bits=bits
                )
        C, E = load(C_bar, block, bits), load(E_bar, block, bits)
        L = load(L_bar, block, bits) if mode == "vq" else C @ C.T
        if k % T2 == 0:  # line 10
            d, Q = np.linalg.eigh(L)
            lambda_max = np.max(np.abs(d))
            indefinite += int(d[0] < -order * 2e-16 * lambda_max)
            P = (Q * (np.maximum(d, 0.0) + lambda_max * eps) ** (-1.0 / root)) @ Q.T
            root_bar = store((P + P.T) / 2, block, bits)  # line 11: Eq. 6, Eq. 12
        state = {
            f"{X}_hat": load(root_bar, block, bits),
            f"{X}_hat_bar": root_bar,
            X: L,
            f"indefinite_{X}": indefinite,
        }
        cholesky = {f"C_bar_{X}": C_bar, f"E_bar_{X}": E_bar, f"C_{X}": C, f"E_{X}": E}
        states.append(state | ({f"{X}_bar": L_bar} if mode == "vq" else cholesky))
    return states


def shampoo_4bit(
    gradients,
    *,
    mode,
    b=0.95,
    be=0.95,
    eps=1e-6,
    root=4,
    statistics_every,
    refresh_every,
    block=64,
    min_elements=4096,
    graft="norm",
    bits=4,
    small="factor",
):
    """000 Algorithm 1; mode "vq", "cq" or "cq_ef"; `statistics_every` T1, `refresh_every` T2."""
    m, n = gradients[0].shape
    sides = []
    for X, order, Gs in (("L", m, gradients), ("R", n, [G.T for G in gradients])):
        size = block if order * order >= min_elements else None
        sides.append(
            _factor(
                X, Gs, mode, b, be, eps, root, statistics_every, refresh_every, size, bits, small
            )
        )
    directions, states = [], []
    for G, S_L, S_R in zip(gradients, *sides, strict=True):
        G_hat = S_L["L_hat"] @ G @ S_R["R_hat"]  # line 15
        directions.append(rescale(G_hat, np.linalg.norm(G)))  # Alg. 2 line 15
        states.append(S_L | S_R | {"G_hat": G_hat})
    return directions, states
