"""How a refresh renews eigenbases and roots: values for `method=` of `soap`, `shampoo` and others.

The names "eigh", "qr" and "rotations" stand for these functions without arguments.
"""

from .transforms.refresh._methods import (
    BasisMethod,
    RefreshMethod,
    eigh,
    qr,
    rotations,
    saturated_roots,
    stored_roots,
)

__all__ = [
    "BasisMethod",
    "RefreshMethod",
    "eigh",
    "qr",
    "rotations",
    "saturated_roots",
    "stored_roots",
]
