"""SWAN."""

from ._bounds import polar
from ._papers import GONG
from ._row import Readme, Row

ROW = Row(
    name="swan",
    family="orthogonalized",
    svd=True,
    scale_free=True,
    blind_to="means",
    growth=512.0,  # the inverse of the gradient's smallest nonzero singular value
    longest=polar,
    numbers=lambda s: 0,
    floor="SVD",
    mind="an SVD at every step, no averages",
    brief=True,
    readme=Readme(
        direction="`(G̃G̃ᵀ)^(-1/2) G̃`, `G̃` with normalized rows",
        state="none",
        work="one SVD",
        refresh="",
        paper=f"{GONG}, B.7",
    ),
)
