"""OSGDM."""

from ._bounds import polar
from ._papers import REFAEL
from ._row import Readme, Row

ROW = Row(
    name="osgdm",
    family="orthogonalized",
    contract={"b1": 0.0},  # accumulated steps keep the learning rates of their own steps
    faults_rate=0.03,
    svd=True,
    fields=frozenset({"trace"}),
    after_the_matrices=True,
    scale_free=True,
    growth=512.0,  # the inverse of the gradient's smallest nonzero singular value
    longest=polar,
    numbers=lambda s: s.m * s.n,
    narrow=True,
    floor="SVD",
    mind="an SVD at every step",
    readme=Readme(
        direction="momentum of `U Vᵀ` of `G`",
        state="`mn`",
        work="one SVD",
        refresh="",
        paper=f"{REFAEL}, section 2",
    ),
)
