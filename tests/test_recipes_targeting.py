"""`trace-jax reproduce capability-targeting`: the table against arithmetic done by hand, refusals, one small study."""

import json
import time

import pytest
from recipes_helpers import compile_cache, finished_smoke, smoke

from trace_jax import cli
from trace_jax.recipes import contrast, in_worlds, stage_costs, targeting, worlds

__all__ = ["compile_cache", "finished_smoke", "smoke"]  # fixtures

NAMES = ("base", "target", "mix", "sum", "routed", "oracle", "intersection", "abstaining")


def seed_of(*values):
    held = dict(zip(NAMES, values, strict=True))
    row = {w: {"success": 0.5, "reward": 0.4} for w in ("intersection", "abstaining")}
    routed = {"intersection": {"success": 0.53, "reward": 0}, "abstaining": {"success": 0.47, "reward": 0}}
    return {
        "held_out": held,
        "in_worlds": {"base": row, "routed": routed},
        "routing": {"agreement": 0.25, "chance": 0.2, "chosen": {}, "oracle": {}},
        "rollouts": {"target": 64, "intersection": 32},
        "seconds": {"target": 9.0, "intersection": None},
    }


RUNS = {
    0: seed_of(0.50, 0.60, 0.55, 0.40, 0.50, 0.70, 0.52, 0.58),
    1: seed_of(0.50, 0.62, 0.57, 0.44, 0.48, 0.66, 0.61, 0.51),
}


def test_the_table_is_that_of_the_seeds():
    found = targeting.summary(RUNS)
    without = [n for n in targeting.ORDER if n not in ("gate", "gate_mix")]
    assert list(found)[:7] == without and set(found) == {*NAMES, targeting.SINGLE}
    assert found["oracle"]["mean"] == pytest.approx(0.68) and found["base"]["half"] == 0
    # Student's t with one degree of freedom: 12.706 * |0.70 - 0.66| / sqrt(2) / sqrt(2)
    assert found["oracle"]["half"] == pytest.approx(12.706 * 0.02, rel=1e-3)
    assert found["oracle"]["over_target"]["mean"] == pytest.approx((0.10 + 0.04) / 2)
    assert found[targeting.SINGLE]["mean"] == pytest.approx((0.58 + 0.61) / 2)  # the best of each seed
    assert found["base"].keys() == {"mean", "half"} and "over_target" not in found["target"]
    worlds = {"intersection": 0.0, "abstaining": 2.0}
    text = targeting.markdown({"steps": 4, "worlds": worlds, "runs": RUNS, "summary": found})
    assert "| oracle | 0.680 ± 0.254 | +0.180 ± 0.254 | +0.070 ± 0.381 |" in text
    assert "| routed | 0.530 (+3.0) | 0.470 (-3.0) |" in text and "abstaining@2" in text


def test_costs_add_up_over_interruptions(tmp_path):
    costs = stage_costs.StageCosts(tmp_path / "study")
    with pytest.raises(KeyboardInterrupt), costs.timed("worlds"):
        time.sleep(0.05)
        raise KeyboardInterrupt
    costs = stage_costs.StageCosts(tmp_path / "study")
    with costs.timed("worlds"):
        time.sleep(0.05)
    costs.played("worlds", 1600)
    found = costs.result()["worlds"]
    assert found["seconds"] >= 0.1 and found["rollouts"] == 1600
    assert "| worlds | 1,600 | 0 |" in stage_costs.markdown(costs.result())


@pytest.mark.parametrize(
    "words, says",
    [
        ([], "give --init DIR"),
        (["--variants", "x"], "--variants does not go with"),
        (["--init", "RUN", "--seeds", "1", "1"], "names one twice"),
        (["--init", "RUN", "--policy.layers", "3"], "--policy.layers is of the SFT policy and fixed"),
    ],
)
def test_refused(words, says, smoke, tmp_path, capsys):
    words = [str(smoke[0]) if w == "RUN" else w for w in words]
    assert cli.main(["reproduce", "capability-targeting", "--out", str(tmp_path / "out"), *words]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("flag", ["--world-seeds", "--gate-steps"])
def test_sizes_of_worlds_are_of_this_study(flag, tmp_path, capsys):
    assert cli.main(["reproduce", "objectives", "--out", str(tmp_path / "out"), flag, "3"]) == 2
    assert f"{flag} is of capability-targeting" in capsys.readouterr().err


@pytest.mark.slow
def test_a_study(smoke, tmp_path, capsys, monkeypatch):
    """Adapters of both worlds, mix and target with as many steps as both; repeated without training or playing."""
    names = ["abstaining", "drill_down"]
    monkeypatch.setattr(contrast, "command", lambda *_, **__: {"kept": names, "attempts": 8})
    found = {n: {"accepted": True, "level": 0.0, "tries": []} for n in names}
    monkeypatch.setattr(worlds, "command", lambda *_, **__: {"settings": {"seeds": 4, "rollouts": 2}, "worlds": found})
    monkeypatch.setattr(in_worlds.command, "__kwdefaults__", {"episodes": 4, "samples": 2})
    out = tmp_path / "study"
    words = ["reproduce", "capability-targeting", "--init", str(smoke[0]), "--out", str(out), "--seeds", "3", "4"]
    words += ["--steps", "1", "--grpo.prompts", "2", "--grpo.group", "2", "--grpo.hints", "0", "--json"]
    words += ["--evaluation.samples", "1", "--grpo.validation_episodes", "2", "--lora.rank", "2"]
    assert cli.main(words) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(told["runs"]) == {"3", "4"} and json.loads((out / "table.json").read_text()) == told
    for run in told["runs"].values():
        assert set(run["held_out"]) == {"base", "sum", "routed", "oracle", "mix", "target", *names}
        assert set(run["in_worlds"]) == {"base", "mix", "target", "routed", *names}
        assert run["steps"] == {**dict.fromkeys(names, 1), "mix": 2, "target": 2}
        assert all(n >= 4 * run["steps"][k] for k, n in run["rollouts"].items())  # more where groups were drawn again
    monkeypatch.setattr(in_worlds, "_play", None)
    stages = told.pop("costs")
    assert stages["contrast"]["rollouts"] == 8 and stages["worlds"]["rollouts"] == 0
    for seed in ("3", "4"):
        assert stages[f"seed {seed}: adapters"]["rollouts"] == sum(told["runs"][seed]["rollouts"].values())
    assert cli.main(words) == 0
    again = json.loads((out / "table.json").read_text())
    assert all(cost["seconds"] >= stages[n]["seconds"] for n, cost in again.pop("costs").items()) and again == told
    assert cli.main([*words, "--grpo.prompts", "3"]) == 2 and "is a study with other fields" in capsys.readouterr().err

    # a gate is added to what is there; adapters are not trained again, nor what they answered asked again
    assert cli.main([*words, "--gate-steps", "1"]) == 0
    gated = json.loads((out / "table.json").read_text())
    for seed, run in gated["runs"].items():
        assert run["steps"] == {**told["runs"][seed]["steps"], "gate": 1}
        assert {k: v for k, v in run["held_out"].items() if k != "gate"} == told["runs"][seed]["held_out"]
        assert gated["costs"][f"seed {seed}: gate"]["rollouts"] == run["rollouts"]["gate"] >= 4
    text = (out / "table.md").read_text()
    assert "| gate | " in text and "`gate` 1 on the task besides" in text
    assert list(gated["summary"]).index("gate") == list(gated["summary"]).index("oracle") - 1
