"""The papers' claims as comparisons of suites: the claims stand here, the verdicts come from lines.

A claim says which method is ahead of which others. Differences are those of `_compare.py`, seed by
seed; a claim holds against another method if the difference is on its side and its p-value, by
Holm's correction for all comparisons of the paper's table, is below 0.05. Only the claim itself is
typed by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from .._record import table
from ._compare import CONFIDENCE, Result, curve_of, difference, holm, results, steps_for
from ._plan import Runs
from ._suites import SUITES

LEVEL = 0.01  # differences up to here count as level, whatever the interval


class Claim(NamedTuple):
    """That a method is ahead of others, or level with them; or needs a share of AdamW's steps."""

    claim: str
    where: str  # in the paper
    suites: tuple[str, ...]
    method: str
    others: tuple[str, ...] = ("adamw",)
    level: bool = False
    steps: float | None = None  # how many times its steps AdamW needs, at least
    behind: bool = False  # that the method is behind the others


LANGUAGE = ("recipe-250",)
LENGTHS = ("recipe-250", "recipe-500")
BATCHES = (*LENGTHS, "batch-125")
SIZES = (*LENGTHS, "recipe-1000", "small-500", "large-160", "code-500", "batch-125")
BOTH = ("recipe-250", "vision-2000")
TUNED = ("finetune-250", "classify-250")

CLAIMS: dict[str, tuple[Claim, ...]] = {
    "shampoo": (
        Claim("Shampoo is ahead of its base, AdamW", "Tables 3-6", BOTH, "shampoo"),
        Claim(
            "4-bit Shampoo (CQ+EF) matches 32-bit Shampoo",
            "Tables 3-6",
            ("forms-250",),
            "shampoo_cq",
            ("shampoo",),
            level=True,
        ),
        Claim(
            "4-bit Shampoo (CQ+EF) is ahead of AdamW", "Tables 3-6", ("forms-250",), "shampoo_cq"
        ),
        Claim(
            "Cholesky quantization with error feedback beats vanilla quantization",
            "Table 3",
            ("forms-250",),
            "shampoo_cq",
            ("shampoo_vq",),
        ),
        Claim(
            "VQ is behind the base optimizer on LLaMA",
            "Tables 3-6",
            ("forms-250",),
            "shampoo_vq",
            behind=True,
        ),
    ),
    "racs": (
        Claim(
            "Adam needs more than twice Alice's steps",
            "Table 2",
            LENGTHS,
            "alice",
            steps=2.0,
        ),
        Claim("RACS is ahead of Adam, with the state of SGD", "Table 2", SIZES, "racs"),
        Claim("Alice is ahead of Adam", "Table 2", BATCHES, "alice"),
        Claim(
            "Alice is ahead of GaLore, Fira and Apollo",
            "Table 2",
            LANGUAGE,
            "alice",
            ("galore", "fira", "apollo"),
        ),
        Claim("RACS is ahead of Apollo", "Table 2", LANGUAGE, "racs", ("apollo",)),
        Claim("Fira is ahead of Adam", "Table 2", LANGUAGE, "fira"),
        Claim("Apollo is ahead of Adam", "Table 2", LANGUAGE, "apollo"),
        Claim("GaLore is behind Adam", "Table 2", LANGUAGE, "galore", behind=True),
    ),
    "asgo": (
        Claim(
            "ASGO is ahead of Shampoo, with half the memory",
            "Figure 1",
            BOTH,
            "asgo",
            ("shampoo",),
        ),
        Claim("ASGO and Muon are level", "Figure 1", LENGTHS, "asgo", ("muon",), level=True),
        Claim("ASGO is ahead of AdamW", "Figure 1, Table 1", BOTH, "asgo"),
        Claim("ASGO is behind Muon on GPT-2", "Table 1", LENGTHS, "asgo", ("muon",), behind=True),
        Claim("DASGO is level with AdamW on nanoGPT", "Figure 1", LANGUAGE, "dasgo", level=True),
        Claim("DASGO is far behind AdamW on GPT-2", "Table 1", LANGUAGE, "dasgo", behind=True),
        Claim(
            "ASGO is ahead of Muon and AdamW when fine-tuning",
            "Table 2",
            TUNED,
            "asgo",
            ("muon", "adamw"),
        ),
        Claim(
            "DASGO is ahead of Muon and AdamW when fine-tuning",
            "Table 2",
            TUNED,
            "dasgo",
            ("muon", "adamw"),
        ),
    ),
    "sumo": (
        Claim(
            "SUMO is ahead of GaLore, LoRA and full fine-tuning",
            "Table 2",
            TUNED,
            "sumo",
            ("galore", "lora_8", "lora_16", "adamw"),
        ),
        Claim(
            "SUMO is ahead of GaLore in pretraining, and from 130M on of full-rank Adam",
            "Table 3",
            LANGUAGE,
            "sumo",
            ("galore", "adamw"),
        ),
        Claim("OSGDM is better than Adam", "section 2", LANGUAGE, "osgdm"),
    ),
    "foam": (
        Claim("FOAM is ahead of AdamW", "Tables 3, 6, 7", BOTH, "foam"),
        Claim(
            "FOAM is ahead of stale Shampoo and DR-Shampoo",
            "Tables 3, 6, 7",
            BOTH,
            "foam",
            ("stale_shampoo", "dr_shampoo"),
        ),
        Claim("FOAM is ahead of `shampoo` on AdamW, with p = 4", "", BOTH, "foam", ("shampoo",)),
        Claim("FOAM is ahead of SOAP", "Tables 3, 6, 7", BOTH, "foam", ("soap",)),
    ),
}


def key_of(suite: str, *methods: str) -> str:
    """Of a comparison, whichever of the two methods the claim names first."""
    return " ".join((suite, *sorted(methods)))


def corrected(claims: Iterable[Claim], runs: Runs) -> dict[str, float]:
    """p-values of all comparisons of claims, after Holm's correction."""
    ps = {}
    for claim in claims:
        for suite in claim.suites if claim.steps is None else ():
            found = results(SUITES[suite], runs)
            for other in claim.others:
                pair = [found[name].finals for name in (claim.method, other)]
                if all(len(finals) == len(SUITES[suite].seeds) for finals in pair):
                    d = difference(found[claim.method].losses, found[other].losses)
                    ps[key_of(suite, claim.method, other)] = d.p
    return holm(ps)


def words_of(
    claim: Claim, suite: str, found: Mapping[str, Result], ps: Mapping[str, float]
) -> Iterator[tuple[str, str, bool | None]]:
    """Each other method, the difference to it, and whether the claim holds; `None`: undecided."""
    own = found[claim.method].losses
    for other in claim.others:
        d = difference(own, found[other].losses)
        p = ps[key_of(suite, claim.method, other)]
        told = f"{d.mean:+.3f} [{d.low:+.3f}, {d.high:+.3f}] to {name_of(other)}, p {p:.1g}"
        decided = not p > 1 - CONFIDENCE  # NaN: one of the runs diverged
        if claim.level:
            holds: bool | None = not decided or abs(d.mean) <= LEVEL
        else:
            holds = (d.mean < 0) != claim.behind if decided else None
        yield name_of(other), told, holds


def name_of(method: str) -> str:
    """As pages have it."""
    return "AdamW" if method == "adamw" else f"`{method}`"


def judged(claim: Claim, suite: str, runs: Runs, ps: Mapping[str, float]) -> tuple[str, str]:
    """The measurement, and the verdict."""
    found = results(SUITES[suite], runs)
    needed = (claim.method, *claim.others)
    seeds = SUITES[suite].seeds
    if any(len(found[name].finals) < len(seeds) for name in needed):
        return "", "open: not all runs are there"
    own = float(np.mean(found[claim.method].losses))
    if claim.steps is not None:
        steps, sign = steps_for(own, curve_of(SUITES[suite], runs))
        ratio = steps / SUITES[suite].steps
        agrees = ratio >= claim.steps
        if sign == ">" and not agrees:
            return f"more than {ratio:.2f} times", "open: longer runs of AdamW are missing"
        measured = f"{'more than ' if sign == '>' else ''}{ratio:.2f} times"
        return measured, "agrees" if agrees else "disagrees"
    words = list(words_of(claim, suite, found, ps))
    measured = "; ".join(told for _, told, _ in words)
    verdicts = {holds for _, _, holds in words}
    if verdicts == {True}:
        return measured, "agrees"
    if verdicts == {None}:
        return measured, "undecided: within the noise of seeds"
    kinds = {True: "agrees against", False: "disagrees against", None: "undecided against"}
    if verdicts == {False}:
        return measured, "disagrees"
    parts = [
        f"{kind} {', '.join(other for other, _, holds in words if holds is key)}"
        for key, kind in kinds.items()
        if key in verdicts
    ]
    return measured, "; ".join(parts)


def claims(paper: str, runs: Runs) -> str:
    """The table of a paper."""
    rows, ps = [], corrected(CLAIMS[paper], runs)
    for claim in CLAIMS[paper]:
        for suite in claim.suites:
            measured, verdict = judged(claim, suite, runs, ps)
            rows.append([claim.claim, claim.where, f"`{suite}`", measured, verdict])
    titles = ["claim", "where", "suite", "loss beyond the other's [95 %], p", "verdict"]
    return table(titles, rows).replace("---:", "---")  # all of it is text
