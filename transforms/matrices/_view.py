"""The matrix view: converts a tree of parameters to a few stacks of matrices, and back.

Matrices of one shape share a stack `(N, m, n)`, even if they come from different parameters, so
that programs grow with the number of shapes. Parameters that are batches already (scanned layers,
experts) keep an array of their own, unless their matrices are small, because they need no copy.

*Cost.* Reshapes and transposes of each leaf; a stack adds one copy of its gradients and one of its
updates. Compile time: one or two milliseconds per leaf of a stack, see `split_stack`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh

from .._guard import guard_matrices, restarted
from .._own_state import checks_arguments
from .._paths import is_placeholder, named_leaves, remembered
from .._recording import Key, is_recording, record, recording
from .._stacks import Plan, as_planned, init_each, planned
from .._validate import check_transformation, checked
from ..distribute._distribute import divided_over
from ..distribute._layout import BoxedState, boxed_like, is_divided
from ..distribute._meshes import (
    axis_names,
    check_on_mesh,
    mesh_and_specs,
    mesh_axes,
    sharded_like,
    unsharded,
)
from ..distribute._step import Matrices, OnMesh, Within
from ..linalg._platforms import split_stack
from ._chunks import in_chunks
from ._form import MatrixAxes, MatrixForm, from_matrices, matrix_forms
from ._matrix_rule import MatrixRule, as_rule


@dataclasses.dataclass(frozen=True)
class Group:
    """The matrices that form one array `(N, m, n)` of the view."""

    key: str
    members: tuple[MatrixForm, ...]

    @functools.cached_property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the array."""
        return (sum(form.count for form in self.members), *self.members[0].tile)


class MatrixViewState(NamedTuple):
    """State of `on_matrices`."""

    inner: Any  # per stack the state of the inner transformation; with a mesh a DistributedState


class ViewRecord(NamedTuple):
    """The groups of a matrix view, for `recording`."""

    groups: tuple[Group, ...]


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


def groups_of(tree: Any, rule: MatrixRule, stack: bool | None) -> tuple[Group, ...]:
    """The stacks of a tree of parameters, which must all be matrices."""
    treatments = rule(tree)
    for name, treatment in treatments.items():
        if isinstance(treatment, str):
            raise ValueError(
                f"on_matrices: the parameter {name!r} is not a matrix ({treatment}). Route it to "
                "another optimizer, as the full optimizers do, or select it with matrices= or "
                "weight_dimension_numbers=."
            )
    axes = {n: t for n, t in treatments.items() if isinstance(t, MatrixAxes)}
    shapes = {n: tuple(x.shape) for n, x in named_leaves(tree).present().items()}
    return lay_out(shapes, axes, block_size=rule.block_size, stack=stack)


def on_matrices(
    inner: optax.GradientTransformation,
    rule: MatrixRule | None = None,
    *,
    guard: bool = True,
    projects: bool = False,
    mesh: Any = None,
    mesh_axis: str | Sequence[str] | None = None,
    **rule_arguments: Any,
) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` on the matrices of a tree of parameters.

    `inner` gets one stack of matrices `(N, m, n)` at a time: gradients, parameters and the state of
    that stack. So a number that it computes from all that it gets, such as a norm of its tree, is
    that of a stack, or of a chunk of it: clip before the optimizer. Updates are returned in the
    shapes of the gradients, and in the wider dtype of gradient and parameter; without parameters,
    in the gradient's. Matrices that share a stack have the widest of their dtypes there. If the sum
    of squares of a matrix's gradient is not finite in float32, the matrix skips that step: its
    state is updated with a zero gradient, its update is zero, and `skipped` in the state counts the
    step. A matrix whose update is not finite although its gradient is does not move, and its state
    starts anew (`restarted`).

    Args:
      inner: a transformation of batches of matrices (last two axes).
      rule: which parameters are matrices, their axes, their block size, and which of them share an
        array.
      guard: whether to check gradients and updates here. Give `False` if `inner` starts with
        `in_subspace`, which checks the smaller projections instead.
      projects: whether `inner` reads the gradients only to project them, and writes directions only
        to project them back. Large stacks then need no chunks.
      mesh: devices that share the matrices, see `distribute`. With a mesh, all matrices of one
        shape are stacked unless the rule's `stack` is `False`. A mesh, or the shardings of the
        parameters on it (`jax.tree.map(lambda x: x.sharding, params)`): programs with Auto axes
        need these on TPUs and for `jax.export`.
      mesh_axis: the mesh axis or axes that share the matrices; all axes by default. Without a mesh:
        the axis of the `pmap` or `shard_map` inside which the optimizer is called.
      **rule_arguments: fields of a `MatrixRule`, instead of `rule`.

    Returns:
      A transformation of a tree in which every leaf is a matrix. `optax.tree.map_params` maps all
      arrays of the stacks' states, step counts too.

    Raises:
      ValueError: in `init` and `update`, naming the parameter that is not a matrix, or whose axes,
        gradient or direction do not fit.

    Example:
      >>> import curvax, jax, jax.numpy as jnp
      >>> view = curvax.on_matrices(curvax.orthogonalize("svd"))
      >>> grads = {"query": {"kernel": jnp.ones((8, 2, 4))}, "dense": {"kernel": jnp.eye(8)}}
      >>> updates, _ = jax.jit(view.update)(grads, view.init(grads))
      >>> updates["query"]["kernel"].shape
      (8, 2, 4)
    """
    check_transformation("inner", inner)
    if rule is None:
        rule = MatrixRule(**rule_arguments)
    elif rule_arguments:
        names = ", ".join(rule_arguments)
        raise ValueError(f"give rule or {names}, not both; got rule={rule!r}.")
    view = matrix_view(
        inner, as_rule(rule), guard=guard, projects=projects, mesh=mesh, mesh_axis=mesh_axis
    )
    return checks_arguments(view)


@checked
def matrix_view(
    inner: optax.GradientTransformation,
    rule: MatrixRule,
    *,
    guard: bool,
    projects: bool,
    mesh: Any,
    mesh_axis: str | Sequence[str] | None,
) -> optax.GradientTransformationExtraArgs:
    """`on_matrices` for arguments that are checked already."""
    divided = mesh is not None or mesh_axis is not None
    inner = guard_matrices(inner) if guard else optax.with_extra_args_support(inner)
    restart = functools.partial(restarted, inner.init) if guard else None
    inner, stack = in_chunks(inner, projects=projects), rule.stack
    if mesh is not None:
        mesh, lie = mesh_and_specs(mesh)
        inner = divided_over(OnMesh(mesh, mesh_axes(mesh, mesh_axis), lie), inner, restart)
    elif mesh_axis is not None:
        axes = axis_names("axis_name (mesh_axis)", mesh_axis)
        inner = divided_over(Within(axes), inner, restart)
    if divided and stack is None:
        stack = True
    layout = remembered(functools.partial(groups_of, rule=rule, stack=stack))
    view = _View(inner, layout, restart, mesh, divided)
    return optax.GradientTransformationExtraArgs(view.init, view.update)


@dataclasses.dataclass(frozen=True)
class _View:
    """The transformation of a tree from that of stacks."""

    inner: optax.GradientTransformationExtraArgs  # of a dict of stacks if divided, else of one
    layout: Callable[[Any], tuple[Group, ...]]  # the groups of a tree
    restart: Callable[..., dict[str, Any]] | None  # of the damaged matrices of all stacks
    mesh: Mesh | None
    divided: bool  # whether devices share the matrices

    def init(self, params: Any) -> MatrixViewState:
        if is_placeholder(params):
            return MatrixViewState(params)
        if self.mesh is not None:
            check_on_mesh(params, self.mesh)
            if boxed_like(params):
                return _boxed(self._init, params)
        return self._init(params)

    def _init(self, params: Any) -> MatrixViewState:
        groups = self.layout(params)
        record(ViewRecord(groups))
        if is_recording():
            groups = tuple(dataclasses.replace(g, key=Key(g.key, g)) for g in groups)
        matrices = gather(groups, params, explicit=True)
        plan = {
            g.key: as_planned(g.key, matrices[g.key], tuple((f.name, f.count) for f in g.members))
            for g in sorted(groups, key=lambda g: g.key)
        }
        with planned(Plan(plan)):
            if self.divided:
                return MatrixViewState(self.inner.init(matrices))
            # As a step returns it, so that a step compiled ahead of time takes its own state.
            return MatrixViewState(unsharded(init_each(self.inner.init, matrices), matrices))

    def update(self, updates: Any, state: Any, params: Any = None, **extra_args: Any):
        if self.mesh is not None:
            check_on_mesh(updates, self.mesh)
        groups = self.layout(updates)
        if self.divided:
            return self._divided(groups, updates, state.inner, params, extra_args)
        leaves = jax.tree.leaves((updates, params))
        explicit = any(AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types for x in leaves)
        gradients = gather(groups, updates, explicit=explicit)
        matrices = {} if params is None else gather(groups, params, explicit=explicit)
        old = unsharded(state.inner, gradients) if explicit else state.inner
        if self.restart is not None and old:
            old = self.restart(old, matrices or gradients)
        directions, new = {}, {}
        for group in groups:
            key, g = group.key, gradients[group.key]
            directions[key], new[key] = self.inner.update(
                g, old[key], matrices.get(key), **extra_args
            )
            shape = jnp.shape(directions[key])
            if shape != g.shape:
                parameters = ", ".join(repr(form.parameter) for form in group.members[:3])
                raise ValueError(
                    f"the direction of the matrices of {parameters} must have the shape of their "
                    f"gradient, {group.shape}; got {shape}."
                )
        return scatter(groups, directions, updates, explicit=explicit), MatrixViewState(new)

    def _divided(
        self, groups: tuple[Group, ...], updates: Any, state: Any, params: Any, extra_args: Any
    ) -> tuple[Any, MatrixViewState]:
        """The update where devices share the matrices."""
        if not groups:
            return updates, MatrixViewState(state)
        forms, leaves = {group.key: group.members for group in groups}, named_leaves(updates)
        gradients = Matrices(forms, leaves.present())
        weights = None if params is None else Matrices(forms, named_leaves(params).present())
        step: Any = self.inner.update
        is_boxed = isinstance(state, BoxedState)
        plain = state.unbox() if is_boxed else state
        directions, new = step(gradients, plain, weights, **extra_args)
        new = state.replace_boxed(new) if is_boxed else new
        return leaves.rebuild(directions), MatrixViewState(new)


def _boxed(init: Callable[[Any], MatrixViewState], params: Any) -> MatrixViewState:
    """The state in a box of Flax, whose keys say how it is distributed."""
    with recording() as events:
        inner = init(params).inner
    for event in events:
        record(event)
    return MatrixViewState(BoxedState(*inner) if is_divided(inner) else inner)


def gather(groups: tuple[Group, ...], tree: Any, *, explicit: bool = False) -> dict[str, jax.Array]:
    """Gathers the matrices of `tree` into stacks, by the keys of the groups.

    If arrays are on an Explicit mesh (`explicit`), the stacks are replicated.
    """
    leaves = named_leaves(tree).present()
    stacks = {}
    for group in groups:
        arrays = [(form, jnp.asarray(leaves[form.parameter])) for form in group.members]
        parts = [form.to_matrices(unsharded(x) if explicit else x) for form, x in arrays]
        stacks[group.key] = parts[0] if len(parts) == 1 else jnp.concatenate(parts)
    return stacks


def scatter(groups: tuple[Group, ...], stacks: Any, like: Any, *, explicit: bool = False) -> Any:
    """Splits stacks into a tree with the structure, shapes, dtypes and shardings of `like`."""
    named = named_leaves(like)
    leaves = named.present()
    parts: dict[str, list[tuple[MatrixForm, jax.Array]]] = {}
    for group in groups:
        slices = split_stack(stacks[group.key], [form.count for form in group.members])
        for form, x in zip(group.members, slices, strict=True):
            parts.setdefault(form.parameter, []).append((form, x))

    updates = {
        name: from_matrices(pieces).astype(leaves[name].dtype) for name, pieces in parts.items()
    }
    if explicit:
        updates = {name: sharded_like(x, leaves[name]) for name, x in updates.items()}
    return named.rebuild(updates)
