"""Helpers for all tests: one tolerance, generators of matrices and gradients, drivers."""

import functools
import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters.partial_eval import dce_jaxpr
from jaxlib.version import __version_info__

from curvax.transforms.state._entries import entries_in
from curvax.transforms.state._portable import joined_state
from curvax.transforms.state._traced import traced as traced_state

from .cells import ALL_CELLS

# Compiler options that undo tests/conftest.py, for tests of the compiled program.
OPTIMIZED: dict[str, Any] = {"xla_backend_optimization_level": 3}
if __version_info__ < (0, 11):
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True

# For programs that tests read but do not run: XLA's passes do not depend on the code level.
TO_READ: dict[str, Any] = OPTIMIZED if ALL_CELLS else {}


def resolution(*arrays: Any) -> float:
    """The machine epsilon of the coarsest floating dtype of `arrays`; 0 if there is none."""
    # Use the array's own dtype: without x64, JAX would turn float64 into float32.
    dtypes = [getattr(x, "dtype", None) or jnp.result_type(x) for x in arrays]
    inexact = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    return max((float(jnp.finfo(dtype).eps) for dtype in inexact), default=0.0)


def tolerance(
    actual: Any, desired: Any, factor: float, condition: float = 1.0, eps: float | None = None
) -> float:
    """The bound of `assert_close` for two arrays: `factor · condition · eps · max |desired|`."""
    eps = resolution(actual, desired) if eps is None else eps
    scale = float(np.max(np.abs(np.asarray(desired, np.float64)), initial=0.0))
    return factor * condition * eps * scale


def assert_close(
    actual: Any,
    desired: Any,
    factor: float = 16.0,
    *,
    condition: float = 1.0,
    eps: float | None = None,
) -> None:
    """Requires two trees of arrays to agree up to rounding, leaf by leaf.

    The bound, for every entry of a leaf:

        |actual - desired| <= factor · condition · eps · max |desired|

    where `eps` is the machine epsilon of the coarser of the two dtypes, so that a comparison with
    a float64 reference is as sharp as the float32 result allows; for integers it is 0. The largest
    entry sets the scale, as it does for rounding errors of products. `factor` covers the growth of
    errors with sizes and steps; `condition` is the condition number by which the operation
    multiplies them. `eps` overrides the epsilon if the work is done in another dtype. Entries that
    are not finite never agree; `factor = 0` requires equality.
    """
    left, left_tree = jax.tree_util.tree_flatten_with_path(actual)
    right, right_tree = jax.tree.flatten(desired)
    assert left_tree == right_tree, f"structures differ:\n{left_tree}\n{right_tree}"
    for (path, x), y in zip(left, right, strict=True):
        place = jax.tree_util.keystr(path) or "the array"
        bound = tolerance(x, y, factor, condition, eps)
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert x.shape == y.shape, f"{place}: shapes {x.shape} and {y.shape}"
        assert np.isfinite(x).all() and np.isfinite(y).all(), f"{place} is not finite"
        error = float(np.max(np.abs(x - y), initial=0.0))
        assert error <= bound, f"{place}: error {error:.3g} exceeds the bound {bound:.3g}"


def rejection(call: Callable[[], Any]) -> str:
    """The message of the `ValueError` that `call` raises."""
    with pytest.raises(ValueError) as error:
        call()
    return str(error.value)


def assert_names(message: str, fragments: str) -> None:
    """Requires all fragments, between which stands ` | `, in a message."""
    assert [x for x in fragments.split(" | ") if x not in message] == [], message


def generator(key: jax.Array, *place: int) -> np.random.Generator:
    """NumPy's generator for a JAX key: it compiles nothing and is equal on all platforms."""
    return np.random.default_rng([*map(int, jax.random.key_data(key)), *place])


def orthogonal(key: jax.Array, n: int, columns: int) -> np.ndarray:
    """A float64 matrix `(n, columns)` with orthonormal columns, uniformly distributed."""
    q, r = np.linalg.qr(generator(key).standard_normal((n, columns)))
    return q * np.sign(np.diag(r))


def with_spectrum(
    key: jax.Array, m: int, n: int, singular_values: Sequence[float] | np.ndarray
) -> np.ndarray:
    """A float64 matrix `(m, n)` with these singular values and random singular vectors.

    It takes at most `min(m, n)` values; missing values are 0, so `[1.0]` gives a matrix of rank 1.
    """
    values = np.asarray(singular_values, np.float64)
    assert values.ndim == 1 and len(values) <= min(m, n), values.shape
    left, right = (jax.random.fold_in(key, side) for side in range(2))
    u, v = orthogonal(left, m, len(values)), orthogonal(right, n, len(values))
    return (u * values) @ v.T


def normal_like(key: jax.Array, tree: Any, dtype: jax.typing.DTypeLike | None = None) -> Any:
    """A tree of standard normal arrays in the shapes of `tree`, and in `dtype` or its dtypes.

    The numbers of each leaf depend only on the key, its path and its shape.
    """

    def drawn(path: Any, x: Any) -> jax.Array:
        place = zlib.crc32(jax.tree_util.keystr(path).encode())
        entries = generator(key, place).standard_normal(jnp.shape(x))
        return jnp.asarray(entries, jnp.result_type(x) if dtype is None else dtype)

    return jax.tree_util.tree_map_with_path(drawn, tree)


def normal(key: jax.Array, shapes: Any, dtype: jax.typing.DTypeLike = "float32") -> Any:
    """`normal_like` for a tree of shapes."""
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    zeros = jax.tree.map(lambda x: np.zeros(x, jnp.dtype(dtype)), shapes, is_leaf=is_shape)
    return normal_like(key, zeros)


def zeros_like(shapes: Any) -> Any:
    """NumPy's zeros for the leaves of a tree of arrays or of their shapes: nothing is compiled."""
    return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)


def gradients_like(
    tree: Any, steps: int, seed: int = 0, dtype: jax.typing.DTypeLike | None = None
) -> list[Any]:
    """A list of `steps` trees of gradients, from `normal_like`."""
    keys = [jax.random.fold_in(jax.random.key(seed), step) for step in range(steps)]
    return [normal_like(key, tree, dtype) for key in keys]


def run(
    transformation: Any, gradients: Iterable[Any], params: Any, *, jit: bool = True
) -> tuple[list[Any], list[Any]]:
    """The updates and states of a transformation at every step, with constant parameters."""
    transformation = optax.with_extra_args_support(transformation)
    step = jax.jit(transformation.update) if jit else transformation.update
    state = transformation.init(params)
    updates, states = [], []
    for gradient in gradients:
        update, state = step(gradient, state, params)
        updates.append(update)
        states.append(state)
    return updates, states


def trained(optimizer: Any, params: Any, gradients: Iterable[Any]) -> tuple[Any, Any]:
    """Parameters and state after some steps, in one program per step."""
    init, step = _compiled(optimizer)
    state = init(params)
    for gradient in gradients:
        params, state = step(params, state, gradient)
    return params, state


@functools.lru_cache(maxsize=16)
def _compiled(optimizer: Any) -> tuple[Any, Any]:
    """`init`, and a step from parameters to parameters: once for all runs of an optimizer."""

    def step(params: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(optimizer.init), jax.jit(step)


def weights_of_steps(optimizer: Any, params: Any, gradients: Any, read: Any = None) -> Any:
    """The weights after each step, time first, in one program for all steps.

    `gradients` are a list of trees, or a tree with time first. With `read`, it is what this
    function makes of each state and its weights.
    """
    gradients = stacked(gradients) if isinstance(gradients, list) else gradients
    return jax.device_get(_descent(optimizer, read)(params, gradients))


@functools.lru_cache(maxsize=4)
def _descent(optimizer: Any, read: Any) -> Any:
    def step(carry: Any, gradient: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), read(state, params) if read else params

    return jax.jit(lambda p, g: jax.lax.scan(step, (p, optimizer.init(p)), g)[1])


def stacked(trees: Iterable[Any]) -> Any:
    """Stacks trees of equal structure along a new first axis."""
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def at(tree: Any, *place: Any) -> Any:
    """Indexes every leaf at `place`: in a trajectory, `at(tree, t)` is step `t`."""
    return jax.tree.map(lambda x: x[place], tree)


def steps_of(tree: Any) -> list[Any]:
    """The inverse of `stacked`."""
    return [at(tree, t) for t in range(len(jax.tree.leaves(tree)[0]))]


def trajectory(transformation: Any) -> Callable[..., tuple[Any, Any]]:
    """A function from the gradients of all steps, time first, to updates and states of all steps.

    The caller compiles it. Parameters, its second argument, stay constant; by default they are 0.
    """
    transformation = optax.with_extra_args_support(transformation)

    def run(gradients: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            params = jax.tree.map(lambda g: jnp.zeros_like(g[0]), gradients)

        def step(state: Any, gradient: Any) -> Any:
            update, state = transformation.update(gradient, state, params)
            return state, (update, state)

        return jax.lax.scan(step, transformation.init(params), gradients)[1]

    return run


@functools.lru_cache(maxsize=128)
def scanned(make: Any) -> Callable[..., tuple[Any, Any]]:
    """The compiled `trajectory`, which returns NumPy arrays.

    `make` is a transformation, or a function that builds one from a value such as a period. The
    value is traced, so one program serves all values. The arguments of the returned function are
    gradients, value and parameters.
    """

    @jax.jit
    def run(gradients: Any, value: Any, params: Any) -> Any:
        return trajectory(make(value) if callable(make) else make)(gradients, params)

    def found(gradients: Any, value: Any = None, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(np.asarray, run(gradients, value, params))

    return found


def run_scanned(
    transformation: Any, gradients: Iterable[Any], params: Any = None
) -> tuple[list[Any], list[Any]]:
    """The result of `run`, from one program for all steps."""
    gradients = list(gradients)
    found = scanned(transformation)(stacked(gradients), params=params)
    updates, states = ([at(tree, t) for t in range(len(gradients))] for tree in found)
    return updates, states


def program(f: Any, *args: Any) -> str:
    """The program of `f` for arrays or their shapes, as text: equal for equal computations."""
    return traced(f, *args)[0]


def traced(f: Any, *args: Any) -> tuple[str, Any]:
    """`program`, and the shapes of the result, from one trace."""
    closed, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    return str(dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))[0]), shapes


# Primitives that only call another program.
CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2"}


def computations(f: Callable[..., Any], *args: Any) -> Any:
    """A digest per output of `f` of what it computes, whatever the order and the names."""
    traced, shapes = jax.make_jaxpr(f, return_shape=True)(*args)
    return jax.tree.unflatten(jax.tree.structure(shapes), _outputs(traced))


def _outputs(traced: Any, arguments: Sequence[str] | None = None) -> list[str]:
    """Digests of the outputs of a traced program, from those of its arguments."""
    program, constants = getattr(traced, "jaxpr", traced), getattr(traced, "consts", ())
    arguments = arguments or [f"argument {i} {x.aval}" for i, x in enumerate(program.invars)]
    known = dict(zip(program.invars, arguments, strict=True))
    known |= zip(program.constvars, map(_text, constants), strict=False)

    def of(x: Any) -> str:
        return f"{x.val} {x.aval}" if hasattr(x, "val") else known[x]

    for equation in program.eqns:
        inputs, params = [of(x) for x in equation.invars], equation.params
        called = params.get("jaxpr", params.get("call_jaxpr"))
        if equation.primitive.name in CALLS and called is not None:
            found = _outputs(called, inputs)
        else:
            own = digest(f"{equation.primitive} {_text(params)} {inputs}")
            found = [digest(f"{own} {i} {x.aval}") for i, x in enumerate(equation.outvars)]
        known |= zip(equation.outvars, found, strict=True)
    return [of(x) for x in program.outvars]


def _text(x: Any) -> str:
    """A parameter of an operation as text, with digests of programs and arrays in it."""
    if hasattr(x, "eqns"):
        return digest(str(_outputs(x)))
    if isinstance(x, dict):
        return str({name: _text(x[name]) for name in sorted(x, key=str) if name != "name"})
    if isinstance(x, (list, tuple)):
        return str([_text(y) for y in x])
    if isinstance(x, (np.ndarray, jax.Array)):
        return digest(f"{x.dtype} {x.shape} {np.asarray(x).tobytes()}")
    return re.sub("(<function .*)? at 0x[0-9a-f]+", "", str(x))


def digest(text: str) -> str:
    """A short name of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def states_by_parameter(optimizer: Any, params: Any, state: Any) -> dict[str, dict[str, Any]]:
    """The results of `curvax.state_of` for all parameters, as NumPy arrays."""
    whole = traced_state(optimizer, params)
    leaves = jax.device_get(jax.tree.leaves(joined_state(whole, state)))
    found: dict[str, dict[str, Any]] = {}
    for entry, leaf in zip(entries_in(whole, params), leaves, strict=True):
        for owner, part in entry.owners:
            for place, own in entry.values_by_place(leaf).items():
                found.setdefault(owner, {})[place] = own if part is None else own[part]
    return found
