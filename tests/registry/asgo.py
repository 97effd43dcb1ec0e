"""ASGO."""

from ._bounds import polar
from ._papers import AN
from ._row import Coded, Readme, Row

ROW = Row(
    name="asgo",
    family="scaled, or one-sided",
    settings={"b1": 0.9, "b2": 0.95, "eps": 0.01, "refresh": 2},
    algebra={"b2": 0.3, "eps": 0.3},
    faults={"b2": 0.9, "eps": 1e-4},
    fault_cell=("foam", "quantized"),
    keeps="roots",
    fields=frozenset({"mu"}),
    everything=True,
    growth=512.0,  # the condition number of its damped statistics
    longest=lambda at: at.longest / 1e-6**0.5,
    # For a constant G, V ≥ 0.05 G Gᵀ and M ≤ (1 - 0.9^t) G.
    longest_repeated=lambda at: (1 - 0.9**at.t) * polar(at) / 0.05**0.5,
    numbers=lambda s: s.m * s.n + 2 * s.squares,
    narrow=True,
    floor="one root",
    aim=1.3,
    coded=Coded("VQ", "codes lose what ASGO gains"),
    mind="a root at every step by default",
    brief=True,
    readme=Readme(
        direction="`(V + εI)^(-1/2) M`, `V` the mean of `G Gᵀ`",
        state="`mn + 2m²`",
        work="`4m²n`",
        refresh="one `eigh` of order `m`",
        paper=f"{AN}, Alg. 2",
    ),
)
