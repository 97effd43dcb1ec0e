r"""Quantized moments for any transformation.

Each step decodes the state, runs the transformation, and encodes the new state again, in tiles of
the last two axes (`storage/_codec.py`). Updates divide by second moments, so a small one must not
round to 0: they have the map "unsigned"; `_carry.py` has which fields of a state they are.

*Numerics.* Decoding restores the dtype that the transformation's `init` gives. A matrix with an
entry that is not finite keeps its previous codes. *Memory.* `bits / 8` bytes per element and 4 per
tile; within a step the decoded state too, in a matrix view in chunks (`storage/_lazy_moments.py`).
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._carry import roles
from .._counts import next_step
from .._recording import Meaning, record
from .._validate import as_transformation, check_predicate, check_state_given, checked
from ..distribute._layout import is_divided
from ..storage._codec import Codec, decode
from ..storage._lazy_moments import LazyMoments, encoded, is_lazy
from ..storage._quantized import MIN_ELEMENTS
from ._traced import is_view, nodes_in, place_of


class QuantizedState(NamedTuple):
    inner: Any  # the transformation's state, with a `Coded` in place of every coded leaf
    updates: Any = None  # t of the dither, int32 scalar


@checked
def quantize_state(
    inner: optax.GradientTransformation,
    *,
    bits: int = 8,
    block: int = 64,
    dither: bool = False,
    unsigned: Collection[str] = (),
    where: Callable[[str, Any], bool] | None = None,
    min_elements: int = MIN_ELEMENTS,
) -> optax.GradientTransformationExtraArgs:
    """Stores the moments of a transformation in `bits` bits per element.

    Args:
      inner: any transformation whose state keeps the structure that `init` gives:
        `optax.adamw(1e-3)`, momentum, or a method of this library.
      bits: 4, 6 or 8.
      block: width of the square tiles that share a scale; even.
      dither: whether to round up and down in turn, instead of to the nearest code.
      unsigned: names of fields that are second moments, coded without a zero, although the class of
        their state does not declare them in an attribute `second_moments`. Optax's states and those
        of this library need no names. All other fields have a code for zero, so that entries
        without gradients stay where they are.
      where: a predicate of a leaf's path in the state, such as "0/mu/dense/kernel", and the leaf:
        whether it is coded. By default every floating leaf of at least `min_elements` elements is.
      min_elements: see `where`.

    Returns:
      The transformation; extra arguments are passed through.

    Raises:
      ValueError: naming the argument, its value and the allowed values.

    Example:
      >>> import curvax, jax.numpy as jnp, optax
      >>> params = {"kernel": jnp.zeros((256, 512))}
      >>> adam, eight_bit = optax.adam(1e-3), curvax.quantize_state(optax.adam(1e-3))
      >>> curvax.state_bytes(adam, params) / curvax.state_bytes(eight_bit, params) > 3.9
      True
    """
    inner = as_transformation("inner", inner)
    if isinstance(unsigned, str) or not all(isinstance(name, str) for name in unsigned):
        raise ValueError(f"unsigned must be a collection of field names, got {unsigned!r}.")
    if where is not None:
        check_predicate("where", where)
    signed, positive = Codec(bits, block), Codec(bits, block, "unsigned")
    unsigned_fields = "".join(f", unsigned {name}" for name in sorted(unsigned))

    def codec_of(path: tuple[Any, ...], leaf: Any, role: str) -> Codec | None:
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or leaf.ndim == 0:
            return None
        if not (where(place_of(path), leaf) if where else leaf.size >= min_elements):
            return None
        fields = {key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)}
        return positive if role == "second" or not fields.isdisjoint(unsigned) else signed

    def codecs_of(state: Any) -> Any:
        return jax.tree_util.tree_map_with_path(codec_of, state, roles(state))

    def init(params: Any) -> QuantizedState:
        plain = inner.init(params)
        record(Meaning(f"moments: {signed.describe()}{unsigned_fields}"))
        if next(nodes_in(plain, is_divided), None) is not None:
            raise ValueError(
                "quantize_state: inner distributes its state over devices (mesh=), which codes "
                "cannot follow. Quantize inside instead: curvax.assemble(curvax.quantize_state("
                "scale_by_…(), where=lambda place, leaf: leaf.ndim > 2), learning_rate, mesh=…)."
            )
        start = lambda x, codec: x if codec is None else encoded(x, codec, None)  # noqa: E731
        coded = jax.tree.map(start, plain, codecs_of(plain))
        return QuantizedState(coded, jnp.zeros([], jnp.int32) if dither else None)

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        check_state_given(state)
        like = jax.eval_shape(inner.init, updates if params is None else params)
        codecs, before = codecs_of(like), state.inner
        count = None if state.updates is None else next_step(state.updates)

        def decoded(like: Any, codec: Codec | None, stored: Any, in_view: bool) -> Any:
            if codec is None:
                return stored
            columns = like.shape[-1]
            if in_view and like.ndim > 2:
                counts = None if count is None else jnp.broadcast_to(count, like.shape[:1])
                return LazyMoments(stored, counts, codec, columns, like.dtype)
            return decode(stored, codec, columns).reshape(like.shape).astype(like.dtype)

        def coded(_: Any, codec: Codec | None, before: Any, x: Any) -> Any:
            if is_lazy(x):
                return x.coded
            return x if codec is None else encoded(x, codec, count, before)

        of_view = lambda node: jax.tree.map(lambda _: is_view(node), node)  # noqa: E731
        in_views = jax.tree.map(of_view, like, is_leaf=is_view)
        plain = jax.tree.map(decoded, like, codecs, before, in_views)
        updates, new = inner.update(updates, plain, params, **extra_args)
        return updates, QuantizedState(jax.tree.map(coded, like, codecs, before, new), count)

    return optax.GradientTransformationExtraArgs(init, update)
