"""Alice's parts switched on and off: Table 5 and the variants of Figure 5, on a small model.

    python -m benchmarks.papers.alice_lm        # about half an hour on two CPU cores

Gong et al., arXiv:2502.07752, sections 7.2 and F.7, on the model of `python -m benchmarks train
--only lm`:

- Table 5 and Figure 5a: subspaces by exact decomposition or switched, with tracking and without,
  no compensation; then Alice with everything, and Alice-0, which does not track;
- Figure 5b: what the columns beyond the leading ones are replaced by, with tracking. The paper does
  not say whether with compensation: both are here;
- Figure 5c: the compensation, with tracking and switching;
- Figure 5d: the last layer left to AdamW or not, for Alice, GaLore and Fira;
- Figure 5e: RACS with and without its averages.

Each variant has its own learning rate, tuned as all others are (`_tuning.py`). In 5a to 5c the last
layer is trained by the method, as in the paper.

Runs that have finished are kept under runs/tuned and are not repeated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from matplotlib.figure import Figure

import curvax
from curvax.subspaces import full_basis, gaussian_mix

from .. import _record, _tasks
from .._curves import draw_curves, spread, styles, tuning_table
from .._optimizers import methods_for
from .._training import Method
from .._tuning import Found, Study

TASK = _tasks.lm()
METHODS = methods_for(TASK)
ALICE = METHODS["alice"].options
LEADING = ALICE["switching"].leading


def alice(**options: Any) -> Method:
    """Alice with parts of its own."""
    return Method(curvax.alice, {**ALICE, **options})


def with_adam_head(name: str) -> Method:
    """A method that leaves the last layer to AdamW."""
    method = METHODS[name]
    options = {**method.options, "weight_dimension_numbers": {"head/kernel": None}}
    return Method(method.make, options)


BARE = {"compensation": None}
TRACKED = alice(switching="evd", **BARE)
SWITCHED = alice(**BARE)
PUBLISHED = {  # Table 5: evaluation perplexity at 130M
    "none of them": 26.96,
    "tracking": 27.35,
    "tracking and switching": 25.11,
    "tracking, switching and compensation": 21.95,
}
TABLE_5 = dict(
    zip(
        PUBLISHED,
        (alice(b3=None, switching="evd", **BARE), TRACKED, SWITCHED, METHODS["alice"]),
        strict=True,
    )
)


class Panel(NamedTuple):
    """A part of Figure 5."""

    title: str
    variants: dict[str, Method]
    reference: str  # the paper's choice among them


PANELS = {
    "5a": Panel(
        "tracking and switching, without compensation",
        {
            "exact subspaces, no tracking": TABLE_5["none of them"],
            "exact subspaces, tracking": TRACKED,
            "switching, no tracking": alice(b3=None, **BARE),
            "switching, tracking": SWITCHED,
        },
        "switching, tracking",
    ),
    "5b": Panel(
        "switching, without compensation",
        {
            "Gaussian": alice(switching="gaussian", b3=None, **BARE),
            "Gaussian mix": alice(switching=gaussian_mix(LEADING), **BARE),
            "full basis": alice(switching=full_basis(LEADING), **BARE),
            "complement": SWITCHED,
        },
        "complement",
    ),
    "5b with compensation": Panel(
        "switching, with compensation",
        {
            "Gaussian": alice(switching="gaussian", b3=None),
            "Gaussian mix": alice(switching=gaussian_mix(LEADING)),
            "full basis": alice(switching=full_basis(LEADING)),
            "complement": METHODS["alice"],
        },
        "complement",
    ),
    "5c": Panel(
        "compensation",
        {
            "none": SWITCHED,
            "Fira": alice(compensation="fira"),
            "Fira+": alice(compensation="fira+"),
            "optimal": METHODS["alice"],
            "optimal, no tracking (Alice-0)": alice(b3=None),
        },
        "optimal",
    ),
    "5d": Panel(
        "the last layer, by the method or by AdamW",
        {
            name + head: make(name.lower())
            for name in ("GaLore", "Fira", "Alice")
            for head, make in (("", METHODS.__getitem__), (", head by AdamW", with_adam_head))
        },
        "Alice",
    ),
    "5e": Panel(
        "RACS's averages",
        {"without": Method(curvax.racs, {"b2": 0.0}), "RACS": METHODS["racs"]},
        "RACS",
    ),
}


def lines(found: dict[str, Found], reference: str) -> list[list[str]]:
    """The lines of a table."""
    return [
        [
            name,
            spread(x.losses, ".4f"),
            "" if name == reference else spread(x.losses - found[reference].losses, "+.4f"),
            f"{x.rate:g}",
        ]
        for name, x in found.items()
    ]


TITLES = ("validation loss, mean (range)", "learning rate")


def table(first: str, found: dict[str, Found], reference: str) -> str:
    """A part of the figure as a table."""
    loss, *rest = TITLES
    titles = [first, loss, f"beyond “{reference}”, mean (range)", *rest]
    return _record.table(titles, lines(found, reference))


def table_5(found: dict[str, Found]) -> str:
    """Table 5, with the paper's column."""
    loss, *rest = TITLES
    titles = ["components", "paper: perplexity, LLaMA 130M", loss, "beyond all of them", *rest]
    rows = lines(found, list(found)[-1])
    return _record.table(
        titles,
        [
            [row[0], f"{published:.2f}", *row[1:]]
            for row, published in zip(rows, PUBLISHED.values(), strict=True)
        ],
    )


def draw(found: dict[str, dict[str, Found]]) -> Figure:
    """One panel for each part."""
    figure = Figure(figsize=(15, 9.5), layout="constrained")
    for axis, (name, panel) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
        draw_curves(axis, found[name], styles(panel.variants), TASK.unit)
        axis.set(title=f"({name[1]}) {panel.title}")
        axis.legend(frameon=False, fontsize="small", title="variant, learning rate")
    figure.suptitle("Mean and range of three seeds, each variant at its own best learning rate")
    return figure


def main() -> None:
    """Runs everything and writes tables, numbers and figure."""
    args = _record.paper_arguments(__doc__)
    groups = {"Table 5": TABLE_5, **{name: panel.variants for name, panel in PANELS.items()}}
    methods = [method for variants in groups.values() for method in variants.values()]
    study = Study(TASK, methods, args.seed).run()
    found = {name: study.find_all(variants) for name, variants in groups.items()}
    parts = [
        study.head(),
        f"Rank {ALICE['rank']}, {LEADING} leading columns, a new subspace every "
        f"{ALICE['refresh']} steps. “Beyond” is taken seed by seed.",
        "## Table 5",
        table_5(found["Table 5"]),
    ]
    for name, panel in PANELS.items():
        parts += [f"## Figure {name}: {panel.title}"]
        parts += [table("variant", found[name], panel.reference)]
    tuned: dict[str, tuple[str, Found]] = {}  # a variant is in several parts
    for name, variants in groups.items():
        for variant, method in variants.items():
            tuned.setdefault(method.said, (f"{name}: {variant}", found[name][variant]))
    parts += [tuning_table(dict(tuned.values()), args.seed).markdown()]
    _record.write_paper(
        args,
        "alice_lm",
        "Alice's parts: Table 5 and Figure 5 on a small language model",
        "\n\n".join(parts),
        draw(found),
    )


if __name__ == "__main__":
    main()
