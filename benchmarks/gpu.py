"""A quarter of an hour on a GPU: one queue, which goes on where it was stopped.

    python -m benchmarks gpu --list          # what there is, what is done, minutes
    python -m benchmarks gpu --minutes 12    # in this order, what fits into so long
    python -m benchmarks gpu --preset cpu --lines benchmarks/results/gpu_rehearsal.jsonl  # 1/30

The order: products and refreshes by them, with steps of all methods; LLaMA-60M on 33 million tokens
with each method at some learning rates, then other seeds of the best; 130M; Marin's smallest model
at Marin's rates, with weights on spheres and without; costs of steps, training steps with guards
and without, storages, compiling; layer-wise steps of large models; fine-tuning from prose to code.
`_pretraining.py` describes the training of models, `_products.py` the products. Tokens come from
`runs/corpus.npz` (`python -m benchmarks corpus`).

A measurement is a line of the file `--lines` as soon as it ends. It has a limit of time and runs in
another process, so that one that fails or hangs leaves the reason and costs no other. Minutes are
estimates for an H100, corrected by measurements; the command names the jobs that do not fit at its
end.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from . import _lines, _llama, _products, _record
from ._pretraining import FINETUNED, KEPT, MARIN, RATES, SIZES, Trainer
from .corpus import PLACE

FLAGS = {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"}  # compiles five times as fast
FLAGS["JAX_COMPILATION_CACHE_DIR"] = "runs/gpu/compiled"
FLAGS["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1"
Lines = Mapping[str, Mapping[str, Any]]  # by job
ALL = ("adamw", "muon", "soap", "racs", "alice", "shampoo")
STACKS = (
    *(("products", 120, 768), ("products", 24, 3072)),
    *(("rotations", 120, 768), ("rotations", 24, 3072)),
    *(("roots", 72, 768), ("roots", 24, 3072), ("eigh", 72, 768)),
)
BY_TRITON = (*(("products", 120, 768), ("products", 24, 3072)), ("rotations", 120, 768))
"""Measured with XLA's own kernels too, which split operands for X3 and X6 inside of one product."""
STEP = "step --only gpt2 --plain --rounds 23 --seconds 3 --methods"
TIMED = {  # seconds, and methods whose steps are timed
    "step muon, racs": (35, "muon,racs,asgo,dasgo"),
    "step soap": (45, "soap,eigen_adam,kl_shampoo"),
    "step rotations": (40, "'soap, rotations,eigen_adam, rotations,kl_shampoo, rotations'"),
    "step in X6": (45, "'soap, rotations in X6,soap, rotations in X3,asgo, roots in X6'"),
    "precision": (40, ""),
    "step shampoo": (45, "shampoo,foam,dr_shampoo"),
    "step galore": (40, "galore,fira,alice,apollo"),
    "step sumo": (30, "sumo"),
    "step swan": (45, "swan,osgdm"),
}
ERRORS = "precision --only refreshes,roots,steps"
STEPS = {x: (seconds, f"{STEP} {own}" if own else ERRORS) for x, (seconds, own) in TIMED.items()}
COSTS = {
    "step llama": (150, "step --only llama --plain --rounds 23 --seconds 3"),
    "storages": (150, "step --only gpt2 --rounds 12 --seconds 3 --methods shampoo,asgo,soap"),
    "training": (150, "step --only training --plain --rounds 12 --seconds 5"),
}
LAYERWISE = ("1.3B racs", "1.3B galore 8 bits", "7B racs", "7B galore 8 bits")
SECONDS = {"60M": 55.0, "130M": 45.0, "2M": 40.0}
SECONDS |= {"Marin 130M": 50.0, "Marin 2M": 10.0}  # of a training run
MOST_RATES = 5  # of a grid that grows
WARMING = 60.0  # of compiling a size's programs


class Preset(NamedTuple):
    """Sizes, for a GPU and for two cores."""

    stacks: Sequence[tuple[str, int, int]]  # kind of products, number, order
    trained: Mapping[str, tuple[str, ...]]  # methods by size; rates are those of the first size
    seeds: tuple[int, ...]  # besides 0
    lengths: tuple[int, ...] = ()  # of AdamW's other runs, for its curve
    tuned: int = 0  # steps of fine-tuning
    marin: str = ""  # a size that trains at Marin's rates
    suites: bool = False


TRAINED = {"60M": ALL, "130M": ("adamw", "muon", "soap", "racs")}
FEW = [(kind, 2, 64) for kind, *_ in STACKS[::2]]
PRESETS = {
    "gpu": Preset(STACKS, TRAINED, (1, 2), (500, 2000), 400, "Marin 130M", True),
    "cpu": Preset(FEW, {"2M": ALL}, (1, 2), marin="Marin 2M"),
}


class Job(NamedTuple):
    """A measurement."""

    name: str
    seconds: float  # about, on an H100
    alike: str  # jobs that take about as long
    do: dict[str, Any]  # for the process that measures

    @property
    def programs(self) -> Any:
        """The key of jobs whose programs are compiled together."""
        return [self.do.get(key) for key in ("kind", "size", "steps", "base")]


def tuned(lines: Lines, size: str, method: str) -> tuple[list[float], float]:
    """The learning rates of a method, and the best so far, at first the first of them.

    A best one at an end of the grid proves nothing, so the grid grows there, up to `MOST_RATES`.
    """
    rates = list(RATES[method])
    while True:
        found = {rate: lines.get(f"{size} {method} {rate:g} seed 0") for rate in rates}
        losses = {x: y["loss"] for x, y in found.items() if y and y.get("loss") is not None}
        best = min(losses, key=losses.__getitem__, default=rates[0])
        more = [x for x, end in ((best / 2, min(rates)), (2 * best, max(rates))) if best == end]
        if None in found.values() or not more or len(rates) == MOST_RATES:
            return rates, best
        rates += more


def trained(
    name: str,
    size: str,
    method: str,
    rates: tuple[float, float],  # of matrices, and of others
    seed: int = 0,
    steps: int = 0,
    base: float | None = None,
) -> Job:
    """A run, of the size's length unless it says another, or fine-tuning from AdamW at a rate."""
    rate, adam_rate = rates
    steps = steps or SIZES[size].steps
    do = {"kind": "train", "size": size, "steps": steps, "base": base, "method": method}
    do |= {"rate": rate, "adam_rate": adam_rate, "seed": seed}
    seconds = 15.0 if base else SECONDS[size] * steps / SIZES[size].steps
    return Job(name, seconds, f"{size} {method} {steps} {base}", do)


def training(preset: Preset, lines: Lines) -> Iterator[Job]:
    """Runs from scratch: rates with one seed, other seeds of the best; then the other sizes."""
    first, *others = preset.trained
    grids = {method: tuned(lines, first, method) for method in preset.trained[first]}
    best = {method: rate for method, (_, rate) in grids.items()}

    def job(name: str, size: str, method: str, rate: float, seed: int = 0, steps: int = 0) -> Job:
        return trained(f"{size} {method} {name}", size, method, (rate, best["adamw"]), seed, steps)

    for method, (rates, _) in grids.items():
        for rate in rates:
            yield job(f"{rate:g} seed 0", first, method, rate)
    for seed in preset.seeds:
        for method, rate in best.items():
            yield job(f"best seed {seed}", first, method, rate, seed)
    for steps in preset.lengths:
        yield job(f"best {steps} steps", first, "adamw", best["adamw"], steps=steps)
    for size in others:
        for method in preset.trained[size]:
            yield job("best seed 0", size, method, best[method])


def as_marin(preset: Preset) -> Iterator[Job]:
    """Muon, SOAP, and both on spheres, at rates that are published."""
    size = preset.marin
    for method, rates in MARIN.items() if size else ():
        yield trained(f"{size} {method} {rates[0]:g}", size, method, rates)


def finetuning(preset: Preset, lines: Lines) -> Iterator[Job]:
    """From prose to code."""
    size = next(iter(preset.trained))
    how: dict[str, Any] = {"steps": preset.tuned, "base": tuned(lines, size, "adamw")[1]}
    for method, rates in FINETUNED.items() if preset.tuned else ():
        for rate in rates:
            both = rate, FINETUNED["adamw"][0]
            yield trained(f"{size} fine-tuned {method} {rate:g}", size, method, both, **how)


def plan(preset: Preset, lines: Lines) -> list[Job]:
    """All jobs in their order; rates of other seeds and sizes follow from the lines."""

    def suites(commands: Mapping[str, tuple[float, str]]) -> Iterator[Job]:
        for name, (seconds, command) in commands.items() if preset.suites else ():
            yield Job(name, seconds, name, {"kind": "suite", "command": shlex.split(command)})

    def layerwise(name: str, step: str) -> Job:
        size, _, method = name.partition(" ")
        # A process of its own, whose most memory is the step's.
        do = {"kind": "layerwise", "of": (size, method, step), "size": f"{name} {step}"}
        return Job(f"{step} {name}", 60.0, f"layer-wise {size}", do)

    def products(of: tuple[str, int, int], by: str = "", **how: str) -> Job:
        do = {"kind": "products", "of": of, **how}
        return Job(f"{of[0]} {of[1]} × {of[2]}²{by}", 40.0 if by else 30.0, f"{of[0]}{by}", do)

    stacks = map(products, preset.stacks)
    by_triton = (products(of, " by Triton", size="Triton") for of in BY_TRITON * preset.suites)
    pairs = [(name, step) for name in LAYERWISE for step in ("layerwise", "ordinary")]
    large = (layerwise(*pair) for pair in pairs if preset.suites)
    runs = [*training(preset, lines), *as_marin(preset)]
    rest = [*suites(COSTS), *large, *finetuning(preset, lines)]
    return [*stacks, *by_triton, *suites(STEPS), *runs, *rest]


def estimate(job: Job, jobs: Sequence[Job], lines: Lines) -> float:
    """Seconds, corrected by jobs that are alike, or by all that were measured."""
    done = [x for x in jobs if x.name in lines and "error" not in lines[x.name]]
    ratios = [(x.alike == job.alike, lines[x.name]["took"] / x.seconds) for x in done]
    known = [ratio for alike, ratio in ratios if alike] or [ratio for _, ratio in ratios]
    return job.seconds * (statistics.median(known) if known else 1.0)


trainer = functools.cache(Trainer)  # it keeps compiled programs from job to job


def measured(job: Mapping[str, Any]) -> dict[str, Any]:
    """The measurements of a job, in the process that is for them."""
    if job["kind"] == "suite":  # it has a process of its own, with the whole device
        return suite(job["command"])
    if job["kind"] == "products":
        rows, by = _products.measured(*job["of"]), f" by {job['size']}" if "size" in job else ""
        found = {"rows": [row | {"program": f"{row['program']}{by}"} for row in rows]}
    elif job["kind"] == "layerwise":
        found = _llama.timed(*job["of"])
    else:
        found = trainer().line(job)
    return found | _record.machine()


def suite(command: Sequence[str]) -> dict[str, Any]:
    """The tables of another suite, whose page stays under runs/gpu."""
    folder = KEPT / re.sub(r"\W+", "_", " ".join(command))[:60]
    run = [sys.executable, "-m", "benchmarks", *command, "--preset", "gpu", "--out", str(folder)]
    done = subprocess.run(run, capture_output=True, text=True)
    if done.returncode:
        return {"error": "; ".join(done.stderr.strip().splitlines()[-1:])[:300]}
    record = json.loads((folder / f"{command[0]}.json").read_text())
    tables = [{"title": x["title"], "rows": x["rows"]} for x in record["tables"]]
    return {"tables": tables, "hardware": record["hardware"], "versions": record["versions"]}


def run(path: Path, preset: Preset, minutes: float) -> None:
    """Takes the missing measurements that fit, job after job.

    The process that measures starts anew for another kind of job and after a failure.
    """
    lines, left_out, end = recorded(path), [], time.monotonic() + 60 * minutes
    worker: _lines.Worker | None = None
    kind: Any = None
    warm: list[Any] = []  # what has been compiled in this process
    while True:
        jobs = plan(preset, lines)
        waiting = [job for job in jobs if job.name not in lines and job.name not in left_out]
        if not waiting:
            break
        job, left = waiting[0], end - time.monotonic()
        cold = job.do["kind"] == "train" and job.programs not in warm
        needed = estimate(job, jobs, lines) + WARMING * cold
        if needed > left:
            left_out.append(job.name)
            continue
        if worker is None or kind != job.programs[:2] or not worker.process.is_alive():
            if worker is not None:
                worker.end()
            kind, warm = job.programs[:2], []
            own = {"XLA_FLAGS": ""} if kind[1] == "Triton" else {}
            worker = _lines.Worker(measured, FLAGS | own)
        warm.append(job.programs)
        together = [x.do.get("method") for x in waiting if x.programs == job.programs]
        begin, limit = time.monotonic(), min(3 * needed + 120, left + 30)
        found = worker.ask({**job.do, "waiting": list(dict.fromkeys(together))}, limit)
        if found is None and limit == left + 30:  # the time is over, which is not its fault
            left_out.append(job.name)
            continue
        found = {"error": f"over {limit:.0f} s"} if found is None else found
        took = time.monotonic() - begin - float(found.get("warming_seconds", 0.0))
        lines[job.name] = {"job": job.name, **job.do, "took": round(took, 1), **found}
        _lines.append(path, lines[job.name])
        print(f"{job.name}: {told(lines[job.name])}", flush=True)
    if worker is not None:
        worker.end()
    if left_out:
        print(f"did not fit into {minutes:g} minutes: {'; '.join(left_out)}")


def recorded(path: Path) -> dict[str, Any]:
    """The lines of a file by job."""
    return {line["job"]: line for line in _lines.read(path)}


def told(line: Mapping[str, Any]) -> str:
    """A line in some words."""
    loss = f"loss {line['loss']:.4f}, " if line.get("loss") is not None else ""
    return line.get("error") or f"{loss}{line['took']:.0f} s"


def listed(preset: Preset, lines: Lines) -> str:
    """The queue: minutes of the remaining jobs, and the finished ones."""
    jobs = plan(preset, lines)
    left = {x.name: estimate(x, jobs, lines) / 60 for x in jobs if x.name not in lines}
    rows = [
        [name, f"{left[name]:.1f}", ""] if name in left else [name, "", told(lines[name])]
        for name in (job.name for job in jobs)
    ]
    rows.append(["all that is left", f"{sum(left.values()):.0f}", ""])
    return _record.table(["measurement", "minutes", "done"], rows)


def main() -> None:
    """Runs the command of the arguments."""
    parser = _record.parser_of(__doc__)
    add = parser.add_argument
    add("--preset", choices=tuple(PRESETS), default="gpu", help="sizes (%(default)s)")
    add("--minutes", type=float, default=math.inf, help="what does not fit is left out")
    add("--lines", type=Path, default=_record.FOLDER / "gpu.jsonl", help="(%(default)s)")
    add("--list", action="store_true", help="prints the queue")
    args = parser.parse_args()
    from .pages import write_gpu

    jax.config.update("jax_platforms", "cpu")  # the device is for the process that measures
    if args.list:
        print(listed(PRESETS[args.preset], recorded(args.lines)))
    elif not PLACE.exists():
        parser.error(f"there is no {PLACE}: `python -m benchmarks corpus` makes it")
    else:
        run(args.lines, PRESETS[args.preset], args.minutes)
        write_gpu(args.lines, recorded(args.lines))
