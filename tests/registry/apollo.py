"""APOLLO."""

from ._bounds import KAPPA, of_moments, projected
from ._papers import GONG
from ._row import Readme, Row

ROW = Row(
    name="apollo",
    family="low rank",
    settings={"rank": 3, "refresh": 2, "eps": 0.1},
    algebra={"b1": 0.5, "b2": 0.5, "variant": "svd"},
    fault_cell=("below_norm", None),
    minima_rate=3e-3,  # its subspaces are random
    keeps="subspaces",
    random=True,
    fields=frozenset({"mu", "nu"}),
    spares_output_layer=True,
    growth=128.0,  # it divides by the norms of projected columns
    longest_repeated=lambda at: (
        of_moments(0.9, 0.999, at.t, corrected=True) * projected(at) * KAPPA
    ),
    numbers=lambda s: 2 * s.low,
    floor="projection, not back",
    mind="only the scales of columns adapt",
    readme=Readme(
        direction="`G diag(s)`, `s` from Adam of `UᵀG`, `U` random",
        state="`2nr`",
        work="`2mnr`",
        refresh="",
        paper=f"{GONG}, Alg. 9",
    ),
)
