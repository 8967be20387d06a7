"""The tools of the search environment: what they find, what they say of a bad call, and that nothing breaks them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import EnvironmentConfig, SearchConfig
from trace_jax.environments.search.environment import SearchEnvironment, WorldRange
from trace_jax.environments.search.tool import MAX_ACTION, SearchTool, library, words

SIZES = SearchConfig(documents=24)
LIBRARY = library(SIZES, 3, 0, "compact")
TEXTS = {number: "\n".join(said) for number, said in LIBRARY.sentences.items()}


def tool(characters=2000, results=3):
    return SearchTool(LIBRARY, results=results, characters=characters)


def test_search_open_find():
    one = tool()
    for entity in LIBRARY.world.entities:
        listed = one.run(f'search("{entity.name.upper()}")')
        assert listed.status == "ok" and listed.text.splitlines()[0] == f"{entity.id}:{entity.name}:{entity.type}"
        assert 1 <= len(listed.text.splitlines()) <= 3
        opened = one.run(f" open( '{entity.id}' )\n")
        assert opened.text == TEXTS[entity.id] and opened == one.run(f"open({entity.id})")
        relation, value = entity.facts[0]
        assert f"{relation}:{value}" in one.run(f"find('{value.lower()}')").text
        assert one.run("find('nothing of the kind')").text == "not in this document"
    assert one.run('search("qwxz")').text == "no results"
    assert len(tool(results=5).run('search("person city")').text.splitlines()) == 5


def test_words_of_the_text_decide_the_rank():
    wanted = next(e for e in LIBRARY.world.entities if e.type == "company")
    value = dict(wanted.facts)["founder"]
    assert wanted.id in LIBRARY.search(f"company founder {value}", 3)
    for text in ("mayor", "company seat", wanted.name):
        found = LIBRARY.search(text, 24)
        assert all(set(words(text)) & set(words(TEXTS[n])) for n in found) and len(found) == len(set(found))


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ("", "empty call"),
        ("   \n", "empty call"),
        ("who is it?", "not a call"),
        ("search", "not a call"),
        ("search('a'", "not a call"),
        ("search('a') + open(1)", "not a call"),
        ("search('a')('b')", "not a call"),
        ("search('a'); open(1)", "not a call"),
        ("x.search('a')", "not a call"),
        ("print('a')", "no tool print"),
        ("search()", "takes one text"),
        ("search('a', 'b')", "takes one text"),
        ("search(text='a')", "takes one text"),
        ("search(*['a'])", "takes one text"),
        ("search(name)", "takes one text"),
        ("search(None)", "takes one text"),
        ("find(b'a')", "takes one text"),
        ("open(True)", "takes one number"),
        ("open(1.5)", "takes one number"),
        ("open(-1)", "takes one number"),
        ("open(0)", "no document 0"),
        ("open(25)", "no document 25"),
        ("open('Bala')", "no document Bala"),
        ("find('a')", "no document is open"),
        ("search('" + "a" * MAX_ACTION + "')", "longer than"),
        ("search('\\x41')", "backslashes"),
        ("search('a\0')", "not a call"),
        ("search('\ud800')", "not a call"),
        ("search(" * 240 + "1" + ")" * 240, "not a call"),
        ("search(" * 60 + "1" + ")" * 60, "takes one text"),
    ],
)
def test_errors_help(action, said):
    seen = tool().run(action)
    assert seen.status == "error" and seen.error and said in seen.text and "\n" not in seen.text
    assert len(seen.text) < 160 and LIBRARY.world.answer not in seen.text


def test_empty_find():
    one = tool()
    one.run("open(1)")
    assert "find takes a text" in one.run("find(' ')").text


ACTIONS = st.one_of(
    st.text(),
    st.builds("{}({}){}".format, st.sampled_from(["search", "open", "find", "eval"]), st.text(), st.text(max_size=2)),
    st.builds("{}({!r})".format, st.sampled_from(["search", "open", "find"]), st.text() | st.integers() | st.binary()),
)


@settings(max_examples=400, deadline=None)
@given(st.lists(ACTIONS, max_size=4), st.integers(80, 200))
def test_any_text_is_survived(actions, limit):
    one = tool(characters=limit)
    for action in actions:
        seen = one.run(action)
        assert seen.status in ("ok", "error") and seen.error == (seen.status == "error") and len(seen.text) <= limit


def test_long_observations_are_cut():
    seen = SearchTool(library(SIZES, 3, 0, "full"), results=10, characters=80).run('search("person")')
    assert len(seen.text) == 80 and seen.text.endswith(" ...")


def test_the_answer_is_in_documents_only():
    tasks = SearchEnvironment(WorldRange(3, 0, 30), SIZES, EnvironmentConfig(name="search"))
    for index in range(30):
        task = tasks.task(index)
        episode = tasks.open(task)
        gold = task.gold_answer
        shown = [repr(tasks), repr(episode), repr(episode._tool), task.system, task.user]
        shown += [
            episode.step(a).text for a in ("", "gold_answer", "find('a')", "open(99)", "search(answer)", "help()")
        ]
        assert not any(gold in text for text in shown)
        assert episode.step("open(1)", final_turn=True).text.endswith("\nAnswer now.")
        episode.close()
        episode.close()
