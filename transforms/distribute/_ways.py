"""Rows of numbers on their way from the devices that have them to those that want them.

Tables say which rows these are: `(devices, rows)` of ids, and -1 for any row. If all pairs of
devices along some mesh axes exchange as many rows, an all-to-all is the way. It would pad other
exchanges. There the devices permute rows in turns: who sends or gets the most does so in each turn
(Kőnig's theorem), so that none receives more than that. Where these were too many turns, rows are
spread over all devices first, and a device receives them twice.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ._cuts import ranks
from ._routes import Axes, device_index

Pairs = tuple[tuple[int, int], ...]  # of devices: from, to

TURNS = 16
"""So many turns at most: each is a collective of its own."""


class Way(NamedTuple):
    """One exchange, inside a mapped axis."""

    axes: Axes  # of all devices
    send: np.ndarray  # (devices, rows): what a device sends, in the order of the exchange
    along: Axes  # of an all-to-all
    turns: tuple[tuple[Pairs, int], ...]  # or who sends to whom, and how many rows
    take: np.ndarray  # (devices, rows): what comes, in the order in which it is wanted

    @property
    def cost(self) -> tuple[int, int]:
        """The rows that a device receives, and the number of collectives."""
        sizes = [size for pairs, size in self.turns if pairs]
        sizes += [self.send.shape[1]] * bool(self.along)
        return sum(sizes), len(sizes)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self._rows(x, self.send)
        if self.along:
            size = math.prod(map(jax.lax.axis_size, self.along))
            parts = self.send.reshape(len(self.send), size, -1)
            if (parts == parts[:, :1]).all():  # everybody gets the same
                x = jax.lax.all_gather(x[: len(x) // size], self.along, tiled=True)
            else:
                x = jax.lax.all_to_all(x, self.along, 0, 0, tiled=True)
        if self.turns:
            ends = np.cumsum([size for _, size in self.turns])[:-1]
            parts = [
                jax.lax.ppermute(part, self.axes, pairs) if pairs else part
                for part, (pairs, _) in zip(jnp.split(x, ends), self.turns, strict=True)
            ]
            x = jnp.concatenate(parts)
        return self._rows(x, self.take)

    def _rows(self, x: jax.Array, table: np.ndarray) -> jax.Array:
        """The device's rows of `x`."""
        if (table != table[0]).any():
            return x[jnp.asarray(table)[device_index(self.axes)]]
        first, last = table[0, 0], table[0, -1] + 1
        return x[first:last] if np.array_equal(table[0], np.arange(first, last)) else x[table[0]]


class Ways:
    """The ways from what devices have to what they want, on mesh axes of these sizes."""

    def __init__(self, mesh: Mapping[str, int], has: np.ndarray, wants: np.ndarray):
        self.mesh, self.shape, self.known = mesh, has.shape, wants >= 0
        place, rows = np.zeros(has.max() + 2, int), np.arange(has.size).reshape(has.shape)
        place[has] = rows
        found = np.empty_like(wants)
        for i, own in enumerate(has):
            place[own] = rows[i]  # rather the own row than that of another device
            found[i] = place[wants[i]]
        self.sender, self.row = np.divmod(found, has.shape[1])
        self.sender = np.where(self.known, self.sender, -1)
        self.getter = np.tile(np.arange(len(has))[:, None], wants.shape[1])
        self.rank = np.where(self.known, ranks(self.sender), 0)  # among those of one sender
        self.counts = np.zeros((len(has), len(has)), int)  # from, to
        np.add.at(self.counts, (self.sender[self.known], self.getter[self.known]), 1)

    @classmethod
    def best(
        cls, mesh: Mapping[str, int], has: np.ndarray, wants: np.ndarray, spread: np.ndarray
    ) -> tuple[Way, ...]:
        """One exchange, or two with rows `spread` between them: in which a device gets least."""
        direct = cls(mesh, has, wants)
        at_once = direct.at_once()
        if at_once.cost[0] <= max(direct.counts.sum(0).max(), direct.counts.sum(1).max()):
            return (at_once,)
        choices = [
            (at_once,),
            (cls(mesh, has, spread).at_once(), cls(mesh, spread, wants).at_once()),
        ]
        turns = [*itertools.islice(_turns(direct.counts), TURNS + 1)]
        if len(turns) <= TURNS:
            choices.append((direct.in_turns(turns),))
        return min(choices, key=lambda ways: np.sum([way.cost for way in ways], 0).tolist())

    def at_once(self) -> Way:
        """By an all-to-all along the mesh axes along which anything is sent."""
        sizes, (sender, getter) = [*self.mesh.values()], np.nonzero(self.counts)
        places = np.array(np.unravel_index(np.arange(len(self.counts)), sizes))
        apart = (places[:, sender] != places[:, getter]).any(1)
        along = tuple(a for a, sent in zip(self.mesh, apart, strict=True) if sent)
        group = np.where(apart, sizes, 1)
        member: Any = np.ravel_multi_index([*(places * apart[:, None])], group)
        size = self.counts.max()
        there, here = (member[who] * size + self.rank for who in (self.getter, self.sender))
        return self._way(there, here, group.prod() * size, along)

    def in_turns(self, amounts: Sequence[np.ndarray]) -> Way:
        """By permutations of the devices; first what stays."""
        own = np.diag(np.diag(self.counts))
        spot = np.zeros((*own.shape, self.counts.max()), int)
        sent, turns, begin = np.zeros_like(own), [], 0
        for amount in (own, *amounts):
            pairs = [*map(tuple, np.argwhere(amount).tolist())]
            for s, d in pairs:
                spot[s, d, sent[s, d] :][: amount[s, d]] = begin + np.arange(amount[s, d])
            turns.append((() if amount is own else (*pairs,), int(amount.max())))
            sent, begin = sent + amount, begin + amount.max()
        spot = spot[self.sender, self.getter, self.rank]
        return self._way(spot, spot, begin, (), tuple(turns))

    def _way(self, there: Any, here: Any, size: int, along: Axes, turns: Any = ()) -> Way:
        """From the place of each row where it is sent, and where it comes; any for the others."""
        devices, known = len(self.counts), self.known
        send = np.tile(np.minimum(np.arange(size), self.shape[1] - 1), (devices, 1))
        send[self.sender[known], there[known]] = self.row[known]
        others = np.minimum(np.arange(known.shape[1]), size - 1)
        return Way((*self.mesh,), send, along, turns, np.where(known, here, others))


def along_ways(x: jax.Array, *ways: Way) -> jax.Array:
    """Rows at the end of these ways."""
    for way in ways:
        x = way(x)
    return x


def listed(tables: Sequence[np.ndarray]) -> np.ndarray:
    """A table of rows of different lengths, with -1 at their ends."""
    found = np.full((len(tables), max(map(len, tables))), -1)
    for i, row in enumerate(tables):
        found[i, : len(row)] = row
    return found


def _turns(left: np.ndarray) -> Iterator[np.ndarray]:
    """The numbers of rows `(from, to)` in turns; in each a device sends to one and gets from one.

    The turns together have as many rows as the device has that sends or gets the most.
    """
    from scipy.optimize import linear_sum_assignment  # slow to import; JAX needs it too

    left = left - np.diag(np.diag(left))
    while left.any():
        sends, gets = left.sum(1), left.sum(0)
        most = max(sends.max(), gets.max())
        needed = (sends == most)[:, None].astype(int) + (gets == most)
        weights = np.where(left, left + needed * left.sum(), 0)
        matched = np.zeros_like(left)
        pairs = linear_sum_assignment(weights, maximize=True)
        matched[pairs] = left[pairs]
        # With more rows in this turn, another device would be left with too many.
        size = min((most - sends + matched.sum(1)).min(), (most - gets + matched.sum(0)).min())
        yield np.minimum(matched, size)
        left = left - np.minimum(matched, size)
