"""Studies that are scored on the held-out episodes: tables and orderings against arithmetic by hand, a small study."""

import dataclasses
import json
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from recipes_helpers import compile_cache, finished_smoke, smoke

from trace_jax import cli, config_io
from trace_jax.config import ConfigError, EvaluationConfig, RunConfig
from trace_jax.config_rules import get, validate
from trace_jax.evaluation import metrics, paper
from trace_jax.recipes import assess, scored, scored_table
from trace_jax.recipes.interrupt import Interrupted
from trace_jax.recipes.studies import FORMAT, FROM_FORMAT, SCORED, Ordering

__all__ = ["compile_cache", "finished_smoke", "smoke"]  # fixtures

CONFIG = EvaluationConfig(bootstrap=400)
CAUSAL, ABSTENTION = SCORED["causal"], SCORED["abstention"]
SFT, RL = "SFT", "SFT -> RL"


def answers(rates, seed, samples=5):
    """Ten episodes with a signal and five without; `rates`: chance of a right answer on the two."""
    rng, rows = np.random.default_rng(seed), []
    for i in range(15):
        kind, cause = ("campaign", "BID_INCREASE") if i < 10 else ("no_signal", "NO_SIGNAL")
        for sample in range(samples):
            right = bool(rng.random() < rates[i >= 10])
            said = cause if right else "BUDGET_CAP"
            rows.append(
                metrics.EvalRecord(i, kind, cause, sample, True, right, right, None, 2, "finished", predicted=said)
            )
    return rows


def runs_of(rates):
    """Figures and records as `scored` keeps them, of three seeds a row."""
    records = {row: {s: answers(r, 10 * k + s) for s in range(3)} for k, (row, r) in enumerate(rates.items())}
    figures = {}
    for row, seeds in records.items():
        summaries = {s: metrics.summarise(rows, CONFIG) for s, rows in seeds.items()}
        figures[row] = {
            s: {"metrics": scored_table.metrics_of(x), "decision": scored_table.decision_of(x)}
            for s, x in summaries.items()
        }
    return figures, records


def test_means_and_differences_over_seeds():
    figures, records = runs_of({SFT: (0.5, 0.9), RL: (0.95, 0.3)})
    found = scored_table.summary(figures, records, CAUSAL, CONFIG)
    share = {row: [np.mean([r.full_right for r in rows]) for rows in seeds.values()] for row, seeds in records.items()}
    main = found["summary"][RL]["full_attr_at_1"]
    assert main["mean"] == pytest.approx(np.mean(share[RL]))
    # Student's t with two degrees of freedom
    assert main["half"] == pytest.approx(4.303 * np.std(share[RL], ddof=1) / np.sqrt(3), rel=1e-3)
    changes = np.subtract(share[RL], share[SFT])
    assert main["difference"] == pytest.approx(changes.mean())
    assert main["difference_half"] == pytest.approx(4.303 * changes.std(ddof=1) / np.sqrt(3), rel=1e-3)
    assert "difference" not in found["summary"][SFT]["full_attr_at_1"]
    assert found["summary"][RL]["jaccard"] is None  # nothing was located

    quiet = [np.mean([r.full_right for r in rows if r.cause == "NO_SIGNAL"]) for rows in records[SFT].values()]
    assert found["episodes"][SFT]["no_signal"]["value"] == pytest.approx(np.mean(quiet))
    signal = [np.mean([r.full_right for r in rows if r.cause != "NO_SIGNAL"]) for rows in records[RL].values()]
    assert found["summary"][RL]["extra.signal"]["mean"] == pytest.approx(np.mean(signal))


def test_orderings_need_both_intervals():
    figures, records = runs_of({SFT: (0.1, 0.95), RL: (0.97, 0.2)})
    found = {(o["higher"], o["metric"]): o for o in scored_table.summary(figures, records, CAUSAL, CONFIG)["orderings"]}
    assert set(found) == {(RL, "full_attr_at_1"), (SFT, "no_signal")}  # there are no two-attribute episodes
    falls = found[SFT, "no_signal"]
    assert falls["reported"] == pytest.approx(0.76 - 0.49) and falls["holds"] == "yes"
    contrary = scored_table.ordering(Ordering(RL, SFT, ("no_signal",)), figures, records, CAUSAL, CONFIG)
    assert contrary["holds"] == "no" and contrary["seeds"]["mean"] == pytest.approx(-falls["seeds"]["mean"])
    assert contrary["episodes"]["value"] == pytest.approx(-falls["episodes"]["value"])

    sure, wide = {"mean": 0.2, "half": 0.1}, {"mean": 0.2, "half": 0.3}
    inside, outside = {"low": 0.05, "high": 0.3}, {"low": -0.05, "high": 0.3}
    assert scored_table.verdict(sure, inside) == "yes"
    assert scored_table.verdict(wide, inside) == scored_table.verdict(sure, outside) == "undecided"
    assert scored_table.verdict({"mean": 0.2, "half": None}, inside) == "yes"
    assert scored_table.verdict({"mean": -0.2, "half": 0.1}, {"low": -0.3, "high": -0.05}) == "no"


def test_only_seeds_that_both_rows_have_are_compared():
    figures, records = runs_of({SFT: (0.5, 0.9), RL: (0.95, 0.3)})
    for side in (figures, records):
        del side[RL][1], side[SFT][2]
    found = scored_table.ordering(Ordering(RL, SFT, ("full_attr_at_1",)), figures, records, CAUSAL, CONFIG)
    values = [figures[row][0]["metrics"]["full_attr_at_1"] for row in (RL, SFT)]
    assert found["seeds"] == {"mean": pytest.approx(values[0] - values[1]), "half": None}
    assert found["episodes"]["value"] == pytest.approx(values[0] - values[1])
    del figures[RL][0], records[RL][0]
    assert scored_table.ordering(Ordering(RL, SFT, ("full_attr_at_1",)), figures, records, CAUSAL, CONFIG) is None


def test_tables_and_charts():
    rates = {"untrained": (0.0, 0.0), SFT: (0.5, 0.9), RL: (0.95, 0.3)}
    figures, records = runs_of(rates)
    for seeds in figures.values():
        for s in seeds.values():
            s["full_right"] = [0.1, 0.2, 0.4]
    for s in figures["untrained"].values():
        s["metrics"]["parsed"] = 0.0
    result = {"study": "causal", "steps": 3, "runs": figures}
    result |= scored_table.summary(figures, records, CAUSAL, CONFIG)
    text = scored_table.markdown(result, CAUSAL)
    table = text.split("\n\n")[0].splitlines()
    rows = {line.split(" | ")[0].strip("| "): line for line in table}
    assert {"*paper: base*", "*paper: SFT*", "*paper: SFT -> RL*"} <= set(rows) and "*paper: RL from base*" not in rows
    assert "| 0.757 |" in rows["*paper: SFT -> RL*"] and "3 seeds" in text
    width = rows[SFT].count("|")
    assert all(line.count("|") == width for name, line in rows.items() if name in (*rates, "*paper: SFT*"))
    assert "RL cannot begin there" in text and "Does each ordering of the paper hold?" in text
    figures["untrained"][0]["metrics"]["parsed"] = 0.01
    assert "RL cannot begin there" not in scored_table.markdown(result, CAUSAL)
    for name in SCORED:
        root = ET.fromstring(scored_table.chart(name, result))
        assert len(root.findall(".//{*}circle")) == (6 if name == "abstention" else 0)
    for row in result["episodes"].values():
        row["no_signal"] = {"value": None, "low": None, "high": None}
    assert scored_table.chart("abstention", result) is None


def test_what_the_paper_reports_is_in_order():
    assert paper.ROWS["SFT -> RL"]["by_type"]["segment_2d"]["value"] == 0.27
    assert paper.ROWS["SFT -> RL, KL"]["no_signal"]["value"] == 0.30
    assert paper.ROWS["SFT -> RL, graded reward only"]["by_type"]["segment_2d"]["value"] == 0.0
    assert {row.reported for study in SCORED.values() for row in study.rows.values()} <= {"", *paper.ROWS}


@pytest.mark.parametrize("name", SCORED)
def test_every_row_is_a_valid_run(name):
    study, config = SCORED[name], RunConfig()
    for row, own in study.rows.items():
        found = scored.config_of(config, study, row, 7)
        validate(found)
        assert found.grpo.steps == 7 and found.grpo.save_every == 7
        assert all(get(found, field) == value for field, value in own.fields.items())
        assert own.agent == "sft" or study.rows[own.begins].agent == "sft"
        first = study.rows[own.begins] if own.begins else own
        assert found.sft.trajectories == round(first.lessons * config.sft.trajectories)
    rows = {o.higher for o in study.orderings} | {o.lower for o in study.orderings} | {study.baseline}
    assert rows <= set(study.rows)


def test_rows_come_with_what_they_begin_with():
    assert scored._chosen(CAUSAL, ["untrained"]) == [SFT, "untrained"]
    assert scored._chosen(CAUSAL, [FROM_FORMAT]) == [SFT, FORMAT, FROM_FORMAT]
    assert set(scored._chosen(CAUSAL, [])) == set(CAUSAL.rows)
    assert scored._chosen(ABSTENTION, ["penalty 1"]) == [SFT, RL, "penalty 1"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["causal"], "--out"),
        (["casual", "--out", "x"], "causal"),
        (["causal", "--out", "x", "--variants", "SFT->RL"], "did you mean 'SFT -> RL'"),
        (["causal", "--out", "x", "--seeds", "1", "1"], "names one twice"),
        (["abstention", "--out", "x", "--seeds", "-1"], "seed"),
        (["abstention", "--out", "x", "--init", "nowhere"], "nowhere"),
        (["causal", "--out", "x", "--environment.name", "search"], "works on `environment.name` ads only"),
        (["causal", "--out", "x", "--environment.reward_full", "0"], "is what the row 'SFT -> RL, graded reward only'"),
        (["abstention", "--out", "x", "--grpo.no_signal_share", "0.2"], "`grpo.no_signal_share` is 0.2 already"),
        (["causal", "--out", "x", "--world-seeds", "3"], "is of capability-targeting"),
    ],
)
def test_refused(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", *words]) == 2
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_a_source_with_other_lessons_is_refused(tmp_path, monkeypatch):
    config = RunConfig()
    (tmp_path / "config.yaml").write_text(config_io.dump(config))
    monkeypatch.setattr(scored.adoption, "check", lambda *args: None)
    scored._check_source(tmp_path, config.replace(seed=5, grpo=dataclasses.replace(config.grpo, steps=3)))
    for field, value in (("simulator.noise", "2.0"), ("data.seed", "3"), ("sft.epochs", "9")):
        with pytest.raises(ConfigError, match=f"`{field}` is {value}"):
            scored._check_source(tmp_path, config_io.override(config, [(field, value)]))


def made(path, config, lessons=True):
    """What a run directory looks like from outside after SFT; a run of GRPO alone has no lessons."""
    (path / "checkpoints" / "sft" / "00000001").mkdir(parents=True)
    (path / "data" / "teacher").mkdir(parents=True)
    (path / "tokenizer.model").write_text(path.name)
    (path / "data" / "test-1.npz").write_text("episodes")
    if lessons:
        (path / "data" / "teacher" / "00000.parquet").write_text(path.name)
    (path / "config.yaml").write_text(config_io.dump(config))
    return path


@pytest.mark.parametrize(("seed", "with_source"), [(0, True), (1, True), (1, False)])
def test_what_an_sft_run_begins_with(tmp_path, monkeypatch, seed, with_source):
    """Lessons and tokenizer together, of a run that made as many; the policy only of the run that this one would be."""
    config, copied = RunConfig(), []
    monkeypatch.setattr(scored.adoption, "copy_policy", lambda theirs, *args: copied.append(theirs.run.path.name))
    out = tmp_path / "study"
    made(out / "a-rl-0", config, lessons=False)
    made(out / "b-format-0", config_io.override(config, [("sft.trajectories", "640")]))
    made(out / "c-sft-0", config)
    source = made(tmp_path / "source", config_io.override(config, [("grpo.steps", "3")])) if with_source else None
    path = out / f"sft-{seed}"
    path.mkdir()
    run = scored.RunDirectory(path, config.replace(seed=seed), lock=False)
    scored._begin(out, source, run)
    donor = "source" if with_source else "c-sft-0"
    assert (path / "tokenizer.model").read_text() == donor
    assert (path / "data" / "teacher" / "00000.parquet").read_text() == donor
    assert (path / "data" / "test-1.npz").read_text() == "episodes"
    assert copied == (["source"] if with_source and seed == 0 else [])


def test_runs_of_another_study_are_refused_before_anything_is_trained(tmp_path):
    made(tmp_path / "sft-rl-1", RunConfig(seed=1))
    with pytest.raises(ConfigError, match="sft-rl-1 is of another study \\(`grpo."):
        scored.command("causal", RunConfig(), tmp_path, seeds=[0, 1], variants=[RL], steps=2)
    assert [p.name for p in tmp_path.iterdir()] == ["sft-rl-1"]


@pytest.mark.slow
def test_a_study(smoke, tmp_path, capsys, monkeypatch):
    """Two seeds from a run's lessons, one with its policy, too; an interrupt; a second study that shares the runs."""
    source, _ = smoke
    out = tmp_path / "study"
    words = ["reproduce", "causal", "--init", source, "--out", out, "--seeds", 0, 1, "--steps", 2, "--json"]
    words += ["--variants", "untrained", RL, "SFT -> RL, KL"]
    words = [str(w) for w in words]
    score, calls = assess.score, []

    def stop_at_the_third(work, agent):
        calls.append((work.run.path.name, agent))
        if len(calls) == 3:
            raise Interrupted(130)
        return score(work, agent)

    monkeypatch.setattr(assess, "score", stop_at_the_third)
    assert cli.main(words) == 130
    assert "continue with: trace-jax reproduce causal" in capsys.readouterr().err
    assert calls == [("sft-0", "sft"), ("sft-0", "untrained"), ("sft-rl-0", "grpo")]
    assert json.loads((out / "causal.json").read_text())["runs"].keys() == {"untrained", SFT}
    assert cli.main(words) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = ["sft-0", "sft-rl-0", "sft-rl-kl-0", "sft-1", "sft-rl-1", "sft-rl-kl-1"]
    assert sorted(names) == sorted(p.parent.name for p in out.glob("*/config.yaml"))
    assert len(calls) == 3 + 6  # the third again, and the five of the rest
    # seed 0 is the policy of the source, seed 1 one of its own from the same lessons
    tables = [(out / name / "data" / "teacher" / "00000.parquet").read_bytes() for name in ("sft-0", "sft-1")]
    assert tables == [(source / "data" / "teacher" / "00000.parquet").read_bytes()] * 2
    assert not (out / "sft-0" / "metrics.jsonl").exists() and (out / "sft-1" / "metrics.jsonl").exists()
    assert {row: sorted(seeds) for row, seeds in told["runs"].items()} == {
        row: ["0", "1"] for row in ("untrained", SFT, RL, "SFT -> RL, KL")
    }
    assert len(told["runs"][RL]["0"]["full_right"]) == 2 and told["steps"] == 2
    assert len({run["benchmark"] for seeds in told["runs"].values() for run in seeds.values()}) == 1
    assert config_io.load(out / "sft-rl-kl-1" / "config.yaml").grpo.kl_coefficient == 0.005
    ET.fromstring((out / "causal.svg").read_text())
    assert (out / "causal.md").read_text().startswith("| | Cause@1")

    monkeypatch.setattr(scored.train, "command", None)  # would fail: everything is done
    assert cli.main(words) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == told and len(calls) == 9
    words[words.index("--steps") + 1] = "3"
    assert cli.main(words) == 2
    assert "is of another study (`grpo." in capsys.readouterr().err

    monkeypatch.undo()
    words = ["reproduce", "abstention", "--init", source, "--out", out, "--seeds", 0, "--steps", 2, "--json"]
    assert cli.main([str(w) for w in [*words, "--variants", "penalty 1"]]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told["runs"].keys() == {SFT, RL, "penalty 1"} and told["baseline"] == RL
    assert sorted(told["runs"][RL]) == ["0", "1"]  # of the other study
    assert sorted({p.parent.name for p in out.glob("*/config.yaml")} - set(names)) == ["penalty-1-0"]
    ET.fromstring((out / "abstention.svg").read_text())
