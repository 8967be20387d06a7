"""What surrounds the numbers says nothing about the cause: prompt text, ids, table names, row counts, row order, files.

A classifier battery (`leak_probe`) is given only that and has to predict the cause of 300 episodes; a permutation test
says whether it does better than chance. Everything is seeded, so the outcome is the same on every run.
"""

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute  # noqa: F401 - pa.compute
import pyarrow.parquet  # noqa: F401 - pa.parquet
import pytest
from leak_probe import hashed_text, number_features, probe, probe_beyond

from trace_jax.config import EnvironmentConfig, SimulatorConfig
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.simulator.accepted import accepted_episodes
from trace_jax.simulator.causes import CAUSE_INDEX, CAUSES
from trace_jax.warehouse import dataset
from trace_jax.warehouse.schema import GRAIN, VISIBLE_TABLES
from trace_jax.warehouse.splits import EpisodeSet

PER_CAUSE = 25
ALPHA = 0.005  # eight probes: a false alarm in 4 % of all possible seeds
ROW_MODULI = (2, 3, SimulatorConfig().days)  # a whole number of rows a day leaves no remainder
PERCENT = re.compile(r"[+-]?\d+(?:\.\d+)?%|n/a")


@pytest.fixture(scope="module")
def episodes():
    """Equally many episodes of every cause (segment causes: 1-D and 2-D), so that chance is 1/12."""
    composition = {}
    for cause in CAUSES:
        one = 0 if cause.level in ("campaign", "none") else 1
        composition[cause.name, one] = PER_CAUSE if cause.level != "segment" else PER_CAUSE - PER_CAUSE // 2
        if cause.level == "segment":
            composition[cause.name, 2] = PER_CAUSE // 2
    return EpisodeSet(*accepted_episodes(SimulatorConfig(batch=64), 77, "leak", composition), split="leak")


@pytest.fixture(scope="module")
def labels(episodes):
    return np.array([CAUSE_INDEX[e.cause] for e in episodes])


@pytest.fixture(scope="module")
def tables(episodes):
    return [e.visible() for e in episodes]


@pytest.fixture(scope="module")
def prompts(episodes):
    """System and user text by style."""
    out = {}
    for style in ("compact", "full"):
        environment = AdsEnvironment(episodes, EnvironmentConfig(prompt=style))
        tasks = [environment.task(i) for i in range(len(episodes))]
        out[style] = ([t.system for t in tasks], [t.user for t in tasks])
    return out


def change_numbers(users):
    """The described change: the percentages of the prompt, in order."""
    found = [PERCENT.findall(text) for text in users]
    assert len({len(f) for f in found}) == 1, "every prompt describes the same quantities"
    return np.array([[0.0 if x == "n/a" else float(x[:-1]) for x in f] for f in found])


def counted(tables):
    return np.array([[t[name].num_rows for name in VISIBLE_TABLES] for t in tables], float)


def identities(episodes, tables):
    """Every id and the date that an episode shows, and its place in the set."""
    rows = []
    for e, t in zip(episodes, tables, strict=True):
        own = int(e.campaign_id[1:])
        advertiser = int(t["daily_campaign"]["advertiser_id"][0].as_py()[1:])
        others = sorted({int(c[1:]) for c in t["daily_campaign"]["campaign_id"].to_pylist()} - {own})
        first = t["budget_log"]["ds"][0].as_py().toordinal()
        category = sum(map(ord, t["daily_campaign"]["category"][0].as_py()))
        rows.append([e.index, own, advertiser, *others, others[-1] - others[0], own - others[0], first, category])
    return np.array(rows, float)


def order_of(tables):
    """Where the rows of each table stand against the canonical order, at 40 places a table; all zero when sorted."""
    out = []
    for t in tables:
        parts = []
        for name in VISIBLE_TABLES:
            keys = [(key, "ascending") for key in GRAIN[name]]
            plain = pa.table({key: t[name][key].cast(pa.string()) for key in GRAIN[name]})
            moved = pa.compute.sort_indices(plain, keys).to_numpy() - np.arange(len(plain))
            parts.append(moved[np.linspace(0, len(moved) - 1, 40).astype(int)] / len(moved))
        out.append(np.concatenate(parts))
    return np.array(out)


def names_of(tables):
    return hashed_text([" ".join(f"{name} {table.schema.to_string()}" for name, table in t.items()) for t in tables])


def surroundings(episodes, tables, users):
    """Every feature together."""
    masked = [PERCENT.sub("#", text) for text in users]
    return np.concatenate(
        [
            hashed_text(masked),
            number_features(counted(tables), ROW_MODULI),
            number_features(identities(episodes, tables)),
            order_of(tables),
            names_of(tables),
        ],
        axis=1,
    )


def test_setting_is_balanced(episodes, labels):
    assert len(episodes) == PER_CAUSE * len(CAUSES) and set(np.bincount(labels)) == {PER_CAUSE}


@pytest.mark.parametrize("style", ["compact", "full"])
def test_prompt_text_without_the_change_is_at_chance(prompts, labels, style):
    systems, users = prompts[style]
    assert len(set(systems)) == 1
    found = probe(hashed_text([PERCENT.sub("#", text) for text in users]), labels)
    assert found.p > ALPHA, found


@pytest.mark.parametrize("what", ["counts", "ids", "order", "names"])
def test_table_surroundings_are_at_chance(episodes, tables, labels, what):
    features = {
        "counts": lambda: number_features(counted(tables), ROW_MODULI),
        "ids": lambda: number_features(identities(episodes, tables)),
        "order": lambda: order_of(tables),
        "names": lambda: names_of(tables),
    }[what]()
    found = probe(features, labels)
    assert found.p > ALPHA, found


def test_everything_together_is_at_chance(episodes, tables, prompts, labels):
    found = probe(surroundings(episodes, tables, prompts["compact"][1]), labels)
    assert found.p > ALPHA, found


def test_surroundings_add_nothing_to_the_described_change(episodes, tables, prompts, labels):
    """The described change itself does say something; the rest adds nothing to it."""
    change = change_numbers(prompts["compact"][1])
    known = np.concatenate([change, number_features(change)], axis=1)
    assert probe(known, labels).p < 0.01
    found = probe_beyond(known, surroundings(episodes, tables, prompts["compact"][1]), labels)
    assert found.p > 1 / 41, found


def test_planted_leaks_are_found(episodes, tables, labels):
    """Positive control on the same episodes: in a quarter of them rows are dropped by cause, or moved by cause."""
    rng = np.random.default_rng(0)
    hit = rng.random(len(labels)) < 0.25
    counts = counted(tables)
    counts[:, 1] -= np.where(hit, 1 + labels, rng.integers(1, 13, len(labels)))
    assert probe(number_features(counts, ROW_MODULI), labels).p < ALPHA
    order = order_of(tables)
    order[hit, labels[hit] * 3] = 0.5
    assert probe(order, labels).p < ALPHA


def test_files_of_a_data_set_name_no_episode(episodes, tmp_path):
    """File names depend on the split alone, and visible files hold no column of the truth."""
    few, more = episodes.slice(0, 5), episodes.slice(5, 40)
    for name, part in (("few", few), ("more", more)):
        dataset.write(tmp_path / name, {"train": part})
    names = [sorted(p.relative_to(tmp_path / n).as_posix() for p in (tmp_path / n).rglob("*")) for n in ("few", "more")]
    assert names[0] == names[1]
    text = " ".join(names[0]).upper()
    assert not any(c.name in text for c in CAUSES)
    visible = [p for p in (tmp_path / "more").rglob("*.parquet") if p.parts[-3] == "visible"]
    assert sorted(p.parent.name for p in visible) == sorted(VISIBLE_TABLES)
    for path in visible:
        raw = path.read_bytes()
        assert not any(c.name.encode() in raw for c in CAUSES), path
        ids = pa.parquet.read_table(path)["campaign_id"].to_pylist()
        own = [c for c in dict.fromkeys(ids) if c in {e.campaign_id for e in more}]
        assert own == sorted(own), "episodes in the order of their ids, not of their causes"


def test_agent_database_holds_this_episode_only(episodes):
    environment = AdsEnvironment(episodes, EnvironmentConfig(prompt="full"))
    for i in (0, 1, len(episodes) - 1):
        with environment.open(environment.task(i)) as episode:
            seen = episode.step('sql("SELECT table_name FROM information_schema.tables ORDER BY ALL")').text.split()
            assert seen[-len(VISIBLE_TABLES) :] == sorted(VISIBLE_TABLES) and "gt_" not in " ".join(seen)
            ids = set()
            for name in VISIBLE_TABLES:
                ids |= set(episode.step(f'sql("SELECT DISTINCT campaign_id FROM {name}")').text.split()[1:])
            expected = {c for c in episodes[i].visible()["daily_campaign"]["campaign_id"].to_pylist()}
            assert ids == expected
            others = {e.campaign_id for e in episodes if e.index != i}
            assert not ids & others
