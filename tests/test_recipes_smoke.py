"""The whole recipe at its smallest: what it leaves behind, bad input on a run, exact resume after interruptions."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time

import numpy as np
from recipes_helpers import (
    CONFIG,
    compile_cache,
    figures,
    final_state,
    finished_smoke,
    reached,
    records,
    smoke,
    start,
    unfinished_copy,
    wait_until,
)

from trace_jax import cli
from trace_jax.policy import hf
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.report import html
from trace_jax.rollout.trajectory import read_parquet
from trace_jax.simulator.causes import CAUSE_NAMES, EPISODE_TYPES

__all__ = ["compile_cache", "finished_smoke", "smoke"]  # fixtures

KEYS = {"cause_at_1", "full_attr_at_1", "full_attr_at_5", "jaccard", "no_signal", "parsed", "tool_calls"}


def check_results(result):
    assert KEYS | {"by_type", "by_cause"} <= result.keys()
    assert set(result["by_type"]) == set(EPISODE_TYPES) and set(result["by_cause"]) == set(CAUSE_NAMES)
    for value in [*(result[k] for k in KEYS), *result["by_type"].values(), *result["by_cause"].values()]:
        assert set(value) == {"value", "low", "high"}


def bad(capsys, *argv):
    assert cli.main([str(a) for a in argv]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("trace-jax: ")]
    assert len(err) == 1, err
    return err[0]


def test_the_run_leaves_what_the_readme_says(smoke):
    run, done = smoke
    check_results(json.loads(done["stdout"].splitlines()[-1]))
    assert "SFT->GRPO" in done["stdout"] and "analyst" in done["stdout"]
    for name in ("config.yaml", "tokenizer.model", "export/model.safetensors", "export/config.json", "report.html"):
        assert (run / name).is_file(), name
    stages = {r["stage"] for r in records(run)}
    assert stages == {"teacher", "sft", "validation", "grpo"}
    assert [r["step"] for r in records(run) if r["stage"] == "grpo"] == [1, 2, 3, 4]
    assert [r["step"] for r in records(run) if r["stage"] == "validation"] == [0, 2, 4]
    grpo = [r for r in records(run) if r["stage"] == "grpo"]
    gaps = [r["mismatch_gap"] for r in grpo if r["mismatch_gap"] is not None]  # None: all groups constant
    assert max(gaps, default=0.0) < 1e-4  # sampler and learner mean the same distribution
    assert {p.stem for p in (run / "evaluation").glob("*.json")} == {"untrained", "analyst", "sft", "grpo"}
    trajectories = read_parquet(run / "trajectories" / "grpo-000001.parquet")
    assert len(trajectories) == 8 and all(set(t.versions) == {0} for t in trajectories)
    sft = [r["loss"] for r in records(run) if r["stage"] == "sft"]
    assert sft[-1] < 0.3 * sft[0]


def test_a_finished_run_is_only_shown_again(smoke, capsys):
    run, done = smoke
    before = (run / "metrics.jsonl").read_text()
    assert cli.main(["train", "--run-dir", str(run), "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(done["stdout"].splitlines()[-1])
    assert (run / "metrics.jsonl").read_text() == before


def test_eval_and_export(smoke, capsys, tmp_path):
    run, done = smoke
    assert cli.main(["eval", "--run-dir", str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result == json.loads(done["stdout"].splitlines()[-1])  # the same seeds, the same answers
    assert cli.main(["export", "--run-dir", str(run), "--stage", "sft", "--out", str(tmp_path / "e"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["stage"] == "sft"
    model, tokenizer = hf.load(tmp_path / "e")
    assert model.vocab_size == tokenizer.vocab_size
    final, _ = hf.load(run / "export")
    assert not np.array_equal(final.embedding[...], model.embedding[...])
    assert cli.main(["export", "--run-dir", str(run), "--stage", "best", "--out", str(tmp_path / "b")]) == 0
    scores = {r["step"]: r["reward"] for r in records(run) if r["stage"] == "validation"}
    best, _ = hf.load(tmp_path / "b")  # the later one of equals
    assert np.array_equal(best.embedding[...], final.embedding[...]) == (scores[4] >= scores[2])


def test_eval_with_other_settings_leaves_the_results_alone(smoke, capsys, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(smoke[0], run)
    before = (run / "evaluation" / "grpo.json").read_text()
    changes = (("seed", 5), ("policy.max_length", 1024), ("rollout.max_turn_tokens", 100), ("data.train", 30))
    for field, value in changes:
        assert f"`{field}`" in bad(capsys, "eval", "--run-dir", run, f"--{field}", value)
    argv = ["eval", "--run-dir", str(run), "--agent", "analyst", "--evaluation.bootstrap", "100", "--json"]
    assert cli.main(argv) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["settings"]["evaluation.bootstrap"] == 100
    assert (run / "evaluation" / "other" / "analyst,evaluation.bootstrap=100.json").is_file()
    assert (run / "evaluation" / "grpo.json").read_text() == before
    page = html.build(run)
    assert "analyst,evaluation" not in page


def test_lost_teacher_files_cost_a_finished_run_nothing(smoke, capsys, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(smoke[0], run)
    shutil.rmtree(run / "data" / "teacher")
    before = (run / "metrics.jsonl").read_text()
    assert cli.main(["sft", "--run-dir", str(run), "--resume"]) == 0
    assert (run / "metrics.jsonl").read_text() == before and not list(run.glob("data/teacher/*"))


def test_export_needs_a_whole_checkpoint_and_no_write_access(smoke, capsys, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(smoke[0], run)
    with RunDirectory.open(run):  # as if it were being trained
        assert cli.main(["export", "--run-dir", str(run), "--out", str(tmp_path / "e")]) == 0
    for manifest in (run / "checkpoints" / "grpo").glob("*/checkpoint.json"):
        manifest.unlink()
    assert "--stage sft" in bad(capsys, "export", "--run-dir", run)
    assert "choose a directory" in bad(capsys, "export", "--run-dir", run, "--out", run / "config.yaml")


def test_grpo_from_the_sft_policy_of_another_run(smoke, capsys, tmp_path):
    run, _ = smoke
    new = tmp_path / "seed1"
    argv = ["grpo", "--init", run, "--run-dir", new, "--seed", 1, "--grpo.steps", 1, "--json"]
    assert cli.main([str(a) for a in argv]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["stage"] == "grpo"
    assert [r["step"] for r in records(new) if r["stage"] == "grpo"] == [1]
    first, other = (read_parquet(r / "trajectories" / "grpo-000001.parquet") for r in (run, new))
    assert [t.task_index for t in first] != [t.task_index for t in other]


def test_bad_input_on_a_run(smoke, capsys, tmp_path):
    run, _ = smoke
    assert "add --resume" in bad(capsys, "train", "--config", CONFIG, "--run-dir", run)
    assert "`seed` cannot change" in bad(capsys, "train", "--resume", "--run-dir", run, "--seed", "5")
    # limits that would cut the answers of a policy trained on the teacher's transcripts
    argv = ("sft", "--config", CONFIG, "--run-dir")
    for field, value in (("rollout.max_turn_tokens", 8), ("rollout.max_turns", 2), ("rollout.context", 100)):
        copy = unfinished_copy(run, tmp_path / field)
        (copy / "config.yaml").unlink()
        message = bad(capsys, *argv, copy, f"--{field}", value, "--rollout.max-turn-tokens", 8)
        assert "transcripts: raise it to" in message
        assert "continue with --resume --rollout." in message
    copy = unfinished_copy(run, tmp_path / "unfinished")
    assert "SFT of" in bad(capsys, "grpo", "--run-dir", copy)
    assert "no checkpoint" in bad(capsys, "export", "--run-dir", copy)
    assert "no checkpoint" in bad(capsys, "eval", "--run-dir", copy)


def test_damaged_checkpoint_and_full_disk(smoke, capsys, tmp_path):
    run, _ = smoke
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    newest = max((copy / "checkpoints" / "grpo").iterdir())
    data = max((p for p in (newest / "params").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 255
    data.write_bytes(content)
    assert "damaged" in bad(capsys, "export", "--run-dir", copy)
    assert "damaged" in bad(capsys, "eval", "--run-dir", copy, "--agent", "grpo")

    full = unfinished_copy(run, tmp_path / "full")
    (full / "metrics.jsonl").symlink_to("/dev/full")
    assert "no space left" in bad(capsys, "sft", "--run-dir", full, "--resume")


def test_interrupted_run_ends_like_an_uninterrupted_one(smoke, compile_cache, tmp_path):
    """Case 8 of trainer: SIGINT in SFT, in GRPO and in a save, SIGKILL in a save; then bitwise equality."""
    run, _ = smoke
    copy = unfinished_copy(run, tmp_path / "copy")
    saves = copy / "checkpoints" / "grpo"

    def saving():
        return saves.is_dir() and any(p.name.startswith(".partial") for p in saves.iterdir())

    plan = [
        (lambda: reached(copy, "sft", 5), signal.SIGINT),
        (lambda: reached(copy, "grpo", 1), signal.SIGINT),
        (saving, signal.SIGINT),
        (saving, signal.SIGKILL),
    ]
    command = ["train", "--run-dir", str(copy), "--resume"]
    for condition, number in plan:
        process = start(*command, cache=compile_cache)
        wait_until(process, condition)
        os.killpg(process.pid, number)
        _, stderr = process.communicate()
        if number == signal.SIGINT:
            assert process.returncode == 130, stderr
            line = stderr.splitlines()[-1]
            assert shlex.split(line.partition("continue with: ")[2]) == ["trace-jax", *command]
    assert saving(), "the kill was meant to leave half a checkpoint"
    assert not reached(copy, "grpo", 4) or len([p for p in saves.iterdir() if p.name.isdigit()])
    process = start(*command, cache=compile_cache)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert "skipping incomplete checkpoint" in stderr

    expected, extra = final_state(run)
    actual, resumed_extra = final_state(copy)
    assert extra == resumed_extra and expected.keys() == actual.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)
    assert figures(copy) == figures(run)
    exported = "export/model.safetensors"
    assert (copy / exported).read_bytes() == (run / exported).read_bytes()
    for step in range(1, 5):
        name = f"trajectories/grpo-{step:06d}.parquet"
        pairs = zip(read_parquet(run / name), read_parquet(copy / name), strict=True)
        assert all(np.array_equal(a.ids, b.ids) and np.array_equal(a.logprobs, b.logprobs) for a, b in pairs)


def processes(session: int) -> list[str]:
    return subprocess.run(["ps", "-o", "args=", "-s", str(session)], capture_output=True, text=True).stdout.split("\n")[
        :-1
    ]


def test_signal_in_the_teacher_stage(compile_cache, tmp_path):
    """Nothing but the chunk at hand is lost, and no worker process stays behind."""
    run = tmp_path / "run"
    process = start("sft", "--config", CONFIG, "--run-dir", run, cache=compile_cache)
    wait_until(process, lambda: len(processes(process.pid)) >= 4)  # the command, its resource tracker, two workers
    os.killpg(process.pid, signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130 and "--resume" in stderr
    end = time.monotonic() + 20  # helpers end a moment after their parent
    while (left := processes(process.pid)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left
