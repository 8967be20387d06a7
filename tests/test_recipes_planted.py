"""Teachers with something left out, and the study that asks whether the contrast finds it."""

from dataclasses import replace

import numpy as np
import pytest
from recipes_helpers import CONFIG, compile_cache

from trace_jax import cli, config_io
from trace_jax.config import ConfigError, RolloutConfig, RunConfig
from trace_jax.environments.ads import analyst, queries
from trace_jax.environments.ads.capabilities import CAPABILITIES
from trace_jax.environments.base import Observation, Transcript
from trace_jax.recipes import domain, planted, teacher
from trace_jax.recipes.studies import PLANTED_VARIANTS

__all__ = ["compile_cache"]  # a fixture


def without(*names):
    return config_io.load(None, [("sft.without", f"[{', '.join(names)}]")])


def test_lessons_of_a_type_are_left_out(monkeypatch):
    """The composition that is drawn has none of them; the others keep their proportions."""
    drawn = []
    monkeypatch.setattr(domain, "accepted_episodes", lambda *args, **kwargs: drawn.append(args[3]) or ())
    monkeypatch.setattr(domain, "EpisodeSet", lambda *args, **kwargs: None)
    for names in ((), ("segment_2d", "no_signal")):
        domain._ads_draw(without(*names), "teacher-0", 1000, None)
    whole, less = drawn
    assert any(d == 2 for _, d in whole) and ("NO_SIGNAL", 0) in whole
    assert not any(d == 2 for _, d in less) and ("NO_SIGNAL", 0) not in less and sum(less.values()) == 1000
    one, campaign = sum(n for (c, d), n in less.items() if c == "CREATIVE_FATIGUE"), less["BID_INCREASE", 0]
    assert one / campaign == pytest.approx(0.33 / 0.2, rel=0.05)


class Told:
    """An episode that counts what it is asked."""

    def __init__(self):
        self.asked = []

    def step(self, action, *, final_turn=False):
        self.asked.append(action)
        return Observation("volume 0")


def test_a_teacher_without_a_stop_rule_asks_on():
    """Its own steps come first and its answer stays; it goes on `GO_ON` of the time, never beyond the limit."""
    own, more = [("sql('select 1')", "1"), ("sql('select 2')", "2")], []
    for seed in range(400):
        episode = Told()
        found = analyst.keep_asking(episode, Transcript(list(own), "{}"), np.random.default_rng(seed), 12)
        assert found.steps[:2] == own and found.answer == "{}" and len(found.steps) == 2 + len(episode.asked) <= 12
        more.append(len(episode.asked))
    p = analyst.GO_ON
    assert np.mean(more) == pytest.approx(sum(p**k for k in range(1, 11)), rel=0.1)
    assert max(more) == 10 and min(more) == 0


def test_a_lesson_is_cut_off_where_a_policy_would_be():
    """Up to the last turn that ends within the limits; whole lessons stay whole."""
    turns = [(0, True, 4), (0, False, 6), (1, True, 4), (1, False, 6), (2, True, 5)]  # turn, sampled, tokens
    index = np.concatenate([[-1] * 5] + [[k] * n for k, _, n in turns])
    mask = np.concatenate([[False] * 5] + [[s] * n for _, s, n in turns])
    lesson = teacher.EncodedLesson(np.arange(len(index)), mask, index)
    for context, most, length in ((30, 3, 30), (29, 3, 19), (30, 2, 19), (18, 3, 9), (9, 3, 9)):
        cut = teacher._cut_off(lesson, RolloutConfig(context=context, max_turns=most))
        assert len(cut.ids) == len(cut.loss_mask) == len(cut.turn_index) == length and cut.loss_mask[-1]


def test_a_teacher_searches_in_the_ways_it_is_given():
    """Of two ways each is taken as often as it is among all three; alone it is taken always, also by the lessons."""
    drawn = [analyst.Habits.draw(np.random.default_rng(i), ("drill", "shallow")).search for i in range(2000)]
    assert set(drawn) == {"drill", "shallow"} and np.mean([d == "drill" for d in drawn]) == pytest.approx(0.6, abs=0.04)
    scans = {f'sql("""{queries.scan(n)}""")' for n in (2, 3)}
    for searches, share in (("[scan]", 1.0), ("[drill, shallow]", 0.0), ("[scan, drill, shallow]", 0.5)):
        config = config_io.load(None, [("sft.searches", searches)])
        found = []
        for seed in range(200):
            episode = Told()
            domain._analyst_lesson(episode, None, np.random.default_rng(seed), config)
            found.append(bool(scans & set(episode.asked)))
        assert np.mean(found) == pytest.approx(share, abs=0.12 * (0 < share < 1))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ([("sft.without", "[segments]")], "`sft.without` has `segments`"),
        ([("sft.without", "[campaign, mix, segment_1d, segment_2d, no_signal]")], "leaves no type of lesson"),
        ([("sft.searches", "[scan, deep]")], "`sft.searches` has `deep`"),
        ([("sft.searches", "[]")], "no way to search"),
        ([("sft.without", "[mix]"), ("environment.name", "search")], "`sft.without` belongs to `environment.name` ads"),
    ],
)
def test_what_can_be_left_out_is_checked(fields, says):
    with pytest.raises(ConfigError, match=says):
        config_io.load(None, fields)


def test_every_variant_is_a_valid_run_and_names_a_capability():
    names = {c.name for c in CAPABILITIES}
    for variant, (left_out, capability) in PLANTED_VARIANTS.items():
        config = planted._config(RunConfig(), variant)
        assert config.sft.without == ((left_out,) if left_out else ())
        assert (capability in names) == bool(left_out)


def found(kept, rank, planted_kept, gap=1.0):
    gaps = {"intersection": gap, "drill_down": 0.9}
    coverages = {"intersection": gap, "drill_down": 0.1}
    return {"kept": kept, "rank": rank, "planted_kept": planted_kept, "gaps": gaps, "coverages": coverages}


def test_summary_counts_seeds():
    variant = "no two-attribute lessons"
    runs = {
        planted.CONTROL: {s: {"kept": ["drill_down"]} for s in (0, 1)} | {2: {"kept": []}},
        variant: {
            0: found(["intersection"], 1, True),
            1: found(["drill_down", "intersection"], 2, True, 0.5),
            2: found(["drill_down"], 3, False, 0.0),
        },
    }
    told = planted.summary(runs)[variant]
    assert (told["first"], told["kept"], told["alone"], told["alone_beside_control"]) == (1, 2, 1, 2)
    assert told["first_explained"] == 2  # .5 x .5 is more than .1 x .9
    assert told["gap"] == 0.5 and told["others"] == ["drill_down"] and told["seeds"] == 3
    text = planted.markdown({"summary": {variant: told}, "runs": runs})
    assert (
        "| 1 of 3 | 2 of 3 | 2 of 3 | 1 of 3 | 2 of 3 |" in text and "own weaknesses, in any seed: drill_down" in text
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--out", "x", "--init", "y"], "--init"),
        (["--out", "x", "--steps", "3"], "--steps does not go with planted-deficits"),
        (["--out", "x", "--variants", "no stop rules"], "did you mean 'no stop rule'"),
        (["--out", "x", "--seeds", "1", "1"], "names one twice"),
        (["--out", "x", "--sft.without", "[mix]"], "what the variants of planted-deficits set"),
        (["--out", "x", "--environment.name", "search"], "works on `environment.name` ads only"),
    ],
)
def test_refused(words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["reproduce", "planted-deficits", *words]) == 2
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1 and not list(tmp_path.iterdir())


def test_a_study_takes_up_what_is_there(tmp_path, monkeypatch):
    """Runs in their directories, one after another; each seed of a variant gets the lessons of the first."""
    trained, contrasted = [], []

    def train(name, path, config, *, resume):
        assert name == "sft" and not resume
        lessons = sorted(p.name for p in (path / "data" / "teacher").glob("*")) if (path / "data").exists() else []
        trained.append((path.name, config.sft.without, config.seed, lessons))
        (path / "data" / "teacher").mkdir(parents=True, exist_ok=True)
        (path / "data" / "teacher" / "00000.parquet").write_text(",".join(config.sft.without))
        (path / "checkpoints" / "sft" / "00000001").mkdir(parents=True)
        (path / "config.yaml").write_text(config_io.dump(config))

    def contrast(path, config, *, stage):
        contrasted.append(path.name)
        order = ["intersection", *(c.name for c in CAPABILITIES if c.name != "intersection")]
        figures = {"mean_gap": 0.5, "coverage": {"value": 0.3}}
        entries = [{"capability": n, "kept": n == "intersection", **figures} for n in order]
        return {"failed": 5, "attempts": 10, "kept": ["intersection"], "capabilities": entries}

    monkeypatch.setattr(planted.train, "command", train)
    monkeypatch.setattr(planted.contrast, "command", contrast)
    told = planted.command(
        config_io.load(CONFIG), tmp_path, seeds=(3, 4), variants=["no two-attribute lessons", "no stop rule"]
    )
    assert [t[0] for t in trained] == contrasted and len(trained) == 6
    assert [t[3] for t in trained] == [[]] * 3 + [["00000.parquet"]] * 3  # lessons of the first seed
    pairs = tmp_path / "no-two-attribute-lessons-4"
    assert (pairs / "data" / "teacher" / "00000.parquet").read_text() == "segment_2d"
    assert told["summary"]["no two-attribute lessons"]["first"] == 2 and told["summary"]["no stop rule"]["first"] == 0
    assert (tmp_path / "table.md").read_text().startswith("| | planted")
    with pytest.raises(ConfigError, match="is of another study"):
        planted.command(replace(config_io.load(CONFIG), name="other"), tmp_path, seeds=(3,), variants=["no stop rule"])


@pytest.mark.slow
def test_a_study_in_miniature(compile_cache, tmp_path, capsys):
    """Smoke policies learn nothing worth contrasting: only that every part fits the next."""
    words = ["reproduce", "planted-deficits", "--config", CONFIG, "--out", tmp_path / "out", "--seeds", 0, "--json"]
    words += ["--variants", "no stop rule", "--sft.epochs", 1]
    assert cli.main([str(w) for w in words]) == 0
    assert '"planted": "stopping"' in capsys.readouterr().out.splitlines()[-1]
