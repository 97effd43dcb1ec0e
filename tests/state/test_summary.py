"""Looking into optimizers: what becomes of each parameter, and the bytes of the state."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import curvax
from tests.cases import every_optimizer
from tests.cells import cells
from tests.helpers import assert_close, gradients_like, run, states_by_parameter, zeros_like
from tests.registry import REGISTRY, Row
from tests.shared.reports import table

SPEC = {"layers/kernel": curvax.MatrixAxes(rows=1, columns=2)}
PARAMS = {
    "layers": {"kernel": np.ones((3, 4, 6), np.float32)},
    "up": {"kernel": np.ones((4, 6), np.float32), "bias": np.ones(6, np.float32)},
    "down": {"kernel": np.ones((6, 4), np.float32)},
}
NAMES = ("down/kernel", "layers/kernel", "up/bias", "up/kernel")

WRAPPERS: dict[str, Callable[[Row], Any]] = {
    "plain": lambda row: row.make(weight_dimension_numbers=SPEC),
    "chain": lambda row: optax.chain(optax.clip_by_global_norm(1.0), WRAPPERS["plain"](row)),
    "inject_hyperparams": lambda row: optax.inject_hyperparams(
        row.optimizer, static_args=row.static
    )(0.1, weight_dimension_numbers=SPEC, **row.settings),
    "MultiSteps": lambda row: optax.MultiSteps(WRAPPERS["plain"](row), 2),
    "apply_if_finite": lambda row: optax.apply_if_finite(WRAPPERS["plain"](row), 3),
}


def actual_bytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def tables(summary: str) -> list[dict[str, list[str]]]:
    """The cells of the two tables by their first cell: parameters, and parts of the state."""
    blocks = summary.replace("*", "").split("\n\n")
    found = [table(block) for block in blocks]
    lines = [len(block.splitlines()) - 2 for block in blocks]
    assert [len(rows) for rows in found] == lines and len(found) == 2, summary
    return [{name: [*cells.values()] for name, cells in rows.items()} for rows in found]


def number(cell: str) -> int:
    return int(cell.replace(",", ""))


@pytest.mark.parametrize(("row", "wrapper"), cells(REGISTRY, WRAPPERS, of=6))
def test_bytes_add_up_and_entries_are_their_share(row: Row, wrapper: str) -> None:
    optimizer = WRAPPERS[wrapper](row)
    numbers, shapes = itertools.count(1), jax.eval_shape(optimizer.init, PARAMS)
    state = jax.tree.map(lambda x: np.full(x.shape, next(numbers) % 100, x.dtype), shapes)
    total = curvax.state_bytes(optimizer, PARAMS)
    assert total == actual_bytes(state)
    parameters, parts = tables(curvax.summarize(optimizer, PARAMS))
    assert number(parameters.pop("total")[-1]) == total
    assert sum(number(line[-1]) for line in parameters.values()) == total
    assert sum(number(line[-1]) for line in parts.values()) == total
    assert number(parameters.pop("shared")[-1]) < 200  # counters and numbers
    assert tuple(sorted(parameters)) == NAMES

    # `state_of` and `summarize` agree, and the entries are those of the state.
    found = states_by_parameter(optimizer, PARAMS, state)
    assert sorted(found) == list(NAMES)
    one = NAMES[sum(map(ord, row.name + wrapper)) % len(NAMES)]
    assert_close(curvax.state_of(optimizer, PARAMS, state, one), found[one], factor=0)
    for name, entries in found.items():
        assert actual_bytes(entries) == number(parameters[name][-1]), name
        fields = {part for place in entries for part in place.split("/")}
        if name == "up/bias" and not row.everything:
            assert {"mu", "nu"} <= fields
        else:
            matrices = 3 if name == "layers/kernel" else 1
            # A momentum behind the matrices is that of the parameter, not a matrix's.
            own_fields = row.state_fields - (row.fields if row.after_the_matrices else set())
            own = {p: x for p, x in entries.items() if own_fields & set(p.split("/"))}
            assert row.state_fields <= fields
            if wrapper != "MultiSteps":  # which keeps whole gradients too
                assert {x.shape[0] for x in own.values()} == ({matrices} if own else set()), name


@every_optimizer
def test_treatments_are_shown(row: Row) -> None:
    wide = tall = ""
    if row.ranked:
        sides = ("right", "left") if row.side(row.settings) == "larger" else ("left", "right")
        switched = row.settings.get("switching")
        stay = f", leading {switched.leading}" if switched else ""
        wide, tall = (f"; rank {row.settings['rank']} on the {side}{stay}" for side in sides)
    expected = {
        "down/kernel": ["6×4 float32", f"1 matrix 6×4 in stack 6x4{tall}"],
        "layers/kernel": ["3×4×6 float32", f"3 matrices 4×6 in stack 4x6{wide}"],
        "up/kernel": ["4×6 float32", f"1 matrix 4×6 in stack 4x6{wide}"],
        "up/bias": [
            "6 float32",
            "1 matrix 1×6 in stack 1x6" if row.everything else "not a matrix: vector",
        ],
    }
    parameters, _ = tables(curvax.summarize(WRAPPERS["plain"](row), jax.eval_shape(lambda: PARAMS)))
    assert {name: parameters[name][:2] for name in NAMES} == expected


def test_blocks_heads_and_own_entries_are_shown() -> None:
    params = {
        "query": {"kernel": jnp.ones((8, 2, 4)), "bias": jnp.ones((2, 4))},
        "mlp": {"kernel": jnp.ones((10, 7))},
        "embed": {"embedding": jnp.ones((9, 4))},
    }
    optimizer = curvax.asgo(
        0.1,
        matrices=curvax.MatrixRule(matrices=None, block_size=4, stack=False),
        weight_dimension_numbers={"query/kernel": curvax.MatrixAxes(0, (1, 2), column_heads=2)},
    )
    parameters, _ = tables(curvax.summarize(optimizer, params))
    shown = {name: cells[1] for name, cells in parameters.items() if len(cells) > 1}
    assert shown["mlp/kernel"] == "6 matrices 4×4 (3×2 tiles) in an entry of its own"
    assert shown["query/kernel"] == "4 matrices 4×4 (2×2 tiles) in an entry of its own"
    assert shown["query/bias"] == "not a matrix: bias of query"
    assert shown["embed/embedding"] == "not a matrix: embedding"


def test_entries_are_slices_of_the_stack() -> None:
    params = {f"{name}/kernel": jnp.ones((4, 6)) for name in "abc"}
    muon, gradients = curvax.muon(0.1, b1=0.0, nesterov=False), gradients_like(params, 1)
    for optimizer in (muon, optax.chain(optax.scale(1.0), optax.apply_if_finite(muon, 3))):
        _, (state,) = run(optimizer, gradients, params)
        for name, gradient in gradients[0].items():
            *counters, (place, momentum) = curvax.state_of(optimizer, params, state, name).items()
            ends = [f"4x6/{counter}" for counter in ("skipped", "restarted", "damaged")]
            assert all(x.endswith(end) for (x, _), end in zip(counters, ends, strict=True))
            assert place.endswith("4x6/inner/0/0/mu")
            assert_close(momentum[0], gradient, factor=1)


def test_a_label_may_stand_for_several_parameters() -> None:
    """As in `optax.partition`: the state then has one hole in place of all of them."""
    few = {"down": "own", "layers": "own", "up": "adam"}
    each = {top: jax.tree.map(lambda _, top=top: few[top], PARAMS[top]) for top in PARAMS}
    found = []
    for labels in (few, each):
        parts = {"own": curvax.soap(0.1, weight_dimension_numbers=SPEC), "adam": optax.adamw(0.1)}
        optimizer = optax.partition(parts, labels)
        state = zeros_like(jax.eval_shape(optimizer.init, PARAMS))
        entries = curvax.state_of(optimizer, PARAMS, state, "up/kernel")
        assert [place.rpartition("up")[0][-3:] for place in entries] == ["mu/", "nu/"]
        tools = (curvax.summarize, curvax.describe_state)
        found.append([tool(optimizer, PARAMS) for tool in tools])
    assert found[0] == found[1]


MUON = curvax.muon(0.1)


@pytest.mark.parametrize(
    "params",
    [
        {"a": {"value": jnp.ones((4, 4))}, "b": jnp.ones(4)},
        {"attention": {"value": {"kernel": jnp.ones((4, 4)), "bias": jnp.ones(4)}}},
        {"count": jnp.ones(3), "mu": jnp.ones((4, 4)), "nu": jnp.ones(2)},
        {"kernel": jnp.ones((4, 4)), "a": {"kernel": jnp.ones((4, 4)), "b": jnp.ones(2)}},
        (jnp.ones((4, 4)), jnp.ones(3)),
        jnp.ones((4, 4)),
    ],
    ids=["leaf value", "node value", "names of fields", "one path ends another", "tuple", "array"],
)
@pytest.mark.parametrize("optimizer", [MUON, optax.adam(0.1)], ids=["muon", "adam"])
def test_names_do_not_confuse_entries(optimizer: Any, params: Any) -> None:
    """A parameter owns its moments, whatever its name; of counters it owns `skipped`."""
    parameters, _ = tables(curvax.summarize(optimizer, params))
    shared = number(parameters.pop("shared")[-1])
    counters = [x for x in jax.tree.leaves(optimizer.init(params)) if x.shape == ()]
    assert shared == 4 * len(counters)
    parameters.pop("total")
    leaves = jax.tree.leaves(params)
    assert len(parameters) == len(leaves)
    moments = [1 if "matrix" in c[1][:8] else 2 for c in parameters.values()]
    counted = [(1, 3)[k == 1] if optimizer is MUON else 0 for k in moments]  # by the guards
    sizes = [
        number(line[-1]) // 4 - own for line, own in zip(parameters.values(), counted, strict=True)
    ]
    assert sizes == [k * leaf.size for k, leaf in zip(moments, leaves, strict=True)]


@every_optimizer
def test_bytes_are_those_of_the_formulas_and_of_the_state(row: Row) -> None:
    """The formulas of the registry, and all that is not shared among them; nothing is allocated."""
    matrices = {"query/kernel": (32, 32), "up/kernel": (32, 48), "down/kernel": (48, 32)}
    others, head = {"norm/scale": (1, 32), "embed/embedding": (40, 32)}, {"head/kernel": (32, 40)}
    shapes = {**matrices, **others, **head, "norm/scale": (32,)}
    abstract = {name: jax.ShapeDtypeStruct(x, jnp.bfloat16) for name, x in shapes.items()}
    (others if row.spares_output_layer else matrices).update(head)
    if row.everything:
        matrices, others = matrices | others, {}
    optimizer = row.make()
    leaves = jax.tree.leaves(jax.eval_shape(optimizer.init, abstract))
    expected = sum(x.dtype.itemsize for x in leaves if x.ndim == 0)  # counters of steps
    expected += sum(row.matrix_bytes(*shape, itemsize=2) for shape in matrices.values())
    expected += sum(2 * 2 * math.prod(shape) + 4 for shape in others.values())  # and a counter
    assert curvax.state_bytes(optimizer, abstract) == expected


TOOLS: dict[str, Callable[[Any, Any], Any]] = {
    "summarize": curvax.summarize,
    "state_bytes": curvax.state_bytes,
    "describe_state": curvax.describe_state,
    "state_of": lambda optimizer, params: curvax.state_of(optimizer, params, None, "up/kernel"),
    "report": lambda optimizer, params: curvax.report(optimizer, params, None),
    "portable_state": lambda optimizer, params: curvax.portable_state(optimizer, params, None),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_swapped_arguments_are_named(tool: str) -> None:
    params = {"up/kernel": jnp.ones((4, 6))}
    with pytest.raises(ValueError, match="optimizer, the first argument, .* got <class 'dict'>"):
        TOOLS[tool](params, MUON)
    with pytest.raises(ValueError, match=r"such as curvax\.muon\(0\.02\); got <class 'function'>"):
        TOOLS[tool](curvax.muon, params)
    with pytest.raises(ValueError, match="params, the second argument, .* got an optimizer"):
        TOOLS[tool](MUON, MUON)


@pytest.mark.filterwarnings("ignore:no parameter is a matrix")
@pytest.mark.parametrize(
    ("wrapper", "params", "inside"),
    [
        (optax.flatten, {"kernel": jnp.ones((4, 6)), "bias": jnp.ones(6)}, ""),
        (
            lambda optimizer: optax.lookahead(optimizer, 5, 0.5),
            optax.LookaheadParams.init_synced({"kernel": jnp.ones((4, 6))}),
            "kernel",
        ),
        (
            optax.contrib.split_real_and_imaginary,
            {"kernel": jnp.ones((4, 6), jnp.complex64)},
            "kernel/real",
        ),
    ],
    ids=["flatten", "lookahead", "split_real_and_imaginary"],
)
def test_wrappers_that_pass_on_another_tree_are_named(
    wrapper: Any, params: Any, inside: str
) -> None:
    optimizer = wrapper(MUON)
    state = optimizer.init(params)
    message = f"an array at {inside!r}, .* Pass the inner optimizer"
    with pytest.raises(ValueError, match=message):
        curvax.summarize(optimizer, params)
    with pytest.raises(ValueError, match=message):
        curvax.report(optimizer, params, state)
    if isinstance(params, optax.LookaheadParams):
        assert "1 matrix 4×6" in curvax.summarize(MUON, params.fast)
        shardings = curvax.state_sharding(optimizer, params, jax.make_mesh((2,), ("x",)))
        assert jax.tree.structure(shardings) == jax.tree.structure(state)


HEAD, TURNED = (
    {"lm_head": {"kernel": jax.ShapeDtypeStruct(shape, jnp.float32)}}
    for shape in ((768, 32000), (32000, 768))
)
WARNING = "The state of 'lm_head/kernel' is 85 times as large"


def test_a_state_far_larger_than_its_parameter_is_pointed_out() -> None:
    assert WARNING in curvax.summarize(curvax.foam(0.1), HEAD)
    assert WARNING in curvax.summarize(curvax.soap(0.1), HEAD)
    assert "84 times as large" in curvax.summarize(curvax.kl_shampoo(0.1), HEAD)
    cut = curvax.foam(0.1, matrices=curvax.MatrixRule(block_size=1200))
    one_side = (make(0.1, max_order=10_000) for make in (curvax.soap, curvax.kl_shampoo))
    for optimizer, head in itertools.product((cut, curvax.muon(0.1), *one_side), (HEAD, TURNED)):
        assert "times as large" not in curvax.summarize(optimizer, head)
