"""Routing: `optax.partition` over two labels, which come from a `MatrixRule`.

The rule of the matrix view inside knows the shapes of the other parameters, such as biases.
"""

import warnings
from typing import Any, NamedTuple

import jax
import optax

from .._own_state import raise_explained
from .._paths import inside_of, is_placeholder, named_leaves, remembered
from .._recording import record
from .._trees import as_arrays, in_full_range
from .._validate import check_transformation, shown
from ._matrix_rule import MatrixRule, Treatment

MATRICES, OTHERS = "matrices", "others"
"""The two labels; they are also the keys in the state of `optax.partition`."""


class RoutingRecord(NamedTuple):
    """The treatment of each parameter, for `recording`."""

    treatments: dict[str, Treatment]


def route(
    matrices: optax.GradientTransformation,
    others: optax.GradientTransformation,
    rule: MatrixRule,
) -> optax.GradientTransformationExtraArgs:
    """Sends the matrices of a tree to one transformation and all other parameters to another.

    Args:
      matrices: transformation of the parameters that are matrices under `rule`; usually a chain
        that starts with `on_matrices(..., rule)`.
      others: transformation of all other parameters.
      rule: which parameters are matrices.

    Returns:
      `optax.partition` over the labels "matrices" and "others". `init` warns if no parameter is a
      matrix. Both transformations get parameters and gradients in float16 as float32, so their
      states are in float32; the updates are in float16.

    Raises:
      ValueError: naming the argument of another type.
    """
    check_transformation("matrices", matrices)
    check_transformation("others", others)
    if not isinstance(rule, MatrixRule):
        raise ValueError(f"rule must be a curvax.MatrixRule, got {shown(rule)}.")
    treated = remembered(rule)

    def labels(params: Any) -> Any:
        treatments = treated(params)
        label = {n: OTHERS if isinstance(t, str) else MATRICES for n, t in treatments.items()}
        return named_leaves(params).rebuild(label)

    partition = optax.partition({MATRICES: matrices, OTHERS: others}, labels)

    def init(params: Any) -> Any:
        params = as_arrays(None, params)[1]
        if not is_placeholder(params):
            treatments = treated(params)
            record(RoutingRecord(treatments))
            _warn_without_matrices(treatments)
        with inside_of(params):
            return partition.init(in_full_range(params))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        try:
            params, updates = as_arrays(params, updates)
            with inside_of(updates):
                wide, weights = in_full_range((updates, params))
                updates_and_state = partition.update(wide, state, weights, **extra_args)
            # Optax's Adam promotes moments and updates when gradients are wider than parameters,
            # which would compile the next step anew. A hyperparameter may be a plain number.
            like_before = lambda x, old: x.astype(getattr(old, "dtype", x.dtype))  # noqa: E731
            return jax.tree.map(like_before, updates_and_state, (updates, state))
        except Exception as error:
            raise_explained(error, init, state, updates, params)

    return optax.GradientTransformationExtraArgs(init, update)


def _warn_without_matrices(treatments: dict[str, Treatment]) -> None:
    if treatments and all(isinstance(t, str) for t in treatments.values()):
        reasons = "; ".join(f"{n}: {t}" for n, t in list(treatments.items())[:5])
        warnings.warn(
            "no parameter is a matrix, so all of them go to the optimizer for other parameters, "
            f"by default AdamW ({reasons}{'; ...' if len(treatments) > 5 else ''}). Select "
            "matrices with matrices= or weight_dimension_numbers=.",
            UserWarning,
            stacklevel=3,
        )
