"""KL-Shampoo."""

from ._bounds import of_eigenvalues
from ._row import Readme, Row

ROW = Row(
    name="kl_shampoo",
    family="eigenbases",
    # On the smaller side the first statistic has full rank, so its eigenbasis is unique.
    settings={"b1": 0.9, "b2": 0.95, "refresh": 2, "side": "smaller"},
    algebra={"b1": 0.3, "b2": 0.5, "initial": 1.0, "side": "both"},
    faults={"side": "both", "method": "eigh"},
    fuzz={"side": "both"},
    fault_cell=("every", "packed"),
    keeps="bases",
    fields=frozenset({"mu", "spectrum"}),
    growth=512.0,  # the gaps between the eigenvalues of its statistics
    longest=of_eigenvalues,
    numbers=lambda s: s.m * s.n + 2 * s.squares + sum(s.orders),
    floor="two bases",
    mind="most products",
    readme=Readme(
        direction="`U_L (U_Lᵀ M U_R / √(λ μᵀ)) U_Rᵀ`, `L` averages `G R⁻¹ Gᵀ / n`",
        state="`mn + 2m² + 2n² + m + n`",
        work="`2mn(4m + 5n)`",
        refresh="two `qr`, orders `m`, `n`",
        paper="[Lin et al. 2025](https://arxiv.org/abs/2509.03378)",
    ),
)
