"""Whether a state is an optimizer's own: its arrays compared with those that `init` would give.

`difference` is the one comparison: of a state in `update`, of one that is placed, of a checkpoint's
description. It compares by path what each array is (`kinds_of`), whatever the containers.
`checks_arguments` compares, gradients and parameters too, only after `update` has failed: always,
it would add 4 to 15 % to the time of a trace.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from ._paths import named_leaves
from ._trees import as_arrays
from ._validate import NO_STATE, shown

_TO_ANOTHER_MESH = "curvax.portable_state and curvax.place_state take a state to another mesh."

_ADVICE = {
    "state": "curvax.check_state compares a checkpoint with the optimizer before you restore it; "
    + _TO_ANOTHER_MESH,
    "portable": "If it is a state and not the result of curvax.portable_state, give its "
    "description=, from curvax.describe_state, too.",
}
"""By the name of an argument: what else to try."""

_CONTAINERS = (
    "state has the arrays of this optimizer in other containers: a checkpoint that is restored "
    "without a target has dicts and lists in place of tuples. Restore it into the shapes of "
    "jax.eval_shape(optimizer.init, params), or give it to curvax.place_state, with its "
    "description."
)


def checks_arguments(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """`optimizer` for arguments as users give them (`as_arrays`); errors name the wrong one."""
    optimizer = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        return optimizer.init(as_arrays(None, params)[1])

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        try:
            params, updates = as_arrays(params, updates)
            return optimizer.update(updates, state, params, **extra_args)
        except Exception as error:
            raise_explained(error, optimizer.init, state, updates, params)

    return optax.GradientTransformationExtraArgs(init, update)


def raise_explained(error: Exception, init: Any, state: Any, updates: Any, params: Any) -> NoReturn:
    """Raises a ValueError that names the wrong argument of `update`; `error` if we cannot tell."""
    try:
        message = _explanation(init, state, updates, params, error)
    except Exception:
        message = None
    if message is None:
        raise error
    raise ValueError(message) from error


def _explanation(init: Any, state: Any, updates: Any, params: Any, error: Exception) -> str | None:
    """The error in the arguments of `update`; `None` if there is none."""
    if state is None:
        return NO_STATE
    message = _other_arguments(updates, params, error)
    if message is not None:
        return message
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `init` has given its own
        expected = jax.eval_shape(init, updates if params is None else params)
    as_shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if _has_shape(x) else x  # noqa: E731
    shapes = jax.tree.map(as_shape, state, is_leaf=_has_shape)
    known = params is not None  # otherwise the dtypes of the state are unknown
    made_for = "these parameters" if known else "these gradients"
    arrays = named_leaves(expected).present()
    kinds = kinds_of(arrays), kinds_of(arrays_in(shapes, arrays))
    message = difference("state", *kinds, made_for, dtypes=known)
    if message is not None:
        if known:
            return message
        return f"{message} (Or update needs params: their shapes or dtypes are not the gradients'.)"
    if jax.tree.structure(expected) != jax.tree.structure(shapes):
        return _CONTAINERS
    return _other_devices(updates, state)


def _other_devices(updates: Any, state: Any) -> str | None:
    """Says that the state is on other devices than the gradients, or on these in another order."""

    def places(tree: Any) -> set[tuple[int, ...]]:
        arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
        known: Any = [x.sharding for x in arrays if not isinstance(x, Tracer) and x.committed]
        ordered = (s.mesh.devices.flat if hasattr(s, "mesh") else s.device_set for s in known)
        return {tuple(device.id for device in devices) for devices in ordered}

    here, there = places(updates), places(state)
    if not here or there <= here:
        return None
    return (
        f"state is on the devices {shown([*(there - here).pop()])}, the gradients on "
        f"{shown([*here.pop()])}. {_ADVICE['state']}"
    )


def _other_arguments(updates: Any, params: Any, error: Exception) -> str | None:
    """The error in gradients and parameters, for any state."""
    for argument, tree in (("gradients", updates), ("params", params)):
        if holds_state(tree):
            return (
                f"{argument} must be a tree like the parameters; got an optimizer's state. The "
                "order is (gradients, state, params)."
            )
    is_pair = type(updates) is tuple and len(updates) == 2 and type(params) is not tuple
    if params is None:
        if "not passing `params`" in str(error):  # Optax's message
            return "update needs params: optimizer.update(gradients, state, params)."
        is_pair = is_pair and getattr(updates[0], "shape", None) == ()
        if not is_pair:
            return None
    is_loss = getattr(updates, "shape", None) == () and not _has_shape(params)
    if is_loss or is_pair:
        got = "a number" if is_loss else "a tuple of 2"
        return (
            f"gradients must have the tree of params; got {got}. jax.value_and_grad returns "
            "(loss, gradients)."
        )
    gradients, weights = (named_leaves(tree).present() for tree in (updates, params))
    pairs = ("gradients", gradients, weights), ("params", weights, gradients)
    for argument, names, others in pairs:
        lacking = [name for name in others if name not in names]
        if lacking:
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            return f"{argument} lack {lacking[0]!r}{more}: gradients must have the tree of params."
    return None


def holds_state(tree: Any) -> bool:
    """Whether one of Optax's or our states is in a tree."""

    def is_state(node: Any) -> bool:
        kind = type(node)
        ours = kind.__module__.partition(".")[0] in ("curvax", "optax")
        return ours and isinstance(node, tuple) and kind.__name__.endswith("State")

    return any(map(is_state, jax.tree.leaves(tree, is_leaf=is_state)))


def _has_shape(node: Any) -> bool:
    """Whether it is an array, or stands for one, as moments in codes do."""
    return hasattr(node, "shape") and hasattr(node, "dtype")


def arrays_in(state: Any, names: Collection[str]) -> dict[str, Any]:
    """The arrays of a state by path, with the paths `names` where boxes were restored as dicts."""
    return {
        name if name in names else name.removesuffix("/value"): x
        for name, x in named_leaves(state).present().items()
    }


def kinds_of(arrays: Mapping[str, Any]) -> dict[str, str]:
    """What each array is: its dtype and shape. Of a number in its place too; else the value."""

    def kind(x: Any) -> str:
        too_large = isinstance(x, int) and abs(x) > jnp.iinfo(jnp.int32).max
        if too_large or not (isinstance(x, (bool, int, float)) or _has_shape(x)):
            return shown(x)
        return f"{jnp.result_type(x)}{[*jnp.shape(x)]}"

    return {place: kind(x) for place, x in arrays.items()}


def difference(
    argument: str,
    expected: Mapping[str, str],
    actual: Mapping[str, str],
    made_for: str = "these parameters",
    *,
    what: str = "arrays",
    dtypes: bool = True,
) -> str | None:
    """Says where what is given first differs from the optimizer's own; `None` if it does not."""

    def compared(kinds: Mapping[str, str], place: str) -> str | None:
        kind = kinds.get(place)
        return kind if dtypes or kind is None else kind.partition("[")[2] or kind

    places = [*{**expected, **actual}]
    differing = [place for place in places if compared(expected, place) != compared(actual, place)]
    if not differing:
        return None
    first = differing[0]
    alone = _only_in(actual, expected, argument) + _only_in(expected, actual, "the optimizer")
    changed = "rank, storage, blocks or mesh"
    if expected.keys() != actual.keys():
        changed = (
            "rank, storage, refresh policy, base, blocks, mesh, or a number into a schedule (or "
            "the reverse)"
        )
    return (
        f"{argument} has {actual.get(first, 'nothing')} at {first!r}, where this optimizer has "
        f"{expected.get(first, 'nothing')} for {made_for} ({len(differing)} of {len(places)} {what}"
        f" differ{alone}). It was made by another optimizer or for other parameters, or something "
        f"has changed: {changed}. {_ADVICE.get(argument, _TO_ANOTHER_MESH)}"
    )


def _only_in(places: Iterable[str], others: Iterable[str], where: str) -> str:
    """Names the fields, and the parameters, that are on paths in one state alone."""
    fields, known = (dict.fromkeys("/".join(p).split("/")) for p in (places, others))
    alone = [field for field in fields if field not in (*known, "") and not field.isdigit()]
    return f"; only {where} has {', '.join(alone)}" if alone else ""
