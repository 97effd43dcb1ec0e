"""What directions commute with: transposition, rotations of both sides or one, permutations.

In float64, over six steps, with refreshes between them where bases have no signs to choose. All
matrices of a case run in one program, which serves all of its moves.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import curvax
from tests.cells import cells
from tests.helpers import assert_close, orthogonal, scanned, steps_of
from tests.shared.identities import NEWTON_SCHULZ, of_shapes

Tree = dict[str, np.ndarray]
GRADIENTS = {k: g.astype(np.float64) for k, g in of_shapes((5, 8), (8, 5), (6, 6)).items()}
NOT_SQUARE = {k: g for k, g in GRADIENTS.items() if k != "(6, 6)"}
WIDE, SQUARE = ({k: GRADIENTS[k]} for k in ("(5, 8)", "(6, 6)"))


def rotated(x: np.ndarray) -> np.ndarray:
    left, right = (orthogonal(jax.random.key(i), n, n) for i, n in enumerate(x.shape[-2:]))
    return left @ x @ right


def transposed(tree: Tree) -> Tree:
    """Every matrix transposed, under the name of its new shape."""
    return {str(x.mT.shape[1:]): x.mT for x in tree.values()}


def turned(x: np.ndarray) -> np.ndarray:
    """On the smaller side, the left one of a square matrix."""
    m, n = x.shape[-2:]
    q = orthogonal(jax.random.key(2), min(m, n), min(m, n))
    return q @ x if m <= n else x @ q


def permuted(x: np.ndarray) -> np.ndarray:
    """Rows and columns, with other signs."""
    generator, (m, n) = np.random.default_rng(0), x.shape[-2:]
    signs = generator.choice([-1, 1], n)
    return x[:, generator.permutation(m)][:, :, generator.permutation(n)] * signs


MOVES: dict[str, Callable[[Tree], Tree]] = {
    "T": transposed,
    **{
        name: functools.partial(jax.tree.map, move)
        for name, move in {"QR": rotated, "Q": turned, "P": permuted}.items()
    },
}


class Case(NamedTuple):
    """A direction, what it commutes with and what not, on these gradients, from this step on."""

    make: Any
    moves: str
    others: str = ""
    gradients: Tree = GRADIENTS
    condition: float = 100.0
    start: int = 0


shampoo = functools.partial(curvax.scale_by_shampoo, statistics_every=1, b2=0.9)
ABSOLUTE: dict[str, Any] = {"graft": None, "root": 2, "damping_mode": "absolute", "initial": 0.0}
ONCE: dict[str, Any] = {"rank": 3, "refresh": curvax.every(10**6)}
TWO = curvax.every(2)
CASES = {
    "Muon": Case(curvax.scale_by_muon(), "T QR", condition=NEWTON_SCHULZ),
    "exact Muon": Case(curvax.scale_by_muon(method="svd"), "T QR"),
    "OSGDM": Case(curvax.scale_by_osgdm(), "T QR"),
    "RACS": Case(curvax.scale_by_racs(), "P", "QR"),
    "ASGO": Case(curvax.scale_by_asgo(refresh=2), "T QR", gradients=NOT_SQUARE),
    "ASGO on a square matrix": Case(curvax.scale_by_asgo(refresh=2), "QR", "T", SQUARE),
    "ASGO from momentum": Case(
        curvax.scale_by_asgo(variant="from_momentum", refresh=2), "T QR", gradients=NOT_SQUARE
    ),
    "theoretical ASGO": Case(
        curvax.scale_by_asgo(variant="theoretical", side="smaller"), "T QR", gradients=NOT_SQUARE
    ),
    "DASGO": Case(curvax.scale_by_dasgo(), "P", "QR T"),
    "Shampoo": Case(shampoo(eps=0.1, refresh=TWO, graft="norm"), "T QR"),
    "Shampoo²": Case(shampoo(eps=0.1, refresh=TWO, **ABSOLUTE), "T QR"),
    "one-sided Shampoo": Case(shampoo(eps=0.1, refresh=TWO, side="left", **ABSOLUTE), "QR", "T"),
    "original Shampoo": Case(
        shampoo(b2=None, eps=0.1, refresh=1, initial=None, damping_mode="floor", graft=None), "T QR"
    ),
    "FOAM": Case(curvax.scale_by_foam(check_every=2, graft=None), "T QR", condition=1e6),
    "DR-Shampoo": Case(curvax.scale_by_dr_shampoo(check_every=2, eps=0.1, graft=None), "T QR"),
    # In the first basis, which diagonalizes the first gradient, SOAP divides noise by noise.
    # 1e4 is the fourth power of the gradients' condition.
    "SOAP": Case(curvax.scale_by_soap(refresh=3), "T QR", "", SQUARE, 1e4, start=1),
    "SOAP on one side": Case(curvax.scale_by_soap(refresh=3, side="smaller"), "Q", "QR"),
    "Eigen-Adam": Case(curvax.scale_by_eigen_adam(refresh=3), "Q", "QR", WIDE),
    "KL-Shampoo": Case(curvax.scale_by_kl_shampoo(refresh=3), "T QR", "", SQUARE, 1e4, start=1),
    "SOAP on whitened statistics": Case(
        curvax.scale_by_soap(refresh=3, statistics="kl"), "T", "", SQUARE, 1e4, start=1
    ),
    "GaLore": Case(curvax.scale_by_galore(**ONCE), "Q", "QR"),
    "Fira": Case(curvax.scale_by_fira(**ONCE), "Q", "QR"),
    "Alice": Case(curvax.scale_by_alice(switching="evd", **ONCE), "Q", "QR", condition=1e4),
    "SUMO": Case(
        curvax.scale_by_sumo(rank=3, refresh=2, basis=curvax.subspaces.svd()),
        "T QR",
        gradients=NOT_SQUARE,
    ),
}


@pytest.mark.parametrize("name", cells(CASES, of=16))
def test_directions_commute_with(name: str) -> None:
    """And not with other moves, where much more than rounding tells them apart."""
    case = CASES[name]
    with jax.enable_x64(True):
        run: Callable[[Tree], Tree] = lambda g: scanned(case.make)(g)[0]  # noqa: E731
        plain = run(case.gradients)
        for move in (*case.moves.split(), *case.others.split()):
            found, expected = run(MOVES[move](case.gradients)), MOVES[move](plain)
            if move in case.moves.split():
                pair = [steps_of(x)[case.start :] for x in (found, expected)]
                assert_close(*pair, condition=case.condition)
            else:
                apart = [np.abs(x - expected[k]).max() for k, x in found.items()]
                assert min(apart) > 0.03 * min(np.abs(x).max() for x in expected.values()), move
