"""The optimizers that go through the contract suite, one row each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from helpers import ALL_CELLS

import curvax


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """An optimizer and what the suite has to know about it."""

    name: str
    optimizer: Callable[..., Any]  # the full optimizer; its first argument is the learning rate
    direction: Callable[..., Any]  # its scale_by_ factory
    settings: Mapping[str, Any]  # small ones, taken by both
    everything: bool  # whether vectors, biases and scalars are matrices too
    fields: frozenset[str]  # fields of the state that hold entries of a matrix
    static: tuple[str, ...]  # arguments that inject_hyperparams has to leave alone
    descent: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # the optimizer's own

    def make(self, learning_rate: Any = 0.1, **settings: Any) -> Any:
        """The full optimizer."""
        return self.optimizer(learning_rate, **{**self.settings, **self.descent, **settings})

    def make_direction(self) -> Any:
        """The direction alone, for batches of matrices."""
        return self.direction(**self.settings)


FACTORS = frozenset({"statistic", "inverse_root", "error", "checks", "refreshes", "rejected"})
EIGENPAIRS = (FACTORS - {"error"}) | {"eigenvectors", "eigenvalues", "damping", "proxy"}
SUBSPACE = frozenset({"key", "refreshes", "rejected"})
LOW_RANK = {"rank": 3, "refresh": 2, "eps": 0.1}
ADAM = frozenset({"mu", "nu"})  # of a grafted Adam

REGISTRY = (
    Row(
        name="muon",
        optimizer=curvax.muon,
        direction=curvax.scale_by_muon,
        settings={"steps": 3},
        everything=False,
        fields=frozenset({"mu"}),
        static=("steps",),
    ),
    Row(
        name="racs",
        optimizer=curvax.racs,
        direction=curvax.scale_by_racs,
        settings={"iterations": 2},
        everything=False,
        fields=frozenset({"rows", "columns", "norm"}),
        static=("iterations",),
    ),
    Row(
        name="asgo",
        optimizer=curvax.asgo,
        direction=curvax.scale_by_asgo,
        settings={"b1": 0.9, "b2": 0.95, "eps": 0.01, "refresh": 2},
        everything=True,
        fields=frozenset({"mu", "statistic", "inverse_root"}),
        static=("refresh",),
    ),
    Row(
        name="dasgo",
        optimizer=curvax.dasgo,
        direction=curvax.scale_by_dasgo,
        settings={"b1": 0.9, "b2": 0.95, "eps": 0.01},
        everything=True,
        fields=frozenset({"mu", "columns"}),
        static=(),
    ),
    Row(
        name="shampoo",
        optimizer=curvax.shampoo,
        direction=curvax.scale_by_shampoo,
        settings={"b2": 0.95, "eps": 0.01, "refresh": 2, "statistics_every": 1},
        everything=False,
        fields=FACTORS,
        static=("root", "refresh", "statistics_every", "base", "warmup_steps"),
        descent={"base": None},
    ),
    Row(
        name="foam",
        optimizer=curvax.foam,
        direction=curvax.scale_by_foam,
        settings={"check_every": 2, "max_damping": 1.0, "b1": 0.9, "b2": 0.95, "eps": 0.01},
        everything=False,
        fields=EIGENPAIRS | ADAM,
        static=("check_every", "root"),
    ),
    Row(
        name="dr_shampoo",
        optimizer=curvax.dr_shampoo,
        direction=curvax.scale_by_dr_shampoo,
        settings={"check_every": 2, "b1": 0.9, "b2": 0.95, "eps": 0.01},
        everything=False,
        fields=EIGENPAIRS | ADAM,
        static=("check_every", "root"),
    ),
    Row(
        # On the smaller side the first gradient's statistic has full rank: no basis is arbitrary.
        name="soap",
        optimizer=curvax.soap,
        direction=curvax.scale_by_soap,
        settings={"b1": 0.9, "b3": 0.9, "eps": 0.1, "refresh": 2, "side": "smaller"},
        everything=False,
        fields=frozenset({"statistic", "basis", "mu", "nu"}),
        static=("refresh",),
    ),
    Row(
        name="eigen_adam",
        optimizer=curvax.eigen_adam,
        direction=curvax.scale_by_eigen_adam,
        settings={"b1": 0.9, "b3": 0.9, "eps": 0.1, "refresh": 2, "side": "smaller"},
        everything=False,
        fields=frozenset({"statistic", "basis", "mu", "nu"}),
        static=("refresh",),
    ),
    Row(
        name="galore",
        optimizer=curvax.galore,
        direction=curvax.scale_by_galore,
        settings=LOW_RANK,
        everything=False,
        fields=SUBSPACE | {"basis", "mu", "nu"},
        static=("rank", "refresh", "seed"),
    ),
    Row(
        name="fira",
        optimizer=curvax.fira,
        direction=curvax.scale_by_fira,
        settings=LOW_RANK,
        everything=False,
        fields=SUBSPACE | {"basis", "mu", "nu", "norm"},
        static=("rank", "refresh", "seed"),
    ),
    Row(
        name="alice",
        optimizer=curvax.alice,
        direction=curvax.scale_by_alice,
        settings={**LOW_RANK, "leading": 2, "b3": 0.9},
        everything=False,
        fields=SUBSPACE | {"basis", "tracked", "mu", "nu", "energy", "norm"},
        static=("rank", "leading", "refresh", "seed"),
    ),
    Row(
        name="apollo",
        optimizer=curvax.apollo,
        direction=curvax.scale_by_apollo,
        settings=LOW_RANK,
        everything=False,
        fields=SUBSPACE | {"mu", "nu"},
        static=("rank", "refresh", "seed"),
    ),
    Row(
        name="sumo",
        optimizer=curvax.sumo,
        direction=curvax.scale_by_sumo,
        settings={"rank": 3, "refresh": 2},
        everything=False,
        fields=SUBSPACE | {"basis", "mu", "norm"},
        static=("rank", "steps", "refresh", "seed"),
    ),
    Row(
        name="swan",
        optimizer=curvax.swan,
        direction=curvax.scale_by_swan,
        settings={},
        everything=False,
        fields=frozenset(),
        static=("coefficients", "steps"),
    ),
    Row(
        name="osgdm",
        optimizer=curvax.osgdm,
        direction=curvax.scale_by_osgdm,
        settings={},
        everything=False,
        fields=frozenset({"trace"}),
        static=("steps",),
        descent={"b1": 0.0},  # steps that are taken in do not change with later learning rates
    ),
)

# How much a method multiplies rounding errors from the gradient to the update, in units of the
# dtype's epsilon; see assert_close.
GROWTH = {
    "muon": 3.4445**3,  # an iteration multiplies what is small by 3.4445, and there are three
    "racs": 4.0,
    "asgo": 512.0,  # the condition number of its damped statistics
    "dasgo": 4.0,
    "shampoo": 128.0,  # the inverse of its relative damping
    "foam": 512.0,  # as ASGO
    "dr_shampoo": 512.0,  # as ASGO
    "soap": 512.0,  # the gaps between the eigenvalues of its statistics
    "eigen_adam": 512.0,  # as SOAP
    "galore": 512.0,  # the gaps between the gradient's singular values
    "fira": 512.0,  # as GaLore
    "alice": 512.0,  # as GaLore
    "apollo": 128.0,  # the division by the norms of projected columns
    "sumo": 512.0,  # the inverse of the moment's smallest singular value
    "swan": 512.0,  # the inverse of the gradient's smallest singular value that is not 0
    "osgdm": 512.0,  # the same
}

# A row's tests share compiled programs, so they run in one worker.
ROWS = [pytest.param(row, id=row.name, marks=pytest.mark.xdist_group(row.name)) for row in REGISTRY]
every_optimizer = pytest.mark.parametrize("row", ROWS)


def in_turns(start: int, of: int = 3) -> pytest.MarkDecorator:
    """Every third or `of`-th optimizer: for what happens to all of them alike, as in wrappers.

    The tests begin with another one in turns, so that each optimizer goes through its share of
    them. With CURVAX_ALL_CELLS each goes through all.
    """
    return pytest.mark.parametrize("row", ROWS if ALL_CELLS else ROWS[start::of])
