"""What `in_subspace` is made of: bases, what moments do at a change of basis, compensations.

Values for `basis=`: `svd`, `randomized`, `iterated` and `gaussian`, and `complement`, `full_basis`
and `gaussian_mix`, which replace a part of another one's columns. For `carry=`: `keep`, `rotate`
and `reset`. For `compensation=`: `optimal`, `fira`, `fira_plus` and `channel_scaling`.
`BasisFinder`, `Carry` and `Compensation` are what values of your own must have; `SubspaceCheck`
and `Parts` what they see.
"""

from .transforms.directions._carry import Carry, keep, reset, rotate
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
