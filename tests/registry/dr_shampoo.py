"""DR-Shampoo."""

import curvax

from ._bounds import adam
from ._papers import NAM
from ._row import Readme, Row

ROW = Row(
    name="dr_shampoo",
    family="Kronecker factors",
    settings={"check_every": 2, "b1": 0.9, "b2": 0.95, "eps": 0.01},
    algebra={"threshold": 0.35, "b1": 0.5, "b2": 0.3, "eps": 0.3},
    faults={"threshold": 0.3, "b1": 0.95, "b2": 0.9},
    long={"matrices": curvax.MatrixRule(block_size=50)},
    faults_rate=0.03,
    keeps="roots",
    own_policy=True,
    fields=frozenset({"mu", "nu"}),  # the moments of the grafted Adam
    growth=512.0,  # the condition number of its damped statistics
    longest=lambda at: adam(at, 0.9, 0.95),  # grafting
    numbers=lambda s: 2 * s.m * s.n + 3 * s.squares,
    floor="two roots, statistics",
    mind="most state; how often it decomposes depends on the data",
    readme=Readme(
        direction="the same",
        state="`2mn + 3m² + 3n²`",
        work="`4mn(m + n)`",
        refresh="as above, by residual",
        paper=f"{NAM}, App. I",
    ),
)
