"""GaLore."""

from ._bounds import of_moments, projected
from ._papers import GONG
from ._row import Peer, Readme, Row

ROW = Row(
    name="galore",
    family="low rank",
    settings={"rank": 3, "refresh": 2, "eps": 0.1},
    algebra={"b1": 0.5, "b2": 0.5},
    faults_rate=0.3,
    keeps="subspaces",
    decomposes="svd",
    fields=frozenset({"basis", "mu", "nu"}),
    growth=512.0,  # the gaps between the gradient's singular values
    # Entries in the subspace are ratios of moments, and the basis is orthonormal.
    longest=lambda at: 0.3 * of_moments(0.9, 0.999, at.t, corrected=True) * projected(at),
    numbers=lambda s: s.basis + 2 * s.low,
    floor="projection",
    aim=1.6,
    peer=Peer("optax.contrib.galore", aim=1.0),
    mind="the rest of the gradient is lost",
    brief=True,
    readme=Readme(
        direction="`U Adam(UᵀG)`, `U` leading singular vectors",
        state="`mr + 2nr`",
        work="`4mnr`",
        refresh="one SVD",
        paper=f"{GONG}, Alg. 8",
    ),
)
