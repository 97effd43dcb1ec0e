"""Muon."""

from ._bounds import polar
from ._row import Peer, Readme, Row

ROW = Row(
    name="muon",
    family="orthogonalized",
    settings={"steps": 3},
    fuzz={"eps": 0.0},
    fields=frozenset({"mu"}),
    scale_free=True,
    growth=3.4445**3,  # each of three iterations multiplies small singular values by 3.4445
    # Newton-Schulz bounds singular values by the largest value of the quintic on [0, 1.2].
    longest=lambda at: 1.21 * polar(at) * max(1, at.n / at.m) ** 0.5,
    numbers=lambda s: s.m * s.n,
    narrow=True,
    floor="Newton-Schulz",
    aim=1.3,
    peer=Peer("optax.contrib.muon", aim=0.5),
    mind="last on the digits, a convolutional network",
    brief=True,
    readme=Readme(
        direction="`U Vᵀ` of `M = U Σ Vᵀ`",
        state="`mn`",
        work="`5 · (4m²n + 2m³)`; for `n ≥ 2m` `8m²n + 28m³`",
        refresh="",
        paper="[Jordan et al. 2024](https://kellerjordan.github.io/posts/muon/)",
    ),
)
