"""The length of a direction: values for `graft=` of `shampoo`, `foam` and `dr_shampoo`.

The names "norm", "adam" and "limit" stand for these functions without arguments.
"""

from .transforms.directions._graft import Graft, adam, limit, norm

__all__ = ["Graft", "adam", "limit", "norm"]
