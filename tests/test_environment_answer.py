"""Answer parsers and reward: round trips, dirt that people write, bounds on any text."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.config import EnvironmentConfig
from trace_jax.environments.ads.answer import Answer, format_answer, parse_exact, parse_lenient
from trace_jax.environments.ads.reward import grade, jaccard
from trace_jax.simulator.causes import CAUSE_NAMES, SEGMENT_CAUSES
from trace_jax.simulator.vocabulary import ATTRIBUTES

CONFIG = EnvironmentConfig()
PAIRS = [(name, value) for name, values in ATTRIBUTES.items() for value in values]
causes = st.sampled_from(CAUSE_NAMES)
drivers = st.lists(st.sampled_from(PAIRS), min_size=1, max_size=2, unique_by=lambda p: p[0])
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def answer(cause, segments):
    return json.dumps({"decision": {"root_cause": cause, "driver_segments": segments}})


@given(causes, drivers, st.lists(st.text() | st.dictionaries(st.text(), st.integers())), st.text())
def test_canonical_answers_come_back_from_both_parsers(cause, driver, evidence, explanation):
    text = format_answer(cause, driver, evidence, explanation)
    expected = Answer(cause, tuple(sorted(driver)) if cause in SEGMENT_CAUSES else ())
    assert parse_exact(text) == expected
    assert parse_lenient(text) == expected
    assert "\n" not in text


@given(causes, drivers, json_values, st.text(alphabet=st.characters(exclude_characters="{}")))
def test_lenient_takes_extra_keys_and_prose_around(cause, driver, extra, prose):
    decision = {"why": extra, "root_cause": cause, "driver_segments": [{"dimension": a, "value": v} for a, v in driver]}
    text = f"{prose} ```json\n{json.dumps({'confidence': extra, 'decision': decision}, indent=1)}\n``` {prose}"
    assert parse_lenient(text) == Answer(cause, tuple(sorted(driver)))
    assert parse_exact(text) is None


def _soup(words):
    return st.lists(words | st.text(max_size=4), max_size=30).map("".join)


fragments = st.sampled_from(
    [*'{}[]":,\\ \n', '"decision":', '"root_cause":', '"driver_segments":', *map(json.dumps, CAUSE_NAMES[:3]), "null"]
)


@settings(max_examples=300)
@given(st.text() | json_values.map(json.dumps) | _soup(fragments))
def test_parsers_never_raise_and_rewards_stay_in_bounds(text):
    for cause, driver in (("NO_SIGNAL", ()), ("CREATIVE_FATIGUE", (("geo", "US"), ("device", "MOBILE")))):
        reward = grade(text, cause, driver, CONFIG)
        assert 0.0 <= reward.total <= 1.0
        assert all(0.0 <= part <= 1.0 for part in reward.parts.values())
        assert reward.info["parsed"] or reward.total == 0.0
        assert reward.info["full_right"] == (reward.parts["attr"] == 1.0)
        if reward.info["exact_parsed"]:
            assert reward.info["parsed"]


@given(json_values, json_values, json_values)
def test_any_json_in_the_places_of_the_schema(cause, segments, evidence):
    body = {"decision": {"root_cause": cause, "driver_segments": segments}, "evidence": evidence, "explanation": ""}
    for text in (json.dumps(body), answer("AD_QUALITY_DROP", segments), json.dumps({"decision": cause})):
        lenient, exact = parse_lenient(text), parse_exact(text)
        for parsed in (lenient, exact):
            if parsed is not None:  # whatever comes out is in the vocabulary
                assert parsed.root_cause in CAUSE_NAMES
                assert all(value in ATTRIBUTES[name] for name, value in parsed.driver_segments)
        assert exact is None or exact == lenient


@pytest.mark.parametrize(
    "text",
    [
        "{" * 50_000,
        "[" * 50_000,
        '{"a":' * 30_000,
        '{"decision":' + "9" * 10_000 + "}",
        "\ud800{}",
        '{"decision":{"root',
    ],
)
def test_hostile_texts_do_not_parse(text):
    assert parse_lenient(text) is None
    assert parse_exact(text) is None


def test_nested_segments_are_bounded():
    text = '{"decision":{"root_cause":"AD_QUALITY_DROP","driver_segments":' + '[{"geo":' * 300 + "1" + "}]" * 300 + "}}"
    assert parse_lenient(text) == Answer("AD_QUALITY_DROP")


@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        ("placement", "top_of_search", "TOP_OF_SEARCH"),
        ("Placement", "Top of Search on-Amazon", "TOP_OF_SEARCH"),
        ("placement", "Top-of-Search", "TOP_OF_SEARCH"),
        ("PLACEMENT", "Placement Top", "TOP_OF_SEARCH"),
        ("placement", "PLACEMENT_TOP", "TOP_OF_SEARCH"),
        ("placement", " TopOfSearch ", "TOP_OF_SEARCH"),
        ("placement", "Detail Page on-Amazon", "PRODUCT_PAGE"),
        ("ad product", "sponsored-brands", "SPONSORED_BRANDS"),
        ("device", "Mobile", "MOBILE"),
        ("geo", "us", "US"),
    ],
)
def test_spelling_of_values_is_normalised(attribute, value, expected):
    """Case 15 of data."""
    parsed = parse_lenient(answer("creative fatigue", [{"dimension": attribute, "value": value}]))
    assert parsed == Answer("CREATIVE_FATIGUE", ((attribute.strip().lower().replace(" ", "_"), expected),))


def test_unknown_values_are_absent_and_order_does_not_matter():
    """Case 15 of data."""
    assert parse_lenient(answer("COMPETITIVE_PRESSURE", [{"dimension": "geo", "value": "ATLANTIS"}])) == Answer(
        "COMPETITIVE_PRESSURE"
    )
    assert parse_lenient(answer("COMPETITIVE_PRESSURE", [{"dimension": "colour", "value": "US"}])) == Answer(
        "COMPETITIVE_PRESSURE"
    )
    one = parse_lenient(answer("CREATIVE_FATIGUE", "geo=US & placement=TOP"))
    assert one == parse_lenient(answer("CREATIVE_FATIGUE", "placement = top & Geo = us"))
    assert one == parse_lenient(answer("CREATIVE_FATIGUE", [{"placement": "TOP"}, {"geo": "US"}]))
    assert one == parse_lenient(answer("CREATIVE_FATIGUE", ["geo: US", "placement=Top Of Search"]))
    assert one.driver_segments == (("geo", "US"), ("placement", "TOP_OF_SEARCH"))
    assert parse_lenient(answer("CLIMATE", [])) is None


def test_an_extra_dimension_is_not_exact():
    """Case 15 of data."""
    text = format_answer("COMPETITIVE_PRESSURE", [("geo", "US"), ("device", "MOBILE")])
    reward = grade(text, "COMPETITIVE_PRESSURE", (("geo", "US"),), CONFIG)
    assert reward.info["cause_right"] and not reward.info["full_right"]
    assert reward.parts["attr"] == 0.75


def test_the_last_decision_counts():
    text = f"First I thought {format_answer('BUDGET_CAP')} but in the end {format_answer('NO_SIGNAL')}"
    assert parse_lenient(text) == Answer("NO_SIGNAL")


@pytest.mark.parametrize(
    "change",
    [
        {"extra": 1},
        {"evidence": "none"},
        {"explanation": None},
        {"decision": {"root_cause": "no_signal"}},
        {"decision": {"root_cause": "NO_SIGNAL", "note": ""}},
        {"decision": {"root_cause": "NO_SIGNAL", "driver_segments": [{"dimension": "geo", "value": "US"}]}},
        {"decision": {"root_cause": "AD_QUALITY_DROP"}},
        {"decision": {"root_cause": "AD_QUALITY_DROP", "driver_segments": [{"dimension": "geo", "value": "us"}]}},
        {"decision": {"root_cause": "AD_QUALITY_DROP", "driver_segments": [{"dimension": "geo", "value": "US"}] * 2}},
        {"decision": {"root_cause": "AD_QUALITY_DROP", "driver_segments": {"geo": "US"}}},
    ],
)
def test_exact_refuses_what_lenient_accepts(change):
    body = {"decision": {"root_cause": "NO_SIGNAL"}, "evidence": [], "explanation": ""} | change
    assert parse_exact(json.dumps(body)) is None
    assert parse_lenient(json.dumps(body)) is not None


def test_slice_credit():
    """Case 8 of data: exact slice full credit, its parent 0.75, a wrong slice of the right cause 0.5."""
    cause, driver = "CREATIVE_FATIGUE", (("geo", "US"), ("device", "MOBILE"))

    def attr(*pairs):
        return grade(format_answer(cause, pairs), cause, driver, CONFIG).parts["attr"]

    assert attr(*driver) == 1.0
    assert attr(("geo", "US")) == 0.75
    assert attr(("geo", "UK")) == 0.5
    assert attr() == 0.5
    assert attr(("geo", "US"), ("device", "TABLET")) == pytest.approx(0.5 + 0.5 / 3)
    assert jaccard(driver, reversed(driver)) == 1.0


def test_totals_follow_the_weights():
    driver = (("geo", "US"), ("device", "MOBILE"))
    parent = format_answer("CREATIVE_FATIGUE", driver[:1])
    assert grade(format_answer("CREATIVE_FATIGUE", driver), "CREATIVE_FATIGUE", driver, CONFIG).total == 1.0
    assert grade(parent, "CREATIVE_FATIGUE", driver, CONFIG).total == pytest.approx(0.65 * 0.75 + 0.05)
    assert grade(parent, "BUDGET_CAP", (), CONFIG).total == pytest.approx(0.05)
    assert grade("no idea", "BUDGET_CAP", (), CONFIG).total == 0.0
    # Mix causes have a slice, but the answer need not name it.
    shift = format_answer("PLACEMENT_SHIFT")
    assert grade(shift, "PLACEMENT_SHIFT", (("placement", "TOP_OF_SEARCH"),), CONFIG).total == 1.0


def test_naming_a_cause_for_no_signal_earns_nothing_but_format():
    """Case 10 of data, scoring side: a made-up cause has no credit, one fixed answer is right on one cause."""
    for cause in CAUSE_NAMES:
        text = format_answer(cause, [("geo", "US")])
        right = [truth for truth in CAUSE_NAMES if grade(text, truth, (("geo", "US"),), CONFIG).parts["attr"] > 0]
        assert right == [cause]
    named = grade(format_answer("BUDGET_CAP"), "NO_SIGNAL", (), CONFIG)
    assert named.parts["attr"] == named.parts["full"] == 0.0
