r"""Weights in 8 bits, which learn.

A matrix consists of codes $c \in \{0 \dots 255\}$ and a scale $s$ for each row:

$$w = s\,(2c - 255) / 255, \qquad c \leftarrow \lfloor c + 255\, u / (2s) + \delta \rfloor$$

for an update $u$, with the dither $\delta \in [0, 1)$ of `storage/_codec.py`: an update of a tenth
of the gap between two codes moves the code in one of ten steps. So nothing is lost on average (the
sum of $n$ updates of one size is off by about one gap), and a resumed run repeats itself.

*Scales.* A row keeps its scale while its largest weight is at most the scale and more than a
quarter of it. Otherwise the scale becomes 9/8 of that weight, and the old codes are rounded to new
ones in the same way. (XLA:TPU would write the product with scales of tiles in full size.)

*Contract of Optax.* Updates of codes are differences modulo 256, so that `optax.apply_updates`,
which adds them as unsigned bytes, gives exactly the new codes. *References*: Zhang et al.,
Q-GaLore, arXiv:2407.08296; Zhu et al., APOLLO, arXiv:2412.05270.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from .._arrays import check_real
from .._counts import next_step
from .._paths import named_leaves
from .._validate import as_transformation, check_given, check_predicate
from ..linalg._numerics import magnitude
from ..linalg._platforms import one_layer_in_rows
from ..matrices._names import kind_of
from ..storage._codec import Coded, dither_of

HEADROOM = 9 / 8
LEAST = 2.0**-118  # of scales: the 255th part of it is a normal number of float32
TOP = 255  # the largest code


class Int8WeightsState(NamedTuple):
    count: jax.Array  # steps, int32 ()
    inner: Any  # state of the inner optimizer, for the weights in float32


def to_int8(params: Any, *, where: Callable[[str, Any], bool] | None = None) -> Any:
    """Parameters with matrices in 8 bits.

    Args:
      params: a tree of parameters.
      where: a predicate of a parameter's path, such as "mlp/up/kernel", and the parameter: whether
        to store it in 8 bits. By default all parameters with two axes or more, except those with
        names of embeddings, norms, biases or other vectors. Matrices are the last two axes.

    Returns:
      The same tree with a pair `(codes, scales)` in place of each such parameter: `codes` of its
      shape `(..., m, n)`, uint8, and `scales (..., m, 1)` in its dtype. Rounding moves a weight by
      at most 0.45 % of the largest weight of its row.

    Raises:
      ValueError: naming a parameter for which `where` is true and which is not a floating matrix,
        or one with an entry that is not finite (under `jit` its row becomes NaN instead).

    Example:
      >>> import curvax, jax.numpy as jnp
      >>> params = {"up": {"kernel": jnp.ones((64, 128)), "bias": jnp.zeros(128)}}
      >>> weights = curvax.to_int8(params)
      >>> weights["up"]["kernel"].codes.dtype, weights["up"]["bias"].dtype
      (dtype('uint8'), dtype('float32'))
    """
    if where is not None:
        check_predicate("where", where)
    named = named_leaves(params)

    def encoded(name: str, x: Any) -> Any:
        is_matrix = jnp.ndim(x) >= 2 and jnp.issubdtype(jnp.result_type(x), jnp.floating)
        chosen = is_matrix and kind_of(name) is None if where is None else where(name, x)
        if not chosen:
            return x
        if not is_matrix:
            raise ValueError(
                f"where is true of the parameter {name!r}, of shape {jnp.shape(x)} and dtype "
                f"{jnp.result_type(x)}; only floating parameters of two axes or more go into int8."
            )
        check_real(name, x)
        coded, finite = _encoded(jnp.asarray(x))
        if not isinstance(finite, Tracer) and not finite.all():
            raise ValueError(
                f"the parameter {name!r} must be finite to go into int8, which has no code for "
                f"infinity or NaN; {int(jnp.sum(~finite))} of its rows are not."
            )
        return coded

    return named.rebuild({name: encoded(name, x) for name, x in named.present().items()})


def from_int8(params: Any) -> Any:
    """Decodes the parameters that `to_int8` or an update returned; others stay as they are.

    Example:
      >>> import curvax, jax, jax.numpy as jnp, optax
      >>> params = curvax.to_int8({"kernel": jnp.eye(32)})
      >>> optimizer = curvax.int8_weights(optax.sgd(0.1))
      >>> state = optimizer.init(params)
      >>> grads = jax.grad(lambda p: jnp.sum(p["kernel"] ** 2))(curvax.from_int8(params))
      >>> updates, state = optimizer.update(grads, state, params)
      >>> params = optax.apply_updates(params, updates)
    """
    return _decoded(params, None)


def int8_weights(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Updates weights in 8 bits and rounds up and down in turn, so small updates are not lost.

    Args:
      inner: the whole optimizer. It gets gradients and decoded weights in float32, and its moments
        are in float32 unless it has an argument for their dtype.

    Returns:
      An optimizer of parameters that `to_int8` returned. `update` takes gradients with respect to
      `from_int8(params)` and needs `params`. Add its updates with `optax.apply_updates`, and do not
      change them before. Parameters that are not in 8 bits are updated as without this wrapper. A
      matrix whose update is not finite stays as it is.

    With `curvax.layerwise` only one layer is decoded at a time. `summarize`, `state_of` and
    `report` take `inner`, `from_int8(params)` and the state's field `inner`.

    Raises:
      ValueError: in `init`, if no parameter is in 8 bits; in `update`, without `params`.

    Example:
      >>> import curvax, jax.numpy as jnp, optax
      >>> params = curvax.to_int8({"kernel": jnp.ones((64, 64), jnp.bfloat16)})
      >>> optimizer = curvax.int8_weights(optax.sgd(1.0))
      >>> state, gradients = optimizer.init(params), {"kernel": jnp.full((64, 64), 1e-4)}
      >>> for _ in range(300):
      ...     updates, state = optimizer.update(gradients, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> round(float(jnp.mean(curvax.from_int8(params)["kernel"].astype(float))), 2)
      0.97
    """
    inner = as_transformation("inner", inner)

    def init(params: Any) -> Int8WeightsState:
        if not any(map(_is_coded, jax.tree.leaves(params, is_leaf=_is_coded))):
            raise ValueError("params has no parameter in int8; curvax.to_int8(params) makes them.")
        return Int8WeightsState(jnp.zeros([], jnp.int32), inner.init(_decoded(params, jnp.float32)))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        check_given(state, params)
        count = next_step(state.count)

        def widen(p: Any, g: Any) -> Any:
            return g.astype(jnp.float32) if _is_coded(p) else g

        def change(p: Any, w: Any, u: Any) -> Any:
            return _change(p, w, u, count) if _is_coded(p) else u

        # Tools that trace an optimizer may pass parameters as gradients.
        gradients = jax.tree.map(widen, params, from_int8(updates), is_leaf=_is_coded)
        weights = _decoded(params, jnp.float32)
        updates, inner_state = inner.update(gradients, state.inner, weights, **extra_args)
        changes = jax.tree.map(change, params, weights, updates, is_leaf=_is_coded)
        return changes, Int8WeightsState(count, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


@jax.jit
def _encoded(x: jax.Array) -> tuple[Coded, jax.Array]:
    """A coded matrix, and which of its rows are finite."""
    wide = x.astype(jnp.float32)
    largest = magnitude(wide, -1, keepdims=True)
    finite = jnp.isfinite(largest)
    scales = jnp.where(finite, _scales(largest, 0.0, x.dtype), jnp.nan).astype(x.dtype)
    place = (_over(wide, scales.astype(jnp.float32)) + 1) * (TOP / 2)
    return Coded(jnp.round(place).astype(jnp.uint8), scales), finite


def _change(old: Coded, weights: jax.Array, update: jax.Array, count: jax.Array) -> Coded:
    """The change that `optax.apply_updates` adds to codes and scales."""
    update = update.astype(jnp.float32)
    update = jnp.where(jnp.isfinite(update).all(axis=(-2, -1), keepdims=True), update, 0)
    before = old.scales.astype(jnp.float32)
    after = _scales(magnitude(weights + update, -1, keepdims=True), before, old.scales.dtype)
    signed = 2 * old.codes.astype(jnp.float32) - TOP
    ratio = jnp.where(after == before, 1, _over(before, after))
    place = (signed * ratio + TOP) / 2  # the code itself where the scale stays
    whole = jnp.floor(place)
    *batch, m, n = weights.shape
    thresholds = dither_of(jnp.broadcast_to(count, tuple(batch)), m, n)
    # The sum without `whole`: a zero update adds exactly nothing.
    steps = jnp.floor(place - whole + _over(update, after, TOP / 2) + thresholds)
    codes = jnp.clip(whole + steps, 0, TOP).astype(jnp.uint8)
    return Coded(one_layer_in_rows(codes - old.codes), after - before)


def _scales(largest: jax.Array, before: jax.Array | float, dtype: Any) -> jax.Array:
    """The scales of rows with these largest magnitudes: values of `dtype`, as float32."""
    most = float(jnp.finfo(dtype).max)
    new = jnp.clip(HEADROOM * largest, LEAST, most).astype(dtype).astype(jnp.float32)
    new = jnp.where(largest == 0, 0, new)
    return jnp.where((largest <= before) & (4 * largest > before), before, new)


def _over(x: jax.Array, scales: jax.Array, factor: float = 1.0) -> jax.Array:
    """`factor * x / scales`; reciprocals of the largest scales would be subnormal, and so zero."""
    shift = jnp.where(scales > 1, 2.0**-8, 1.0)  # exact
    scales = scales * shift
    inverse = jnp.where(scales > 0, 1 / jnp.where(scales > 0, scales, 1), 0)  # 0 for rows of zeros
    return (x * shift) * (factor * inverse)


def _is_coded(node: Any) -> bool:
    return isinstance(node, Coded)


def _decoded(params: Any, dtype: Any) -> Any:
    """Decodes coded parameters, in `dtype` or in the dtype of their scales."""

    def plain(p: Any) -> Any:
        if not _is_coded(p):
            return p
        codes = one_layer_in_rows(p.codes)
        values = (2 * codes.astype(jnp.float32) - TOP) * (p.scales.astype(jnp.float32) / TOP)
        return values.astype(p.scales.dtype if dtype is None else dtype)

    return jax.tree.map(plain, params, is_leaf=_is_coded)
