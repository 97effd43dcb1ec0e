"""Training runs at sizes and with tuning that count: the protocol of `docs/evidence.md`.

    python -m benchmarks evidence run                # goes on where it was stopped
    python -m benchmarks evidence run --suites recipe-250 --most 20
    python -m benchmarks evidence status             # what is there and what is left
    python -m benchmarks evidence tables             # pages and pictures, from the lines
    python -m benchmarks evidence calls              # those that pages print, as they stand
    python -m benchmarks evidence try --suites recipe-250 --method asgo --values '{"eps": 1e-10}'
    python -m benchmarks evidence try --suites recipe-250 --method 'curvax.soap(0.01)' --seed 1

`run` needs hours to days and may be killed at any moment. It uses one thread if these are set:
`OPENBLAS_NUM_THREADS=1 XLA_FLAGS="--xla_cpu_multi_thread_eigen=false
intra_op_parallelism_threads=1"`; with `--workers` that many processes do. Every finished run is one
line in `<out>/<suite>.jsonl`. `try` records nothing: it prints the final loss of one more run, of a
call, or of the best point of a method with other values for some of its numbers or arguments.
"""

from __future__ import annotations

from pathlib import Path

import optax

import curvax

from .. import _record
from . import _calls
from ._methods import METHODS
from ._plan import Lines, Request, Runs, best_in, read, status
from ._suites import SUITES, TUNING_SEED
from ._sweep import Runner, sweep
from ._texts import read as read_text

FOLDER = _record.FOLDER / "evidence"


def tried(suite: str, method: str, values: str, seed: int, runs: Runs) -> str:
    """The result of a run of a call, or at the best point of a method with some values changed."""
    if "(" in method:
        request = _calls.request_of(suite, method, seed, runs)
    elif (best := best_in(suite, method, runs)) is not None:
        point = {**best, **eval(values, {"curvax": curvax, "optax": optax})}
        request = Request(suite, method, point, seed)
    else:
        raise SystemExit(f"the tuning of {method} in {suite} has not ended")
    line = Runner().line(request)
    return f"{line['loss']:.4f} with {request.values}, seed {seed}"


def main() -> None:
    """Runs the command of the arguments."""
    parser = _record.parser_of(__doc__)
    add = parser.add_argument
    add("action", choices=("run", "status", "tables", "try", "calls"), help="what to do")
    help = f"some of {', '.join(SUITES)}, separated by commas (all)"
    add("--suites", type=_record.names(tuple(SUITES)), help=help)
    add("--out", type=Path, default=FOLDER, help="where the lines are (%(default)s)")
    add("--most", type=int, help="runs after which to stop")
    add("--elsewhere", action="store_true", help="of `calls`: not on the suite's text but this one")
    add("--workers", type=int, default=1, help="processes that train (%(default)s)")
    add("--method", default="adamw", help="of `try`, or a call (%(default)s)")
    add("--values", default="{}", help="of `try`: numbers and values of a method, by name")
    add("--seed", type=int, default=TUNING_SEED, help="of `try` (%(default)s)")
    args = parser.parse_args()
    if "(" not in args.method and args.method not in METHODS:
        parser.error(f"{args.method} is none of {', '.join(METHODS)}, nor a call")
    if "(" in args.method and args.values != "{}":
        parser.error("--values goes with the name of a method: write a call's into the call")
    suites = [SUITES[name] for name in args.suites or SUITES]
    if args.action == "run":
        sweep(suites, Lines(args.out), args.most, args.workers)
    elif args.action == "calls":
        text = read_text("prose").digest if args.elsewhere else None
        _calls.run(suites, Lines(args.out), args.most, text)
        _calls.drawn("recipe-250", read(args.out)).savefig(args.out / "calls.png", dpi=120)
    elif args.action == "status":
        print(status(suites, read(args.out)))
    elif args.action == "try":
        for suite in suites:
            print(tried(suite.name, args.method, args.values, args.seed, read(args.out)))
    else:
        from ..pages import write_evidence

        write_evidence(args.out, suites, read(args.out))
