"""How many of their cells the tests run; without pytest, which the site's build does not have."""

import collections
import itertools
import os
import sys
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

ALL_CELLS = bool(os.environ.get("CURVAX_ALL_CELLS"))  # run all cells instead of a sample
COUNT = collections.Counter[str]()  # cells of all files that are imported: all, and those that run
_USES = collections.defaultdict[str, collections.Counter[str]](collections.Counter)  # by file


def cells(*factors: Iterable[Any], of: int) -> list[Any]:
    """A sample of one in `of` cells, in their order; with CURVAX_ALL_CELLS, all of them.

    The cells are those of a list, or of the product of several lists. The sample takes, one after
    the other, the cell whose values this file's samples have had least. So each value of a factor
    occurs if the sample has as many cells, and the tests of a file share the methods among
    themselves. Between equals it takes every `of`-th. Files begin at different cells.
    """
    every = list(factors[0] if len(factors) == 1 else itertools.product(*factors))
    file = sys._getframe(1).f_globals["__name__"]
    values, uses = [list(_values(cell)) for cell in every], _USES[file]
    start = zlib.crc32(file.encode()) % of
    left = sorted(range(len(every)), key=lambda i: ((i - start) % of, i))
    taken = left if ALL_CELLS else []
    for _ in range(0 if ALL_CELLS else -(-len(every) // of)):
        taken.append(min(left, key=lambda i: sum(uses[x] for x in values[i])))
        left.remove(taken[-1])
        uses.update(values[taken[-1]])
    COUNT.update({"all": len(every), "run": len(taken)})
    return [every[i] for i in sorted(taken)]


def _values(cell: Any) -> Iterator[str]:
    for x in cell if isinstance(cell, tuple) else [cell]:
        yield getattr(x, "name", None) or repr(x)
