"""Building blocks of `in_subspace`: basis finders, carry rules for moments, and compensations.

Values for `basis=`: `svd`, `randomized`, `iterated` and `gaussian`; `complement`, `full_basis` and
`gaussian_mix` replace some columns of another basis. Values for `carry=`: `keep`, `rotate` and
`reset`. Values for `compensation=`: `optimal`, `fira`, `fira_plus` and `channel_scaling`.

Values of your own implement `BasisFinder`, `Carry` or `Compensation`. A finder takes a
`SubspaceCheck`, a compensation takes `Parts`.
"""

from .transforms._carry import Carry, keep, reset, rotate
from .transforms.subspace._bases import (
    BasisFinder,
    SubspaceCheck,
    complement,
    full_basis,
    gaussian,
    gaussian_mix,
    iterated,
    randomized,
    svd,
)
from .transforms.subspace._compensation import (
    Compensation,
    Parts,
    channel_scaling,
    fira,
    fira_plus,
    optimal,
)

__all__ = [
    "BasisFinder",
    "Carry",
    "Compensation",
    "Parts",
    "SubspaceCheck",
    "channel_scaling",
    "complement",
    "fira",
    "fira_plus",
    "full_basis",
    "gaussian",
    "gaussian_mix",
    "iterated",
    "keep",
    "optimal",
    "randomized",
    "reset",
    "rotate",
    "svd",
]
