"""Rows of what leads the field: recipes of the library's parts that are not methods of their own.

`LEADERS` are all of them; the training benchmark trains each. With CURVAX_ALL_CELLS they are in the
registry too, so that every suite runs them; without it, the suites run the methods that they
consist of.
"""

import dataclasses
import math
from typing import Any

import numpy as np

import curvax
from curvax import recipes

from ._bounds import Step, of_moments, polar
from ._methods import ASGO, MUON, SOAP
from ._row import Row

RMS = 0.2  # of AdamW's updates, usually


def lengthened(at: Step) -> float:
    """The norm of a polar factor by Newton-Schulz, scaled to AdamW's root mean square."""
    return RMS * math.sqrt(max(at.m, at.n)) * 1.21 * polar(at)


def of_weights(at: Step) -> float:
    """The norm of the suites' weights, which have entries of at most 5."""
    return 5 * math.sqrt(at.m * at.n)


def recipe_row(name: str, like: Row, **fields: Any) -> Row:
    """The row of a recipe: that of a method but for these fields."""
    found = dataclasses.replace(like, optimizer=getattr(recipes, name), everything=False)
    return dataclasses.replace(found, name=name, **fields)


POLAR = {"longest": lengthened, "longest_repeated": lengthened}
BOTH_MOMENTS = {"b1": 0.9, "b2": 0.95, "b3": 0.9, "side": "smaller"}

NORMUON = recipe_row(
    "normuon",
    MUON,
    fields=frozenset({"mu", "neurons"}),
    numbers=lambda s: s.m * s.n + s.n,
    scale_free=False,  # its ε
    fuzz={},
    **POLAR,
)
TURBO_MUON = recipe_row(
    "turbo_muon",
    MUON,
    # Not in bfloat16: rounding of 16 bits hides mistakes.
    settings={"method": curvax.polar.newton_schulz(3, coefficients="turbo_muon", norm="aol")},
    scale_free=False,  # sums of magnitudes, by whose roots rows are divided
    fuzz={},
    **POLAR,
)
DION = recipe_row(
    "dion",
    MUON,
    settings={"rank": 3, "side": "smaller"},
    decomposes="qr",
    fields=frozenset({"mu", "factor", "failures"}),
    numbers=lambda s: s.m * s.n + s.other * s.r + 1,  # and a count of failures
    scale_free=False,  # its first factor is random
    narrow=False,
    fuzz={},
    growth=512.0,  # the condition of the momentum in its subspace
    longest=lambda at: math.sqrt(3 * max(1, at.n / at.m)),
    longest_repeated=lambda at: math.sqrt(3 * max(1, at.n / at.m)),
)
ON_WEIGHTS = {"longest": of_weights, "longest_repeated": None}
HYPERBALL_MUON = recipe_row(
    "hyperball_muon",
    MUON,
    reads_weights=True,
    blind_to_norms=True,
    decayed=lambda d, w: 0 * w,
    **ON_WEIGHTS,
)
CAUTIOUS_MUON = recipe_row(
    "cautious_muon",
    MUON,
    reads_weights=True,
    decayed=lambda d, w: np.where(d * w >= 0, w, 0),
    **POLAR,
)
LARS = recipe_row("lars", MUON, reads_weights=True, settings={}, fuzz={}, growth=64.0, **ON_WEIGHTS)
KL_SOAP = recipe_row(
    "kl_soap",
    SOAP,
    settings={**BOTH_MOMENTS, "eps": 0.1, "refresh": 2},
    fields=frozenset({"mu", "nu", "spectrum"}),
    algebra={**SOAP.algebra, "initial": 1.0},
    faults={**SOAP.faults, "b3": 0.5, "method": "eigh"},  # slower, and no basis is due
    numbers=lambda s: 2 * s.m * s.n + 2 * s.squares + sum(s.orders),
)
ROTATED_SOAP = recipe_row(
    "rotated_soap",
    SOAP,
    settings={**BOTH_MOMENTS, "eps": 0.1, "refresh": 2},
    # Its codes are of other arrays than those in float64.
    algebra={**SOAP.algebra, "method": "eigh"},
    faults={**SOAP.faults, "b3": 0.5},
    decomposes="",  # its refreshes are products
)
EIGENVALUE_CORRECTED = recipe_row(
    "eigenvalue_corrected_shampoo",
    SOAP,
    settings={**BOTH_MOMENTS, "eps": 0.1, "refresh": curvax.policies.diagonal_residual(2, 0.01)},
    faults={**SOAP.faults, "refresh": curvax.every(2), "method": "eigh"},
    # The eigenvalues of a basis, and the policy's last figure.
    numbers=lambda s: SOAP.numbers(s) + sum(s.orders) + len(s.orders),
    longest_repeated=lambda at: (
        of_moments(0.9, 0.95, at.t, corrected=True) * math.sqrt(at.m * at.n)
    ),
)
SOAP_BEFORE_MUON = recipe_row(
    "soap_before_muon",
    SOAP,
    settings={**BOTH_MOMENTS, "eps": 0.1, "refresh": 2, **MUON.settings},
    growth=512.0 * 3.4445**3,  # both of its parts'
    **POLAR,
)
ONE_SIDED_SHAMPOO = recipe_row(
    "one_sided_shampoo",
    ASGO,
    settings={"b1": 0.9, "b2": 0.95, "eps": 0.01, "refresh": 2},
    longest=lambda at: RMS * math.sqrt(at.m * at.n),
    longest_repeated=lambda at: RMS * math.sqrt(at.m * at.n),
)

LEADERS = (
    NORMUON,
    TURBO_MUON,
    DION,
    HYPERBALL_MUON,
    CAUTIOUS_MUON,
    LARS,
    KL_SOAP,
    ROTATED_SOAP,
    EIGENVALUE_CORRECTED,
    SOAP_BEFORE_MUON,
    ONE_SIDED_SHAMPOO,
)
