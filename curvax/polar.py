"""Ways to compute a polar factor: values for `method=` of `orthogonalize`, `muon` and others.

The names "newton_schulz", "svd", "qr_svd" and "qdwh" stand for these functions without arguments.
"""

from .transforms.directions._orthogonalize import (
    PolarMethod,
    balanced,
    newton_schulz,
    qdwh,
    qr_svd,
    svd,
)

__all__ = ["PolarMethod", "balanced", "newton_schulz", "qdwh", "qr_svd", "svd"]
