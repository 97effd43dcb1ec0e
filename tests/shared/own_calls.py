"""How much of the library one traced `update` runs: `python -m tests.shared.own_calls`.

It prints the number of functions (without lambdas and generator expressions), of their files, and
of calls on the stack where it is deepest, and these calls.
"""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import curvax

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def is_ours(file: str) -> bool:
    return bool({ROOT / "optimizers", ROOT / "transforms"} & {*Path(file).resolve().parents})


def measure(optimizer, params) -> str:
    functions, stack, deepest = set(), [], []
    state = optimizer.init(params)

    def hook(frame, event, _) -> None:
        code = frame.f_code
        if event == "call" and is_ours(code.co_filename):
            stack.append(code)
            functions.add(code)
            deepest[:] = max(deepest, stack, key=len)
        elif event == "return" and is_ours(code.co_filename):
            stack.pop()

    sys.setprofile(hook)
    try:
        jax.make_jaxpr(optimizer.update)(params, state, params)
    finally:
        sys.setprofile(None)
    named = {code for code in functions if not code.co_name.startswith("<")}
    files = {code.co_filename for code in named}
    names = " > ".join(code.co_qualname.replace(".<locals>", "") for code in deepest)
    return f"{len(named)} functions of {len(files)} files, {len(deepest)} deep\n  {names}"


if __name__ == "__main__":
    shapes = {"a": (32, 64), "b": (32, 64), "c": (64, 32), "d": (32, 32)}
    params = {name: {"kernel": jnp.ones(shape)} for name, shape in shapes.items()}
    params["a"]["bias"] = jnp.ones(64)
    mesh = jax.make_mesh((jax.device_count(),), ("devices",))
    packed = curvax.soap(3e-3, storage=curvax.packed(), mesh=mesh)
    print("muon:", measure(curvax.muon(0.02), params))
    print("soap:", measure(curvax.soap(3e-3), params))
    print("soap with packed storage on a mesh:", measure(packed, params))
