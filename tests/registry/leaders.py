"""Rows of what leads the field: recipes of the library's parts that are no methods of their own."""

from __future__ import annotations

import dataclasses
import math

from . import kl_shampoo, muon, recipes, soap
from ._bounds import Step, polar
from ._row import Row

ON_MUON, ON_FACTORS = "recipes on Muon", "recipes on factors"


def lengthened(at: Step) -> float:
    """The norm of Newton-Schulz's result, by the root mean square of an orthogonal matrix."""
    return 0.2 * math.sqrt(max(at.m, at.n)) * 1.21 * polar(at)


def plain(name: str, like: Row, family: str, **fields: object) -> Row:
    """A row like that of a method, without what only the method's tables need."""
    optimizer = getattr(recipes, name)
    absent = {"peer": None, "coded": None, "aim": None, "brief": False, "variants": {}}
    given = {"optimizer": optimizer, "direction": optimizer.direction, **absent, **fields}
    return dataclasses.replace(like, name=name, family=family, **given)  # pyright: ignore


LEADERS = (
    plain("normuon", muon.ROW, ON_MUON),
    plain("turbo_muon", muon.ROW, ON_MUON),
    plain("dion", muon.ROW, ON_MUON, settings={"rank": 3}),
    plain("hyperball_muon", muon.ROW, ON_MUON),
    plain("cautious_muon", muon.ROW, ON_MUON),
    plain("lars", muon.ROW, ON_MUON, settings={}),
    plain("kl_soap", kl_shampoo.ROW, ON_FACTORS),
    plain("eigenvalue_corrected_shampoo", soap.ROW, ON_FACTORS),
    plain("soap_before_muon", soap.ROW, ON_FACTORS),
    plain("one_sided_shampoo", soap.ROW, ON_FACTORS),
)
