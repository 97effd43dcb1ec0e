"""The work of one device: its matrices of each stack, its matrix of each round, parts of others.

It runs inside a mapped axis, of the `shard_map` of `_distribute.py` or of a caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._layout import DistributedState, StateLayout, split_axis
from ._shares import Round


class Given(NamedTuple):
    """Gradients, parameters or updates of some stacks."""

    even: Any  # stacks: the matrices of the device
    # Per round, one matrix of each of its stacks, of which that of the device's kind is its own;
    # of updates, only that one, as a flat row.
    dealt: Any
    shared: Any  # stacks: the matrices that all devices share


class Step(NamedTuple):
    """The work of one device, inside a mapped axis."""

    inner: Any
    layout: StateLayout
    axes: tuple[str, ...]
    extra_args: Mapping[str, Any]

    def update(
        self, state: DistributedState, gradients: Given, params: Given | None = None
    ) -> tuple[Given, DistributedState]:
        """The device's updates, those of a round's matrix as a flat row, and its state."""
        common, even, dealt, split = {}, {}, [], {}
        found = Given({}, [], {})
        for key, x in gradients.even.items():
            p = params and params.even[key]
            own = state.common[key], state.even[key]
            found.even[key], common[key], even[key] = self._updated(key, x, own, p)
        for key, x in gradients.shared.items():
            p = params and params.shared[key]
            found.shared[key], common[key], split[key] = self._shared(key, x, state, p)
        own = params.dealt if params else [None] * len(gradients.dealt)
        for r, buffers, *given in zip(
            self.layout.shares.rounds, state.dealt, gradients.dealt, own, strict=True
        ):
            row, buffers = self._dealt(r, state.common, buffers, *given)
            found.dealt.append(row)
            dealt.append(buffers)
        for key in state.common.keys() - common.keys():
            common[key] = self._counted(key, state.common[key], gradients, params)
        return found, DistributedState(common, even, tuple(dealt), split)

    def matrices(self, rows: jax.Array, key: str) -> jax.Array:
        """Flat rows as matrices of a stack."""
        shape = self.layout.stacks[key].shape[1:]
        return rows[:, : math.prod(shape)].reshape(-1, *shape)

    def _updated(
        self, key: str, gradient: Any, own: tuple[Any, Any], params: Any, **more: Any
    ) -> tuple[jax.Array, Any, Any]:
        """The updates of some matrices of a stack, and both parts of their state."""
        layout = self.layout.of[key]
        state = layout.state(*own)
        update, new = self.inner.update(gradient, state, params, **self.extra_args, **more)
        return update, layout.common(new), layout.arrays(new)

    def _dealt(self, r: Round, common: Any, buffers: Any, gradients: Any, params: Any) -> Any:
        """The update of the device's matrix of a round, and its state."""
        own = {dtype: x[0] for dtype, x in buffers.items()}
        lengths = {dtype: x.size for dtype, x in own.items()}
        size = max(math.prod(gradients[key].shape[1:]) for key in r.kinds)
        row_dtype = jnp.result_type(*(gradients[key] for key in r.kinds))

        def work(key: str) -> Callable[[Any], Any]:
            def branch(own: Any) -> Any:
                state = common[key], self.layout.of[key].unpacked(own)
                p = params and params[key]
                update, _, arrays = self._updated(key, gradients[key], state, p)
                row = update.astype(row_dtype).reshape(-1)
                row = jnp.pad(row, (0, size - row.size))
                return row, self.layout.of[key].packed(arrays, lengths)

            return branch

        def nothing(own: Any) -> Any:
            return jnp.zeros(size, row_dtype), own

        kind = jnp.asarray(r.kind)[jax.lax.axis_index(self.axes)]
        row, own = jax.lax.switch(kind, [*map(work, r.kinds), nothing], own)
        return row[None], {dtype: x[None] for dtype, x in own.items()}

    def _shared(
        self, key: str, gradient: jax.Array, state: DistributedState, params: Any
    ) -> tuple[jax.Array, Any, Any]:
        """The updates of matrices that all devices share, and the device's part of their state."""
        devices, layout = self.layout.shares.devices, self.layout.of[key]
        axes = [split_axis(x.shape, devices) for x in layout.matrix]

        def gathered(x: jax.Array, axis: int | None) -> jax.Array:
            return x if axis is None else jax.lax.all_gather(x, self.axes, axis=axis, tiled=True)

        def part(x: jax.Array, axis: int | None) -> jax.Array:
            if axis is None:
                return x
            size = x.shape[axis] // devices
            start = jax.lax.axis_index(self.axes) * size
            return jax.lax.dynamic_slice_in_dim(x, start, size, axis)

        def each(f: Any, arrays: Any) -> Any:
            pairs = zip(jax.tree.leaves(arrays), axes, strict=True)
            return layout.tree([f(x, axis) for x, axis in pairs])

        own = state.common[key], each(gathered, state.split[key])
        update, common, arrays = self._updated(key, gradient, own, params, shared_axis=self.axes)
        return update, common, each(part, arrays)

    def _counted(self, key: str, common: Any, gradients: Given, params: Given | None) -> Any:
        """What all devices have of the state of a stack whose matrices are dealt out.

        It does not depend on the matrices, so the compiler leaves out all work on this one.
        """
        i = next(i for i, r in enumerate(self.layout.shares.rounds) if key in r.kinds)
        layout = self.layout.of[key]
        zeros = layout.tree([jnp.zeros(x.shape, x.dtype) for x in layout.matrix])
        p = params and params.dealt[i][key]
        return self._updated(key, gradients.dealt[i][key], (common, zeros), p)[1]
