"""`trace-jax diagnose --run-dir`: a trained policy on a user's file. It needs a finished run, which takes a minute."""

import datetime

import pytest
from helpers_diagnose import FIRST, falls, result, rows, text
from recipes_helpers import compile_cache, finished_smoke  # noqa: F401 - fixtures

from trace_jax import cli


@pytest.mark.slow
def test_a_runs_policy_investigates_and_the_run_stays_as_it_is(finished_smoke, tmp_path, capsys):  # noqa: F811
    run = finished_smoke[0]
    path = tmp_path / "report.csv"
    path.write_text(text(rows(effect=falls({"device": "Mobile phones"}, ctr=0.5))))
    held = lambda: {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}  # noqa: E731
    before = held()
    middle = FIRST + datetime.timedelta(14)
    spans = ("--before", f"{FIRST}:{middle - datetime.timedelta(1)}", "--after", f"{middle}:2026-11-01")
    assert cli.main(["diagnose", str(path), "--yes", "--run-dir", str(run), "--samples", "4", "--json", *spans]) == 0
    found = result(capsys.readouterr().out)
    assert held() == before
    assert found["agent"] == "latest" and len(found["investigations"]) == found["confidence"]["of"] == 4
    # Even a smoke policy asks before it answers, and reads what the tool says about the user's rows.
    steps = [step for one in found["investigations"] for step in one["steps"]]
    assert steps and any("sql(" in code for code, _ in steps)
    assert cli.main(["diagnose", str(path), "--yes", "--run-dir", str(tmp_path / "none")]) == 2
