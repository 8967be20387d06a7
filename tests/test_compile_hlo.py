"""Collectives read from compiled programs: a text with every form that they have, and programs of eight devices whose
collectives are known in closed form."""

import subprocess
import sys
from pathlib import Path

import pytest

from trace_jax.recipes.ahead import hlo, hlo_bytes, hlo_flops, render

HERE = Path(__file__).parent
MESH = {"data": 1, "fsdp": 4, "tensor": 2, "expert": 1}
WEIGHT, GRADIENT = 128 * 64 * 2, 128 * 64 * 4  # bytes


@pytest.fixture(scope="module")
def text():
    return (HERE / "data" / "collectives.hlo").read_text()


def test_every_collective_has_its_axes_and_runs(text):
    found = {(c.kind, c.axes): c for c in hlo.collectives(text, MESH)}
    assert (
        set(found)
        == {
            ("all-gather", "fsdp"),
            ("all-reduce", "tensor"),
            ("collective-permute", "fsdp"),
            ("reduce-scatter", "fsdp"),
        }
        and len(hlo.collectives(text, MESH)) == 5
    )  # two sums over tensor
    gather = found["all-gather", "fsdp"]
    assert (gather.ways, gather.bytes, gather.runs) == (4, WEIGHT, 28)  # once, though two fusions name it
    assert gather.moved == WEIGHT * 3 / 4 and gather.known and gather.in_loop and gather.origin.endswith("weight")
    ring = found["collective-permute", "fsdp"]
    assert ring.runs == 28 * 2 and ring.moved == GRADIENT  # four turns, two to a body
    scattered = found["reduce-scatter", "fsdp"]
    assert (scattered.ways, scattered.runs, scattered.in_loop) == (4, 1, False)
    assert scattered.moved == GRADIENT * 3 / 4


def test_a_loop_whose_end_is_data_counts_once_and_says_so(text):
    sums = [c for c in hlo.collectives(text, MESH) if c.kind == "all-reduce"]
    assert sorted((c.bytes, c.runs, c.known) for c in sums) == [(64, 1, False), (GRADIENT, 28, True)]
    assert all(c.moved == c.bytes for c in sums)  # twice half of it


def test_sums_by_axis(text):
    sums = hlo.by_axis(hlo.collectives(text, MESH))
    assert sums["tensor"] == {"all-reduce": 28 * GRADIENT + 64}
    assert sums["fsdp"]["reduce-scatter"] == GRADIENT * 3 / 4


@pytest.mark.parametrize(
    "groups, axes, ways",
    [
        ("{{0,2,4,6},{1,3,5,7}}", "fsdp", 4),
        ("{}", "fsdp+tensor", 8),
        ("[1,8]<=[8]", "fsdp+tensor", 8),
        ("[8,1]<=[8]", "", 1),
        ("mesh['x'=8] {'x':(4)2}", "tensor", 2),
        ("mesh['x'=8] {'x':(1)4}", "fsdp", 4),
        ("mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0)) {'y'}", "fsdp", 4),
        ("mesh['x'=2,'y'=4], device_ids=(0,2,4,6,1,3,5,7) {'y'}", "fsdp", 4),
    ],
)
def test_groups_in_all_their_notations(groups, axes, ways):
    line = f"f32[8]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%sum"
    assert hlo._group(line, MESH) == (axes, ways)


def test_traffic_of_slices_inside_nested_fusions():
    """A loop over the chunks of an array, whose body is a fusion with fusions in it: it reads a chunk of each operand a
    run, also behind a bitcast, and writes a chunk of a result that it updates in place."""
    text = """HloModule m

%slice.1 (p.0: f32[8,16,4], p.1: s32[]) -> f32[16,4] {
  %p.0 = f32[8,16,4]{2,1,0} parameter(0)
  %p.1 = s32[] parameter(1)
  %zero.0 = s32[] constant(0)
  %part.0 = f32[1,16,4]{2,1,0} dynamic-slice(%p.0, %p.1, %zero.0, %zero.0), dynamic_slice_sizes={1,16,4}
  ROOT %flat.0 = f32[16,4]{1,0} bitcast(%part.0)
}

%chunk.1 (q.0: f32[8,16,4], q.1: s32[], q.2: f32[128,4], q.3: f32[16,4]) -> (f32[8,16,4], f32[16,4]) {
  %q.0 = f32[8,16,4]{2,1,0} parameter(0)
  %q.1 = s32[] parameter(1)
  %q.2 = f32[128,4]{1,0} parameter(2)
  %q.3 = f32[16,4]{1,0} parameter(3)
  %again.0 = f32[8,16,4]{2,1,0} bitcast(%q.2)
  %mine.0 = f32[16,4]{1,0} fusion(%again.0, %q.1), kind=kLoop, calls=%slice.1
  %sum.0 = f32[16,4]{1,0} add(%mine.0, %q.3)
  %new.0 = f32[1,16,4]{2,1,0} bitcast(%sum.0)
  %zero.1 = s32[] constant(0)
  %whole.0 = f32[8,16,4]{2,1,0} dynamic-update-slice(%q.0, %new.0, %q.1, %zero.1, %zero.1)
  ROOT %both.0 = (f32[8,16,4]{2,1,0}, f32[16,4]{1,0}) tuple(%whole.0, %sum.0)
}

ENTRY %main (x.0: f32[8,16,4], x.1: s32[], x.2: f32[128,4], x.3: f32[16,4]) -> (f32[8,16,4], f32[16,4]) {
  %x.0 = f32[8,16,4]{2,1,0} parameter(0)
  %x.1 = s32[] parameter(1)
  %x.2 = f32[128,4]{1,0} parameter(2)
  %x.3 = f32[16,4]{1,0} parameter(3)
  ROOT %done.0 = (f32[8,16,4]{2,1,0}, f32[16,4]{1,0}) fusion(%x.0, %x.1, %x.2, %x.3), kind=kOutput, calls=%chunk.1
}
"""
    chunk, index = 16 * 4 * 4, 4
    # read: the index, a chunk of x.2, x.3; written: the chunk that is new in x.0, the sum
    assert hlo_bytes.traffic(text) == index + 2 * chunk + 2 * chunk
    # where an operand lies in the core's own memory, it is none
    near = text.replace("x.3 = f32[16,4]{1,0} parameter", "x.3 = f32[16,4]{1,0:S(1)} parameter")
    assert hlo_bytes.traffic(near) == index + chunk + 2 * chunk


def test_traffic_counts_a_slice_as_a_slice_and_a_loop_as_often_as_it_runs():
    text = """HloModule m

%slicing (p0: f32[10,100], p1: s32[]) -> f32[1,100] {
  %p0 = f32[10,100]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %cut = f32[1,100]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,100}
}

%body (t: (s32[], f32[10,100])) -> (s32[], f32[10,100]) {
  %t = (s32[], f32[10,100]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %all = f32[10,100]{1,0} get-tuple-element(%t), index=1
  %row = f32[1,100]{1,0} fusion(%all, %i), kind=kLoop, calls=%slicing
  %kept = f32[1,100]{1,0:S(1)} negate(%row)
  ROOT %out = (s32[], f32[10,100]{1,0}) tuple(%i, %all)
}

%condition (t.1: (s32[], f32[10,100])) -> pred[] {
  %t.1 = (s32[], f32[10,100]{1,0}) parameter(0)
  %ten = s32[] constant(10)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  ROOT %less = pred[] compare(%i.1, %ten), direction=LT
}

ENTRY %main (x: f32[10,100]) -> (s32[], f32[10,100]) {
  %x = f32[10,100]{1,0} parameter(0)
  %begin = s32[] constant(0)
  %start = (s32[], f32[10,100]{1,0}) tuple(%begin, %x)
  ROOT %done = (s32[], f32[10,100]{1,0}) while(%start), condition=%condition, body=%body
}
"""
    row = 100 * 4
    fusion, negate, index = 2 * row, row, 4  # what stays in a core's memory is none
    compared = 4 + 4 + 1
    assert hlo_bytes.traffic(text) == 10 * (fusion + negate + index) + 10 * compared


def test_live_programs_of_eight_devices_match_closed_forms():
    done = subprocess.run([sys.executable, HERE / "compile_devices.py"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


def test_products_are_counted_by_what_they_multiply():
    """Three turns of a plain one, a batch written as a dilated convolution (each window meets one of the batch), and
    one whose window runs over padding, of the highest precision."""
    text = (HERE / "data" / "products.hlo").read_text()
    assert hlo_flops.multiplied(text) == 2 * (3 * 30 * 40 * 50 + 8 * 90 * 20 * 10 + 6 * 6 * 7 * 4 * 5)


def test_a_program_that_multiplies_too_much_is_told():
    program = {"executed_flops_per_chip": 2e12, "multiplied_flops_per_chip": 5e12}
    other = {"executed_flops_per_chip": 2e12, "multiplied_flops_per_chip": None}
    (line,) = render.wasteful({"programs": {"accumulate": program, "apply": other}})
    assert "accumulate multiplies 2.5 times" in line
