"""The search environment's worlds, answers and agents: determinism, one answer to a question, distractors, success."""

import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import ConfigError, EnvironmentConfig, SearchConfig
from trace_jax.environments.search.answer import MAX_ANSWER, grade, normalise, parse
from trace_jax.environments.search.corpus import RELATION, RELATIONS, TYPES, WORDS, make_world
from trace_jax.environments.search.environment import SearchEnvironment, WorldRange
from trace_jax.environments.search.explorer import explore, solve

SIZES = SearchConfig(documents=24, min_hops=2, max_hops=5)


def environment(style="compact", size=150, first=0, sizes=SIZES, seed=7):
    return SearchEnvironment(
        WorldRange(seed, first, size), sizes, EnvironmentConfig(name="search", prompt=style, tool_characters=2000)
    )


def documents(world_environment, index, count=SIZES.documents):
    """The texts that the tools give, by number."""
    episode = world_environment.open(world_environment.task(index))
    return {n: episode.step(f"open({n})").text for n in range(1, count + 1)}


def test_a_task_is_a_function_of_seed_and_number():
    first, again = environment(), environment(first=100, size=40)
    for index in (100, 117, 139):
        one, other = first.task(index), again.task(index - 100)
        assert (one.user, one.gold_answer, one.labels) == (other.user, other.gold_answer, other.labels)
        assert documents(first, index) == documents(again, index - 100)
    assert make_world(SIZES, 7, 5) == make_world(SIZES, 7, 5) != make_world(SIZES, 8, 5)
    questions = {environment(first=k * 2**32, size=50).task(i).user for k in range(3) for i in range(50)}
    assert len(questions) > 145  # streams share no world
    with pytest.raises(IndexError):
        first.task(150)
    with pytest.raises(ConfigError, match="environment.prompt"):
        environment("terse")


def answers_by_brute_force(texts, question):
    """All that a compact question may mean: every reading of every document, without the code that wrote them."""
    facts = defaultdict(set)
    for text in texts:
        (name, _), *rest = [line.split(":") for line in text.splitlines()]
        for relation, value in rest:
            facts[name, relation].add(value)
    start, *relations = question.removesuffix("?").split(":")
    reached = {start}
    for relation in relations:
        reached = set().union(*(facts[name, relation] for name in reached))
    return reached


@pytest.mark.parametrize("sizes", [SIZES, SearchConfig(documents=16, max_hops=5), SearchConfig(documents=128)])
def test_every_question_has_one_answer(sizes):
    tasks = environment(sizes=sizes, size=400 if sizes is SIZES else 40)
    hops = set()
    for index in range(len(tasks)):
        task = tasks.task(index)
        found = answers_by_brute_force(documents(tasks, index, sizes.documents).values(), task.user)
        assert found == {task.gold_answer}, task.user
        assert task.gold_answer != task.labels["start"]
        assert task.labels["type"] == f"{task.labels['hops']}_hops" and task.user.count(":") == task.labels["hops"]
        hops.add(task.labels["hops"])
    assert hops == set(range(sizes.min_hops, sizes.max_hops + 1))


def test_distractors_exist():
    for index in range(50):
        entities = make_world(SIZES, 7, index).entities
        assert len({e.name for e in entities}) == len(entities) == SIZES.documents
        assert {e.type for e in entities} == set(TYPES)
        for e in entities:
            others = [o for o in entities if o.type == e.type and o is not e]
            assert {r for r, _ in e.facts} == {r for o in others for r, _ in o.facts}
            alike = e.name.split()[-1] if e.type == "person" else e.name[:3]  # a family name, or a beginning
            assert any(alike in o.name for o in others), e.name
            for kind in TYPES:  # facts that nearly match differ
                values = [v for r, v in e.facts if RELATION[r].target == kind]
                assert len(set(values)) == len(values) and e.name not in values


def test_words_of_names_are_no_words_of_the_wording():
    wording = " ".join(f"{r.name} {r.source} {r.phrase} {r.sentence}" for r in RELATIONS)
    assert not set(WORDS) & set(re.findall(r"\w+", wording)) and len(set(WORDS)) == len(WORDS) == 128


@pytest.mark.parametrize("style", ["compact", "full"])
def test_the_solver_is_right_and_the_explorer_rarely(style):
    tasks, found = environment(style), []
    for index in range(len(tasks)):
        task = tasks.task(index)
        with tasks.open(task) as episode:
            done = solve(episode, task, style)
            assert episode.grade(done.answer).total == 1.0, (task.user, done)
        assert len(done.steps) >= (3 if style == "compact" else 2) * task.labels["hops"]
        with tasks.open(task) as episode:
            done = explore(episode, task, np.random.default_rng(index), calls=8)
            found.append(episode.grade(done.answer))
        assert 1 <= len(done.steps) <= 8 and not any(text.startswith("error") for _, text in done.steps)
        assert done.answer in task.user + " ".join(text for _, text in done.steps)
    assert np.mean([reward.info["parsed"] for reward in found]) == 1
    assert 0 < np.mean([reward.info["right"] for reward in found]) < 0.15


def test_the_explorer_repeats_itself_and_draws_from_its_generator():
    tasks = environment()
    task = tasks.task(3)
    runs = [explore(tasks.open(task), task, np.random.default_rng(s), calls=8) for s in (0, 0, 1, 2)]
    assert runs[0] == runs[1] and len({str(r) for r in runs}) == 3


def test_grading():
    weight = EnvironmentConfig().reward_format
    for text in ("Bala Coren", " bala  coren. ", '"BALA-COREN"', "I read it.\nFinal answer: Bala Coren", "bala_coren"):
        reward = grade(text, "Bala Coren", 3, weight)
        assert reward.total == 1.0 and reward.info == {"right": True, "full_right": True, "parsed": True, "hops": 3}
    for text in ("Bala", "Bala Coren Dunus", "BalaCoren", "Bala Cores", "not Bala Coren"):
        reward = grade(text, "Bala Coren", 3, weight)
        assert reward.total == weight and reward.parts == {"right": 0.0, "format": 1.0}
    for text in ("", " ", "...", "Bala\nCoren", "Bala Coren " * 10, "answer:", "x" * (MAX_ANSWER + 1)):
        assert grade(text, "Bala Coren", 3, weight).total == 0.0
    assert normalise("ＢＡＬＡ  co­ren") == "bala co ren"


@settings(max_examples=200, deadline=None)
@given(st.text() | st.binary().map(lambda b: b.decode("utf-8", "surrogateescape")))
def test_any_answer_is_graded(text):
    assert 0 <= grade(text, "Bala Coren", 2, 0.05).total <= 0.05 or parse(text) == "bala coren"


def test_threads_see_what_one_thread_sees():
    tasks = environment(size=12)

    def work(index):
        task = tasks.task(index % 12)
        return [solve(tasks.open(task), task, "compact"), documents(tasks, index % 12)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(96))) == [work(index) for index in range(12)] * 8
