"""The policy that the package carries: its score, and how a run becomes one."""

import json
import shutil

import pytest
from helpers_diagnose import HALVES, MOBILE, rows, runner, text
from recipes_helpers import compile_cache, finished_smoke  # noqa: F401 - fixtures

from trace_jax import cli
from trace_jax.recipes import shipped
from trace_jax.simulator.causes import CAUSE_NAMES

LEAST = 0.8  # of 40 episodes right; what it has on all of them is in its manifest


def test_the_shipped_policy_is_right_as_often_as_it_was(capsys):
    """Fails when a change of prompts, tools, tables, sampling or arithmetic makes the policy worse."""
    found = shipped.manifest()
    assert found["measured"]["full_attr_at_1"]["value"] > LEAST and found["measured"]["episodes"] == 235
    assert sum(path.stat().st_size for path in shipped.check().iterdir()) < 4 << 20
    argv = ["eval", "--agent", "shipped", "--data.test", "40", "--evaluation.samples", "1", "--json"]
    assert cli.main(argv) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["extra"]["answers"] == 40 and result["full_attr_at_1"]["value"] >= LEAST


@pytest.mark.slow
def test_a_run_becomes_a_shipped_policy_that_eval_and_diagnose_use(
    finished_smoke,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
):
    run, folder = finished_smoke[0], tmp_path / "shipped"
    export = ["export", "--run-dir", str(run), "--format", "shipped", "--out", str(folder), "--json"]
    for _ in range(2):  # the second one replaces the first
        assert cli.main(export) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])["manifest"]
    stored = json.loads((run / "evaluation" / "grpo.json").read_text())
    assert made["measured"]["cause_at_1"] == stored["cause_at_1"] and made["measured"]["episodes"] == 12
    assert made["stage"] == "grpo" and made["name"] == "smoke" and made["dtype"] == "float32"
    monkeypatch.setattr(shipped, "FOLDER", folder)
    assert cli.main(["eval", "--agent", "shipped", "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["cause_at_1"] == stored["cause_at_1"] and again["benchmark"] == made["measured"]["benchmark"]
    diagnose = runner(tmp_path, capsys)
    status, found, out, _ = diagnose(text(rows(effect=MOBILE)), argv=(*HALVES, "--agent", "shipped"))
    assert status == 0 and found["agent"] == "shipped" and "smoke, 86,320 parameters" in out
    assert found["cause"] in (None, *CAUSE_NAMES) and any(i["steps"] for i in found["investigations"])
    for argv, part in (
        (["eval", "--agent", "shipped", "--run-dir", str(run)], "leave --run-dir out"),
        (["eval", "--agent", "shipped", "--policy.width", "64"], "`policy.width` cannot change"),
        (["diagnose", "x.csv", "--policy.width", "64"], "`policy.width` cannot change"),
        ([*export, "--shard-size", "5MB"], "leave it out"),
        ([*export[:-2], str(run)], "holds something else"),
    ):
        assert cli.main(argv) == 2
        assert part in capsys.readouterr().err
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"x")
    assert cli.main(["eval", "--agent", "shipped"]) == 2
    assert "is not the file that was shipped" in capsys.readouterr().err


def test_without_a_shipped_policy_the_analyst_investigates(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "none")
    path = tmp_path / "a.csv"
    path.write_text(text(rows(effect=MOBILE)))
    assert cli.main(["diagnose", str(path), "--yes", "--samples", "1", "--json", *HALVES]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["agent"] == "analyst"
    for command in (["diagnose", str(path)], ["eval"]):
        assert cli.main([*command, "--agent", "shipped"]) == 2
        assert "no shipped policy in" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "none", ignore_errors=True)
