"""The instrument of `python -m benchmarks accelerators`: what it reads in a compiled program."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from curvax.transforms.refresh._visits import visit_all

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.xdist_group("benchmarks")

# Written by hand in the form of XLA's: a product, fusions that slice and that update in place, a
# loop of five rounds, one whose rounds the program decides, one of 6.5 in the mean, a conditional.
PROGRAM = """
HloModule jit_step, is_scheduled=true

%sliced (p.0: f32[8,16], p.1: s32[]) -> f32[1,16] {
  %p.0 = f32[8,16]{1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %c = s32[] constant(0)
  %d = f32[1,16]{1,0} dynamic-slice(%p.0, %p.1, %c), dynamic_slice_sizes={1,16}
  ROOT %n = f32[1,16]{1,0} negate(%d)
}

%updated (p.2: f32[8,16], p.3: f32[1,16], p.4: s32[]) -> f32[8,16] {
  %p.2 = f32[8,16]{1,0} parameter(0)
  %p.3 = f32[1,16]{1,0} parameter(1)
  %p.4 = s32[] parameter(2)
  %c.1 = s32[] constant(0)
  ROOT %u = f32[8,16]{1,0} dynamic-update-slice(%p.2, %p.3, %p.4, %c.1)
}

%multiplied (p.5: f32[8,16]) -> f32[8,8] {
  %p.5 = f32[8,16]{1,0} parameter(0)
  ROOT %dot = f32[8,8]{1,0} dot(%p.5, %p.5), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%body (b: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %b = (s32[], f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%b), index=1
  %row = f32[1,16]{1,0} fusion(%x, %i), kind=kLoop, calls=%sliced
  %new = f32[8,16]{1,0} fusion(%x, %row, %i), kind=kLoop, calls=%updated
  ROOT %t = (s32[], f32[8,16]{1,0}) tuple(%i, %new)
}

%below_five (q: (s32[], f32[8,16])) -> pred[] {
  %q = (s32[], f32[8,16]{1,0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %five = s32[] constant(5)
  ROOT %lt = pred[] compare(%j, %five), direction=LT
}

%below_bound (r: (s32[], f32[8,16])) -> pred[] {
  %r = (s32[], f32[8,16]{1,0}) parameter(0)
  %k = s32[] get-tuple-element(%r), index=0
  ROOT %lt.1 = pred[] compare(%k, %k), direction=LT
}

%dear (e: f32[8,16]) -> f32[8,16] {
  %e = f32[8,16]{1,0} parameter(0)
  %e.1 = f32[8,16]{1,0} copy(%e)
  ROOT %e.2 = f32[8,16]{1,0} negate(%e.1)
}

%cheap (h: f32[8,16]) -> f32[8,16] {
  ROOT %h = f32[8,16]{1,0} parameter(0)
}

ENTRY %main (a: f32[8,16], s: s32[]) -> f32[8,16] {
  %a = f32[8,16]{1,0:T(8,128)} parameter(0), metadata={op_name="g['w (x)']"}
  %s = s32[]{:T(128)} parameter(1)
  %one = s32[]{:T(128)} add(%s, %s)
  %two = s32[]{:T(128)S(6)} copy(%one)
  %product = f32[8,8]{1,0:T(8,128)} fusion(%a), kind=kOutput, calls=%multiplied
  %gemm = (f32[8,8]{1,0}, s8[4096]{0}) custom-call(%a), custom_call_target="__cublas$gemm"
  %eigh = f32[8,8]{1,0} custom-call(%product), custom_call_target="EighTpu"
  %start = (f32[8,16]{1,0:S(1)}, f32[8,16]{1,0}, u32[]{:S(2)}) copy-start(%a)
  %done = f32[8,16]{1,0:S(1)} copy-done(%start)
  %in = (s32[], f32[8,16]{1,0}) tuple(%s, %done)
  %w.1 = (s32[], f32[8,16]{1,0}) while(%in), condition=%below_five, body=%body
  %w.2 = (s32[], f32[8,16]{1,0}) while(%w.1), condition=%below_bound, body=%body, metadata={op_name="jit(step)/while"}
  %w.3 = (s32[], f32[8,16]{1,0}) while(%w.2), condition=%below_bound, body=%body, metadata={op_name="jit(step)/rounds_6.50/while"}
  %out = f32[8,16]{1,0} get-tuple-element(%w.3), index=1
  ROOT %cond = f32[8,16]{1,0} conditional(%s, %out, %out), branch_computations={%dear, %cheap}
}
"""  # noqa: E501


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield


def module(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def test_kernels_of_a_step_and_of_what_it_may_not_take() -> None:
    program = module("_programs").Program(PROGRAM)
    rounds = 5 + 6.5  # a mean
    assert program.step.kinds == {"products": 2, "custom calls": 1, "fusions": 2 * rounds}
    assert program.all_kernels.total == program.step.total + 2 + 2  # a loop's, a branch's
    assert program.loops == 3


def test_copies_are_told_from_kernels_that_compute() -> None:
    Program = module("_programs").Program
    program = Program(PROGRAM)
    assert program.step.copied == 0  # the cheaper branch has none
    assert program.all_kernels.copied == 2 * 4 * 8 * 16  # read and written
    laid_out = Program(PROGRAM.replace("negate(%d)", "copy(%d)"))  # a fusion: a slice of a row
    assert laid_out.step.copied == (5 + 6.5) * (2 * 4 * 16 + 4)  # and a counter


def test_rounds_of_a_loop_over_all_matrices_are_known() -> None:
    def program(size: int) -> Any:
        visit = lambda x: jnp.sin(x) @ x  # noqa: E731
        step = jax.jit(lambda x, count: visit_all(visit, x, (size,), count))
        matrices = jax.ShapeDtypeStruct((size, 4, 4), jnp.float32)
        compiled = step.lower(matrices, jax.ShapeDtypeStruct((), jnp.int32)).compile()
        return module("_programs").Program(compiled.as_text())

    few, many = program(3).step, program(7).step
    assert many.total - few.total == 4 * (few.total - program(2).step.total) > 0


def test_bytes_are_those_of_slices_and_of_updates_in_place() -> None:
    step = module("_programs").Program(PROGRAM).step
    index, row, whole, square = 4, 4 * 16, 4 * 8 * 16, 4 * 8 * 8
    of_a_round = (row + index + row) + (row + index + row)
    to_the_chip = whole
    assert step.bytes == to_the_chip + 2 * (whole + square) + 2 * square + 11.5 * of_a_round


# In the form of a TPU's: a product in whose fusion another one takes a slice, transfers to and
# from the chip. `S(1)` is on the chip.
ON_A_TPU = """
HloModule jit_step, is_scheduled=true

%scaled (p.0: f32[48,8,8], p.1: s32[]) -> f32[8,8] {
  %p.0 = f32[48,8,8]{2,1,0:T(8,128)} parameter(0)
  %p.1 = s32[]{:T(128)} parameter(1)
  %c = s32[] constant(0)
  %d = f32[1,8,8]{2,1,0:T(8,128)} dynamic-slice(%p.0, %p.1, %c, %c), dynamic_slice_sizes={1,8,8}
  ROOT %b = f32[8,8]{1,0:T(8,128)} bitcast(%d)
}

%multiplied (p.2: f32[48,8,8], p.3: s32[]) -> f32[8,8] {
  %p.2 = f32[48,8,8]{2,1,0:T(8,128)} parameter(0)
  %p.3 = s32[]{:T(128)} parameter(1)
  %one = f32[8,8]{1,0:T(8,128)} fusion(%p.2, %p.3), kind=kLoop, calls=%scaled
  ROOT %conv = f32[8,8]{1,0:T(8,128)} convolution(%one, %one), dim_labels=bf_oi->bf
}

ENTRY %main (a: f32[48,8,8], s: s32[]) -> f32[8,8] {
  %a = f32[48,8,8]{2,1,0:T(8,128)} parameter(0)
  %s = s32[]{:T(128)} parameter(1)
  %part = ((f32[48,8,8]{2,1,0:T(8,128)}), f32[2,8,8]{2,1,0:T(8,128)S(1)}, s32[]{:S(2)}) slice-start(%a), slice={[0:2], [0:8], [0:8]}
  %part.1 = f32[2,8,8]{2,1,0:T(8,128)S(1)} slice-done(%part)
  %back = (f32[2,8,8]{2,1,0:T(8,128)}, f32[2,8,8]{2,1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%part.1)
  %back.1 = f32[2,8,8]{2,1,0:T(8,128)} copy-done(%back)
  ROOT %product = f32[8,8]{1,0:T(8,128)} fusion(%a, %s), kind=kOutput, calls=%multiplied
}
"""  # noqa: E501


def test_a_tpu_reads_the_slice_of_a_nested_fusion_and_of_a_transfer() -> None:
    step = module("_programs").Program(ON_A_TPU).step
    assert step.kinds == {"products": 1}
    index, matrix = 4, 4 * 8 * 8
    assert step.bytes == 2 * matrix + 2 * matrix + (matrix + index + matrix)


# A TPU's bytes in tiles of 32 rows, of which a fusion takes or updates a slice in tiles of 8.
IN_OTHER_TILES = """
HloModule jit_step, is_scheduled=true

%low (p.0: u8[12,64,128]) -> u8[12,64,128] {
  %p.0 = u8[12,64,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %c.0 = u8[12,64,128]{2,1,0:T(8,128)(4,1)} copy(%p.0)
}

%high (p.1: u8[12,64,128]) -> u8[12,64,128] {
  %p.1 = u8[12,64,128]{2,1,0:T(8,128)(4,1)} parameter(0)
  ROOT %c.1 = u8[12,64,128]{2,1,0:T(32,128)(4,1)} copy(%p.1)
}

%taken (p.2: u8[12,64,128], p.3: s32[]) -> u8[1,64,128] {
  %p.2 = u8[12,64,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %p.3 = s32[]{:T(128)} parameter(1)
  %f.2 = u8[12,64,128]{2,1,0:T(8,128)(4,1)} fusion(%p.2), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%low
  %c.2 = s32[] constant(0)
  ROOT %d.2 = u8[1,64,128]{2,1,0:T(8,128)(4,1)} dynamic-slice(%f.2, %p.3, %c.2, %c.2), dynamic_slice_sizes={1,64,128}
}

%updated (p.4: u8[12,64,128], p.5: u8[1,64,128], p.6: s32[]) -> u8[12,64,128] {
  %p.4 = u8[12,64,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %p.5 = u8[1,64,128]{2,1,0:T(8,128)(4,1)} parameter(1)
  %p.6 = s32[]{:T(128)} parameter(2)
  %f.4 = u8[12,64,128]{2,1,0:T(8,128)(4,1)} fusion(%p.4), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%low
  %c.4 = s32[] constant(0)
  %d.4 = u8[12,64,128]{2,1,0:T(8,128)(4,1)} dynamic-update-slice(%f.4, %p.5, %p.6, %c.4, %c.4)
  ROOT %f.5 = u8[12,64,128]{2,1,0:T(32,128)(4,1)} fusion(%d.4), kind=kLoop, output_to_operand_aliasing={{}: (0, {})}, calls=%high
}

ENTRY %main (a: u8[12,64,128], s: s32[]) -> u8[12,64,128] {
  %a = u8[12,64,128]{2,1,0:T(32,128)(4,1)} parameter(0)
  %s = s32[]{:T(128)} parameter(1)
  %one = u8[1,64,128]{2,1,0:T(8,128)(4,1)} fusion(%a, %s), kind=kLoop, calls=%taken
  ROOT %all = u8[12,64,128]{2,1,0:T(32,128)(4,1)} fusion(%a, %one, %s), kind=kLoop, calls=%updated
}
"""  # noqa: E501


def test_tiles_of_another_height_are_no_reason_to_read_a_whole_array() -> None:
    step = module("_programs").Program(IN_OTHER_TILES).step
    assert step.kinds == {"fusions": 2}
    index, matrix = 4, 64 * 128
    assert step.bytes == (matrix + index + matrix) + (matrix + index + matrix)
    assert step.copied == 0


def test_pieces_of_a_collective_count_once() -> None:
    line = "  %a.{} = f32[8]{{0}} all-gather(%p), channel_id={}, dimensions={{0}}"
    text = "\n".join(["ENTRY %main () -> f32[8] {", line.format(1, 9), line.format(2, 9)])
    text += "\n" + line.format(3, 10)
    found = module("_devices").collectives(module("_programs").once(text))
    assert [x.bytes for x in found] == [32, 32]


def test_a_step_without_refreshes_decomposes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = module("accelerators")

    class One(subject.Fused):
        def matrices(self) -> dict[str, tuple[int, int]]:
            return {"up": (self.width, self.inner)}

    shapes = One(8, 16, 1, 0)
    monkeypatch.setitem(subject.MODELS, "12", (shapes, jnp.float32))
    lines = {
        part: subject.measured(subject.Cell("cpu", "12", "unrolled", "no", "asgo", part))
        for part in subject.PARTS
    }
    assert lines["whole"]["loops"] >= lines["step"]["loops"] + 1
    assert lines["step"]["leaves"] == 1
    entries = sum(m * n for m, n in shapes.matrices().values())
    assert lines["step"]["gradients"] == 4 * entries
    assert lines["step"]["least"] == 8 * entries + 2 * lines["step"]["state"]


def test_the_table_has_both_programs_of_a_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = module("accelerators")
    counts = {"leaves": 4, "products": 20, "copies": 2, "kernels": 60, "all": 70, "loops": 1}
    sizes = {"bytes": 300, "least": 100, "gradients": 50, "temporaries": 25}
    line = {**counts, **sizes, "trace": 1.0, "compile": 2.0, "versions": "jax 0"}
    cell = subject.Cell("v5e", "12", "unrolled", "default", "asgo", "step")
    whole = {**cell._asdict(), "part": "whole", "error": "over 300 s"}
    path = tmp_path / "accelerators.jsonl"
    path.write_text("\n".join(map(json.dumps, [{**cell._asdict(), **line}, whole])))
    argv = ["accelerators", "--only", "table", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    subject.main()
    (table,) = json.loads(tmp_path.joinpath("accelerators.json").read_text())["tables"]
    (row,) = table["rows"]
    assert row["beyond"] == 10 and row["over_least"] == 3 and row["temporaries"] == 0.5
    assert row["note"] == "with refreshes: over 300 s"
    assert tmp_path.joinpath("accelerators.png").read_bytes().startswith(b"\x89PNG")


class Cell(NamedTuple):
    name: str


def test_methods_on_either_side_of_a_bound_are_named() -> None:
    aims, Table = module("_aims"), module("_record").Table
    seconds = {"optax.contrib.muon": 4.0, "racs": 2.0, "soap": 6.0, "shampoo": 6.1, "muon": None}
    rows = [{"method": name, "clock": x} for name, x in seconds.items()]
    rows.append({"method": "soap, CQ", "clock": 18.0})
    (row,) = aims.table([Table("v5e, 96, unrolled", {}, rows)]).rows
    assert row["bound"] == "1.5"
    assert (row["met"], row["missed"]) == ("`racs` 0.50, `soap` 1.50", "`shampoo` 1.52")
    many = {f"{name}, VQ": {"beyond": 5.0 + i} for i, name in enumerate("abcdefghi")}
    aim = next(a for a in aims.aims() if a.what.endswith("products, in few bits"))
    assert aims.row_of(aim, many)["missed"] == "9: `a`, VQ 5.0 to `i`, VQ 13.0"


def test_a_line_is_measured_once(tmp_path: Path) -> None:
    args = SimpleNamespace(lines=None, out=tmp_path, again=False, limit=1)
    measured: list[str] = []

    def measure(cell: Cell) -> dict[str, Any]:
        measured.append(cell.name)
        return {"value": len(measured)}

    extended = module("_lines").extended
    extended(args, "suite", "lines", [Cell("a")], measure)
    lines = extended(args, "suite", "lines", [Cell("a"), Cell("b")], measure)
    assert measured == ["a", "b"]
    assert [lines[Cell(name)]["value"] for name in "ab"] == [1, 2]


def test_the_peer_takes_scanned_kernels() -> None:
    subject = module("accelerators")
    shapes, _ = subject.MODELS["12"]
    params = module("_trees").abstract_kernels(shapes, jnp.float32, scanned=True)
    cell = subject.Cell("h200", "12", "scanned", "default", "optax.contrib.muon", "step")
    optimizer = subject.method_of(cell).make(10, 40)
    state = jax.eval_shape(optimizer.init, params)
    updates, _ = jax.eval_shape(optimizer.update, params, state, params)
    assert jax.tree.map(lambda x: x.shape, updates) == jax.tree.map(lambda x: x.shape, params)
