"""SOAP."""

from ._bounds import in_eigenbasis, of_moments
from ._papers import GONG
from ._row import Coded, Readme, Row

ROW = Row(
    name="soap",
    family="eigenbases",
    # On the smaller side the first statistic has full rank, so its eigenbasis is unique.
    settings={"b1": 0.9, "b3": 0.9, "eps": 0.1, "refresh": 2, "side": "smaller"},
    algebra={"b1": 0.5, "b2": 0.5, "b3": 0.3, "eps": 3.0, "side": "both"},
    faults={"b2": 0.9, "side": "both"},
    fuzz={"side": "both"},
    fault_cell=("stagger", "packed"),
    keeps="bases",
    fields=frozenset({"mu", "nu"}),
    growth=512.0,  # the gaps between the eigenvalues of its statistics
    longest=in_eigenbasis,
    # Entries in the eigenbasis are ratios of moments.
    longest_repeated=lambda at: of_moments(0.9, 0.95, at.t) * (at.m * at.n) ** 0.5,
    numbers=lambda s: 2 * s.m * s.n + 2 * s.squares,
    floor="two bases",
    aim=1.3,
    coded=Coded("VQ", "codes lose what SOAP gains, and cost time at every step"),
    mind="much state, most products",
    brief=True,
    readme=Readme(
        direction="`U_L (U_Lᵀ M U_R / √v) U_Rᵀ`, `U` eigenvectors of `L`, `R`",
        state="`2mn + 2m² + 2n²`",
        work="`6mn(m + n)`",
        refresh="two `eigh`, orders `m`, `n`",
        paper=f"{GONG}, Alg. 6",
    ),
)
