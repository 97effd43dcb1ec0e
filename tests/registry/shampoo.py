"""Shampoo."""

import curvax

from ._row import Coded, Readme, Row, Variant

ROW = Row(
    name="shampoo",
    family="Kronecker factors",
    settings={"b2": 0.95, "eps": 0.01, "refresh": 2, "statistics_every": 1},
    algebra={"b2": 0.3, "eps": 0.3, "root": 2, "damping_mode": "absolute"},
    faults={"b2": 0.9, "root": 2, "damping_mode": "absolute"},
    fuzz={"initial": 0.0},
    long={"side": "smaller"},
    fault_cell=("every", "feedback"),
    minima_rate=3e-3,  # its direction has the norm of the gradient
    keeps="roots",
    base=True,
    block_size=1200,
    growth=128.0,  # the inverse of its relative damping
    longest=lambda at: at.longest,  # grafting
    numbers=lambda s: 2 * s.squares,
    floor="two roots",
    aim=1.3,
    benchmark={"matrices": curvax.MatrixRule(block_size=None)},
    offset=0,  # by default, its statistics are due at multiples of the period
    variants={
        "statistics at every step": Variant({"statistics_every": 1}, "two roots, statistics", 1.3)
    },
    trained=lambda period: {"statistics_every": 1, "refresh": period // 2},
    coded=Coded("CQ+EF", "codes cost time at every statistic"),
    mind="two orders of factors: large embeddings need `block_size`",
    brief=True,
    readme=Readme(
        direction="`L^(-1/p) G R^(-1/p)`, length of `G`",
        state="`2m² + 2n²` and the base's",
        work="`2mn(m + n)`, twice that with statistics",
        refresh="two `eigh`, orders `m`, `n`",
        paper="[Li et al. 2024](https://arxiv.org/abs/2412.10663), Alg. 2",
    ),
)
