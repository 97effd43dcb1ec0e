"""The matrix view: converts a tree of parameters to a few stacks of matrices, and back.

`on_matrices(inner)` passes `inner` a dict of arrays `(N, m, n)` instead of the tree. Matrices of
one shape share a stack, even if they come from different parameters, so that programs grow with the
number of shapes. Parameters that are batches already (scanned layers, experts) keep an array of
their own, unless their matrices are small, because they need no copy.

An update takes these steps:

1. `lay_out` groups the matrices by shape, from the rule and the shapes of the parameters;
2. `gather` reshapes the gradients into the stacks;
3. `inner` runs on the stacks, behind the guard against gradients that are not finite, and on large
   stacks in chunks (`_chunks.py`);
4. `scatter` splits the stacks into updates with the shapes, dtypes and shardings of the gradients.

*Cost.* Reshapes and transposes of each leaf; a stack adds one copy of its gradients and one of its
updates. Compile time: one or two milliseconds per leaf of a stack, see `split_stack`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from .._guard import guard_matrices
from .._keys import members_of
from .._own_state import explains_state
from .._paths import is_placeholder, named_leaves
from .._recording import record
from .._trees import as_arrays, as_wide_as
from .._validate import check_bool
from ..distribute._distribute import distribute, mesh_axes
from ..distribute._meshes import (
    check_on_mesh,
    cut_evenly,
    is_cut,
    is_explicit,
    on_mesh_of,
    sharded_like,
    unsharded,
)
from ._chunks import in_chunks
from ._form import MatrixAxes, MatrixForm, from_matrices, matrix_forms
from ._matrix_rule import MatrixRule, as_rule
from ._split_stack import split_stack


@dataclasses.dataclass(frozen=True)
class Group:
    """The matrices that form one array `(N, m, n)` of the view."""

    key: str
    members: tuple[MatrixForm, ...]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the array."""
        return (sum(form.count for form in self.members), *self.members[0].tile)

    def slices(self) -> Iterator[tuple[MatrixForm, slice]]:
        """The members and their slices of the stack axis."""
        start = 0
        for form in self.members:
            yield form, slice(start, start + form.count)
            start += form.count


Cut = Callable[[jax.Array], jax.Array]


class MatrixViewState(NamedTuple):
    """State of `on_matrices`: the state of the inner transformation on the stacks."""

    inner: Any


class ViewRecord(NamedTuple):
    """The groups and the state of a matrix view, for `recording`."""

    groups: tuple[Group, ...]
    state: MatrixViewState


class CopyRecord(NamedTuple):
    """A state of a matrix view and the copy that replaces it, for `recording`."""

    state: MatrixViewState
    copy: MatrixViewState


def record_copies(state: Any, copy: Any) -> None:
    """Records that `copy`, which a wrapper made of `state`, replaces it."""
    is_view = lambda node: isinstance(node, MatrixViewState)  # noqa: E731
    views = [filter(is_view, jax.tree.leaves(x, is_leaf=is_view)) for x in (state, copy)]
    for old, new in zip(*views, strict=True):
        record(CopyRecord(old, new))


def lay_out(
    shapes: dict[str, tuple[int, ...]],
    axes: dict[str, MatrixAxes],
    *,
    block_size: int | None = None,
    stack: bool | None = None,
) -> tuple[Group, ...]:
    """Groups the matrices of the parameters into stacks, in the order of the parameters."""
    stacks: dict[str, list[MatrixForm]] = {}
    forms = (
        form
        for name, shape in shapes.items()
        for form in matrix_forms(name, shape, axes[name], block_size)
    )
    for form in forms:
        joined = not form.is_large_batch if stack is None else stack
        key = f"{form.tile[0]}x{form.tile[1]}" if joined else form.name
        while key in stacks and (key in shapes or stacks[key][0].tile != form.tile):
            key += "'"
        stacks.setdefault(key, []).append(form)
    return tuple(Group(key, tuple(members)) for key, members in stacks.items())


def on_matrices(
    inner: optax.GradientTransformation,
    rule: MatrixRule | None = None,
    *,
    guard: bool = True,
    mesh: Mesh | None = None,
    mesh_axis: str | Sequence[str] | None = None,
    **rule_arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` on the matrices of a tree of parameters.

    `inner` gets gradients, parameters and state as a dict whose leaves are batches of matrices
    `(N, m, n)`. Its updates are returned in the shapes of the gradients, and in the wider dtype of
    gradient and parameter; without parameters, in the gradient's. Matrices that share a stack have
    the widest of their dtypes there. If the sum of squares of a matrix's gradient is not finite in
    float32, the matrix skips that step: its state is updated with a zero gradient, its update is
    zero, and `skipped` in the state counts the step. A matrix whose update is not finite although
    its gradient is does not move, and its state starts anew (`restarted`).

    Args:
      inner: a transformation in which every leaf is a batch of matrices (last two axes).
      rule: which parameters are matrices, their axes, their block size, and which of them share an
        array.
      guard: whether to check gradients and updates here. Give `False` if `inner` starts with
        `in_subspace`, which checks the smaller projections instead.
      mesh: devices that share the matrices, see `distribute`. With a mesh, all matrices of one
        shape are stacked unless the rule's `stack` is `False`.
      mesh_axis: the mesh axis or axes that share the matrices; all axes by default. Without a mesh:
        the axis of the `pmap` or `shard_map` inside which the optimizer is called.
      **rule_arguments: fields of a `MatrixRule`, instead of `rule`.

    Returns:
      A transformation of a tree in which every leaf is a matrix.

    Raises:
      ValueError: in `init` and `update`, naming the parameter that is not a matrix, or whose axes
        or gradient shape do not fit.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> view = curvax.on_matrices(curvax.orthogonalize("svd"))
      >>> grads = {"query": {"kernel": jnp.ones((8, 2, 4))}, "dense": {"kernel": jnp.eye(8)}}
      >>> updates, _ = jax.jit(view.update)(grads, view.init(grads))
      >>> updates["query"]["kernel"].shape
      (8, 2, 4)
    """
    if rule is None:
        rule = MatrixRule(**rule_arguments)
    elif rule_arguments:
        names = ", ".join(rule_arguments)
        raise ValueError(f"give rule or {names}, not both; got rule={rule!r}.")
    rule = as_rule(rule)
    stack = rule.stack
    check_bool("guard", guard)
    inner = guard_matrices(inner) if guard else optax.with_extra_args_support(inner)
    inner = in_chunks(inner)
    divided = mesh is not None or mesh_axis is not None
    if divided:
        inner = (
            distribute(inner, axis_name=mesh_axis)
            if mesh is None
            else distribute(inner, mesh, mesh_axis)
        )
        stack = True if stack is None else stack

    cut = back = None
    if mesh is not None:
        cut = functools.partial(cut_evenly, mesh=mesh, axes=mesh_axes(mesh, mesh_axis))
        back = None if is_explicit(mesh) else cut

    def layout(tree: Any) -> tuple[Group, ...]:
        treatments = rule(tree)
        for name, treatment in treatments.items():
            if isinstance(treatment, str):
                raise ValueError(
                    f"on_matrices: the parameter {name!r} is not a matrix ({treatment}). Route it "
                    "to another optimizer, as the full optimizers do, or select it with matrices= "
                    "or weight_dimension_numbers=."
                )
        axes = {n: t for n, t in treatments.items() if isinstance(t, MatrixAxes)}
        shapes = {n: tuple(x.shape) for n, x in named_leaves(tree).present().items()}
        return lay_out(shapes, axes, block_size=rule.block_size, stack=stack)

    def init(params: Any) -> MatrixViewState:
        if is_placeholder(params):
            return MatrixViewState(inner.init(params))
        params = as_arrays(params)
        check_on_mesh(params, mesh)
        groups = layout(params)
        members = {g.key: tuple((form.name, form.count) for form in g.members) for g in groups}
        matrices = gather(groups, params)
        with members_of(members):
            inner_state = inner.init(matrices)
        # As a step returns it, so that a step compiled ahead of time takes its own state.
        state = MatrixViewState(inner_state if divided else on_mesh_of(matrices, inner_state))
        record(ViewRecord(groups, state))
        return state

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any):
        updates, params = as_arrays(updates), as_arrays(params)
        if params is not None:
            check_same_shapes(updates, params)
            updates = as_wide_as(params, updates)
        check_on_mesh(updates, mesh)
        groups = layout(updates)
        matrices = None if params is None else gather(groups, params, cut)
        gradients = gather(groups, updates, cut)
        inner_state = state.inner if divided else on_mesh_of(gradients, state.inner)
        directions, inner_state = inner.update(gradients, inner_state, matrices, **extra_args)
        return scatter(groups, directions, updates, back), MatrixViewState(inner_state)

    return explains_state(optax.GradientTransformationExtraArgs(init, update))


def check_same_shapes(updates: Any, params: Any) -> None:
    """Requires every gradient to have the shape of its parameter.

    Raises:
      ValueError: naming the parameter and both shapes.
    """
    shapes = {name: jnp.shape(x) for name, x in named_leaves(params).present().items()}
    for name, x in named_leaves(updates).present().items():
        if name in shapes and jnp.shape(x) != shapes[name]:
            raise ValueError(
                f"the gradient of {name!r} must have the shape of its parameter, {shapes[name]}; "
                f"got {jnp.shape(x)}."
            )


def gather(groups: tuple[Group, ...], tree: Any, cut: Cut | None = None) -> dict[str, jax.Array]:
    """Gathers the matrices of `tree` into stacks, by the keys of the groups.

    On an Explicit mesh the stacks are replicated; if a leaf of a stack is sharded and `cut` is
    given, `cut` shards the stack.
    """
    leaves = named_leaves(tree).present()

    def stacked(group: Group) -> jax.Array:
        own = {form: jnp.asarray(leaves[form.parameter]) for form in group.members}
        if cut is not None and any(is_cut(leaf) for leaf in own.values()):
            parts = [
                form.to_matrices(cut(leaf))
                if form.keeps_columns
                else cut(form.to_matrices(unsharded(leaf)))
                for form, leaf in own.items()
            ]
        else:
            parts = [form.to_matrices(unsharded(leaf)) for form, leaf in own.items()]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    return {group.key: stacked(group) for group in groups}


def scatter(groups: tuple[Group, ...], stacks: Any, like: Any, cut: Cut | None = None) -> Any:
    """Splits stacks into a tree with the structure, shapes, dtypes and shardings of `like`.

    `cut` shards slices as the stacks are, so that XLA does not exchange a whole stack for each.
    Blocks are left to XLA: those of a parameter are exchanged together.
    """
    named = named_leaves(like)
    leaves = named.present()
    parts: dict[str, list[tuple[MatrixForm, jax.Array]]] = {}
    for group in groups:
        slices = split_stack(stacks[group.key], [form.count for form in group.members])
        for form, x in zip(group.members, slices, strict=True):
            if cut is not None and not form.is_tiled:
                x = cut(x)
            own = x if form.keeps_columns else unsharded(x)
            parts.setdefault(form.parameter, []).append((form, own))

    def update(name: str) -> jax.Array:
        return sharded_like(from_matrices(parts[name]).astype(leaves[name].dtype), leaves[name])

    return named.rebuild({name: update(name) for name in parts})
