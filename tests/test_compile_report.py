"""What `trace-jax compile` says: FLOPs by hand, memory by hand, verdicts, refusals, exit codes."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trace_jax import cli
from trace_jax.config import ConfigError, PolicyConfig
from trace_jax.recipes.ahead import topology, work
from trace_jax.recipes.ahead.chips import CHIPS

ONE = {"data": 1, "fsdp": 1, "tensor": 1, "expert": 1}
DENSE = PolicyConfig(layers=2, width=8, heads=2, kv_heads=1, head_dim=4, mlp_width=16, remat="none")
SPARSE = dataclasses.replace(DENSE, mlp_width=0, experts=4, experts_per_token=2, expert_width=16)
COMMAND = [sys.executable, "-c", "import sys; from trace_jax.startup import main; sys.exit(main())", "compile"]


def run(*words, timeout=600):
    """The command in a process of its own: it starts a backend with as many devices as the topology has."""
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=timeout, env=environment)


# Per token and layer, multiply-adds: q 8*8, k and v 8*4 each, o 8*8 = 192; three MLP matrices 8*16 = 384.
# Scores and values over the mean of (1 + 16) / 2 = 8.5 tokens: 2 * 8 * 8.5 = 136. Output matrix 8*10 = 80.
LINEAR, MLP, SCORES, HEAD = 192, 384, 136, 80


def test_flops_of_a_dense_policy_by_hand():
    found = work.training(DENSE, 10, tokens=32, context=16, mesh=ONE)
    assert found.model == 32 * 3 * 2 * (2 * (LINEAR + MLP + SCORES) + HEAD)
    kernel = (2 + 7) / 2  # two matmuls forward; four and three in the kernels of the backward pass
    executed = 3 * 2 * 2 * (LINEAR + MLP) + kernel * 2 * 2 * SCORES + 4 * 2 * HEAD
    assert found.executed == 32 * executed


def test_remat_computes_layers_again_and_the_mesh_divides_the_work():
    full = dataclasses.replace(DENSE, remat="full")
    found = work.training(full, 10, tokens=32, context=16, mesh=ONE | {"fsdp": 4, "tensor": 2})
    executed = 4 * 2 * 2 * (LINEAR + MLP) + (2 + 7 + 2) / 2 * 2 * 2 * SCORES + 4 * 2 * HEAD
    assert found.executed == 32 / 4 * executed / 2
    assert found.model == work.training(DENSE, 10, 32, 16, ONE).model


def test_chips_of_an_expert_group_share_the_experts_and_nothing_else():
    alone, shared = (work.training(SPARSE, 10, 32, 16, ONE | {"expert": n}).executed for n in (1, 4))
    experts = 32 * 3 * 2 * 2 * 2 * MLP  # three passes, two FLOPs, two layers, two experts of 384
    assert alone - shared == experts * 3 / 4


def test_a_forward_pass_is_a_third_of_training_without_recomputation():
    forward = work.scoring(DENSE, 10, 32, 16, ONE)
    assert forward.model == forward.executed == work.training(DENSE, 10, 32, 16, ONE).model / 3


@pytest.mark.parametrize(
    "name, said",
    [
        ("v6z:2x2", "is unknown: give one such as v5e:4x4"),
        ("v5p:4x4", "v5p has 3 dimensions"),
        ("v5p:64x64x64", "a pod has at most 8960"),
        ("h200x0", "1 to 4096"),
        ("h200x12", "nodes have 8 GPUs"),
    ],
)
def test_a_bad_topology_is_one_line(name, said):
    with pytest.raises(ConfigError, match=said):
        topology.parse(name)


def test_without_libtpu_the_extra_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name))
    with pytest.raises(ConfigError, match=r"pip install 'trace-jax\[tpu\]'"):
        topology.parse("v5e:4x4")


def test_bad_input_is_one_line_and_status_2(capsys):
    assert cli.main(["compile", "--topology", "v9:2x2"]) == 2
    assert cli.main(["compile", "--topology", "h100x8", "--grpo.no_field", "1"]) == 2
    assert cli.main(["compile"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("trace-jax: ") for line in lines)


def test_a_policy_that_cannot_fit_is_refused_with_its_numbers_and_nothing_is_compiled():
    """Parameters, moments, gradients, two earlier versions: 24 bytes each, counted here by hand."""
    sizes = {"layers": 8, "width": 8192, "heads": 64, "kv_heads": 8, "head_dim": 128, "mlp_width": 28672}
    words = [f"--policy.{name}={value}" for name, value in sizes.items()]
    words += ["--policy.vocab_size=32000", "--grpo.staleness=1", "--grpo.microbatch.rows=2", "--mesh.fsdp=2"]
    done = run("--topology", "h100x2", "--json", *words)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    *text, last = done.stdout.splitlines()
    found = json.loads(last)
    layer = 8192 * (8192 * 2 + 1024 * 2) + 3 * 8192 * 28672 + 2 * 8192 + 2 * 128
    parameters = 8 * layer + 8192 * 32001
    memory = found["memory"]
    assert memory["parameters"] == pytest.approx(4 * parameters / 2, rel=1e-5)  # gains of heads are not split
    assert memory["parameters"] == memory["gradients"] == memory["versions"] / 2
    assert memory["moments"] == pytest.approx(2 * memory["parameters"], abs=16)
    assert found["fits"] is False and found["hbm_bytes_per_chip"] > CHIPS["h100"].hbm_bytes == memory["limit"]
    used = found["hbm_bytes_per_chip"] / 1e9
    assert any(f"does not fit: {used:.1f} of 80 GB a chip" in line for line in text)
    assert found["programs"] == {} and found["roofline_step_s"] is None
    assert found["suggestion"] is None and "take more of them" in text[-1]


def test_what_does_not_fit_is_told_the_nearest_that_does():
    """A cache of 65,536 slots of 1,024 positions: four layers of two times two heads of 32, float32."""
    words = ["--rollout.slots", "65536", "--policy.vocab_size", "512", "--rollout.context", "1024"]
    words += ["--policy.max_length", "1024", "--grpo.microbatch.row_length", "1024"]
    words += ["--sft.microbatch.row_length", "1024"]
    done = run("--topology", "h100x1", "--json", *words)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    slot = 4 * 2 * 2 * 32 * 1024 * 4
    assert found["memory"]["kv_cache"] == 65536 * slot
    assert found["suggestion"]["fields"] == {"rollout.slots": 32768}
    assert found["suggestion"]["hbm_bytes_per_chip"] == pytest.approx(32768 * slot, rel=0.01)
    assert "--rollout.slots 32768" in done.stdout.splitlines()[-2]


@pytest.mark.slow
def test_a_run_that_fits_on_virtual_gpus(tmp_path):
    """The report's numbers against those of the shapes; a minute of compiling."""
    config = Path(__file__).parents[1] / "configs" / "smoke.yaml"
    words = ["--config", str(config), "--topology", "h200x4", "--mesh.fsdp", "4", "--grpo.microbatch.rows", "4"]
    done = run(*words, "--rollout", "--json", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["fits"] and found["estimate"] and found["mesh"]["fsdp"] == 4
    assert {"accumulate", "apply", "prefill", "decode"} <= found["programs"].keys()
    given = found["programs"]["accumulate"]["arguments"]
    memory = found["memory"]
    assert given == pytest.approx(memory["parameters"] + memory["gradients"] + memory["batch"] / 2, rel=0.02)
    assert found["programs"]["apply"]["arguments"] == pytest.approx(
        memory["parameters"] + memory["moments"] + memory["gradients"], rel=0.02
    )
    written = json.loads((tmp_path / "smoke.json").read_text())
    assert written["hbm_bytes_per_chip"] == found["hbm_bytes_per_chip"]
    assert "an estimate" in (tmp_path / "smoke.md").read_text().lower()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu (the extra tpu)")
def test_a_small_run_for_a_tpu_slice(tmp_path):
    """Splash attention and sharded parameters are in the program for TPUs that are not there."""
    words = ["--topology", "v5e:2x4", "--mesh.fsdp", "8", "--policy.layers", "9", "--policy.remat", "full"]
    words += ["--grpo.microbatch.rows", "8", "--policy.dtype", "bfloat16", "--json"]
    done = run(*words, timeout=3000)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    gathers = [c for c in found["collectives"]["accumulate"] if c["kind"] == "all-gather" and c["in_loop"]]
    assert gathers and all(c["runs"] % 9 == 0 and c["axes"] == "fsdp" for c in gathers)
    assert not found["gathers"]["parameter_sized_outside"]


def test_the_delta_rule_is_computed_in_float32():
    """One delta layer of one head, 4 x 4 states: 6 * 16 + 4 * 64 * 4 FLOPs a token forward, six times in bfloat16."""
    mixed = dataclasses.replace(
        DENSE, mixers=("delta", "attention"), delta_key_heads=1, delta_value_heads=1, delta_key_dim=4, delta_value_dim=4
    )
    found = work.training(mixed, 10, tokens=32, context=16, mesh=ONE)
    projections = 8 * (2 * 4 + 3 * 4 + 2) + 4 * (2 * 4 + 4)  # queries, keys; values, gate, output; two scalars; taps
    layers = 2 * (LINEAR + MLP) + 2 * (projections + MLP)
    rule = 6 * (6 * 16 + 4 * 64 * 4)
    assert found.executed == 32 * (3 * (layers + rule) + 9 / 2 * 2 * SCORES + 4 * 2 * HEAD)
    assert found.model == 32 * 3 * (layers + 2 * 3 * 16 + 2 * SCORES + 2 * HEAD)


def test_a_lane_over_two_nodes_holds_its_share_and_works_in_turn_with_the_learner():
    """Sixteen GPUs of two nodes, sixteen experts: one lane. Nothing is compiled, the learner's part is too large."""
    sizes = {"layers": 8, "width": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "mlp_width": 0, "experts": 16}
    sizes |= {"experts_per_token": 2, "expert_width": 65536, "vocab_size": 32000}
    words = [f"--policy.{name}={value}" for name, value in sizes.items()]
    words += ["--mesh.expert=16", "--rollout.slots=24", "--topology", "h100x16", "--json"]
    done = run(*words)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    memory = found["memory"]
    shared = 8 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 2 * 4096 + 2 * 128 + 4096 * 16) + 4096 * 32001
    experts = 8 * 3 * 4096 * 65536  # of one of sixteen
    assert memory["sampler_parameters"] == pytest.approx(4 * (shared + experts), rel=1e-3)
    assert found["counts"]["slots_per_lane"] == 24 and found["no_sampler"] is None
    stays = memory["parameters"] + memory["moments"]
    assert found["programs"] == {} and memory["phases"] == {
        "learning": stays + memory["gradients"] + memory["batch"],
        "sampling": stays + memory["sampler_parameters"] + memory["kv_cache"],
    }
    assert found["hbm_bytes_per_chip"] == max(memory["phases"].values()) < memory["learner"] + memory["sampler"]
    assert "  while learning" in done.stdout
    done = run(*words, "--grpo.staleness=1")
    assert done.returncode == 2 and "lie in 2 processes" in done.stderr and "Traceback" not in done.stderr
