"""JSON of ours that is read again: what has another form is named by file and field, whoever reads it."""

import json

import pytest

from trace_jax import cli, config_io
from trace_jax.config import ConfigError, EvaluationConfig, RunConfig
from trace_jax.evaluation import form, metrics, store
from trace_jax.recipes import contrast, in_worlds, records, routing, stage_costs, worlds

TRIED = {"level": 0.0, "reward": 0.3, "success": 0.3, "std": 0.2, "all_success": 0.0, "all_zero": 0.0}
WORLD = {"accepted": True, "level": 0.0, "tries": [TRIED | {"accepted": True, "faults": []}]}
STEP = {"stage": "grpo", "step": 1, "seconds": 2.0, "reward": 0.5, "trajectories": 8.0, "entropy": None}
ROUTES = {
    **{"split": "test", "data_seed": 0, "tasks": 1, "adapters": ["stopping"], "agreement": 1.0, "chance": 0.5},
    **{"chosen": {"stopping": 1}, "oracle": {"base": 1}, "episodes": [{"chosen": "stopping", "oracle": "base"}]},
}


@pytest.mark.parametrize(
    "value, wanted, why",
    [
        (1, float, ""),
        (1.5, int, "x is 1.5, not a whole number"),
        (float("nan"), float, "x is no number below 1e+15"),
        (True, float, "x is true, not a number"),
        (1e400, float, "x is no number below 1e+15"),
        (10**400, int, "x is no number below 1e+15"),
        (None, form.NUMBER, ""),
        ("a", form.NUMBER, "x is a text, not a number or null"),
        ([], {}, "x is a list, not an object"),
        ({"a": {"b": [1, "c"]}}, {"a": {"b": [float]}}, "x.a.b[1] is a text, not a number"),
        ({}, {"a": int}, "it lacks x.a"),
        ({}, {"a?": int}, ""),
        ({"a": None}, {"a?": int}, "x.a is null, not a whole number"),
        ({"k": {"v": "1"}}, {str: {"v": float}}, "x.k.v is a text, not a number"),
        ({"v": []}, ({"v": float}, None), "x.v is a list, not a number"),
    ],
)
def test_faults(value, wanted, why):
    assert form.fault(value, wanted, "x") == why


@pytest.mark.parametrize(
    "content, why",
    [(b"{", "no JSON: "), (b"\xff\xfe", "no JSON: "), (b"[" * 100_000, "nested too deeply"), (b"[]", "it is a list")],
)
def test_files_that_are_no_objects(content, why, tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{path} is damaged \({why}[^\n]*remove it and run the command again$"):
        form.read(path, {})
    assert form.read_if(path, {}) is None
    for none, why in ((tmp_path / "b", "no such file"), (tmp_path, "is a directory")):
        with pytest.raises(ConfigError, match=why):
            form.read(none, {})


def put(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def refused(read, path, says):
    with pytest.raises(ConfigError) as error:
        read()
    assert str(path) in str(error.value) and says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "found, says",
    [
        ({}, "it lacks worlds"),
        ({"worlds": []}, "worlds is a list"),
        ({"worlds": {"stopping": {}}}, "it lacks worlds.stopping.accepted"),
        ({"worlds": {"stopping": WORLD | {"tries": "x"}}}, "worlds.stopping.tries is a text"),
        ({"worlds": {"stopping": WORLD | {"tries": [{}]}}}, "it lacks worlds.stopping.tries[0].level"),
        ({"worlds": {"stopping": WORLD | {"tries": [TRIED | {"std": "x"}]}}}, "tries[0].std is a text"),
        ({"worlds": {"stopping": WORLD | {"tries": [{"level": 0, "faults": []}]}}}, "tries[0] says no reason"),
        ({"worlds": {"stopping": WORLD | {"level": None}}}, "worlds.stopping is accepted and has no level"),
        ({"worlds": {"stopping": WORLD | {"level": "high"}}}, "worlds.stopping.level is a text"),
    ],
)
def test_worlds(found, says, tmp_path):
    path = put(tmp_path / "worlds.json", {"worlds": {"stopping": WORLD, "mix": WORLD | {"accepted": False}}})
    assert set(worlds.read(path)["worlds"]) == {"stopping", "mix"}
    refused(lambda: worlds.read(put(path, found)), path, says)


@pytest.mark.parametrize(
    "kept, says", [(5, "kept is a whole number"), ([[1]], "kept[0] is a list"), (["zzz"], "'zzz'")]
)
def test_what_a_contrast_kept(kept, says, tmp_path):
    run = type("Run", (), {"path": tmp_path})
    path = put(tmp_path / "capability" / "contrast-sft-validation" / "contrast.json", {"kept": ["stopping"]})
    assert worlds.chosen(run, RunConfig(), ()) == ["stopping"]
    put(path, {"kept": kept})
    refused(lambda: worlds.chosen(run, RunConfig(), ()), path, says)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"episodes": []}, "it has 0 of 1 episodes"),
        ({"episodes": [{}]}, "it lacks episodes[0].chosen"),
        ({"episodes": [{"chosen": "zzz", "oracle": "base"}]}, "routes to 'zzz'"),
        ({"chosen": {"base": "x"}}, "chosen.base is a text"),
    ],
)
def test_routes(changes, says, tmp_path):
    path = put(tmp_path / "routes.json", ROUTES)
    assert routing.read(path) == ROUTES
    refused(lambda: routing.read(put(path, ROUTES | changes)), path, says)


@pytest.mark.parametrize(
    "found, says", [([], "it is a list"), ({"a": 3}, "a is a whole"), ({"a": {}}, "it lacks a.sec")]
)
def test_costs(found, says, tmp_path):
    path = put(tmp_path / "costs.json", {"a": {"seconds": 2.0, "rollouts": 3}})
    assert stage_costs.StageCosts(tmp_path).result() == {"a": {"seconds": 2.0, "rollouts": 3}}
    refused(lambda: stage_costs.StageCosts(tmp_path), put(path, found), says)


def test_settings_of_a_contrast(tmp_path):
    contrast._same(tmp_path, {"stage": "sft"})
    path = tmp_path / "settings.json"
    assert json.loads(path.read_text()) == {"stage": "sft"}
    refused(lambda: contrast._same(tmp_path, {"stage": "sft"}), put(path, []), "it is a list")


@pytest.mark.parametrize(
    "agents, says",
    [(None, "it lacks agents"), ([], "agents is a list"), ({"base": {"a": {}}}, "it lacks agents.base.a.success")],
)
def test_results_in_worlds(agents, says, tmp_path):
    whole = {"about": {}, "agents": {"base": {"a": {"success": 0.5, "reward": 0.4}}}}
    path = put(tmp_path / "in-worlds.json", whole)
    assert form.read(path, in_worlds._PLAYED) == whole
    put(path, {"about": {}} | ({} if agents is None else {"agents": agents}))
    refused(lambda: form.read(path, in_worlds._PLAYED), path, says)


@pytest.mark.parametrize(
    "lines, says",
    [
        ('{"stage": "grpo"\n', "line 1: no JSON"),
        (json.dumps(STEP) + "\n[]\n", "line 2: it is a list"),
        ('{"stage": "grpo", "step": 1}\n', "line 1: it lacks seconds"),
        (json.dumps(STEP | {"entropy": "x"}), "line 1: entropy is a text"),
        ('{"stage": "validation", "step": "x"}', "line 1: step is a text"),
    ],
)
def test_records_of_a_run(lines, says, tmp_path):
    path = put(tmp_path / "metrics.jsonl", json.dumps({"stage": "teacher"}) + "\n" + json.dumps(STEP) + "\n")
    assert records.steps(tmp_path, ("trajectories",)) == [STEP] and len(records.read(tmp_path)) == 2
    refused(lambda: records.read(tmp_path, ("full_right",)), path, "line 2: it lacks full_right")
    put(path, lines)
    refused(lambda: records.read(tmp_path), path, says)
    path.unlink()
    refused(lambda: records.read(tmp_path), path, "no such file")


def summary():
    right = dict(parsed=True, cause_right=True, full_right=True, jaccard=None, tool_calls=4, status="finished")
    rows = [
        metrics.EvalRecord(index=i, type="campaign", cause="BID_INCREASE", sample=s, predicted="BID_INCREASE", **right)
        for i in range(3)
        for s in range(2)
    ]
    found = metrics.summarise(rows, EvaluationConfig(bootstrap=20))
    return found | {"benchmark": {"sha256": "a" * 64, "episodes": 3}}, rows


@pytest.mark.parametrize(
    "field, value, says",
    [
        (("benchmark",), "x", "benchmark is a text"),
        (("benchmark",), {"sha256": 5, "episodes": 3}, "benchmark.sha256 is a whole number"),
        (("extra", "signal"), "x", "extra.signal is a text"),
        (("extra", "strict"), [], "extra.strict is a list"),
        (("extra", "efficiency"), "x", "extra.efficiency is a text"),
        (("extra", "voted"), {"value": "x"}, "extra.voted.value is a text"),
        (("extra", "abstention"), "x", "extra.abstention is a text"),
        (("extra", "abstention", "decision"), [{}], "it lacks extra.abstention.decision[0].no_signal"),
        (("extra", "confusion"), "x", "extra.confusion is a text"),
        (("by_type",), "x", "by_type is a text"),
        (("settings",), 3, "settings is a whole number"),
    ],
)
def test_an_edited_result_is_named_by_every_command(field, value, says, tmp_path, capsys):
    run = tmp_path / "run"
    put(run / "config.yaml", config_io.dump(RunConfig()))
    found, rows = summary()
    store.save(run, "grpo", found, rows)
    store.save(run, "sft", found, rows)
    assert store.load_summaries(run)["grpo"] == found
    node = found
    for key in field[:-1]:
        node = node[key]
    node[field[-1]] = value
    path = put(run / "evaluation" / "grpo.json", found)
    for words in (["eval", "--table", run], ["eval", "--compare", f"{run}:sft", f"{run}:grpo"], ["report", run]):
        assert cli.main([*map(str, words)]) == 2
        error = capsys.readouterr().err
        assert str(path) in error and says in error and error.count("\n") == 1


def test_results_of_earlier_versions_are_shown(tmp_path, capsys):
    """They do not say all that newer ones do."""
    found, rows = summary()
    for name in ("strict", "efficiency", "voted", "calibration", "signal", "abstention"):
        del found["extra"][name]
    store.save(tmp_path, "sft", found, rows)
    assert cli.main(["eval", "--table", str(tmp_path)]) == 0
    assert "SFT" in capsys.readouterr().out
