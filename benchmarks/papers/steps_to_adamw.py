"""Steps to the final validation loss of tuned AdamW, for every optimizer of the library.

    python -m benchmarks.papers.steps_to_adamw        # about twenty minutes on two CPU cores

Gong et al., arXiv:2502.07752, claim for Alice on LLaMA that it needs less than half of Adam's steps
(Table 2, "speed-up in steps"). Here every method is tuned as AdamW is, on the model of
`_small_lm.py`, and the step at which its validation loss is down to AdamW's last one is read off
its curve, seed by seed, with AdamW's run of the same seed. As in the paper the schedule is that of
the whole run, whose learning rate is still high where a fast method gets there. Evaluations are a
few steps apart, with a straight line between them.

Runs that have finished are kept under runs/small_lm and are not repeated.
"""

from __future__ import annotations

import math

import numpy as np
from matplotlib.figure import Figure

from . import _report
from ._small_lm import (
    EVAL_EVERY,
    METHODS,
    SEEDS,
    Found,
    Study,
    draw_curves,
    spread,
    styles,
    tuning_table,
)

CLAIM = 2.0  # for Alice


def reached(found: dict[str, Found]) -> dict[str, list[float]]:
    """For each method the step at which it is down to AdamW's final loss, by seed."""
    targets = found["AdamW"].losses
    return {
        name: [run.steps_to(target) for run, target in zip(x.runs, targets, strict=True)]
        for name, x in found.items()
    }


def ratios_of(steps: dict[str, list[float]], all_steps: int) -> dict[str, np.ndarray]:
    """AdamW's number of steps over these; 0 where they never get there."""
    return {name: all_steps / np.array(values) for name, values in steps.items()}


def comparison(found: dict[str, Found], all_steps: int) -> str:
    """One line for each method, the fastest first."""
    steps = reached(found)
    ratios = ratios_of(steps, all_steps)
    adamw = found["AdamW"].losses
    rows = []
    for name, x in sorted(found.items(), key=lambda item: -ratios[item[0]].mean()):
        got = ratios[name][ratios[name] > 0]
        ratio = spread(got, ".2f") if got.size else "never"
        if 0 < got.size < len(SEEDS):
            ratio += f", {got.size} of {len(SEEDS)} seeds"
        counts = [f"{s:.0f}" if math.isfinite(s) else "never" for s in steps[name]]
        rows.append(
            [
                name,
                f"{x.rate:g}",
                f"{len(x.tuning)}",
                spread(x.losses, ".3f"),
                spread(x.losses - adamw, "+.3f"),
                ", ".join(counts),
                ratio,
                f"{x.state_bytes / 1e6:.2f}",
            ]
        )
    titles = [
        "method",
        "learning rate",
        "rates tried",
        "validation loss, mean (range)",
        "beyond AdamW's, mean (range)",
        f"steps to AdamW's last loss, seeds {', '.join(map(str, SEEDS))}",
        f"AdamW's {all_steps} over these",
        "optimizer state, MB",
    ]
    return _report.table(titles, rows)


def draw(found: dict[str, Found], all_steps: int) -> Figure:
    """Curves, and ratios by seed."""
    figure = Figure(figsize=(14, 7.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.2, 1))
    look = styles(found)
    draw_curves(left, found, look, shade=False)
    left.axhline(found["AdamW"].losses.mean(), color="gray", lw=0.8)
    left.set(title=f"Mean of seeds {', '.join(map(str, SEEDS))} at the best learning rate")

    ratios = ratios_of(reached(found), all_steps)
    names = sorted(ratios, key=lambda name: ratios[name].mean())
    for i, name in enumerate(names):
        values, (color, _) = ratios[name], look[name]
        got = values[values > 0]
        right.plot(got, [i] * got.size, "o", color=color, alpha=0.7)
        if got.size == len(SEEDS):
            right.plot([got.mean()] * 2, [i - 0.3, i + 0.3], color=color)
        if got.size < len(SEEDS):
            text = f"never in {len(SEEDS) - got.size} of {len(SEEDS)} seeds"
            place = (0.02, i) if not got.size else (0.98, i)
            right.annotate(
                text,
                place,
                xycoords=("axes fraction", "data"),
                ha="left" if not got.size else "right",
                va="center",
                fontsize="small",
            )
    right.axvline(1, color="gray", lw=0.8)
    right.axvline(CLAIM, color="gray", lw=0.8, linestyle="--")
    most = max(CLAIM, *(values.max() for values in ratios.values()))
    right.set(
        title="dashed: the paper's claim for Alice; seeds and their mean",
        xlabel=f"AdamW's {all_steps} steps over the steps to its last validation loss",
        xlim=(0, 1.1 * most),
        ylim=(-0.6, len(names) - 0.4),
    )
    right.set_yticks(range(len(names)), names)
    right.grid(alpha=0.3)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=6, title="method, learning rate"
    )
    return figure


def main() -> None:
    """Runs everything and writes table, numbers and figure."""
    args = _report.arguments(__doc__)
    study = Study(args.seed, len(METHODS))
    found = study.find_all(METHODS)
    study.bar.close()
    all_steps = study.task.config.steps
    body = "\n\n".join(
        [
            study.head(),
            f"AdamW's last loss is that of its run with the same seed; losses are taken every "
            f"{EVAL_EVERY} steps, with a straight line between them. The paper's claim for Alice "
            f"on LLaMA is a ratio above {CLAIM:g}.",
            comparison(found, all_steps),
            f"The tuning: validation loss by learning rate, seed {args.seed}.",
            tuning_table(found),
            "What was called: "
            + "; ".join(f"{name}: `{method.call}`" for name, method in METHODS.items())
            + ".",
        ]
    )
    results = {"reached": reached(found), "found": {k: x.asdict() for k, x in found.items()}}
    _report.write(
        args,
        "steps_to_adamw",
        "Steps to the final validation loss of tuned AdamW",
        body,
        study.settings(METHODS),
        results,
        draw(found, all_steps),
    )


if __name__ == "__main__":
    main()
