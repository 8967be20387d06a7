"""Phases, speed and memory of a step; the trace of --profile; where figures go; the page that explains them."""

import json
import re
import sys
import threading
import types
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from recipes_helpers import compile_cache, finished_smoke, records

from trace_jax import cli
from trace_jax.config import ConfigError, PolicyConfig, RunConfig
from trace_jax.learner import flops
from trace_jax.recipes import phases
from trace_jax.recipes.phases import PHASES, PhaseTimer
from trace_jax.recipes.profile import Profiler
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.rollout.collect_stats import CollectStats

__all__ = ["compile_cache", "finished_smoke"]  # fixtures
PAGE = Path(__file__).parent.parent / "docs" / "metrics.md"


def test_every_logged_figure_is_explained(finished_smoke):
    rows = [line.split("|")[1:3] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    explained = {name for names, text in rows if len(text.strip()) > 3 for name in re.findall(r"`([^`]+)`", names)}
    logged = {key for record in records(finished_smoke[0]) for key in record}
    assert logged - explained == set()
    assert {f"seconds/{name}" for name in PHASES} <= explained
    # and the run has what is promised for its steps
    assert {"seconds/learn", "learn_tokens_per_second", "mismatch_max", "seconds/generate"} <= logged
    assert logged & {"memory/peak_bytes", "memory/host_rss"}


def test_phases_of_several_threads_are_booked_in_full(monkeypatch):
    clock = threading.local()
    monkeypatch.setattr(phases.time, "perf_counter", lambda: getattr(clock, "now", 0.0))
    timer, meet = PhaseTimer(), threading.Barrier(2, timeout=10)

    def work(name, seconds):
        with timer.phase(name):
            meet.wait()  # both are inside
            clock.now = seconds
            meet.wait()

    threads = [threading.Thread(target=work, args=a) for a in (("generate", 3.0), ("learn", 2.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(KeyError), timer.phase("save"):  # time is booked whatever happens
        clock.now = 0.5
        raise KeyError
    assert timer.take() == {"seconds/generate": 3.0, "seconds/learn": 2.0, "seconds/save": 0.5}
    timer.collected(CollectStats(sampling=4.0, tools=3.0, tools_alone=1.0, total=7.0))
    timer.add("reward", 0.25)
    assert timer.take() == {
        "seconds/generate": 4.0,
        "seconds/tools": 3.0,
        "seconds/reward": 2.25,  # neither sampling nor tools: 7 - 4 - 1
        "seconds/learn": 0.0,  # columns stay
        "seconds/save": 0.0,
    }
    with pytest.raises(ValueError, match="no phase"):
        timer.add("lunch", 1.0)


def test_speed_and_share_of_the_peak(monkeypatch):
    policy = PolicyConfig(layers=1, width=2, heads=1, kv_heads=1, head_dim=2, mlp_width=4)
    lengths = [1, 3]
    # a token of a sequence of n attends to (n + 1) / 2 tokens on average: (1 + 1 + 2 + 3) / 4
    assert flops.attended(lengths) == 7 / 4
    # by hand: q, k, v, o 4 x 4, mlp 3 x 8, head 2 x 10; scores and values 2 x 2 x 7 / 4; forward and backward 6
    each = 6 * (16 + 24 + 20 + 7)
    assert flops.flops_per_token(policy, 10, 7 / 4) == each
    assert phases.throughput(2.0, lengths, 3, policy, 10, 1) == {"learn_tokens_per_second": 6.0}  # no peak of a CPU
    monkeypatch.setattr(flops, "peak", lambda: 1000.0)
    assert phases.throughput(2.0, lengths, 3, policy, 10, 4)["mfu"] == pytest.approx(6.0 * each / 4000)
    assert phases.throughput(2.0, [], 3, policy, 10, 4) == {}


def test_peaks_are_found_by_the_device_kind():
    kinds = {"TPU v5 lite": 197e12, "TPU v5": 459e12, "TPU v5p": 459e12, "TPU v6 lite": 918e12, "TPU v4": 275e12}
    kinds |= {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12, "NVIDIA A100-SXM4-40GB": 312e12}
    kinds |= {"NVIDIA B200": 2250e12, "cpu": None, "NVIDIA GeForce RTX 3060": None}
    assert {kind: flops.peak(SimpleNamespace(device_kind=kind)) for kind in kinds} == kinds


def test_memory_is_of_the_fullest_device_or_of_the_host():
    def device(**stats):
        return SimpleNamespace(memory_stats=lambda: stats or None)

    two = [device(bytes_in_use=5, peak_bytes_in_use=9), device(bytes_in_use=7, peak_bytes_in_use=8)]
    assert phases.memory(two) == {"memory/bytes_in_use": 7.0, "memory/peak_bytes": 9.0}
    resident = phases.memory([device()])["memory/host_rss"]
    pages = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 if Path("/proc/self/statm").exists() else 1
    assert resident >= 0.9 * pages  # the most ever is no less than what is held now


def trace_steps(path):
    """Numbers of the steps in a trace."""
    (file,) = path.rglob("*.xplane.pb")
    found = set()
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                found |= {value for key, value in event.stats if event.name == "step" and key == "step_num"}
    return found


def test_a_trace_has_the_steps_after_the_first_two(tmp_path):
    double = jax.jit(lambda x: 2 * x)
    with Profiler(tmp_path / "profile", 2) as profiler:
        for step in range(10, 17):
            profiler.step(step)
            double(jnp.ones(8)).block_until_ready()
    assert trace_steps(tmp_path / "profile") == {12, 13}
    with pytest.raises(KeyError), Profiler(tmp_path / "cut", 5) as profiler:
        for step in range(4):
            profiler.step(step)
            if step == 3:
                raise KeyError
    assert trace_steps(tmp_path / "cut") == {2, 3}
    with pytest.warns(UserWarning, match="no trace"), Profiler(tmp_path / "short", 2) as profiler:
        profiler.step(0)
    with Profiler(tmp_path / "none", 0) as profiler:
        profiler.step(0)
    assert {p.name for p in tmp_path.iterdir()} == {"profile", "cut"}


class FakeRun:
    """Stands for a W&B run."""

    def __init__(self, **given):
        self.given, self.logged, self.axes, self.ended = given, [], {}, None

    def define_metric(self, name, step_metric=None):
        self.axes[name] = step_metric

    def log(self, figures):
        if len(self.logged) == 3:
            raise BrokenPipeError("service died")
        self.logged.append(figures)

    def finish(self, exit_code):
        self.ended = exit_code


@pytest.fixture
def wandb(monkeypatch):
    """A module of that name; `runs` are those begun."""
    module = types.ModuleType("wandb")
    module.runs = []
    module.init = lambda **given: module.runs.append(FakeRun(**given)) or module.runs[-1]
    module.__spec__ = SimpleNamespace(name="wandb")
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def test_wandb_gets_the_figures_of_metrics_jsonl(wandb, tmp_path, monkeypatch):
    with RunDirectory.create(tmp_path / "r", RunConfig(name="mine")) as run:
        run.track("wandb")
        run.log("sft", 1, {"loss": 2.0, "odd": None, "by": {"a": 1.0}})
        run.log("grpo", 1, {"reward": 0.5})
    (sent,) = wandb.runs
    assert sent.given["project"] == "trace-jax" and sent.given["dir"] == str(tmp_path / "r")
    assert sent.given["config"]["name"] == "mine" and sent.given["config"]["grpo.steps"] == RunConfig().grpo.steps
    seconds = [r["seconds"] for r in records(tmp_path / "r")]
    assert sent.logged == [
        {"sft/step": 1, "sft/seconds": seconds[0], "sft/loss": 2.0},
        {"grpo/step": 1, "grpo/seconds": seconds[1], "grpo/reward": 0.5},
    ]
    assert sent.axes["sft/*"] == "sft/step" and sent.axes["grpo/*"] == "grpo/step" and sent.ended == 0
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    with pytest.raises(KeyError), RunDirectory.open(tmp_path / "r") as run:
        run.track("wandb")
        raise KeyError
    again = wandb.runs[-1]
    assert again.given["id"] == sent.given["id"] and again.given["resume"] == "allow"
    assert again.given["project"] == "theirs" and again.ended == 1


def test_a_service_that_dies_does_not_end_the_run(wandb, tmp_path):
    with RunDirectory.create(tmp_path / "r", RunConfig()) as run:
        run.track("wandb")
        with pytest.warns(UserWarning, match="service died") as seen:
            for step in range(6):
                run.log("sft", step, {"loss": 1.0})
    assert len(seen) == 1 and len(records(tmp_path / "r")) == 6


def test_a_service_that_cannot_be_used_is_one_line(wandb, tmp_path, monkeypatch, capsys):
    def refuse(**given):
        raise RuntimeError("No API key\nconfigured.")

    wandb.init = refuse
    said = r"No API key configured\. Log in .* WANDB_MODE=offline"
    with RunDirectory.create(tmp_path / "r", RunConfig()) as run, pytest.raises(ConfigError, match=said):
        run.track("wandb")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["sft", "--track", "wandb", "--run-dir", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "pip install wandb" in said and not (tmp_path / "new").exists()


def test_flags_take_what_they_say(capsys):
    for argv in (["--profile", "0"], ["--profile=-1"], ["--profile", "many"]):
        assert cli.main(["sft", *argv]) == 2
        assert "--profile" in capsys.readouterr().err
    assert cli.main(["sft", "--track", "mlflow"]) == 2 and "wandb" in capsys.readouterr().err
    assert cli.main(["sft", "--dry-run", "--profile", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["grpo.steps"] == RunConfig().grpo.steps
