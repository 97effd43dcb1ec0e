"""Which donated arrays a compiled program updates in place."""

from __future__ import annotations

import re
from typing import Any

import jax


def not_in_place(compiled: Any, *donated: Any) -> list[str]:
    """Paths of those whose memory no result takes.

    Args:
      compiled: a program whose first arguments are donated, and which uses all of its arguments.
      donated: these arguments, or their shapes.
    """
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(donated)]
    header = compiled.as_text().partition("\n")[0]
    aliases = header.partition("input_output_alias={")[2].partition("entry_computation_layout")[0]
    taken = {int(number) for number in re.findall(r"\{[\d, ]*\}: \((\d+), ", aliases)}
    return [name for i, name in enumerate(names) if i not in taken]
