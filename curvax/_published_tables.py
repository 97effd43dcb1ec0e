"""The tables of the five papers, for `published.RUNS`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from . import _published_calls as make
from ._published_calls import Run, Schedule
from .optimizers import (
    dasgo,
    dr_shampoo,
    fira,
    foam,
    galore,
    muon,
    racs,
    scale_by_dr_shampoo,
    scale_by_foam,
    sumo,
)
from .transforms.matrices._matrix_rule import MatrixRule

RUNS: dict[str, Run] = {}
"""The runs of the five papers, by method and task."""


def _li() -> None:
    """4-bit Shampoo, section C.3."""
    adamw = {"b1": 0.9, "b2": 0.999, "eps": 1e-8}
    cnn = functools.partial(make.sgd, momentum=0.9, weight_decay=5e-4)
    resnet = functools.partial(make.sgd, momentum=0.9, weight_decay=1e-4)
    vit = functools.partial(make.adamw, **adamw, weight_decay=5e-2)
    llama = functools.partial(make.adamw, **adamw, weight_decay=0.0)
    last = "The last learning rate: 0 here."
    periods = "T1 and T2: those of ResNet-50 here. "
    warmup = "The schedule of language models: a warm-up of 2.5 % here. "
    # task, base, T1 and T2, batch, epochs (steps of LLaMA), those of the base alone
    rows = (
        ("cifar100-cnn", cnn, (100, 500), 128, 200, 300, ""),
        ("tiny-imagenet-cnn", cnn, (100, 500), 128, 100, 150, ""),
        ("cifar100-vit", vit, (100, 500), 128, 100, 150, ""),
        ("tiny-imagenet-vit", vit, (100, 500), 128, 100, 150, ""),
        ("imagenet-resnet50", resnet, (200, 1000), 256, 100, 120, ""),
        ("imagenet-vit-base", vit, (200, 1000), 512, 120, 150, periods),
        ("c4-llama-130M", llama, (200, 200), 512, 10_000, 10_000, warmup),
        ("c4-llama-350M", llama, (200, 200), 512, 10_000, 10_000, warmup),
        ("c4-llama-1B", llama, (200, 200), 512, 2_000, 2_000, warmup),
    )
    for task, base, (t1, t2), batch, long, alone, left in rows:
        periods = {"statistics_every": t1, "refresh": t2}
        given = {"base": base, **periods, "b2": 0.95, "eps": 1e-6, "root": 4}
        given |= {"method": "coupled_newton"}
        made: list[tuple[str, Any, Any, int]] = [
            (f"shampoo{form and f'-{form}'}", make.shampoo_on, {**given, "storage": form}, long)
            for form in ("", "vq", "cq", "cq-ef")
        ]
        made.append(("sgd" if base.func is make.sgd else "adamw", base.func, base.keywords, alone))
        for name, maker, numbers, length in made:
            RUNS[f"{name}/{task}"] = Run(
                source="Li et al., section C.3",
                make=maker,
                numbers=numbers,
                learning_rate=0.1 if base.func is make.sgd else 1e-3,
                schedule=Schedule(0.025 if base is llama else 5 / length, 0.0),
                task=f"batch {batch}" + ("" if base is llama else f", {length} epochs"),
                steps=length if base is llama else None,
                open=left + last,
            )


def _gong() -> None:
    """RACS and Alice, Tables 7 to 11 and section F.3."""
    schedule = Schedule(0.1, 0.1)
    shared: dict[str, Any] = {"schedule": schedule}
    shared |= {"open": "The learning rate of Adam's parameters: that of the matrices here."}
    sizes = {"60M": 10_000, "130M": 20_000, "350M": 60_000, "1.3B": 100_000}
    narrow = {"dtype": "bfloat16"}
    for size, steps in sizes.items():
        large = size == "1.3B"
        rank = {"60M": 128, "1.3B": 512}.get(size, 256)
        scale = 0.25 if large else 0.3
        projected = {"rank": rank, "scale": scale, "refresh": 200, **narrow}
        own = {"leading": 160 if large else 40, "compensation_scale": 0.2 if large else 0.4}
        own |= {**projected, "b1": 0.9, "b2": 0.9, "b3": 0.999}
        rate = 0.01 if large else 0.02
        rows: dict[str, tuple[Any, dict[str, Any], float, str]] = {
            "galore": (galore, projected, rate, "Table 7"),
            "fira": (fira, projected, rate, "Table 7"),
            "adam": (make.adamw, {"b1": 0.9, "b2": 0.999}, 7e-4 if large else 1e-3, "Table 8"),
            "racs": (racs, {"b2": 0.9, "scale": 0.02 if large else 0.05}, 0.02, "Table 9"),
            "alice": (make.alice_of, own, 0.02, "Table 11"),
            "alice-0": (
                make.alice_of,
                {**own, "b3": None},
                0.02,
                "Table 11",
            ),
        }
        for name, (maker, numbers, peak, table) in rows.items():
            RUNS[f"{name}/llama-{size}"] = Run(
                source=f"Gong et al., {table}, Table 10, section F.2",
                make=maker,
                numbers=numbers,
                learning_rate=peak,
                steps=steps,
                task="512 sequences of 256 tokens",
                **{**shared, **({"open": ""} if name == "adam" else {})},
            )
    rule = {"matrices": MatrixRule(output_layer="auto")}
    of_alice = RUNS["alice/llama-1.3B"].numbers
    larger = {
        "alice": (make.alice_of, {**of_alice, "scale": 0.3, "compensation_scale": 0.2, **rule}),
        "racs": (racs, RUNS["racs/llama-1.3B"].numbers),
    }
    for name, (maker, numbers) in larger.items():
        RUNS[f"{name}/llama-1B-against-7B"] = Run(
            source="Gong et al., section F.3, Table 4",
            make=maker,
            numbers=numbers,
            learning_rate=0.02,
            steps=150_000,
            task="512 sequences",
            **shared,
        )


def _an() -> None:
    """ASGO, Tables 3 to 5."""
    variant = "Nesterov momentum and scale of Muon: the defaults of `muon` here."
    cycle = (
        "OneCycle: from 1/25 of the peak, to 1/250,000, as in torch; the warm-up is linear here."
    )
    decay = "Weight decay: 0 here; 0.1 in the authors' code."
    shape = {"refresh": 15}
    # learning rate, share of the warm-up, numbers, open values
    nano = {
        "muon": (muon, 0.00349, 0.3, {"b1": 0.9881}, variant),
        "adamw": (make.adamw, 0.0045, 0.2, {"b1": 0.9332, "b2": 0.9528}, "Epsilon: 1e-8 here."),
        "dasgo": (dasgo, 0.06, 0.2, {"b1": 0.9584, "b2": 0.9435}, "Epsilon: 1e-6 here."),
        "asgo": (
            make.exact_asgo,
            0.0147,
            0.3,
            {"b1": 0.9541, "b2": 0.8487, **shape},
            "Epsilon: 1e-6 here.",
        ),
        "shampoo": (
            make.warmed_shampoo,
            0.00593,
            0.3,
            {"b1": 0.9402, "b2": 0.976, "root": 4, "warmup_steps": 128, **shape},
            "Grafting: none here. Epsilon: 1e-6, relative, here.",
        ),
    }
    for name, (maker, rate, warmup, numbers, left) in nano.items():
        idle = 128 if name == "shampoo" else 0
        RUNS[f"{name}/nanogpt"] = Run(
            source="An et al., Table 3, section C.1",
            make=maker,
            numbers=numbers,
            learning_rate=rate,
            schedule=Schedule(warmup, 4e-6, start=0.04, idle=idle),
            steps=20 * 128,
            task="Shakespeare's characters, 128 sequences of 256, 20 epochs",
            open=f"{left} {cycle}",
        )
    gpt2 = {
        "muon": (muon, 0.01, {"b1": 0.9}, (5e-4, 5e-4), f"{variant} {decay}"),
        "adamw": (make.adamw, 0.005, {"b1": 0.9, "b2": 0.99, "eps": 1e-6}, (5e-5, 1e-4), decay),
        "dasgo": (dasgo, 0.01, {"b1": 0.9, "b2": 0.99, "eps": 1e-6}, (1e-3, 1e-3), decay),
        "asgo": (
            make.exact_asgo,
            0.1,
            {"b1": 0.9, "b2": 0.95, "eps": 1e-6, "refresh": 1},
            (1e-3, 1e-3),
            decay,
        ),
    }
    for name, (maker, rate, numbers, tuned, left) in gpt2.items():
        RUNS[f"{name}/gpt2-openwebtext"] = Run(
            source="An et al., Table 4, section C.2",
            make=maker,
            numbers=numbers,
            learning_rate=rate,
            schedule=Schedule(0.2, 1e-5 / rate),
            steps=1000,
            task="32 sequences of 512 on each of 4 GPUs, 8 accumulated",
            open=left,
        )
        for objective, peak in zip(("clm", "fim"), tuned, strict=True):
            RUNS[f"{name}/gpt2-large-{objective}"] = Run(
                source="An et al., Table 5, section C.3",
                make=maker,
                numbers=numbers,
                learning_rate=peak,
                schedule=Schedule(0.0, 0.0),
                task="WikiText-2, 16 sequences of 128, 2 epochs",
                open=left,
            )


def _refael() -> None:
    """SUMO, Tables 3, 7 and 8."""
    left = "The moment's decay rate, the period and the schedule: 0.95, 200 and a cosine here."
    tasks = ("mnli", "sst2", "mrpc", "cola", "qnli", "qqp", "rte", "stsb")
    rates = {
        4: (1e-5, 1e-5, 3e-5, 3e-5, 1e-5, 1e-5, 1e-5, 1e-5),
        8: (1e-5, 2e-5, 2e-5, 1e-5, 1e-5, 2e-5, 2e-5, 3e-5),
    }
    for rank, scale, table in ((4, 4.0, 7), (8, 2.0, 8)):
        for task, rate in zip(tasks, rates[rank], strict=True):
            RUNS[f"sumo/roberta-{task}-r{rank}"] = Run(
                source=f"Refael et al., Table {table}",
                make=sumo,
                numbers={"rank": rank, "scale": scale},
                learning_rate=rate,
                schedule=Schedule(0.0, 0.0),
                task=f"{32 if task == 'cola' else 16} sequences of up to 512, 30 epochs",
                open=left,
            )
    for size, rank in {"60M": 128, "130M": 256, "350M": 256, "1B": 512}.items():
        tokens = {"60M": 1.1, "130M": 2.2, "350M": 6.4, "1B": 13.1}[size]
        RUNS[f"sumo/llama-{size}"] = Run(
            source="Refael et al., Table 3",
            make=sumo,
            numbers={"rank": rank},
            learning_rate=None,
            schedule=Schedule(0.0, 0.0),
            task=f"C4, {tokens} billion tokens",
            open=f"The learning rate, the scale (1 here) and the batch. {left}",
        )


def _nam() -> None:
    """FOAM, Tables 2, 3, 6 and 7, and the authors' code."""
    images = {"b1": 0.95, "b2": 0.995, "eps": 1e-9}
    text = {"b1": 0.95, "b2": 0.99, "eps": 1e-12}
    last = "The last learning rate: 0 here. "
    vit = "The learning rate among 1.75, 2, 2.2 and 2.35e-3: that of the authors' code here. "
    # learning rate, f, f of stale Shampoo, τ, by name ε_max
    tasks = {
        "vit-imagenet": (
            2e-3,
            {**images, "weight_decay": 4.2e-4},
            (20, 20, 0.75, {"": 3e-7}),
            ("Table 3", "batch 1024, 90 epochs", vit),
        ),
        "conformer-librispeech": (
            None,
            {**images, "weight_decay": 5e-4},
            (50, 50, 0.4, {"": 3e-7, "-section-7": 1e-7}),
            ("Table 6", "batch 1024, 90 epochs", "Which of 1.75, 2 and 2.25e-3 is the rate. "),
        ),
        "gpt2-wikitext103": (
            None,
            {**text, "weight_decay": 1e-2},
            (75, 100, 0.4, {"": 1e-10, "-2e-10": 2e-10, "-3e-10": 3e-10}),
            ("Table 7", "batch 512, 30 epochs", "Which of 1, 3.5 and 6e-3 is the rate. "),
        ),
    }
    for task, (rate, numbers, (f, stale, threshold, damping), (table, size, left)) in tasks.items():
        own = {**numbers, "check_every": f, "threshold": threshold}
        rows = {
            "adamw": (make.adamw, numbers),
            "stale-shampoo": (make.stale_shampoo, {**numbers, "check_every": stale}),
            "dr-shampoo": (make.grafted(dr_shampoo), own),
            "soap": (make.soap_with_adamw, {**numbers, "check_every": f}),
        }
        for name, most in damping.items():
            rows[f"foam{name}"] = (make.grafted(foam), {**own, "max_damping": most})
        for name, (maker, given) in rows.items():
            RUNS[f"{name}/{task}"] = Run(
                source=f"Nam and Ahn, Table 2, {table}",
                make=maker,
                numbers=given,
                learning_rate=rate,
                schedule=Schedule(0.05, 0.0),
                task=size,
                open=(left + last).strip(),
            )
    directions = {
        "stale-shampoo": make.stale_direction,
        "dr-shampoo": scale_by_dr_shampoo,
        "foam": scale_by_foam,
    }
    for name, direction in directions.items():
        printed = RUNS[f"{name}/vit-imagenet"]
        RUNS[f"{name}-code/vit-imagenet"] = dataclasses.replace(
            printed,
            source="the authors' code (REAL-KENTECH/FOAM, configs/vit/paper)",
            make=make.as_code(direction),
            numbers={**printed.numbers, "start": 20, "block_size": 1024},
            open="",
        )


for _tables in (_li, _gong, _an, _refael, _nam):
    _tables()
