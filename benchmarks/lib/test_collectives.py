"""Collectives of programs whose traffic is known."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.lib.collectives import Traffic, count_collectives
from flash_lm.ops.cross_entropy import cross_entropy


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def program(mesh, body, out, shape=(128, 4)) -> str:
    spec = PartitionSpec("x")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False)
    return jax.jit(mapped).lower(jnp.zeros(shape)).compile().as_text()


def test_each_kind_with_its_bytes(mesh):
    def body(x):  # 16 x 4 floats per device: 256 bytes
        gathered = jax.lax.all_gather(x, "x")
        turned = jax.lax.ppermute(x, "x", [(i, (i + 1) % 8) for i in range(8)])
        return gathered, turned, jax.lax.all_to_all(x.reshape(8, 2, 4), "x", 0, 0)

    x = PartitionSpec("x")
    traffic = count_collectives(program(mesh, body, (PartitionSpec(None, "x"), x, x)))
    assert traffic == {
        "all-gather": Traffic(1, 8 * 256, 7 * 256),
        "collective-permute": Traffic(1, 256, 256),
        "all-to-all": Traffic(1, 256, 7 * 32),
    }


def test_loops_count_each_turn(mesh):
    def body(x):
        inner = lambda carry, _: (jax.lax.psum(carry * 2, "x") / 8, None)
        outer = lambda carry, _: (jax.lax.scan(inner, carry, None, length=3)[0] * 3, None)
        return jax.lax.scan(outer, x, None, length=5)[0]

    assert count_collectives(program(mesh, body, PartitionSpec("x"))) == {
        "all-reduce": Traffic(15, 15 * 256, 15 * 2 * 7 * 32)
    }


def test_a_loop_without_a_known_end_is_an_error(mesh):
    def body(x):
        return jax.lax.while_loop(lambda carry: carry.sum() < 5, lambda carry: jax.lax.psum(carry + 1, "x"), x)

    with pytest.raises(ValueError, match="number of iterations is unknown"):
        count_collectives(program(mesh, body, PartitionSpec("x")))


def test_the_loss_sums_over_tensor_in_a_loop_whose_end_is_known():
    """Each slice adds the same collectives; the table crosses the devices once, whatever their number."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    shapes = ((8, 16, 4), ("data", "fsdp")), ((32, 4), "tensor"), ((8, 16), ("data", "fsdp"))
    features, table, weights = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(axes)))
        for shape, axes in shapes
    )
    targets = jax.ShapeDtypeStruct(weights.shape, jnp.int32, sharding=weights.sharding)

    def traffic(slices: int) -> dict[str, Traffic]:
        loss = lambda *x: cross_entropy(*x, 32 // slices, 4)[0]
        step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        with jax.set_mesh(mesh):
            return count_collectives(step.lower(features, table, targets, weights).compile().as_text())

    two, four, eight = (traffic(slices).get("all-reduce") for slices in (2, 4, 8))
    assert two and four and eight and 0 < 2 * (four.count - two.count) == eight.count - four.count
    assert 0 <= eight.bytes - four.bytes < 32 * 4 * 4  # of the table


def test_one_device_sends_nothing():
    assert count_collectives(jax.jit(lambda x: x @ x).lower(jnp.zeros((4, 4))).compile().as_text()) == {}


COUNTED = """HloModule step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%is_inside (loop: (s32[], f32[64])) -> pred[] {
  %end = s32[]{:T(128)} constant(8)
  %loop = (s32[]{:T(128)}, f32[64]{0:T(128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%loop), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %end), direction=LT
}

%turn (loop: (s32[], f32[64])) -> (s32[], f32[64]) {
  %loop = (s32[]{:T(128)}, f32[64]{0:T(128)}) parameter(0)
  %one = s32[]{:T(128)} constant(1)
  %i = s32[]{:T(128)} get-tuple-element(%loop), index=0
  %next = s32[]{:T(128)} add(%i, %one)
  %x = f32[64]{0:T(128)} get-tuple-element(%loop), index=1
  %reduced = f32[64]{0:T(128)} all-reduce(%x), channel_id=3, to_apply=%sum
  ROOT %out = (s32[]{:T(128)}, f32[64]{0:T(128)}) tuple(%next, %reduced)
}

ENTRY %main (start: (s32[], f32[64])) -> (s32[], f32[64]) {
  %start = (s32[]{:T(128)}, f32[64]{0:T(128)}) parameter(0)
  ROOT %while = (s32[]{:T(128)}, f32[64]{0:T(128)}) while(%start), condition=%is_inside, body=%turn
}
"""


def test_a_loop_of_a_tpu_counts_to_the_constant_of_its_condition():
    assert count_collectives(COUNTED, 4) == {"all-reduce": Traffic(8, 8 * 64 * 4, 8 * 2 * 3 * 64)}
    with pytest.raises(ValueError, match="does not say which devices"):
        count_collectives(COUNTED)


ASYNCHRONOUS = """HloModule step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%quiet (q: f32[64]) -> f32[64] {
  ROOT %q = f32[64]{0} parameter(0)
}

%loud (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  ROOT %reduced = f32[64]{0} all-reduce(%x), channel_id=3, to_apply=%sum
}

ENTRY %main (p: f32[64], flag: pred[]) -> (f32[512], f32[64], f32[64]) {
  %p = f32[64]{0} parameter(0)
  %flag = pred[] parameter(1)
  %start = (f32[64]{0}, f32[512]{0}) all-gather-start(%p), channel_id=1, dimensions={0}
  %send = (f32[64]{0}, f32[64]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
  %gathered = f32[512]{0} all-gather-done(%start)
  %received = f32[64]{0} collective-permute-done(%send)
  %scattered = f32[8]{0} reduce-scatter(%p), channel_id=2, dimensions={0}, to_apply=%sum
  %choice = f32[64]{0} conditional(%flag, %p, %p), true_computation=%loud, false_computation=%quiet
  ROOT %out = (f32[512]{0}, f32[64]{0}, f32[64]{0}) tuple(%gathered, %received, %choice)
}
"""


def test_asynchronous_pairs_count_once_and_conditionals_count():
    """Programs of GPUs and TPUs have asynchronous pairs."""
    assert count_collectives(ASYNCHRONOUS, 8) == {
        "all-gather": Traffic(1, 512 * 4, 7 * 64 * 4),
        "collective-permute": Traffic(1, 64 * 4, 64 * 4),
        "reduce-scatter": Traffic(1, 64 * 4, 7 * 32),
        "all-reduce": Traffic(1, 64 * 4, 2 * 7 * 32),
    }


FUSED = """HloModule step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%all-reduce-scatter.6 (input: f32[64]) -> f32[16] {
  %input = f32[64]{0} parameter(0)
  %whole = f32[64]{0} all-reduce(%input), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%sum
  %zero = u32[] constant(0)
  ROOT %part = f32[16]{0} dynamic-slice(%whole, %zero), dynamic_slice_sizes={16}
}

%begin (x: f32[16]) -> f32[128] {
  %x = f32[16]{0} parameter(0)
  ROOT %some = f32[128]{0} all-gather(%x), channel_id=2, replica_groups=GROUPS, dimensions={0}
}

%end (y: f32[16]) -> f32[128] {
  %y = f32[16]{0} parameter(0)
  ROOT %all = f32[128]{0} all-gather(%y), channel_id=2, replica_groups=GROUPS, dimensions={0}
}

ENTRY %main (p: f32[64]) -> f32[128] {
  %p = f32[64]{0} parameter(0)
  %scattered = f32[16]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.6
  %first = f32[128]{0} fusion(%scattered), kind=kCustom, calls=%begin
  ROOT %second = f32[128]{0} fusion(%scattered), kind=kCustom, calls=%end
}
"""


@pytest.mark.parametrize(
    "groups",
    ["{{0,1,2,3,4,5,6,7}}", "[1,8]<=[8]", "mesh['a'=4,'b'=2] {'a','b'}", "mesh['a'=16], device_ids=([16]) {'a':(1)8}"],
)
def test_a_fused_reduce_scatter_is_one_and_parts_of_a_collective_count_once(groups):
    """A TPU's compiler fuses an all-reduce with its slice, and cuts a collective into parts beside other work."""
    assert count_collectives(FUSED.replace("GROUPS", groups)) == {
        "reduce-scatter": Traffic(1, 64 * 4, 3 * 64),
        "all-gather": Traffic(1, 128 * 4, 7 * 64),
    }
