"""`trace-jax capability worlds | train` on a finished run: what they write, going on, refusals."""

import json

import numpy as np
import pytest
from recipes_helpers import compile_cache, finished_smoke, records, smoke

from trace_jax import cli
from trace_jax.capability.worlds import Window
from trace_jax.policy import lora
from trace_jax.recipes import adapters, contrast, routing, worlds
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.recipes.workspace import Workspace
from trace_jax.rollout.trajectory import read_parquet

__all__ = ["compile_cache", "finished_smoke", "smoke"]  # fixtures


def run(capsys, *words):
    status = cli.main([*map(str, ("capability", *words))])
    out, err = capsys.readouterr()
    return status, out, err


def accept(path, **levels):
    """A `worlds.json` by hand."""
    (path / "capability").mkdir(exist_ok=True)
    found = {name: {"accepted": level is not None, "level": level, "tries": []} for name, level in levels.items()}
    (path / "capability" / "worlds.json").write_text(json.dumps({"settings": {}, "worlds": found}))


def test_a_search_and_what_it_leaves(smoke, capsys, monkeypatch):
    """A policy that earns too little makes the search go down to the easiest level, and the world is refused; what was
    tried is not tried again, and a search that was stopped goes on."""
    path, _ = smoke
    words = ["worlds", "--run-dir", path, "--capabilities", "abstaining", "--seeds", 2, "--rollouts", 2, "--json"]
    status, out, err = run(capsys, *words)
    assert status == 0, err
    told, file = json.loads(out.splitlines()[-1]), path / "capability" / "worlds.json"
    assert json.loads(file.read_text()) == told and (path / "capability" / "worlds.md").read_text() in out
    world = told["worlds"]["abstaining"]
    assert [t["level"] for t in world["tries"]] == [0.0, -2.0, -4.0, -6.0] and not world["accepted"]
    assert all(t["faults"] for t in world["tries"])

    tries = []
    monkeypatch.setattr(worlds._Search, "_try", lambda self, *_: tries.append(1))
    assert run(capsys, *words)[0] == 0 and not tries
    tried = world["tries"]
    told["worlds"]["abstaining"]["tries"] = tried[:2]
    file.write_text(json.dumps(told))
    monkeypatch.undo()
    status, out, _ = run(capsys, *words)
    again = json.loads(out.splitlines()[-1])["worlds"]["abstaining"]["tries"]
    assert status == 0 and again == tried  # exactly: tries are functions of the seed

    status, _, err = run(capsys, *words[:-1], "--rollouts", 3)
    assert status == 2 and "searched with other settings" in err and len(err.splitlines()) == 1
    assert Window() == worlds.WINDOW


@pytest.mark.slow
def test_adapters_of_two_worlds_on_one_base(smoke, capsys):
    """Each is a run of its own, trained as if alone, with hints taken out; the base stays as it was; a second command
    has nothing to do."""
    path, _ = smoke
    accept(path, abstaining=0.0, intersection=-2.0, stopping=None)
    fields = ["--grpo.steps", 2, "--grpo.prompts", 2, "--grpo.group", 4, "--grpo.validation_episodes", 0]
    fields += ["--lora.rank", 2, "--grpo.optimizer.learning_rate", 1e-2, "--grpo.constant_groups", "count"]
    words = ["train", "--run-dir", path, "--capabilities", "abstaining", "intersection", "mix", *fields, "--json"]
    status, out, err = run(capsys, *words)
    assert status == 0, err
    told = json.loads(out.splitlines()[-1])["adapters"]
    assert {n: a["worlds"] for n, a in told.items()} == {
        "abstaining": ["abstaining@0"], "intersection": ["intersection@-2"], "mix": ["abstaining@0", "intersection@-2"],
    }  # fmt: skip
    with RunDirectory.open(path, lock=False) as opened:
        before = Workspace(opened, None, None).trained_params("sft")
    for name in told:
        folder = path / "capability" / "adapters" / name
        collected = read_parquet(folder / "trajectories" / "grpo-000001.parquet")
        assert [t.info.get("hinted", False) for t in collected] == 2 * [True, False, False, False]
        assert {t.labels["world"] for t in collected} <= {w.partition("@")[0] for w in told[name]["worlds"]}
        with RunDirectory.open(folder, lock=False) as opened:
            work = Workspace(opened, None, None)
            for ours, theirs in zip(*map(leaves, (work.base_params, before)), strict=True):
                np.testing.assert_array_equal(ours, theirs)
            assert isinstance(work.trained_params("grpo")["query"], lora.Pair)
    steps = {n: len(records_of(path, n)) for n in told}
    assert run(capsys, *words)[0] == 0 and steps == {n: len(records_of(path, n)) for n in told}

    # Alone it comes out the same, bit for bit: nothing of the others is in it.
    alone = path.parent / "alone"
    alone.mkdir()
    (alone / "worlds.json").write_text((path / "capability" / "worlds.json").read_text())
    words = ["train", "--run-dir", path, "--capabilities", "intersection", *fields, "--out", alone]
    assert run(capsys, *words)[0] == 0
    for ours, theirs in zip(
        leaves(trained(alone / "adapters" / "intersection")),
        leaves(trained(path / "capability" / "adapters" / "intersection")),
        strict=True,
    ):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_all_stages_and_rows_of_a_mixture_go_as_they_do_alone(smoke, capsys, monkeypatch):
    """`run` leaves what every stage leaves, and a second one samples and trains nothing."""
    path, _ = smoke
    monkeypatch.setattr(worlds, "WINDOW", Window(0.0, 1.0, 0.0, 1.0, 1.0))
    monkeypatch.setattr(worlds, "chosen", lambda *_: ["abstaining", "drill_down"])
    monkeypatch.setattr(contrast, "EPISODES", 4)
    words = ["run", "--run-dir", path, "--seeds", 2, "--rollouts", 2, "--json", "--evaluation.samples", 1]
    words += ["--grpo.steps", 1, "--grpo.prompts", 2, "--grpo.group", 4, "--grpo.validation_episodes", 0]
    words += ["--lora.rank", 2, "--grpo.optimizer.learning_rate", 1.0, "--grpo.constant_groups", "count"]
    status, out, err = run(capsys, *words)
    assert status == 0, err
    told = json.loads(out.splitlines()[-1])
    assert set(told) == {"costs", "contrast", "worlds", "train", "eval"}
    names = ["abstaining", "drill_down", "mix", "target"]
    assert sorted(told["train"]["adapters"]) == names
    assert sorted(told["eval"]) == sorted(["base", "oracle", "routed", "sum", *names])

    folder = path / "capability"
    episodes = json.loads((folder / "routes.json").read_text())["episodes"]
    answers = {n: (folder / "evaluation" / f"{n}.jsonl").read_text().splitlines() for n in told["eval"]}
    assert len(episodes) == len(answers["base"]) > 0
    for way, key in (("oracle", "oracle"), ("routed", "chosen")):
        for i, entry in enumerate(episodes):
            assert answers[way][i] == answers[entry[key]][i]
    assert {e["oracle"] for e in episodes} == {"abstaining", "drill_down", "base"}
    assert answers["abstaining"] != answers["base"] or answers["drill_down"] != answers["base"]  # they do something

    for module, name in ((routing, "evaluate_policy"), (routing, "scores"), (worlds, "collect")):
        monkeypatch.setattr(module, name, None)
    status, out, err = run(capsys, *words)
    assert status == 0, err
    assert {k: v for k, v in json.loads(out.splitlines()[-1]).items() if k != "costs"} == {
        k: v for k, v in told.items() if k != "costs"
    }


def leaves(tree):
    import jax

    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def trained(folder):
    with RunDirectory.open(folder, lock=False) as opened:
        return Workspace(opened, None, None).trained_params("grpo")


def records_of(path, name):
    with RunDirectory.open(path / "capability" / "adapters" / name, lock=False) as opened:
        return [r for r in records(opened.path) if r["stage"] == "grpo"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["worlds", "--capabilities", "intersektion"], "did you mean intersection?"),
        (["worlds"], "has no contrast: run `trace-jax capability contrast"),
        (["worlds", "--seeds", "0"], "--seeds"),
        (["train"], "worlds.json is missing: run `trace-jax capability worlds` first"),
        (["train", "--sft.epochs", "3"], "`sft.epochs` cannot change in `capability train`"),
        (["train", "--capabilities", "target", "--lora.rank", "0"], "lora.rank"),
        (["train", "--capabilities", "gate"], "has no finished adapter of a capability for a gate to mix"),
        (["train", "--capabilities", "gate_mix"], "worlds.json is missing: run `trace-jax capability worlds` first"),
        (["worlds", "--rollout.slots", "8"], "`rollout.slots` cannot change in `capability worlds`: it uses the"),
        (["route", "--grpo.steps", "8"], "`grpo.steps` cannot change in `capability route`: it uses the"),
        (["route"], "has no finished adapter: run `trace-jax capability train` first"),
        (["eval", "--data.train", "80"], "`data.train` cannot change in `capability eval`: only evaluation.*"),
        (["eval", "--agents", "bse"], "did you mean base?"),
        (["run", "--sft.epochs", "3"], "`sft.epochs` cannot change in `capability run`: only capability.*"),
    ],
)
def test_refused(smoke, capsys, words, says):
    status, _, err = run(capsys, words[0], "--run-dir", smoke[0], *words[1:])
    assert status == 2 and says in err and len(err.splitlines()) == 1


def test_worlds_that_cannot_be_trained_in_are_refused(smoke, capsys):
    path, _ = smoke
    accept(path, stopping=None)
    for words, says in (([], "has no accepted world"), (["--capabilities", "stopping"], "has no accepted world")):
        status, _, err = run(capsys, "train", "--run-dir", path, *words)
        assert status == 2 and says in err and len(err.splitlines()) == 1
    accept(path, stopping=None, abstaining=1.0)
    status, _, err = run(capsys, "train", "--run-dir", path, "--capabilities", "stopping")
    assert status == 2 and "its world was refused" in err
    (path / "capability" / "worlds.json").write_text("{")
    status, _, err = run(capsys, "train", "--run-dir", path)
    assert status == 2 and "is damaged (no JSON: " in err and "remove it and run the command again" in err


def test_what_adapters_are_trained_with_unless_told_otherwise():
    from trace_jax.config import RunConfig

    found = adapters._config(RunConfig(), [("grpo.hints", "0")], ("abstaining@1",))
    assert (found.lora.rank, found.lora.alpha, found.grpo.group, found.grpo.hints) == (16, 16.0, 16, 0.0)
    assert (found.grpo.constant_groups, found.grpo.resample_limit, found.grpo.kl_coefficient) == ("resample", 3, 0.0)
    assert adapters._config(RunConfig(), [], ()).grpo.hints == 0.0
