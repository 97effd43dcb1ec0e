"""Loops over matrices, by platform; `docs/xla.md` has the reasons, and the measured savings.

| function | on CPUs | on GPUs | on TPUs |
|---|---|---|---|
| `each_matrix`: a decomposition | one by one | all at once | one by one |
| `in_turn`, `visit_all`: products | all at once | all at once | one by one |
| `visit_all`: arrays in few bits | one by one | in groups, `VISITED` | one by one |
| `visit_due`: refreshes | one by one | in groups, `REFRESHED`, `ROTATED` | one by one |
| `at_most_once`: rare work | a loop of 0 or 1 round | the same | the same |
| `alone`: a layer's update | a loop of 1 round | as it is | as it is |

A visit takes one entry out of a batch, works on it, and writes it back in place, so temporaries are
those of one matrix. Refreshes that are not due cost nothing: their loop has no rounds.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr

from ._numerics import declared
from ._platforms import behind_barrier, by_platform, in_rows


class Groups(NamedTuple):
    """How many entries of a batch GPUs visit in one round."""

    numbers: int  # that the matrices of a group have at most
    large: float = math.inf  # matrices with so many go alone if there would be fewer than `least`
    least: int = 1
    enough: int | None = None  # of large ones, if the groups of many stacks may have one size

    def size(self, batch: int, numbers: int | None, about: int | None = None) -> int:
        """The largest group that divides a batch of matrices with so many `numbers`; 1 for `None`.

        Or the smallest from `about` on, of large matrices from `enough`, if there is one, and 1 for
        less than `least`.
        """
        if numbers is None:
            return 1
        most = max(1, min(batch, self.numbers // numbers))
        size = max(i for i in range(1, most + 1) if batch % i == 0)
        least = self.least if numbers >= self.large else 1
        if about is not None:
            least = min(about, self.least)
        elif numbers >= self.large:
            about = self.enough
        size = next((i for i in range(about or size, size) if batch % i == 0), size)
        return 1 if size < least else size


VISITED = Groups(2**25)
"""128 MiB in float32."""

REFRESHED = Groups(2**24, large=2**17, least=8)
"""256 matrices of order 256, 28 of order 768, 16 of order 1024; from order 363 on at least 8."""

ROTATED = Groups(2**25, large=2**17, least=8, enough=12)
"""Of large ones a dozen: stacks of several heights share kernels then (`docs/xla.md`, "GPUs")."""


def each_matrix(
    f: Callable[[jax.Array], Any], x: jax.Array, at_once: Callable[[jax.Array], Any] | None = None
) -> Any:
    """`f` of each matrix of `x (..., m, n)`; `at_once` of a stack, by default `jax.vmap(f)`."""
    batch = x.shape[:-2]
    stack = x.reshape(-1, *x.shape[-2:])
    form = by_platform(gpu=at_once or jax.vmap(f), default=functools.partial(jax.lax.map, f))
    return jax.tree.map(lambda y: y.reshape(*batch, *y.shape[1:]), form(stack))


def in_turn(f: Callable[..., jax.Array], stack: jax.Array, *others: Any) -> jax.Array:
    """`f(stack, *others)`, arrays with the same leading axes; on TPUs matrix by matrix."""
    batch = stack.shape[:-2]
    if not _may_take_turns(batch):
        return f(stack, *others)

    def turns(*args: Any) -> jax.Array:
        flat = jax.tree.map(lambda x: x.reshape(math.prod(batch), *x.shape[len(batch) :]), args)
        new = jax.lax.map(lambda entry: f(*entry), flat)
        return new.reshape(*batch, *new.shape[1:])

    return by_platform(tpu=turns, default=f)(stack, *others)


def _may_take_turns(batch: tuple[int, ...]) -> bool:
    """Whether a stack has several matrices, all on one device: a loop would send others to all."""
    if math.prod(batch) < 2:
        return False
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 if mesh.empty else bool(mesh.manual_axes)


def visit_all(
    visit: Callable[[Any, Any], Any],
    batch: Any,
    batch_shape: tuple[int, ...],
    count: jax.Array,
    numbers: int | None,
    inputs: Any = (),
) -> Any:
    """Applies `visit` to every entry of a batch, one after the other, in place.

    Args:
      visit: maps an entry, and that of `inputs`, to a new entry of the same structure, shapes and
        dtypes; it takes batches of entries too.
      batch: a pytree of arrays with the axes `batch_shape` first.
      batch_shape: these axes.
      count: the step, from 1, on which the number of rounds appears to depend: XLA unrolls a loop
        of one known round, and several loops then share no temporaries.
      numbers: of the largest matrix that `visit` makes of an entry, for the groups of GPUs. With
        `None` only programs for TPUs visit one by one.
      inputs: a pytree like `batch`, which `visit` only reads.
    """
    if numbers is None and not _may_take_turns(batch_shape):
        return visit(batch, inputs)
    each = functools.partial(_visit_groups, visit, ndim=len(batch_shape), due=count > 0)
    if numbers is None:
        return by_platform(tpu=each, default=visit)(batch, inputs)
    group = VISITED.size(math.prod(batch_shape), numbers)
    in_groups = functools.partial(each, group=group)
    return (by_platform(gpu=in_groups, default=each) if group > 1 else each)(batch, inputs)


def visit_due(
    visit: Callable[[Any, Any], Any],
    batch: Any,
    batch_shape: tuple[int, ...],
    due: jax.Array,
    group: int = 1,
    inputs: Any = (),
) -> Any:
    """Applies `visit` to entries that are due: bool, or bool (size,); on GPUs by groups of them."""
    each, due = functools.partial(_visit_groups, ndim=len(batch_shape)), declared(due)
    if group == 1:
        return each(visit, batch, inputs, due)

    def in_groups(batch: Any, inputs: Any, due: jax.Array) -> Any:
        if due.ndim == 0:
            return each(jax.vmap(visit), batch, inputs, due, group=group)

        def if_due(entry: Any, read: tuple[Any, jax.Array]) -> Any:
            inputs, is_due = read
            new = visit(entry, inputs)
            return jax.tree.map(lambda a, b: jnp.where(is_due, a, b).astype(b.dtype), new, entry)

        read, some = (inputs, due.reshape(batch_shape)), due.reshape(-1, group).any(axis=1)
        return each(jax.vmap(if_due), batch, read, some, group=group)

    return by_platform(gpu=in_groups, default=functools.partial(each, visit))(batch, inputs, due)


def at_most_once(f: Callable[..., Any], due: jax.Array, inputs: Any, state: Any) -> Any:
    """`f(inputs, state)` if due, else `state`; `f` keeps its structure, shapes and dtypes."""
    # A `lax.cond` would copy a state that it does not change; a loop with no rounds does not.
    # Behind a barrier, or XLA computes before the loop what does not depend on the round.
    round_of = lambda j, s: f(behind_barrier((inputs, j))[0], s)  # noqa: E731
    return _rounds(due.astype(jnp.int32), round_of, state, most=1)


def while_at_most(
    most: int, unfinished: Callable[[Any], jax.Array], step: Callable[[Any], Any], state: Any
) -> Any:
    """`lax.while_loop(unfinished, step, state)` of at most so many rounds, with all derivatives."""
    # Where one is taken, it is a scan of `most` rounds, because only these have reverse mode.

    @jax.custom_jvp
    def loop(captured: Any, state: Any) -> Any:
        running, advance = bound(captured)
        return jax.lax.while_loop(running, advance, state)

    @loop.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        return jax.jvp(scanned, primals, tangents)

    def scanned(captured: Any, state: Any) -> Any:
        running, advance = bound(captured)

        def visit(state: Any, _: Any) -> tuple[Any, None]:
            runs = running(state)
            moved = lambda s: jax.tree.map(lambda a, b: jnp.where(runs, a, b), advance(s), s)  # noqa: E731
            return jax.lax.cond(_of_any(runs), moved, lambda s: s, state), None

        return jax.lax.scan(visit, state, length=most)[0]

    def bound(captured: Any) -> list[Callable[[Any], Any]]:
        return [functools.partial(f, arrays) for f, arrays in zip(closed, captured, strict=True)]

    closed, captured = zip(*(_closed(f, state) for f in (unfinished, step)), strict=True)
    return loop(captured, state)


@jax.custom_batching.custom_vmap
def _of_any(flag: jax.Array) -> jax.Array:
    """`flag`; under `vmap`, whether any of the batch is True."""
    # A condition on a batch is a choice, whose tangents JAX cannot transpose in a rule for them.
    return flag


@_of_any.def_vmap
def _(size: int, is_batch: list[bool], flags: jax.Array) -> tuple[jax.Array, bool]:
    return _of_any(jnp.any(flags, axis=0)), False


def _closed(f: Callable[[Any], Any], argument: Any) -> tuple[Callable[[Any, Any], Any], Any]:
    """A function of the arrays that `f` takes from around it, and of its argument; these arrays."""
    # `jax.closure_convert` leaves integers in the function, which may be tracers.
    made, shape = jax.make_jaxpr(f, return_shape=True)(argument)
    treedef = jax.tree.structure(shape)

    def closed(captured: Any, argument: Any) -> Any:
        results = eval_jaxpr(made.jaxpr, captured, *jax.tree.leaves(argument))
        return treedef.unflatten(results)

    return closed, made.consts


def _rounds(number: jax.Array, step: Callable[[Any, Any], Any], state: Any, most: int) -> Any:
    """`lax.fori_loop(0, number, step, state)`, with derivatives, of at most so many rounds."""
    unfinished = lambda loop: loop[0] < number  # noqa: E731
    advance = lambda loop: (loop[0] + 1, step(*loop))  # noqa: E731
    return while_at_most(most, unfinished, advance, (jnp.int32(0), state))[1]


def alone(f: Callable[[Any, Any], Any], inputs: Any, state: Any) -> Any:
    """Runs one layer's update, `f(inputs, state)`, so that XLA:CPU writes its arrays in place."""
    # Without the loop of one round, unstacked layers are updated only after all gradients exist
    # (`docs/xla.md`, "Loops and conditions"). Elsewhere it adds temporaries.

    def in_loop(inputs: Any, state: Any) -> Any:
        due = jax.lax.optimization_barrier(jnp.ones([], bool))  # else XLA removes the loop
        return at_most_once(f, due, inputs, state)

    return by_platform(cpu=in_loop, default=f)(inputs, state)


def _visit_groups(
    visit: Callable[[Any, Any], Any],
    batch: Any,
    inputs: Any,
    due: jax.Array,
    *,
    ndim: int,
    group: int = 1,
) -> Any:
    """Visits the groups of so many entries that are due: bool, or bool (groups,)."""
    flat, read = jax.tree.map(lambda x: x.reshape(-1, *x.shape[ndim:]), (batch, inputs))
    size, step = len(jax.tree.leaves(flat)[0]), declared(group)
    if due.ndim == 0:
        next_of, rounds = lambda j, _: j * step, jnp.where(due, declared(size // group), 0)
    else:
        starts = declared(jnp.arange(0, size, group))
        next_of = lambda _, last: jnp.argmax(due & (starts > last)) * step  # noqa: E731
        rounds = declared(jnp.sum(due))
    if group == 1:
        take = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
        put = jax.lax.dynamic_update_index_in_dim
    else:
        take = functools.partial(jax.lax.dynamic_slice_in_dim, slice_size=group)
        put = jax.lax.dynamic_update_slice_in_dim

    def body(j: jax.Array, carry: tuple[jax.Array, Any]) -> Any:
        last, flat = carry
        i = next_of(j, last).astype(jnp.int32)
        # In a batch of one, a loop invariant.
        taken, _ = behind_barrier((jax.tree.map(lambda x: take(x, i), (flat, read)), j))
        entry, inputs = in_rows(taken)
        new = jax.tree.map(lambda x, y: y.astype(x.dtype), entry, visit(entry, inputs))
        return i, jax.tree.map(lambda x, y: put(x, y, i, 0), flat, in_rows(new))

    _, flat = _rounds(rounds, body, (jnp.int32(-1), flat), most=size // group)
    return jax.tree.map(lambda x, y: y.reshape(x.shape), batch, flat)
