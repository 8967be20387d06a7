"""The search environment through the recipe: one shrunk run from the explorer to the report, and what is refused."""

import json
from pathlib import Path

import pytest
from recipes_helpers import compile_cache, records

from trace_jax import cli, config_io
from trace_jax.config import ConfigError
from trace_jax.policy import hf
from trace_jax.recipes.domain import domain_of
from trace_jax.recipes.rundir import stored_config
from trace_jax.rollout.trajectory import read_parquet

__all__ = ["compile_cache"]  # fixture

CONFIGS = Path(__file__).parent.parent / "configs"
CONFIG = CONFIGS / "search_smoke.yaml"
SHRUNK = {
    "policy.layers": 1,
    "grpo.steps": 1,
    "grpo.iterations": 1,
    "grpo.validate_every": 1,
    "data.test": 4,
}


@pytest.fixture(scope="module")
def run(compile_cache, tmp_path_factory):
    """A finished run."""
    path = tmp_path_factory.mktemp("search") / "run"
    flags = [word for field, value in SHRUNK.items() for word in (f"--{field}", str(value))]
    assert cli.main(["train", "--config", str(CONFIG), "--run-dir", str(path), *flags]) == 0
    return path


def bad(capsys, *argv):
    assert cli.main([str(a) for a in argv]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trace-jax: ")]
    assert len(err) == 1, err
    return err[0]


def test_the_whole_recipe(run, capsys):
    assert {r["stage"] for r in records(run)} == {"teacher", "sft", "validation", "grpo"}
    assert {p.stem for p in (run / "evaluation").glob("*.json")} == {"untrained", "explorer", "solver", "sft", "grpo"}
    solver = json.loads((run / "evaluation" / "solver.json").read_text())
    assert solver["right_at_1"]["value"] == solver["parsed"]["value"] == 1
    trajectories = read_parquet(run / "trajectories" / "grpo-000001.parquet")
    assert len(trajectories) == 8 and all(t.labels["type"] == f"{t.labels['hops']}_hops" for t in trajectories)
    page = (run / "report.html").read_text()
    assert "Right@1" in page and "hops" in page and "hidden cause" not in page
    hf.load(run / "export")
    assert cli.main(["eval", "--run-dir", str(run), "--json"]) == 0
    shown = capsys.readouterr().out
    result = json.loads(shown.splitlines()[-1])
    assert result["environment"] == "search" and "explorer" in shown
    assert result == json.loads((run / "evaluation" / "grpo.json").read_text())
    assert cli.main(["report", "--run-dir", str(run)]) == 0
    assert "--agent analyst" in bad(capsys, "eval", "--run-dir", run, "--agent", "analyst")


def test_turn_credit_asks_for_the_answer(run, tmp_path, capsys):
    new = tmp_path / "credit"
    credit = ["--grpo.turn_credit.enabled", "true", "--grpo.turn_credit.microbatch.row_length", "512"]
    assert cli.main(["grpo", "--init", str(run), "--run-dir", str(new), *credit]) == 0
    trajectories = read_parquet(new / "trajectories" / "grpo-000001.parquet")
    assert all(len(t.probes) == t.tool_calls + 1 for t in trajectories)
    assert cli.main(["inspect", "--trajectory", str(new), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["gold_answer"] == trajectories[0].labels["answer"]


def test_commands_of_the_advertising_world_refuse(capsys, tmp_path):
    for command in ("simulate", "inspect", "play", "certify"):
        said = bad(capsys, command, "--config", CONFIG)
        assert f"`{command}`" in said and "search" in said
    assert "bench tools" in bad(capsys, "bench", "tools", "--config", CONFIG)
    assert "explorer or solver" in bad(capsys, "eval", "--config", CONFIG, "--agent", "analyst")
    assert "choose analyst" in bad(capsys, "eval", "--config", CONFIGS / "smoke.yaml", "--agent", "solver")


@pytest.mark.parametrize(
    ("file", "field", "value"),
    [
        ("search_smoke", "simulator.days", 30),
        ("search_smoke", "environment.reward_attr", 0.5),
        ("search_smoke", "grpo.no_signal_share", 0.5),
        ("smoke", "search.documents", 40),
    ],
)
def test_fields_of_another_environment_are_refused(file, field, value, capsys):
    said = bad(capsys, "train", "--config", CONFIGS / f"{file}.yaml", f"--{field}", value, "--dry-run")
    assert f"`{field}`" in said and "leave it out" in said


def test_hops_must_be_in_order():
    with pytest.raises(ConfigError, match="search.min_hops"):
        config_io.load(CONFIG, [("search.min_hops", "3")])


def test_runs_from_before_there_were_environments_open(tmp_path):
    text = config_io.dump(config_io.load(CONFIGS / "smoke.yaml"))
    lines = text.splitlines(keepends=True)
    start = lines.index("search:\n")
    end = next(i for i in range(start + 1, len(lines)) if not lines[i].startswith(" "))
    old = "".join(lines[:start] + lines[end:]).replace("  name: ads\n", "")
    assert old != text
    (tmp_path / "config.yaml").write_text(old)
    assert stored_config(tmp_path) == config_io.load(CONFIGS / "smoke.yaml")


@pytest.mark.parametrize("name", ["search_smoke", "search_nano"])
def test_splits_and_lessons_share_no_question(name):
    config = config_io.load(CONFIGS / f"{name}.yaml")
    row = domain_of(config)
    streams = ("train", "validation", "test", "plan", "teacher-0", "teacher-1")
    worlds = [row.draw(config, stream, 10**6, None) for stream in streams]
    ranges = sorted((w.first, w.first + w.size) for w in worlds)
    assert all(a[1] <= b[0] for a, b in zip(ranges, ranges[1:], strict=False))
    assert len(row.split(config, "test", Path("unused"), None)) == config.data.test
