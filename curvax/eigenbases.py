"""Ways to renew an eigenbasis: values for `method=` of `in_eigenbasis`, `soap` and others.

The names "eigh", "qr" and "tracked" stand for these functions without arguments.
"""

from .transforms.kronecker._methods import BasisMethod, eigh, qr, tracked

__all__ = ["BasisMethod", "eigh", "qr", "tracked"]
