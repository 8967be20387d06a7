"""`trace-jax capability contrast` on a finished run: what it writes, going on, other thresholds, refusals."""

import json
import xml.etree.ElementTree as ET

import pyarrow.parquet as pq
import pytest
from recipes_helpers import compile_cache, finished_smoke, smoke

from trace_jax import cli, config_io
from trace_jax.capability import attempts
from trace_jax.environments.ads.capabilities import CAPABILITIES
from trace_jax.environments.capability import Label
from trace_jax.recipes import contrast
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.trajectory import read_parquet

__all__ = ["compile_cache", "finished_smoke", "smoke"]  # fixtures
NAMES = [c.name for c in CAPABILITIES]


def run(capsys, *words):
    status = cli.main([*map(str, ("capability", "contrast", *words))])
    out, err = capsys.readouterr()
    return status, out, err


def test_a_contrast_and_what_it_leaves(smoke, capsys, monkeypatch):
    """Written in parts and taken up again; labels agree with the trajectories kept; figures with the labels."""
    path, _ = smoke
    monkeypatch.setattr(contrast, "PART", 2)
    words = ["--run-dir", path, "--stage", "sft", "--episodes", 4, "--samples", 2, "--json"]
    words += ["--evaluation.temperature", 1.0]
    status, out, err = run(capsys, *words)
    assert status == 0, err
    told, folder = json.loads(out.splitlines()[-1]), path / "capability" / "contrast-sft-validation"
    assert json.loads((folder / "contrast.json").read_text()) == told
    assert told["attempts"] == 8 and sorted(e["capability"] for e in told["capabilities"]) == sorted(NAMES)
    assert (folder / "contrast.md").read_text() in out
    ET.fromstring((folder / "contrast.svg").read_text())

    parts = sorted((folder / "trajectories").glob("*.parquet"))
    kept = [t for part in parts for t in read_parquet(part)]
    assert len(parts) == 2 and [(t.task_index, t.sample) for t in kept] == [(i, s) for i in range(4) for s in range(2)]
    rows = pq.read_table(folder / "labels.parquet").to_pylist()
    with RunDirectory.open(path, lock=False) as opened:
        chat = Workspace(opened, None, None).chat
        read = [attempts.of_trajectory(t, chat, opened.config.rollout) for t in kept]
    for row, attempt in zip(rows, read, strict=True):
        assert {n: row[n] for n in NAMES} == {c.name: c.label(attempt).name for c in CAPABILITIES}
        assert row["passed"] == attempt.passed and row["ending"] == attempt.ending
    for entry in told["capabilities"]:
        failed = [r[entry["capability"]] for r in rows if not r["passed"]]
        assert entry["coverage"]["value"] == pytest.approx(failed.count("LACKING") / max(len(failed), 1))

    # A part that is missing is sampled again, exactly; one that is there is not touched.
    parts[1].unlink()
    before = parts[0].stat().st_mtime_ns
    assert run(capsys, *words)[0] == 0 and parts[0].stat().st_mtime_ns == before
    again = read_parquet(parts[1])
    assert all((a.ids == b.ids).all() and a.status == b.status for a, b in zip(again, kept[4:], strict=True))

    # Other thresholds cost no sampling and select other capabilities.
    monkeypatch.setattr(contrast, "evaluate_policy", None)
    status, out, err = run(capsys, *words, "--capability.coverage", 0, "--capability.gap", 0)
    assert status == 0, err
    generous = json.loads(out.splitlines()[-1])
    assert generous["thresholds"]["gap"] == 0 and set(told["kept"]) <= set(generous["kept"])

    # Other settings do not mix with what is there.
    for other in (["--samples", 3], ["--evaluation.temperature", 0.5], ["--split", "train"]):
        changed = [w for w in words if not str(w).startswith("--evaluation") and w not in (1.0,)]
        at = changed + ["--out", folder, *other] + ([] if "--evaluation.temperature" in other else words[-2:])
        status, _, err = run(capsys, *at)
        assert status == 2 and "holds trajectories of other settings" in err and len(err.splitlines()) == 1


def test_stored_trajectories_are_contrasted_without_sampling(smoke, capsys, monkeypatch):
    path, _ = smoke
    file = sorted((path / "trajectories").glob("grpo-*.parquet"))[-1]
    monkeypatch.setattr(contrast, "evaluate_policy", None)
    status, out, err = run(capsys, "--run-dir", path, "--trajectories", file, "--json")
    assert status == 0, err
    told = json.loads(out.splitlines()[-1])
    assert told["attempts"] == len(read_parquet(file)) and told["settings"] == {"trajectories": str(file)}
    assert told["notes"] == (
        ["No attempt passed: ER+ counts as 0, and gaps are ER- alone."] if told["failed"] == told["attempts"] else []
    )
    status, _, err = run(capsys, "--run-dir", path, "--trajectories", file, "--samples", 2)
    assert status == 2 and "--samples is about sampling" in err


def test_an_endpoint_labels_in_runs_of_its_own(smoke, capsys, monkeypatch):
    """Its replies become labels of each run; `runs` of them, and thresholds count runs of the model."""
    path, _ = smoke
    file = sorted((path / "trajectories").glob("grpo-*.parquet"))[-1]
    asked = []

    def ask(self, messages, capabilities, run):
        asked.append(run)
        return [Label.LACKING if run < 2 else Label.PRESENT for _ in capabilities]

    monkeypatch.setattr(contrast.endpoint.Endpoint, "ask", ask)
    words = ["--run-dir", path, "--trajectories", file, "--json", "--capability.labeller", "endpoint"]
    words += ["--capability.endpoint", "http://localhost:9/v1", "--capability.model", "judge"]
    words += ["--capability.runs", 3, "--capability.keep", 2]
    status, out, err = run(capsys, *words)
    assert status == 0, err
    told = json.loads(out.splitlines()[-1])
    assert sorted(asked) == sorted([0, 1, 2] * told["attempts"])
    rows = pq.read_table(path / "capability" / f"contrast-{file.stem}" / "labels.parquet").to_pylist()
    assert {(r["run"], r["stopping"]) for r in rows} == {(0, "LACKING"), (1, "LACKING"), (2, "PRESENT")}
    # All attempts are labelled alike: there is a gap only where none of them passed.
    expected = 2 if told["failed"] == told["attempts"] else 0
    assert all(e["runs_selecting"] == expected for e in told["capabilities"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--sft.epochs", "3"], "`sft.epochs` cannot change in `capability contrast`"),
        (["--episodes", "13"], "validation has 12"),
        (["--evaluation.temperature", "0", "--samples", "2"], "all of them would be the same"),
        (["--stage", "best", "--split", "test"], "--split"),
        (["--capability.keep", "11"], "`capability.keep` (11) exceeds"),
        (["--capability.labeller", "endpoint"], "needs `capability.endpoint`"),
        (["--capability.model", "judge"], "set `capability.labeller` to endpoint"),
        (["--trajectories", "nowhere.parquet"], "no such file"),
    ],
)
def test_refused(smoke, capsys, words, says):
    status, _, err = run(capsys, "--run-dir", smoke[0], *words)
    assert status == 2 and says in err and len(err.splitlines()) == 1


def test_an_environment_without_a_dictionary_is_refused(capsys, tmp_path):
    config = config_io.load(None, [("environment.name", "search")])
    (tmp_path / "config.yaml").write_text(config_io.dump(config))
    status, _, err = run(capsys, "--run-dir", tmp_path)
    assert status == 2 and "search has no capability dictionary" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("status", "last", "ending"),
    [
        ("finished", ("answer", 5, 10), "answered"),
        ("malformed", ("malformed", 5, 10), "malformed"),
        ("truncated", ("call", 5, 100), "exhausted"),  # the last turn was still a call
        ("truncated", ("malformed", 5, 100), "exhausted"),  # the context ended in the middle of a turn
        ("truncated", ("malformed", 8, 100), "runaway"),  # its own limit ended it
        ("truncated", ("malformed", 7, 3), "runaway"),  # it filled the context alone
        ("timed_out", ("call", 5, 10), "lost"),
        ("tool_failure", ("call", 5, 10), "lost"),
    ],
)
def test_endings(status, last, ending):
    assert attempts._ending(status, *last, most=8) == ending
