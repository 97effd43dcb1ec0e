"""How far steps are from their products, from a third of GPT-2-small's and LLaMA-130M's width on.

    python -m benchmarks width                              # about a quarter of an hour
    python -m benchmarks width --only llama --widths 768    # the kernels of one layer as they are

What is held to an aim, and its peers, as in `python -m benchmarks step`, between refreshes and with
one layer, so that the width can be the model's own on a CPU. Products of matrices of order d take
d³ operations and all else takes d² of them: the wider, the nearer a step is to its products. The
rank is a quarter of the width. Step 1, at which everything is refreshed, is not counted.
"""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from . import _record
from ._methods import METHODS, with_peers
from .step_time import MODELS, TITLES, measure

# Widths, layers, rounds.
PRESETS = {"cpu": ((256, 384, 512, 768), 1, 20), "gpu": ((768, 1536, 3072), 4, 100)}


def rows_of(found: dict[int, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A line for every aim: the ratio at each width, held to the aim at the largest."""
    rows = []
    last = max(found)
    for i, full in enumerate(found[last]):
        method = METHODS[full["method"]]
        for key, over, bound in (
            ("over_products", "its products", method.aim),
            ("over_peer", method.peer, method.peer_aim),
        ):
            if bound is None:
                continue
            row = {"method": full["method"], "over": over}
            row |= {str(width): table[i][key] for width, table in found.items()}
            rows.append(row | {"aim": _record.verdict(full[key], bound), "p50": full["p50"]})
    return rows


def columns(widths: list[int]) -> dict[str, tuple[str, str]]:
    """Of a table with these widths."""
    ratios = {str(width): (f"width {width}", ".2f") for width in widths}
    ends = {"aim": ("aim", ""), "p50": (f"p50 at {max(widths)}, ms", ".1f")}
    return {"method": ("method", ""), "over": ("its time over that of", "")} | ratios | ends


def draw(tables: list[_record.Table], widths: list[int]) -> Figure:
    """The ratios against the width: whole lines over products, broken ones over peers."""
    figure = Figure(figsize=(1 + 4 * len(tables), 4.2), layout="constrained")
    axes = figure.subplots(1, len(tables), squeeze=False, sharey=True)[0]
    methods = dict.fromkeys(row["method"] for table in tables for row in table.rows)
    colors = dict(zip(methods, _record.COLORS, strict=False))
    for axis, table in zip(axes, tables, strict=True):
        for row in table.rows:
            to_peer = row["over"] != "its products"
            label = f"{row['method']}, over {row['over']}" if to_peer else row["method"]
            style = "o--" if to_peer else "o-"
            ratios = [row[str(width)] for width in widths]
            axis.plot(widths, ratios, style, color=colors[row["method"]], label=label)
        axis.axhline(1, color=_record.BLACK, linewidth=0.8)
        axis.set(xlabel="width", title=table.title, xscale="log")
        axis.set_xticks(widths, map(str, widths))
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set(ylim=(0, None), ylabel="time of a step over that of its products, or of a peer")
    handles = axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside right center", frameon=False, fontsize=8)
    return figure


def main() -> None:
    """Prints the tables that the arguments ask for."""
    parser = _record.arguments(__doc__, tuple(MODELS))
    add = parser.add_argument
    for name, many in {"widths": "+", "layers": None, "rounds": None}.items():
        add(f"--{name}", type=int, nargs=many, help="in place of the preset's")
    args = parser.parse_args()
    preset = zip(("widths", "layers", "rounds"), PRESETS[args.preset], strict=True)
    settings: dict[str, Any] = {name: getattr(args, name) or value for name, value in preset}
    widths, layers, rounds = sorted(settings["widths"]), settings["layers"], settings["rounds"]
    held = {name: m for name, m in METHODS.items() if m.aim is not None or m.peer_aim is not None}
    tables = []
    for section in args.only:
        found = {}
        for width in widths:
            model = MODELS[section].scaled(width, layers)
            period = rounds + 2  # the next refresh comes after the last round
            found[width] = measure(
                model, width // 4, rounds, float("inf"), with_peers(held), args.seed, period
            )
        note = f"At the largest width: {model}; rank {widths[-1] // 4}."
        tables.append(_record.Table(TITLES[section], columns(widths), rows_of(found), note))
    about = (
        "An optimizer's update of the kernels alone, between refreshes, with donated state: "
        "medians. The programs of a width take turns, in another order every round. The aims are "
        "for the largest width."
    )
    figure = draw(tables, widths)
    _record.write(args, "width", "Steps against width", about, tables, figure, settings)


if __name__ == "__main__":
    main()
