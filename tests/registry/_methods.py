"""The rows of the methods, in the order of the first table of `docs/methods.md`."""

import dataclasses

from curvax import dr_shampoo, eigen_adam
from curvax.grafts import adam as adam_graft
from curvax.polar import newton_schulz
from curvax.subspaces import complement, svd

from ..reference.swan import swan
from ._bounds import adam, in_eigenbasis, of_eigenvalues, of_moments, polar, projected
from ._row import Row

MUON = Row(
    name="muon",
    family="orthogonalized",
    settings={"method": newton_schulz(3)},
    fuzz={"method": newton_schulz(3, eps=0.0)},
    fields=frozenset({"mu"}),
    narrow=True,
    scale_free=True,
    growth=3.4445**3,  # each of three iterations multiplies small singular values by 3.4445
    # Newton-Schulz bounds singular values by the largest value of the quintic on [0, 1.2].
    longest=lambda at: 1.21 * polar(at) * max(1, at.n / at.m) ** 0.5,
    numbers=lambda s: s.m * s.n,
)


RACS = Row(
    name="racs",
    family="scaled, or one-sided",
    settings={"iterations": 2},
    faults={"iterations": 5},
    fields=frozenset({"rows", "columns", "norm"}),
    scale_free=True,
    spares_output_layer=True,
    growth=4.0,
    longest=lambda at: 0.05 / 0.1 * (at.m * at.n) ** 0.5,  # α √(mn) / (1 - b2)
    numbers=lambda s: s.m + s.n + 1,
)
ASGO = Row(
    name="asgo",
    family="scaled, or one-sided",
    settings={"b1": 0.9, "b2": 0.95, "eps": 0.01, "refresh": 2},
    algebra={"b2": 0.3, "eps": 0.3},
    faults={"b2": 0.9, "eps": 1e-4},
    keeps="roots",
    fields=frozenset({"mu"}),
    everything=True,
    narrow=True,
    growth=512.0,  # the condition number of its damped statistics
    longest=lambda at: at.longest / 1e-6**0.5,
    # For a constant G, V ≥ 0.05 G Gᵀ and M ≤ (1 - 0.9^t) G.
    longest_repeated=lambda at: (1 - 0.9**at.t) * polar(at) / 0.05**0.5,
    numbers=lambda s: s.m * s.n + 2 * s.squares + sum(s.orders),
)
DASGO = Row(
    name="dasgo",
    family="scaled, or one-sided",
    transcribed=("asgo",),
    settings={"b1": 0.9, "b2": 0.95, "eps": 0.01},
    algebra={"b2": 0.99, "eps": 0.1},
    faults={"b2": 0.9, "eps": 1e-6},
    fields=frozenset({"mu", "diagonal"}),
    everything=True,
    narrow=True,
    growth=4.0,
    longest=lambda at: of_moments(0.9, 0.95, at.t) * at.m**0.5,  # rows of M over norms in v
    numbers=lambda s: s.m * s.n + s.m,
)
SHAMPOO = Row(
    name="shampoo",
    family="Kronecker factors",
    transcribed=("shampoo", "shampoo_4bit"),
    settings={"b2": 0.95, "eps": 0.01, "refresh": 2, "statistics_every": 1},
    algebra={"b2": 0.3, "eps": 0.3, "root": 2, "damping_mode": "absolute"},
    faults={"b2": 0.9, "root": 2, "damping_mode": "absolute"},
    fuzz={"initial": 0.0},
    keeps="roots",
    base=True,
    growth=128.0,  # the inverse of its relative damping
    longest=lambda at: at.longest,  # grafting
    numbers=lambda s: 2 * s.squares + sum(s.orders),
)
FOAM = Row(
    name="foam",
    family="Kronecker factors",
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
    own_policy=True,
    growth=512.0,  # the condition number of its damped statistics
    longest=lambda at: adam(at, 0.9, 0.95),  # grafting
    numbers=lambda s: 2 * s.m * s.n + 2 * s.squares + sum(s.orders),
)
DR_SHAMPOO = dataclasses.replace(
    FOAM,
    name="dr_shampoo",
    optimizer=dr_shampoo,
    settings={"check_every": 2, "graft": adam_graft(0.9), "b2": 0.95, "eps": 0.01},
    algebra={"threshold": 0.35, "graft": adam_graft(0.5), "b2": 0.3, "eps": 0.3},
    faults={"threshold": 0.3, "graft": adam_graft(0.95), "b2": 0.9},
)
SOAP = Row(
    name="soap",
    family="eigenbases",
    # On the smaller side the first statistic has full rank, so its eigenbasis is unique.
    settings={"b1": 0.9, "b3": 0.9, "eps": 0.1, "refresh": 2, "side": "smaller"},
    algebra={"b1": 0.5, "b2": 0.5, "b3": 0.3, "eps": 3.0, "side": "both"},
    faults={"b2": 0.9, "side": "both"},
    fuzz={"side": "both"},
    keeps="bases",
    fields=frozenset({"mu", "nu"}),
    growth=512.0,  # the gaps between the eigenvalues of its statistics
    longest=in_eigenbasis,
    # Entries in the eigenbasis are ratios of moments.
    longest_repeated=lambda at: of_moments(0.9, 0.95, at.t) * (at.m * at.n) ** 0.5,
    numbers=lambda s: 2 * s.m * s.n + 2 * s.squares,
)
EIGEN_ADAM = dataclasses.replace(
    SOAP,
    name="eigen_adam",
    optimizer=eigen_adam,
    transcribed=("soap",),
    algebra={"b1": 0.5, "b2": 0.5, "b3": 0.3, "eps": 1.0},
    faults={"b2": 0.9},
    fuzz={},
)
KL_SHAMPOO = Row(
    name="kl_shampoo",
    family="eigenbases",
    # On the smaller side the first statistic has full rank, so its eigenbasis is unique.
    settings={"b1": 0.9, "b2": 0.95, "refresh": 2, "side": "smaller"},
    algebra={"b1": 0.3, "b2": 0.5, "initial": 1.0, "side": "both"},
    # Its statistic moves so fast that a refresh is wanted while a fault lasts.
    faults={"side": "both", "method": "eigh", "b2": 0.5},
    fuzz={"side": "both"},
    keeps="bases",
    fields=frozenset({"mu", "spectrum"}),
    growth=512.0,  # the gaps between the eigenvalues of its statistics
    longest=of_eigenvalues,
    numbers=lambda s: s.m * s.n + 2 * s.squares + sum(s.orders),
)
GALORE = Row(
    name="galore",
    family="low rank",
    settings={"rank": 3, "refresh": 2, "eps": 0.1},
    algebra={"b1": 0.5, "b2": 0.5},
    keeps="subspaces",
    decomposes="svd",
    fields=frozenset({"basis", "mu", "nu"}),
    growth=512.0,  # the gaps between the gradient's singular values
    # Entries in the subspace are ratios of moments, and the basis is orthonormal.
    longest=lambda at: 0.3 * of_moments(0.9, 0.999, at.t, corrected=True) * projected(at),
    numbers=lambda s: s.basis + 2 * s.low,
)
FIRA = Row(
    name="fira",
    family="low rank",
    transcribed=("galore",),
    settings={"rank": 3, "refresh": 2, "eps": 0.1},
    algebra={"b1": 0.5, "b2": 0.5},
    keeps="subspaces",
    decomposes="svd",
    fields=frozenset({"basis", "mu", "nu", "norm"}),
    growth=512.0,  # the gaps between the gradient's singular values
    # The residual is at most √(order / rank) times as long as the direction in the subspace.
    longest=lambda at: 0.3 * adam(at) * (1 + min(3, at.m, at.n) / min(at.m, at.n)) ** 0.5,
    numbers=lambda s: s.basis + 2 * s.low + 1,
)
ALICE = Row(
    name="alice",
    family="low rank",
    settings={"rank": 3, "refresh": 2, "eps": 0.1, "switching": complement(2), "b3": 0.9},
    algebra={"b1": 0.5, "b2": 0.5},
    keeps="subspaces",
    decomposes="qr",
    fields=frozenset({"basis", "tracked", "mu", "nu", "energy", "norm"}),
    growth=512.0,  # the gaps between the gradient's singular values
    # Residual columns are divided by the roots of their energies, times √(order - rank).
    longest=lambda at: (
        0.3 * of_moments(0.9, 0.9, at.t) * projected(at) + 0.3 * 0.4 * (at.m * at.n / 0.1) ** 0.5
    ),
    numbers=lambda s: s.basis + 2 * s.low + s.r * s.r + s.other + 1,
)
APOLLO = Row(
    name="apollo",
    family="low rank",
    transcribed=("galore",),
    settings={"rank": 3, "refresh": 2, "eps": 0.1},
    algebra={"b1": 0.5, "b2": 0.5, "basis": svd()},
    keeps="subspaces",
    fields=frozenset({"mu", "nu"}),
    random=True,
    spares_output_layer=True,
    growth=128.0,  # it divides by the norms of projected columns
    longest=adam,
    numbers=lambda s: 2 * s.low,
)
SUMO = Row(
    name="sumo",
    family="low rank",
    settings={"rank": 3, "refresh": 2},
    algebra={"b1": 0.5},
    keeps="subspaces",
    decomposes="eigh",  # for the basis; the direction uses others
    fields=frozenset({"basis", "mu", "norm"}),
    svd=True,
    growth=512.0,  # the inverse of the moment's smallest singular value
    longest=lambda at: min(3, at.m, at.n) ** 0.5,  # the root of a polar factor's rank
    numbers=lambda s: s.basis + s.low + 1,
)
SWAN = Row(
    name="swan",
    family="orthogonalized",
    scale_free=True,
    svd=True,
    reference=swan,
    growth=512.0,  # the inverse of the gradient's smallest nonzero singular value
    longest=polar,
    numbers=lambda s: 0,
)
OSGDM = Row(
    name="osgdm",
    family="orthogonalized",
    fields=frozenset({"trace"}),
    after_the_matrices=True,
    narrow=True,
    scale_free=True,
    svd=True,
    growth=512.0,  # the inverse of the gradient's smallest nonzero singular value
    longest=polar,
    numbers=lambda s: s.m * s.n,
)
METHODS = tuple(row for row in [*vars().values()] if isinstance(row, Row))
