"""The advertising environment: prompts without a leak, shared databases, grading, threads."""

import dataclasses
import re
import threading

import pytest
from helpers_episodes import fake_batch, fake_set

from trace_jax.config import ConfigError, EnvironmentConfig
from trace_jax.environments.ads import environment as module
from trace_jax.environments.ads.answer import parse_exact
from trace_jax.environments.ads.environment import AdsEnvironment
from trace_jax.environments.ads.prompt import NUDGE, system_prompt
from trace_jax.simulator.causes import CAUSE_NAMES
from trace_jax.simulator.vocabulary import ATTRIBUTES
from trace_jax.warehouse.schema import COLUMNS, VISIBLE_TABLES
from trace_jax.warehouse.splits import EpisodeSet

COMPACT = EnvironmentConfig(tool_seconds=10)
FULL = dataclasses.replace(COMPACT, prompt="full")


@pytest.fixture(scope="module")
def episodes():
    return fake_set(5)


@pytest.fixture
def environment(episodes):
    return AdsEnvironment(episodes, COMPACT)


def test_prompts_are_short_or_complete(episodes):
    assert len(system_prompt("compact").split()) <= 12
    full = system_prompt("full")
    words = [*CAUSE_NAMES, *VISIBLE_TABLES, *ATTRIBUTES, *(c for t in VISIBLE_TABLES for c in COLUMNS[t])]
    assert all(word in full for word in [*words, "driver_segments", "root_cause", "evidence", "explanation", "sql("])
    assert "gt_" not in full
    with pytest.raises(ConfigError, match="compact, full"):
        AdsEnvironment(episodes, dataclasses.replace(COMPACT, prompt="long"))
    for config in (COMPACT, FULL):
        task = AdsEnvironment(episodes, config).task(0)
        assert task.system == system_prompt(config.prompt)
        assert "\n" not in task.user and (config is FULL or len(task.user.split()) < 25)


def test_the_described_change_is_what_a_query_finds(episodes, environment):
    """Every figure, id and date of the prompts against SQL over the visible tables."""
    full = AdsEnvironment(episodes, FULL)
    for index in range(len(environment)):
        short, long = environment.task(index), full.task(index)
        pattern = r"Campaign (\w+), .* Days (\S+) to \S+; .* starts on (\S+)\. "
        campaign, start, middle = re.match(pattern, long.user).groups()
        where = f"FROM daily_campaign WHERE campaign_id = '{campaign}'"
        columns = ", ".join(
            f"round(100 * (sum({m}) FILTER (ds >= '{middle}') / sum({m}) FILTER (ds < '{middle}') - 1))"
            for m in ("impressions", "clicks", "orders", "spend")
        )
        with environment.open(short) as episode:
            found = episode.step(f'sql("""SELECT {columns} {where}""")').text.split()
            dates = episode.step(f"sql(\"SELECT min(ds), count(*) / 2 - (DATE '{middle}' - min(ds)) {where}\")").text
            # The short prompt relies on one campaign in segment_daily, whose halves meet at the median day.
            halves = "SELECT count(DISTINCT campaign_id), min(ds) FILTER (ds > (SELECT median(ds) FROM segment_daily))"
            split = episode.step(f"sql('{halves} FROM segment_daily')").text
        for task in (short, long):
            said = re.findall(r"([+-]\d+)%", task.user)
            assert [float(x) for x in said] == pytest.approx([float(x) for x in found], abs=1)
        assert dates == f"{start} 0" and split == f"1 {middle}"


def test_prompts_do_not_depend_on_the_label():
    batch, verdict = fake_batch(5)
    other = {
        f: getattr(batch, f)[::-1]
        for f in ("cause", "slice_attributes", "slice_values", "strength", "profile", "onset")
    }
    mixed = EpisodeSet(batch.replace(**other), verdict)
    for config in (COMPACT, FULL):
        pair = AdsEnvironment(EpisodeSet(batch, verdict), config), AdsEnvironment(mixed, config)
        assert [pair[0].task(i).user for i in range(5)] == [pair[1].task(i).user for i in range(5)]
        assert [pair[0].task(i).labels for i in range(5)] != [pair[1].task(i).labels for i in range(5)]


def test_a_campaign_without_traffic_has_a_prompt():
    """Case 7 of data, prompt side: no NaN or infinity in the described change."""
    batch, verdict = fake_batch(1)
    silent = batch.replace(**{f: getattr(batch, f) * 0 for f in ("impressions", "clicks", "orders", "spend")})
    assert AdsEnvironment(EpisodeSet(silent, verdict), COMPACT).task(0).user.count("n/a") == 4


def test_gold_answers_earn_everything(episodes):
    environment = AdsEnvironment(episodes, COMPACT)
    for index in range(len(environment)):
        task = environment.task(index)
        with environment.open(task) as episode:
            reward = episode.grade(task.gold_answer)
            assert reward.total == 1.0 and reward.info["exact_parsed"]
            assert episode.grade("").total == 0.0
        assert parse_exact(task.gold_answer).root_cause == task.labels["cause"]


def test_no_truth_within_reach_of_the_tool(environment, episodes):
    task = environment.task(0)
    with environment.open(task) as episode:
        assert episode.step("sql('SHOW TABLES')").text.split() == sorted(VISIBLE_TABLES)
        for table in ("gt_episode", "gt_evidence", "gt_validation", "episodes"):
            assert episode.step(f"sql('SELECT * FROM {table}')").error
        for name in ("task", "gold_answer", "labels", "episode", "record", "self", "database", "verdict"):
            assert "NameError" in episode.step(name).text
        seen = episode.step("sql('SELECT DISTINCT campaign_id FROM daily_campaign')").text.split()
        assert set(seen).isdisjoint({r.campaign_id for r in episodes if r.index != 0})


def test_final_turn_adds_the_nudge(episodes):
    for config in (COMPACT, FULL):
        environment = AdsEnvironment(episodes, config)
        with environment.open(environment.task(1)) as episode:
            plain = episode.step("sql('SELECT 1 AS a')")
            last = episode.step("sql('SELECT 1 AS a')", final_turn=True)
            assert last.text == f"{plain.text}\n{NUDGE[config.prompt]}" and not last.error
            assert episode.step("1/0", final_turn=True).text.endswith(NUDGE[config.prompt])
            assert plain.text == ("1" if config is COMPACT else "a\n1")


def test_a_group_shares_one_database_and_nothing_else(environment, monkeypatch):
    built = []
    real = module.EpisodeDatabase
    monkeypatch.setattr(module, "EpisodeDatabase", lambda *a, **k: built.append(1) or real(*a, **k))
    task = environment.task(2)
    group = [environment.open(task) for _ in range(8)]
    assert len(built) == 1
    for k, episode in enumerate(group):
        episode.step(f"x = {k}")
    assert [e.step("x").text for e in group] == [str(k) for k in range(8)]
    for episode in group[:-1]:
        episode.close()
        episode.close()
    assert group[-1].step("sql('SELECT 1')").text == "1"
    group[-1].close()
    assert not environment._open
    assert group[-1].step("sql('SELECT 2')").error
    with environment.open(task) as again:
        assert again.step("sql('SELECT 3')").text == "3"
    assert len(built) == 2


def test_many_threads_open_and_close(environment):
    failures = []

    def work(seed):
        try:
            for k in range(12):
                with environment.open(environment.task((seed + k // 2) % 5)) as episode:
                    if episode.step(f"sql('SELECT {k % 3}')").text != str(k % 3):
                        failures.append((seed, k))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not failures and not environment._open
