"""What `trace-jax diagnose` concludes: mix, noise, windows, late conversions, on data made with NumPy."""

import datetime

import duckdb
import numpy as np
import pytest
from helpers_diagnose import (
    FIRST,
    HALVES,
    MIDDLE,
    MOBILE,
    falls,
    rows,
    runner,
    said,
    text,
)

from trace_jax.diagnose import findings, quality, tables, windows
from trace_jax.environments.ads.answer import format_answer


@pytest.fixture
def diagnose(tmp_path, capsys):
    return runner(tmp_path, capsys)


def test_mix_is_not_blamed_on_rates(diagnose):
    """Case 1: shares (.5, .5) to (.8, .2) at fixed rates .01 and .05."""
    values = {"placement": ("Detail Page on-Amazon", "Top of Search on-Amazon")}

    def effect(t, cell):
        top = cell["placement"].startswith("Top")
        return {"ctr": 2.5 if top else 0.5, "impressions": 1.0 if t < 14 else 0.4 if top else 1.6}

    table = rows(("placement",), effect=effect, values=values, impressions=60_000, noise=0.03)
    _, found, _, _ = diagnose(text(table), argv=HALVES)
    assert said(found) == ("PLACEMENT_SHIFT", {})
    ctr = next(line for line in found["decomposition"] if line.startswith("CTR"))
    mix, rate = (float(part.split(" pp")[0]) for part in ctr.split("placement ")[1].split(", rates inside "))
    assert mix < -1.0 and abs(rate) < 0.15 * abs(mix)


def test_simpson_reversal(diagnose):
    """Case 2: CTR rises inside every placement, falls overall."""
    values = {"placement": ("Detail Page on-Amazon", "Top of Search on-Amazon")}

    def effect(t, cell):
        top = cell["placement"].startswith("Top")
        late = {"impressions": 0.3 if top else 1.7, "ctr": (2.5 if top else 0.5) * 1.1}
        return late if t >= 14 else {"ctr": 2.5 if top else 0.5}

    _, found, _, _ = diagnose(text(rows(("placement",), effect=effect, values=values, impressions=60_000)), argv=HALVES)
    assert said(found) == ("PLACEMENT_SHIFT", {})


def quiet(seed, **options):
    return rows(("placement", "device", "geo"), seed=seed, impressions=1500, noise=0.12, **options)


def test_nothing_planted_abstains(diagnose):
    """Cases 3, 5 and 10: noise, a tiny slice without clicks, a loud weekday cycle, one outlier day; unequal windows."""
    abstained = 0
    for seed in range(5):
        table = quiet(seed, effect=lambda t, cell: {"impressions": 1.8} if t == 9 else {})
        tiny = [r for r in table if r["device"] == "Tablets" and r["geo"] == "Japan"]
        for row in tiny:
            row |= {"impressions": 2, "clicks": int(row["date"] == FIRST), "orders": 0, "spend": 0.0}
        unequal = ("--before", f"{FIRST}:2026-10-25", "--after", "2026-10-26:2026-11-01")
        _, found, _, _ = diagnose(text(table), argv=(*(unequal if seed % 2 else HALVES), "--samples", "1"))
        assert said(found)[1].get("geo") != "Japan"
        abstained += found["cause"] == "NO_SIGNAL"
    assert abstained >= 4


def test_unequal_windows_find_the_slice(diagnose):
    """Case 5: 21 days before, 7 after, summed volumes differ by two thirds; so do 7 and 21."""
    for onset in (21, 7):
        table = rows(effect=falls({"geo": "Germany"}, onset, ctr=0.6))
        first = FIRST + datetime.timedelta(onset)
        argv = ("--before", f"{FIRST}:{first - datetime.timedelta(1)}", "--after", f"{first}:2026-11-01")
        _, found, _, _ = diagnose(text(table), argv=argv)
        assert said(found) == ("CREATIVE_FATIGUE", {"geo": "Germany"})


def test_zero_impressions_are_no_rate(diagnose):
    """Case 11: a value without impressions in either window is finite everywhere and never the answer."""
    table = rows(effect=lambda t, cell: {"impressions": 0.0} if cell["device"] == "Tablets" else MOBILE(t, cell))
    _, found, _, _ = diagnose(text(table), argv=HALVES)
    assert said(found) == ("CREATIVE_FATIGUE", {"device": "Mobile phones"})
    assert all(
        v is None or not isinstance(v, float) or np.isfinite(v) for e in found["evidence"] for r in e["rows"] for v in r
    )


def test_late_conversions_are_no_page_that_got_worse(diagnose):
    """Case 13: the last six days hold 85 to 30 % of their orders. A page that got worse half-way is still found."""
    late = lambda t, cell: {"cvr": 1 - 0.14 * (t - 21)} if t >= 22 else {}  # noqa: E731
    table = rows(effect=late, impressions=20_000)
    _, found, _, _ = diagnose(text(table), argv=HALVES)
    assert found["cause"] == "NO_SIGNAL"
    assert any(q["name"] == "late" and q["serious"] for q in found["quality"])
    _, kept, _, _ = diagnose(text(table), argv=(*HALVES, "--lag", "0"))
    assert kept["cause"] == "PAGE_DEGRADATION" and kept["confidence"]["level"] != "high"
    worse = rows(effect=lambda t, cell: {"cvr": 0.6} if t >= 14 else {}, impressions=20_000)
    _, found, _, _ = diagnose(text(worse), argv=HALVES)
    assert found["cause"] == "PAGE_DEGRADATION"
    assert any("OUT_OF_STOCK and PAGE_DEGRADATION" in line for line in found["not_checked"])


def test_time_zones_move_the_days_and_not_the_answer(diagnose):
    """Case 14: the same hours as moments of UTC, in days of UTC and of Los Angeles."""
    table = []
    for row in rows(effect=MOBILE):
        for part, hour in enumerate((3, 15)):
            moment = f"{row['date']}T{hour:02d}:00:00Z"
            half = {m: row[m] // 2 + (row[m] % 2 if part else 0) for m in ("impressions", "clicks", "orders")}
            table.append({"timestamp": moment, "device": row["device"], "geo": row["geo"]} | half)
    _, utc, _, _ = diagnose(text(table))
    _, west, _, _ = diagnose(text(table), argv=("--timezone", "America/Los_Angeles"))
    assert said(utc) == said(west) == ("CREATIVE_FATIGUE", {"device": "Mobile phones"})
    first = [q["text"][:10] for q in (utc["quality"][0], west["quality"][0])]
    assert first == [str(FIRST), str(FIRST - datetime.timedelta(1))]


def test_spellings_of_one_value_are_one_value(diagnose):
    """Case 15."""
    spellings = {"Mobile phones": ("mobile", "MOBILE", "Mobile Phones", "smartphone"), "Tablets": ("tablet", "TABLETS")}
    table = rows(effect=MOBILE)
    for number, row in enumerate(table):
        options = spellings.get(row["device"], (row["device"],))
        row["device"] = options[number % len(options)]
    _, found, _, _ = diagnose(text(table), argv=HALVES)
    assert found["cause"] == "CREATIVE_FATIGUE"
    assert {
        w for v, w in found["words"]["device"].items() if v.lower() in ("mobile", "mobile phones", "smartphone")
    } == {"MOBILE"}
    inside = next(r for r in found["evidence"][0]["rows"] if r[:2] == ["1 before", "slice"])
    plain = rows(effect=MOBILE)
    own = sum(r["impressions"] for r in plain if r["device"] == "Mobile phones" and r["date"] < MIDDLE)
    assert inside[3] == round(own / 14)


def test_what_the_tables_cannot_tell_is_not_decided(diagnose):
    """A fall of volume alone: a budget or the market. With a budget in the tables it is the budget."""
    table = rows(effect=lambda t, cell: {"impressions": 0.55} if t >= 14 else {}, noise=0.04)
    _, found, out, _ = diagnose(text(table), argv=HALVES)
    assert found["cause"] is None and found["undecided"].startswith("BUDGET_CAP, or a move of the whole market")
    assert found["confidence"]["level"] == "low" and "undecided: BUDGET_CAP" in out
    spent = {}
    for row in table:
        spent[row["date"]] = spent.get(row["date"], 0) + row["spend"]
    budgets = [
        {"date": d, "campaign": "Brand", "budget": round(s * 1.02 if d >= MIDDLE else s * 2)} for d, s in spent.items()
    ]
    _, found, _, _ = diagnose(text(table), text(budgets), argv=HALVES)
    assert found["cause"] == "BUDGET_CAP" and found["undecided"] is None
    levels = found["evidence"][1]
    assert levels["columns"] == ["period", "days", "budget_a_day"]
    with duckdb.connect() as fresh:
        fresh.execute(found["evidence_setup"])
        assert [list(r) for r in fresh.execute(levels["sql"]).fetchall()] == levels["rows"]
    means = [np.mean([b["budget"] for b in budgets if (b["date"] < MIDDLE) == early]) for early in (True, False)]
    np.testing.assert_allclose([r[2] for r in levels["rows"]], means, atol=0.01)


@pytest.mark.parametrize(
    ("answers", "cause", "level"), [("AAAAB", "A", "high"), ("AAABC", "A", "medium"), ("AABCD", None, "low")]
)
def test_an_answer_needs_more_than_half_of_the_investigations(answers, cause, level):
    names = dict(zip("ABCD", ("BID_INCREASE", "NO_SIGNAL", "OUT_OF_STOCK", "BUDGET_CAP"), strict=True))
    given = [findings.Investigation((), format_answer(names[a])) for a in answers]
    found = findings.conclude(given, [], quality.Report(()), {}, {})
    assert (found.cause, found.level, found.of) == (names.get(cause), level, 5)
    doubtful = findings.conclude(given, [], quality.Report((quality.Finding("x", "gaps", serious=True),)), {}, {})
    assert doubtful.level != "high" and "gaps" in doubtful.why


def test_what_markets_do_by_themselves_is_no_cause_without_another_campaign(diagnose):
    """Clicks 12 % dearer everywhere: the market, for all that one campaign shows. Beside another one it is the bid; and
    so is what no market does."""
    dearer = lambda cpc: lambda t, cell: {"cpc": cpc, "ctr": 0.9} if t >= 14 else {}  # noqa: E731
    table = rows(effect=dearer(1.12), impressions=20_000, noise=0.03)
    _, alone, out, _ = diagnose(text(table), argv=HALVES)
    assert said(alone) == ("NO_SIGNAL", {}) and alone["confidence"]["level"] == "medium"
    assert alone["confidence"]["why"] == [
        "3 of 3 say BID_INCREASE, but CPC +12% is no more than season and market do by themselves, "
        "and there is no other campaign to compare with"
    ]
    both = table + rows(seed=5, campaign="Other", impressions=20_000, noise=0.03)
    _, beside, _, _ = diagnose(text(both), argv=(*HALVES, "--campaign", "Brand"))
    assert said(beside) == ("BID_INCREASE", {})
    _, loud, _, _ = diagnose(text(rows(effect=dearer(1.5), impressions=20_000, noise=0.03)), argv=HALVES)
    assert said(loud) == ("BID_INCREASE", {})


# Windows


def test_windows_are_proposed_where_the_change_began(diagnose):
    _, found, _, _ = diagnose(text(rows(effect=falls({"device": "Mobile phones"}, 18, ctr=0.6))))
    assert found["windows"]["after"][0] == str(FIRST + datetime.timedelta(18))
    assert said(found) == ("CREATIVE_FATIGUE", {"device": "Mobile phones"})


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (("--before", "2026-10-05:2026-10-18"), "--after is missing"),
        (("--before", "2026-10-05", "--after", "2026-10-19:2026-10-20"), "first and last day"),
        (("--before", "2026-10-05:2026-10-18", "--after", "2026-10-10:2026-10-20"), "must follow"),
        (("--before", "2020-10-05:2020-10-18", "--after", "2026-10-19:2026-10-25"), "it needs 4"),
        (("--agent", "grpo"), "--run-dir"),
        (("--samples", "0"), "number of investigations"),
    ],
)
def test_wrong_requests_get_one_line(argv, part, diagnose):
    status, _, _, err = diagnose(text(rows(("device",))), argv=argv)
    assert status == 2 and part in err and err.count("\n") == 1


def test_step_scores_are_those_of_weighted_least_squares():
    rng = np.random.default_rng(0)
    y, w = rng.normal(size=20), rng.uniform(0.5, 2, 20)
    scores = windows.step_scores(y, w, 4)
    for t in range(4, 17):
        x = np.stack([np.ones(20), np.arange(20) >= t], 1)
        information = x.T @ (w[:, None] * x)
        beta = np.linalg.solve(information, x.T @ (w * y))
        variance = (w * (y - x @ beta) ** 2).sum() / 18 * np.linalg.inv(information)[1, 1]
        np.testing.assert_allclose(scores[t], beta[1] / np.sqrt(variance))


def test_moved_windows_are_parted_by_the_agents_own_middle():
    """Whatever the windows: the median of first and last day, as the agent's SQL takes it, falls between them."""
    rng = np.random.default_rng(1)
    with duckdb.connect() as connection:
        for before, gap, after in rng.integers(1, 40, (40, 3)):
            a = FIRST
            b = a + datetime.timedelta(int(before) - 1)
            c = b + datetime.timedelta(int(gap))
            d = c + datetime.timedelta(int(after) - 1)
            moved = datetime.timedelta(tables.shift_days((a, b), (c, d)))
            assert moved.days % 7 == 0
            parted = connection.execute(
                "SELECT $b > list_median([$a, $d]), $c > list_median([$a, $d])",
                {"a": a - moved, "b": b - moved, "c": c, "d": d},
            ).fetchone()
            assert parted == (False, True)
