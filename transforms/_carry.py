"""Moments that follow a change of basis: which a state has, and how to carry them over.

The inner transformation of `in_subspace` or `in_eigenbasis` keeps its moments in the coordinates of
a basis. When the basis changes, they are mapped to the new coordinates, by a `Carry` in a subspace
and by `kronecker/_bases.py` in an eigenbasis. The class of a state declares them, in the names of
fields `first_moments` and `second_moments`; for Optax's states, which declare nothing, the table is
below. (`quantize_state` asks too, because second moments must not round to 0.) Any other array with
more than one number per matrix, such as a factor, is an error, because no rule is known for it.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey

from ._recording import is_repeated
from ._validate import Value
from .linalg._products import exact_product

OPTAX: dict[type, tuple[tuple[str, ...], tuple[str, ...]]] = {
    optax.FactoredState: ((), ("v_row", "v_col", "v")),
    optax.TraceState: (("trace",), ()),
    optax.ScaleByLionState: (("mu",), ()),
    optax.ScaleByRmsState: ((), ("nu",)),
    optax.ScaleByAdamState: (("mu",), ("nu",)),
    optax.ScaleByAdanState: (("m", "v", "g"), ("n",)),
    optax.contrib.ScaleByAdemamixState: (("m1", "m2"), ("nu",)),
    optax.ScaleByAmsgradState: (("mu",), ("nu", "nu_max")),
    optax.ScaleByBeliefState: (("mu",), ("nu",)),
    optax.ScaleByRStdDevState: (("mu",), ("nu",)),
}
"""The first and second moments of Optax's states."""


class Moments(NamedTuple):
    """The moments of one array of matrices, each of its shape."""

    first: list[Any]
    second: list[Any]


def declared(node: Any) -> dict[str, str]:
    """The fields of a state's node that are moments: "first" or "second"."""
    fields = getattr(node, "first_moments", ()), getattr(node, "second_moments", ())
    first, second = OPTAX.get(type(node), fields)
    return dict.fromkeys(first, "first") | dict.fromkeys(second, "second")


def roles(state: Any) -> Any:
    """A tree like `state`: "first" or "second" for arrays of moments, "" for others."""
    fields = declared(state)
    if not fields:
        is_known = lambda node: bool(declared(node))  # noqa: E731
        return jax.tree.map(lambda x: roles(x) if is_known(x) else "", state, is_leaf=is_known)
    return type(state)(
        **{
            name: jax.tree.map(lambda _, role=fields[name]: role, x) if name in fields else roles(x)
            for name, x in state._asdict().items()
        }
    )


def check_moments(state: Any, like: Any) -> None:
    """Requires a rule for every array that a state keeps for the matrices `like (..., m, n)`."""
    if is_repeated():
        return
    pairs = jax.tree_util.tree_leaves_with_path(state)
    for (path, x), role in zip(pairs, jax.tree.leaves(roles(state)), strict=True):
        moment = x.shape == like.shape and jnp.issubdtype(x.dtype, jnp.floating)
        if (role or x.ndim > like.ndim - 2) and not (role and moment):
            names = [key.name for key in path if isinstance(key, GetAttrKey)]
            raise ValueError(
                f"the inner transformation's state field {names[-1] if names else None!r} holds "
                "more than one number per matrix; only moments of the matrix's shape, which the "
                "class of the state declares in first_moments and second_moments, can follow a "
                "change of basis."
            )


def take_moments(state: Any) -> Moments:
    """The moments of a state."""
    pairs = list(zip(jax.tree.leaves(state), jax.tree.leaves(roles(state)), strict=True))
    return Moments(*([x for x, role in pairs if role == name] for name in Moments._fields))


def put_moments(state: Any, moments: Moments) -> Any:
    """The state with other moments."""
    new = {name: iter(values) for name, values in moments._asdict().items()}
    return jax.tree.map(lambda x, role: next(new[role]) if role else x, state, roles(state))


class Carry(Value):
    """The type of `carry=`: maps moments `(r, n)` to a new basis of their rows."""

    needs_names = True  # whether the rule needs to know which moments are first, which second

    @abc.abstractmethod
    def first(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """Maps a first moment to the new basis; `turn (r, r)` is `U_newᵀ U_old`."""

    def second(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        """Maps a second moment to the new basis, by default as a first one."""
        return self.first(moment, turn)


@dataclasses.dataclass(frozen=True)
class Keep(Carry):
    needs_names = False

    def first(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        return moment


@dataclasses.dataclass(frozen=True)
class Rotate(Carry):
    def first(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        dtype = jnp.result_type(turn, moment)  # SUMO's Alg. 1, block 1.1
        return exact_product(turn.astype(dtype), moment.astype(dtype)).astype(moment.dtype)

    def second(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        return self.first(moment, turn**2)


@dataclasses.dataclass(frozen=True)
class Reset(Carry):
    def first(self, moment: jax.Array, turn: jax.Array) -> jax.Array:
        return jnp.zeros_like(moment)


def keep() -> Keep:
    """Keeps moments unchanged under a new basis (GaLore, Alice)."""
    return Keep()


def rotate() -> Rotate:
    r"""Rotates first moments with the basis (SUMO): $M \leftarrow R M$, $R = U_{new}^\top U_{old}$.

    Components outside the new subspace are lost. Second moments become $(R \circ R)\, v$: the
    expected squares if the old coordinates are uncorrelated.
    """
    return Rotate()


def reset() -> Reset:
    """Resets moments to zero; counters, such as that of Adam's bias correction, go on."""
    return Reset()
