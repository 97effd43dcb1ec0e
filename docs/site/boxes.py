r"""What the box "Algorithm" of a method's page has around the formulas of its docstring.

A box is a list: a number is a formula of the docstring, in its order; a text is a line of its own.
Every formula of a docstring is in its box. `SYMBOLS` says what the formulas do not, `TALL` which
methods show an `m × n` matrix with `m ≥ n`.
"""

from __future__ import annotations

MOMENTUM = r"$M \leftarrow b_1 M + (1-b_1) G$"
DESCENT = r"$W \leftarrow W - \mathrm{lr}\, (D + \lambda W)$"
MOMENTS = (
    r"$\mathrm{Adam}(\sigma)$ is Adam's direction, from moments of $\sigma$ with "
    "`b1`, `b2` and `eps`"
)
LIMITED = r"$\phi$ is the $\|{}\|$ of the step before; at step 1 nothing is limited"
ELEMENTWISE = (
    r"the square, $\sqrt v$ and the quotient are elementwise, 0 where $\sqrt v$ is rounding noise; "
    r"longer $D$ are shortened to the root mean square `limit`"
)
EIGENVECTORS = r"$U_L$, $U_R$ become the eigenvectors of $L$, $R$"
AT_REFRESH = "**At step 1 and at every step divisible by `refresh`**: "
LEADING = rf"{AT_REFRESH}$U$ becomes the leading $r$ left singular vectors of $G$"
FACTORS = r"$Q$, $d$ are the eigenvectors and eigenvalues of a factor at its last refresh"
CHECKED_ROOTS = (
    r"$\hat L = Q\, \mathrm{diag}(\max(d, 0) + \epsilon)^{-1/p}\, Q^\top$ from $L$, and $\hat R$ from "
    "$R$"
)
GRAFTED = r"$D = \hat G\, \|A\| / \|\hat G\|$"

BOXES: dict[str, tuple[int | str, ...]] = {
    "muon": (0, 1, 2, 3),
    "osgdm": (0, 1, 2),
    "swan": (0, 1, DESCENT),
    "racs": (0, 1, 2, 3, 4, 6, 5, 7, DESCENT),
    "asgo": (
        0,
        1,
        "**At steps 1, `refresh` + 1, 2 `refresh` + 1, …** (by default at every step): the "
        r"root $(V_t + \epsilon I)^{-1/2}$ is computed; between, the last one is used",
        2,
        DESCENT,
    ),
    "dasgo": (0, 1, 2, DESCENT),
    "shampoo": (
        "**At every step divisible by `statistics_every`**:",
        0,
        1,
        "**At every step divisible by `refresh`**: "
        r"$\hat L = (L + \epsilon \lambda_{\max} I)^{-1/p}$, and $\hat R$ from $R$",
        2,
        3,
        r"$W \leftarrow W + \mathrm{base}(D)$",
    ),
    "foam": (
        r"$L \leftarrow b_2 L + (1-b_2) G G^\top$",
        r"$R \leftarrow b_2 R + (1-b_2) G^\top G$",
        "**At step 1 and every `check_every` steps after it**, for $L$ and $R$:",
        0,
        1,
        2,
        r"if $\tilde\epsilon$ is at most `max_damping`, $\epsilon \leftarrow \tilde\epsilon$; else, and "
        r"at step 1, a refresh: $Q$, $d$ become those of the factor, and $\epsilon \leftarrow \epsilon_0$",
        CHECKED_ROOTS,
        r"$\hat G = \hat L\, G\, \hat R$",
        GRAFTED,
        DESCENT,
    ),
    "dr_shampoo": (
        r"$L \leftarrow b_2 L + (1-b_2) G G^\top$",
        r"$R \leftarrow b_2 R + (1-b_2) G^\top G$",
        "**At step 1 and every `check_every` steps after it**, for $L$ and $R$: a refresh, in which "
        "$Q$, $d$ become those of the factor, at step 1 and if",
        0,
        r"without a refresh, $d \leftarrow \mathrm{diag}(Q^\top L Q)$ at a check",
        CHECKED_ROOTS,
        r"$\hat G = \hat L\, G\, \hat R$",
        GRAFTED,
        DESCENT,
    ),
    "soap": (
        MOMENTUM,
        0,
        1,
        "**At step 1 and at every step divisible by the period** (`refresh`; by default 3, growing "
        f"to 10): {EIGENVECTORS}",
        2,
        3,
        DESCENT,
    ),
    "kl_shampoo": (
        MOMENTUM,
        0,
        1,
        r"$d_L$, $d_R$ average the diagonals of the new terms of $L$, $R$ in their bases, with $b_2$",
        AT_REFRESH + EIGENVECTORS,
        2,
        DESCENT,
    ),
    "eigen_adam": (
        MOMENTUM,
        0,
        rf"{AT_REFRESH}$U$ becomes the eigenvectors of $Q$",
        1,
        2,
        DESCENT,
    ),
    "galore": (LEADING, 0, 1, DESCENT),
    "fira": (
        LEADING,
        0,
        1,
        2,
        r"limit: $C \leftarrow C / \max(\|C\| / \gamma\phi, 1)$",
        3,
        DESCENT,
    ),
    "alice": (
        rf"{AT_REFRESH}$U$ follows $b_3 U \tilde Q U^\top + (1-b_3) G G^\top$ by a step of subspace "
        "iteration (at step 1 its eigenvectors), keeps its first `leading` columns, and draws the "
        "others from the orthogonal complement",
        0,
        1,
        r"$M \leftarrow b_1 M + (1-b_1) \sigma$ and $v \leftarrow b_2 v + (1-b_2) \sigma^2$",
        2,
        r"$p \leftarrow b_1 p + (1-b_1) (1^\top G^2 - 1^\top \sigma^2)$",
        r"$C = \sqrt{m-r}\, (G - U\sigma)\, \mathrm{diag}(p)^{-1/2}$",
        r"limit: $C \leftarrow C / \max(\|C\| / \gamma\phi, 1)$",
        3,
        DESCENT,
    ),
    "apollo": (
        rf"{AT_REFRESH}$U$ becomes random, $m \times r$, normal with variance $1/r$",
        0,
        1,
        2,
        DESCENT,
    ),
    "sumo": (
        "**At steps 1, `refresh` + 1, 2 `refresh` + 1, …**: $Q$ becomes an orthonormal basis of the "
        r"leading range of $G$, and $M \leftarrow (Q_{new}^\top Q_{old}) M$",
        0,
        1,
        2,
        r"limit: $O \leftarrow O / \max(\|O\| / \gamma\phi, 1)$",
        3,
        DESCENT,
    ),
}

SYMBOLS: dict[str, str] = {
    "muon": r"`method=` approximates $U V^\top$ by Newton-Schulz. "
    "$M$ starts at 0",
    "osgdm": "$M$ starts at 0",
    "swan": "mean and std are taken over each row; SWAN keeps no state",
    "racs": r"$G^{\odot 2}$ has squared entries; $\alpha$ is "
    r"`scale`, $\gamma$ is `gamma`. $\bar s$, $\bar q$, $\phi$ start at 0, and $\eta = 1$ while "
    r"$\phi = 0$. Longer $\tilde G$ are shortened to the root mean square `limit`",
    "asgo": r"$\epsilon$ is `eps`; $M$, $V$ start at 0",
    "dasgo": r"$\epsilon$ is `eps`. $M$, $v$ start at 0",
    "shampoo": r"$p$ is `root`, $\epsilon$ is `eps`, $\lambda_{\max}$ the largest eigenvalue; "
    r"base is the optimizer `base=` at the learning rate, by default SGD with momentum; with "
    r"`base=None` the last line is that of other methods. $L$, $R$ start at "
    r"$\epsilon I$, $\hat L$, $\hat R$ at $I$",
    "foam": rf"{FACTORS}; $p$ is `root`, $\tau$ is `threshold`, $\epsilon_0$ is `eps`, $\alpha$ the "
    r"spectral over the Frobenius norm of the root, $A$ Adam's direction for $G$. $L$, $R$ start at 0",
    "dr_shampoo": rf"{FACTORS}; $p$ is `root`, $\tau$ is `threshold`, $\epsilon$ is `eps`, $A$ Adam's "
    "direction for $G$. $L$, $R$ start at 0",
    "soap": rf"{ELEMENTWISE}. $M$, $L$, $R$, $v$ start at 0",
    "kl_shampoo": r"$R^{-1}$, $L^{-1}$ are made of the bases and of the eigenvalues $d_R$, $d_L$ of "
    r"the step before; $\sqrt{d_L d_R^\top}$ and the quotient are elementwise; longer $D$ are "
    r"shortened to the root mean square `limit`. $M$ starts at 0, $U_L$ and $U_R$ at $I$, $L$ and "
    r"$R$ at `initial` times $I$, by default the root of the first gradient's mean square, $d_L$ and "
    "$d_R$ at this number",
    "eigen_adam": rf"{ELEMENTWISE}. $M$, $Q$, $v$ start at 0",
    "galore": rf"$r$ is `rank`, $\alpha$ is `scale`; {MOMENTS}",
    "fira": rf"$r$ is `rank`, $\alpha$ is `scale`; {MOMENTS}; $i$ counts columns; $\gamma$ is 1.01, "
    rf"and {LIMITED.format('C')} but by the `limit` of `subspaces.fira`",
    "alice": r"$r$ is `rank`, $\alpha$ is `scale`, `leading` that of `subspaces.complement`, 40; "
    r"squares, roots and quotients are elementwise, $1^\top$ sums columns; $\alpha_c$ and $\gamma$ are "
    r"`weight` and `gamma` of `subspaces.optimal`, 0.4 and 1.01; "
    rf"{LIMITED.format('C')}. $M$, $v$, $\tilde Q$, $p$ start at 0",
    "apollo": rf"$r$ is `rank`, $\alpha$ is `scale`; {MOMENTS}; $i$ counts columns",
    "sumo": r"$r$ is `rank`, the number of columns of $Q$; $\alpha$ is "
    rf"`scale`, $\gamma$ is `gamma`; {LIMITED.format('O')}. $M$ starts at 0",
}
TALL = ("sumo",)
# What stands in a box, and what it is in all boxes.
COMMON = {
    r"\Sigma": r"$U \Sigma V^\top$ is an SVD",
    r"\|": r"$\|\cdot\|$ is the Frobenius norm",
    "_t": "$t$ counts steps from 1",
    "b_1": "$b_1$ is `b1`",
    "b_2": "$b_2$ is `b2`",
    "b_3": "$b_3$ is `b3`",
    r"\mathrm{lr}": r"$\mathrm{lr}$ is `learning_rate`",
    r"\lambda W": r"$\lambda$ is `weight_decay`",
    r"\mathrm{diag}": r"$\mathrm{diag}$ of a vector is the matrix with this diagonal, of a matrix its "
    "diagonal",
    " I": "$I$ is the identity",
    r"\mathrm{off}": r"$\mathrm{off}$ of a matrix has zeros on the diagonal",
}
