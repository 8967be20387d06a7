"""The ads capability dictionary: what the reader sees in queries, and agreement with hand labels."""

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trace_jax.environments.ads import queries
from trace_jax.environments.ads.capabilities import CAPABILITIES, labels_of, quotes
from trace_jax.environments.ads.reading import read, shown
from trace_jax.environments.capability import ENDINGS, Attempt, Label
from trace_jax.simulator.causes import CAUSES, EPISODE_TYPES

HAND = json.loads((Path(__file__).parent / "data" / "capability_hand_labels.json").read_text())
NAMES = [c.name for c in CAPABILITIES]


def attempt_of(entry):
    steps = tuple((HAND["codes"][code], text) for code, text in entry["steps"])
    return Attempt(entry["user"], steps, entry["answer"], entry["ending"], entry["facts"], entry["passed"])


def query(sql, text="1"):
    [found] = read(f'sql("""{sql}""")', text).queries
    return found


def slices(found):
    return {tuple(sorted(s)) for n in (1, 2) for s in found.slices(n)}


@pytest.mark.parametrize("name", NAMES)
def test_labels_agree_with_hand_labels(name):
    """Precision and recall of LACKING and of PRESENT are at least .9 each; the attempts are described in the file."""
    counts = Counter()
    for entry in HAND["attempts"]:
        counts[entry["labels"].get(name, "NA"), labels_of(attempt_of(entry))[name].name] += 1
    for label in ("LACKING", "PRESENT"):
        both = counts[label, label]
        by_hand = sum(n for (hand, _), n in counts.items() if hand == label)
        found = sum(n for (_, other), n in counts.items() if other == label)
        assert by_hand >= 8, f"{name}: only {by_hand} attempts are {label} by hand"
        assert both >= 0.9 * by_hand and both >= 0.9 * found, f"{name} {label}: {dict(counts)}"


def test_hand_labels_are_many_varied_and_reasoned():
    attempts = HAND["attempts"]
    assert len(attempts) >= 50 and len({a["id"] for a in attempts}) == len(attempts)
    assert {a["facts"]["type"] for a in attempts} == set(EPISODE_TYPES)
    assert {a["ending"] for a in attempts} == set(ENDINGS) - {"lost"}
    assert len({a["source"] for a in attempts}) > 8 and all(a["reason"] for a in attempts)
    assert {n for a in attempts for n in a["labels"]} == set(NAMES)


def test_the_analysts_queries_are_read_as_they_are_meant():
    singles = {("placement",), ("audience",), ("device",), ("geo",)}
    assert query(queries.overview()).totals and not slices(query(queries.overview()))
    assert {"ctr", "cvr", "cpc", "volume", "stock"} <= query(queries.overview()).metrics
    assert slices(query(queries.single())) == singles
    assert slices(query(queries.mix())) == {("placement",), ("audience",)}
    assert slices(query(queries.scan())) == singles | {
        ("audience", "placement"),
        ("device", "placement"),
        ("geo", "placement"),
        ("audience", "device"),
        ("audience", "geo"),
        ("device", "geo"),
    }
    inside = query(queries.pairs("geo", "UK"))
    assert inside.filters == {("geo", "UK")}
    assert slices(inside) - {("placement",), ("audience",), ("device",)} == {
        ("geo",),
        ("geo", "placement"),
        ("audience", "geo"),
        ("device", "geo"),
    }
    for text in (queries.overview(), queries.single(), queries.scan(), queries.mix(), queries.pairs("geo", "UK")):
        found = query(text)
        assert found.compares and found.noise and not (found.totals and slices(found))
    week = query(queries.weekly("ctr", "device = 'MOBILE' and geo = 'US'"))
    assert week.compares and not week.noise and ("device", "geo") in slices(week)
    assert not week.totals and query(queries.budget()).metrics == {"budget"}


@pytest.mark.parametrize(
    ("select", "rest", "expected"),
    [
        ("device, geo", "group by device, geo", {("device", "geo")}),
        ("device, geo", "group by all", {("device", "geo")}),
        ("device d", "where ds < '2025-01-02' group by 1", {("device",)}),
        ("geo || device as k", "group by k", {("device", "geo")}),
        ("1", "group by cube (geo, device)", {("geo",), ("device",), ("device", "geo")}),
        ("geo", "where device = 'MOBILE' group by geo", {("geo",), ("device", "geo"), ("device",)}),
        ("ds", "group by ds", set()),
        ("geo, device, audience", "group by geo, device, audience", set()),
    ],
)
def test_groupings_in_other_spellings(select, rest, expected):
    assert slices(query(f"select {select}, sum(clicks) from segment_daily {rest}")) == expected


def test_a_query_may_begin_with_from():
    assert slices(query("from segment_daily select geo g, sum(clicks) group by g")) == {("geo",)}


def test_loops_and_rows_in_python_are_followed():
    loop = "for a in ['geo', 'device']:\n  print(sql(f\"select {a}, sum(clicks) from segment_daily group by {a}\"))"
    assert {s for q in read(loop, "1").queries for s in slices(q)} == {("geo",), ("device",)}
    rows = "rows = sql('select * from segment_daily')\nz = {r['geo']: r['clicks'] for r in rows if r['ds'] > m}"
    [found] = read(rows, "1").queries
    assert slices(found) == {("geo",)} and found.compares
    assert read("x = 1", "1").queries == () and not read("sql('select 1')", "out\nerror: no").works


def test_shares_are_not_what_only_divides():
    by = "from segment_daily where ds > '2025-01-02' group by geo"
    assert "share" not in query(f"select geo, sum(clicks) / nullif(sum(impressions), 0) {by}").metrics
    assert "share" in query(f"select geo, sum(impressions) n, sum(clicks) {by}").metrics


def test_printed_numbers_are_found_under_their_names():
    [totals] = [read(f'sql("""{queries.overview()}""")', "volume 0\nctr -3\nstock 2")]
    assert shown(totals)["ctr"] == {-3.0} and shown(totals)["stock"] == {2.0}
    table = read(f'sql("""{queries.single()}""")', "US -7 -1 14 1\nDESKTOP -1 0 3 null")
    assert shown(table)["ctr"] == {-7.0} and shown(table)["cpc"] == {14.0}  # a row with a null is not lined up
    full = read("sql('select 1')", "geo   ctr  ctr_se\nUS  -0.51     0.1\nUK    1e-3    0.2")
    assert shown(full)["ctr"] == {-0.51, 0.001} and shown(full)["ctr_se"] == {0.1, 0.2}
    assert quotes('{"decision":{},"evidence":["cpc 10 ctr -3"],"explanation":"7 days"}') == [
        ("cpc", "10"),
        ("ctr", "-3"),
    ]
    assert quotes('{"decision":{}}') == quotes(None) == []


FACTS = st.builds(
    lambda cause, kind, pairs: {"cause": cause.name, "type": kind, "driver": pairs},
    st.sampled_from(CAUSES),
    st.sampled_from(EPISODE_TYPES),
    st.sampled_from([[], [["geo", "US"]], [["geo", "US"], ["device", "MOBILE"]]]),
)
CODES = st.one_of(
    st.text(max_size=60),
    st.sampled_from(HAND["codes"]).flatmap(
        lambda code: st.tuples(st.integers(0, len(code)), st.text(max_size=5), st.integers(0, len(code))).map(
            lambda cut: code[: cut[0]] + cut[1] + code[cut[2] :]
        )
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(CODES, st.text(max_size=60)), max_size=4),
    st.one_of(st.none(), st.text(max_size=80), st.sampled_from([a["answer"] for a in HAND["attempts"] if a["answer"]])),
    st.sampled_from(ENDINGS),
    FACTS,
)
def test_labellers_never_raise(steps, answer, ending, facts):
    """Any text in calls, results and answers; an attempt that was broken off from outside has no labels."""
    found = labels_of(Attempt("why?", tuple(steps), answer, ending, facts))
    assert set(found) == set(NAMES) and all(isinstance(label, Label) for label in found.values())
    if ending == "lost":
        assert set(found.values()) == {Label.NA}


def test_an_unknown_ending_is_refused():
    with pytest.raises(ValueError, match="unknown ending"):
        Attempt("why?", (), None, "bored")


def test_descriptions_and_definitions_say_something():
    assert len(set(NAMES)) == len(NAMES) and all(n.isidentifier() for n in NAMES)
    for c in CAPABILITIES:
        assert "\n" not in c.description and len(c.description) < 120 and "acking:" in c.definition


@pytest.mark.parametrize(
    "piece",
    ["select ", "group by ", "(", "group by (", "sum(", " ", "'", '"""', "a = 'MOBILE' ", "ds<", "[", "select geo g,"],
)
def test_hostile_queries_take_no_time(piece):
    """Long repetitions of what the reader looks for."""
    begin = time.process_time()
    for code in (
        piece * 20_000,
        f'sql("""{piece * 20_000}""")',
        f'sql("""select impressions {piece * 5000} impressions""")',
    ):
        labels_of(Attempt("why?", ((code, piece * 100),), None, "exhausted", HAND["attempts"][0]["facts"]))
    assert time.process_time() - begin < 5.0
