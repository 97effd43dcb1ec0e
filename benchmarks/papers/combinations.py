"""Four combinations that the papers leave as future work, each a line of code, on a small model.

    python -m benchmarks.papers.combinations        # about ten minutes on two CPU cores

SOAP with factors and bases in 4 bits (CQ+EF), ASGO with its roots refreshed as FOAM has it, SOAP in
a low-rank subspace, and SUMO with its moment in 4 bits, beside their plain forms, on the model of
`python -m benchmarks train --only lm`; each at its own best learning rate (`_tuning.py`). The lines
printed are those that ran.

Roots are checked at every step, where the plain form refreshes them; FOAM's threshold and largest
damping and SOAP's tiles and error feedback were chosen among four settings each on seed 0.

Runs that have finished are kept under runs/tuned and are not repeated.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from matplotlib.figure import Figure

import curvax

from .. import _record, _tasks
from .._curves import draw_curves, spread, styles, tuning_table
from .._optimizers import methods_for
from .._training import Method, Watch
from .._tuning import Found, Study

TASK = _tasks.lm()
METHODS = methods_for(TASK)
RANK, PERIOD = (METHODS["galore"].options[name] for name in ("rank", "refresh"))

# The combinations; `rest` is weight decay and AdamW's learning rate for all other parameters.


def soap_4bit(rate: Any, **rest: Any) -> optax.GradientTransformation:
    return curvax.soap(rate, storage=curvax.cholesky(block=16, error_feedback=0.0), **rest)


def asgo_foam(rate: Any, **rest: Any) -> optax.GradientTransformation:
    return curvax.asgo(rate, refresh=curvax.policies.foam(1, 0.4, max_damping=1e-5), **rest)


def low_rank_soap(rate: Any, **rest: Any) -> optax.GradientTransformation:
    return curvax.assemble(
        curvax.in_subspace(
            curvax.in_eigenbasis(curvax.moment_ratio(0.95, 0.95), refresh=curvax.every(10)),
            RANK,
            basis=curvax.subspaces.svd(),
            refresh=curvax.every(PERIOD),
        ),
        rate,
        guard=False,  # in_subspace checks its projections
        **rest,
    )


def sumo_4bit(rate: Any, **rest: Any) -> optax.GradientTransformation:
    return curvax.quantize_state(
        curvax.sumo(rate, rank=RANK, refresh=PERIOD, **rest),
        bits=4,
        where=lambda place, _: place.startswith("inner_states/matrices") and "/mu/" in place,
    )


# What they are to save.


def count_refreshes(optimizer: Any, state: Any) -> list[jax.Array]:
    """Roots computed so far, of every factor."""
    del optimizer
    is_factor = lambda x: hasattr(x, "refreshes") and hasattr(x, "inverse_root")  # noqa: E731
    leaves = jax.tree.leaves(state["opt_state"], is_leaf=is_factor)
    return [leaf.refreshes.sum() for leaf in leaves if is_factor(leaf)]


REFRESHES = Watch("refreshes of all factors", count_refreshes)


class Combination(NamedTuple):
    """A combination and what it is compared with; its plain form comes first."""

    name: str
    line: Callable[..., optax.GradientTransformation]
    method: Method
    others: dict[str, Method]

    @property
    def code(self) -> str:
        """The expression that is returned."""
        _, _, expression = inspect.getsource(self.line).partition("    return ")
        return textwrap.dedent("    " + expression).strip()

    @property
    def plain(self) -> str:
        """The name of its plain form."""
        return next(iter(self.others))


COMBINATIONS = (
    Combination(
        "4-bit SOAP",
        soap_4bit,
        Method(soap_4bit),
        {
            "SOAP": METHODS["soap"],
            "SOAP, CQ+EF in 8 bits": Method(
                curvax.soap, {"storage": curvax.cholesky(bits=8, error_feedback=0.95)}
            ),
        },
    ),
    Combination(
        "FOAM-refreshed ASGO",
        asgo_foam,
        Method(asgo_foam, watch=REFRESHES),
        {
            "ASGO, root at every step": Method(curvax.asgo, watch=REFRESHES),
            "ASGO, root every 10 steps": Method(curvax.asgo, {"refresh": 10}, REFRESHES),
        },
    ),
    Combination(
        "low-rank SOAP",
        low_rank_soap,
        Method(low_rank_soap),
        {"SOAP": METHODS["soap"], "GaLore": METHODS["galore"]},
    ),
    Combination("SUMO, 4-bit moment", sumo_4bit, Method(sumo_4bit), {"SUMO": METHODS["sumo"]}),
)


# What comes of them.


def refreshes_of(found: Found) -> np.ndarray:
    """Roots computed in a run, by seed."""
    return np.array([sum(run.watched[-1]) for run in found.runs])


def table(combination: Combination, found: dict[str, Found]) -> str:
    """The combination and what it is compared with."""
    plain = found[combination.plain]
    rows = []
    for name, x in found.items():
        rows.append(
            [
                name,
                f"{x.rate:g}",
                spread(x.losses, ".4f"),
                "" if name == combination.plain else spread(x.losses - plain.losses, "+.4f"),
                f"{x.state_bytes:,}",
                f"{plain.state_bytes / x.state_bytes:.2f}",
            ]
        )
        if combination.line is asgo_foam:
            rows[-1].append(spread(refreshes_of(x), ".0f"))
    titles = [
        "method",
        "learning rate",
        "validation loss, mean (range)",
        f"beyond “{combination.plain}”, mean (range)",
        "optimizer state, bytes",
        "plain form's over these",
        *(["roots computed"] if combination.line is asgo_foam else []),
    ]
    return _record.table(titles, rows)


def draw(found: dict[str, dict[str, Found]]) -> Figure:
    """A panel for each combination."""
    figure = Figure(figsize=(12, 9.5), layout="constrained")
    for axis, (name, methods) in zip(figure.subplots(2, 2).flat, found.items(), strict=True):
        draw_curves(axis, methods, styles(methods), TASK.unit)
        axis.set(title=name)
        axis.legend(frameon=False, title="method, learning rate")
    figure.suptitle("Mean and range of three seeds, each method at its own best learning rate")
    return figure


def main() -> None:
    """Runs everything and writes table, numbers and figure."""
    args = _record.paper_arguments(__doc__)
    groups = {c.name: {**c.others, c.name: c.method} for c in COMBINATIONS}
    methods = {name: method for group in groups.values() for name, method in group.items()}
    study = Study(TASK, methods.values(), args.seed).run()
    found = {name: study.find_all(group) for name, group in groups.items()}
    parts = [study.head()]
    for combination in COMBINATIONS:
        parts += [
            f"## {combination.name}",
            f"```python\n{combination.code}\n```",
            table(combination, found[combination.name]),
        ]
    parts += [tuning_table(study.find_all(methods), args.seed).markdown()]
    _record.write_paper(
        args,
        "combinations",
        "Four combinations that the papers leave as future work",
        "\n\n".join(parts),
        draw(found),
    )


if __name__ == "__main__":
    main()
