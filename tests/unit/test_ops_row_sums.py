"""Each implementation of the row passes against the plain one, on the shapes where their loops and masks have edges."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from otb_megatron.ops.partial_sums import merge
from otb_megatron.ops.row_sums import ELSEWHERE, EMPTY_REFERENCE, IGNORED, LOG2_E, Coefficients, PlainRowSums, RowSums
from otb_megatron.ops.row_sums_numba import NumbaRowSums

SHAPES = [(1, 1, 1), (3, 5, 5), (4, 16, 0), (6, 97, 97), (5, 130, 100), (3, 2048, 2048), (3, 5000, 4999)]  # tokens, width, columns
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def check_against_plain(implementation: RowSums, tokens: int, width: int, columns: int, dtype: torch.dtype) -> None:
    """Sums within 1e-6 and gradients within 1e-6 (or one rounding to a half-precision dtype) of the plain form in float32."""
    generator = torch.Generator().manual_seed(width)
    tile = (torch.randn(tokens, width, generator=generator) * 4).to(dtype)
    tile[:, columns:] = 3e4
    target = torch.randint(0, max(columns, 1), (tokens,), generator=generator)
    target[-1] = ELSEWHERE if tokens > 2 or columns == 0 else 0
    target[-2:-1] = IGNORED
    target = target.clamp(max=columns - 1) if columns else torch.full_like(target, ELSEWHERE)
    scale = torch.linspace(0.5, 2.0, tokens) * LOG2_E
    before = tile.clone()

    # The choice of reference is free: sums are compared after merging with a part at a fixed one.
    fixed = torch.tensor([60.0, 0, 0, 0, 0], dtype=torch.float64).reshape(1, 5, 1).expand(1, 5, tokens)
    actual, expected = (merge(torch.cat([fixed, x.sums(tile, columns, target, scale).unsqueeze(0)])) for x in (implementation, PlainRowSums()))
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-12)

    per_row = [torch.randn(tokens, generator=generator) for _ in range(4)]
    bits = torch.cat([torch.zeros(tokens, 1), tile[:, :columns]], dim=1).double() * scale.unsqueeze(1)
    coefficients = Coefficients(torch.logsumexp(bits / LOG2_E, 1) * LOG2_E, *per_row)
    outs = [torch.full_like(tile, 7.0) for _ in range(2)]
    implementation.gradients(tile, columns, target, scale, coefficients, out=outs[0])
    PlainRowSums().gradients(tile, columns, target, scale, coefficients, out=outs[1])
    rounding = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(*outs, rtol=rounding, atol=1e-6)
    assert (outs[0][:, columns:] == 0).all() and (outs[0][target == IGNORED] == 0).all()
    assert torch.equal(tile, before)
    implementation.gradients(tile, columns, target, scale, coefficients, out=tile)  # in place
    assert torch.equal(tile, outs[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_numba_equals_plain(shape, dtype):
    check_against_plain(NumbaRowSums(), *shape, dtype)


def test_numba_on_rows_that_are_views():
    tile = torch.randn(6, 300)
    target, scale = torch.tensor([0, 1, 2, 3, 4, 5]), torch.full((6,), LOG2_E)
    expected = NumbaRowSums().sums(tile, 300, target, scale)
    for view in (tile.t().contiguous().t(), torch.cat([tile, tile], dim=1)[:, :300]):
        assert not view.is_contiguous()
        assert torch.equal(NumbaRowSums().sums(view, 300, target, scale), expected)


def test_sums_of_a_hand_computed_row():
    """scale 1, z = (3, 1, 3, 2), y = 1: reference 3, S = 1 + 1 + 1/2, R = 1 + 1 + 1/4, T = -1/2, target 1."""
    tile, target, scale = torch.tensor([[3.0, 1.0, 3.0, 2.0]]), torch.tensor([1]), torch.ones(1)
    for implementation in (PlainRowSums(), NumbaRowSums()):
        assert implementation.sums(tile, 4, target, scale).flatten().tolist() == [3.0, 2.5, 2.25, -0.5, 1.0]


def test_merging_parts_equals_the_whole():
    tile = torch.randn(7, 60) * 5
    target, scale = torch.tensor([0, 7, 20, 59, ELSEWHERE, 31, 12]), torch.rand(7) + 0.5
    parts = []
    for start, stop in ((0, 8), (8, 8), (8, 33), (33, 60)):
        local = target - start
        local[(local < 0) | (local >= stop - start)] = ELSEWHERE
        parts.append(PlainRowSums().sums(tile[:, start:stop], stop - start, local, scale))
    torch.testing.assert_close(merge(torch.stack(parts)), PlainRowSums().sums(tile, 60, target, scale), rtol=1e-6, atol=1e-12)
    assert (parts[1][0] == EMPTY_REFERENCE).all()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_triton_kernels_compile_for_hopper(dtype, monkeypatch, tmp_path):
    """Compiled for sm_90, which needs no GPU: logits are read and gradients written 16 bytes at a time, and no register is spilled."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from otb_megatron.ops import row_sums_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"tile": f"*{dtype}", "out": f"*{dtype}", "target": "*i64", "result": "*fp64"}
    types |= {name: "i32" for name in ("stride_row", "columns", "tokens", "out_row", "width")}
    constants = {"BLOCK": row_sums_triton.MAX_BLOCK_COLUMNS, "stride_column": 1, "out_column": 1}  # Triton makes a stride of 1 a constant by itself
    aligned = {"tile", "out", "stride_row", "out_row", "width"}
    for kernel in (row_sums_triton._sums_kernel, row_sums_triton._gradients_kernel):
        names = kernel.arg_names
        source = ASTSource(
            kernel,
            signature={name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names},
            constexprs={name: value for name, value in constants.items() if name in names},
            attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if name in aligned},
        )
        compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": row_sums_triton.NUM_WARPS})
        ptx = compiled.asm["ptx"]
        assert ".target sm_90" in ptx and compiled.asm["cubin"]
        assert ".local" not in ptx
        if kernel is row_sums_triton._sums_kernel:
            assert "ld.global.v4.b32" in ptx
        else:
            assert "st.global.v4.b32" in ptx


def test_triton_equals_plain_in_its_interpreter():
    """Triton decides when it is imported whether it interprets, hence a process of its own."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", "tests.unit.test_ops_row_sums"], cwd=root, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == ["checked", "15"]


def check_triton() -> int:
    from otb_megatron.ops import row_sums_triton

    row_sums_triton.MAX_BLOCK_COLUMNS = 32  # several blocks in a short row
    cases = [(shape, dtype) for shape in SHAPES if shape[1] <= 130 for dtype in DTYPES]
    for shape, dtype in cases:
        check_against_plain(row_sums_triton.TritonRowSums(), *shape, dtype)
    strided = torch.randn(50, 6).t()
    target, scale = torch.tensor([0, 1, 2, ELSEWHERE, 4, 49]), torch.full((6,), LOG2_E)
    plain, interpreted = (x.sums(strided, 50, target, scale) for x in (PlainRowSums(), row_sums_triton.TritonRowSums()))
    torch.testing.assert_close(interpreted, plain, rtol=1e-6, atol=1e-12)
    return len(cases)


if __name__ == "__main__":
    print("checked", check_triton())
