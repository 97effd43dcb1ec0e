"""FOAM."""

from curvax.grafts import adam as adam_graft

from ._bounds import adam
from ._row import Row

ROW = Row(
    name="foam",
    settings={
        "check_every": 2,
        "max_damping": 1.0,
        "graft": adam_graft(0.9),
        "b2": 0.95,
        "eps": 0.01,
    },
    algebra={
        "threshold": 0.25,
        "max_damping": 2.2,
        "graft": adam_graft(0.5),
        "b2": 0.3,
        "eps": 0.3,
    },
    faults={"threshold": 0.3, "max_damping": 0.02, "graft": adam_graft(0.95), "b2": 0.9},
    keeps="roots",
    fields=frozenset({"mu", "nu"}),  # the moments of the grafted Adam
    traits=frozenset({"own policy"}),
    growth=512.0,  # the condition number of its damped statistics
    longest=lambda at: adam(at, 0.9, 0.95),  # grafting
    numbers=lambda s: 2 * s.m * s.n + 3 * s.squares,
)
