"""Moved bytes of programs whose traffic is known."""

import jax
import jax.numpy as jnp
import pytest

from benchmarks.lib.moved_bytes import KINDS, count_moved_bytes, list_moved

NOTHING = dict.fromkeys(KINDS, 0)


def compiled(function, *shapes) -> str:
    return jax.jit(function).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()


def test_a_product_reads_both_operands_and_writes_its_result():
    text = compiled(lambda x, y: x @ y, (256, 512), (512, 128))
    assert count_moved_bytes(text)["products"] == 4 * (256 * 512 + 512 * 128 + 256 * 128)


def test_a_chain_of_functions_is_one_fusion():
    text = compiled(lambda x, y: jnp.tanh(x * y) + x, (64, 128), (64, 128))
    assert count_moved_bytes(text) == NOTHING | {"elementwise": 3 * 4 * 64 * 128}


def test_a_loop_reads_a_slice_of_its_inputs_each_time():
    """Not all seven rows, which would be 14 to read and to write; besides, the carry is read and written."""

    def add(carry, row):
        return carry + row, carry * row

    counted = count_moved_bytes(compiled(lambda start, rows: jax.lax.scan(add, start, rows), (512,), (7, 512)))
    row = 4 * 512
    assert 7 * 4 * row <= sum(counted.values()) <= 7 * 10 * row


def test_the_smaller_branch_counts():
    def choose(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x @ x, jnp.tanh, x)

    assert count_moved_bytes(compiled(choose, (128, 128)))["products"] == 0


def test_a_loop_without_a_known_end_needs_a_number():
    text = compiled(lambda x: jax.lax.while_loop(lambda x: x.sum() < 5, lambda x: x + 1, x), (128,))
    with pytest.raises(ValueError, match="number of iterations of .* is unknown"):
        count_moved_bytes(text)
    assert count_moved_bytes(text, 20)["elementwise"] == 2 * count_moved_bytes(text, 10)["elementwise"] > 0


ACCELERATOR = """HloModule step, is_scheduled=true

%rows (a: bf16[8,128,64], i: s32[]) -> bf16[1,128,64] {
  %a = bf16[8,128,64]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = bf16[1,128,64]{2,1,0} dynamic-slice(%a, %i, %zero, %zero), dynamic_slice_sizes={1,128,64}
}

ENTRY %main (stack: bf16[8,128,64], i: s32[], w: bf16[64,64]) -> bf16[128,64] {
  %stack = bf16[8,128,64]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %w = bf16[64,64]{1,0} parameter(2)
  %row = bf16[1,128,64]{2,1,0} fusion(%stack, %i), kind=kLoop, calls=%rows
  %x = bf16[128,64]{1,0} bitcast(%row)
  %start = (bf16[64,64]{1,0:T(8,128)S(1)}, bf16[64,64]{1,0}, u32[]) copy-start(%w)
  %near = bf16[64,64]{1,0:T(8,128)S(1)} copy-done(%start)
  %gemm = (bf16[128,64]{1,0}, s8[4194304]{0}) custom-call(%x, %near), custom_call_target="__cublas$gemm"
  ROOT %out = bf16[128,64]{1,0} get-tuple-element(%gemm), index=0
}
"""


def test_slices_near_memory_and_workspaces():
    """A fused slice is read and written; a copy into the chip is read; a product moves no workspace or near operand."""
    row, weights = 2 * 128 * 64, 2 * 64 * 64
    assert count_moved_bytes(ACCELERATOR) == NOTHING | {"copies": 2 * row + 4 + weights, "products": 2 * row}
    assert [one.name for one in list_moved(ACCELERATOR)[:2]] == ["row", "gemm"]
