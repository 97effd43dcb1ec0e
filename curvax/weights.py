"""What a step does with the weights beside the direction: values for `weights=` of all methods.

The names "hyperball" and "brake" stand for these functions without arguments.
"""

from .transforms.weights._weights_side import Weights, chain
from .transforms.weights._weights_values import brake, decay, floor, hyperball

__all__ = ["Weights", "brake", "chain", "decay", "floor", "hyperball"]
