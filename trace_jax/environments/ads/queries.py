"""The analyst's queries: SQL over the agent-visible tables that compares the two halves of the window.

Every z is a log change over its standard error, which comes from the baseline's own day-to-day residuals
(quasi-likelihood), so overdispersed days do not look like signals. Rates are ratios of sums, never means of ratios.
Campaign totals are compared with those of the sibling campaigns, which share market and season. Rates of slices are
means over their segments' own changes, so that a shift of the mix is no change of rate. These are the statistics of the
oracle (simulator.statistics).
"""

from __future__ import annotations

from collections.abc import Sequence

from trace_jax.simulator.vocabulary import DRIVER_ATTRIBUTES

# Long format (key k, metric m, day, half b): numerator n and denominator e of the series whose change is tested.
_CHANGE = """
, h as (select k, m, sum(n) filter (not b) na, sum(n) filter (b) nb, sum(e) filter (not b) ea, sum(e) filter (b) eb
 from m group by all)
, r as (select k, m, var_samp(n - e * na / ea) * count(*) v from m join h using (k, m) where not b group by all)
, z as (select k, m, ln(nb * ea / na / eb) d, v / na / na + v / na / nb w
 from h join r using (k, m) where least(na, nb, ea, eb) > 0)
"""
# Second half of the window, by the middle of its first and last day: single days may be missing.
_HALF = "ds > (select list_median([min(ds), max(ds)]) from segment_daily)"


def overview() -> str:
    """Campaign against siblings: z of volume, CTR, CVR, CPC, and of the in-stock share; one row a metric."""
    return f"""with c as (select campaign_id from segment_daily limit 1)
, d as (select ds, {_HALF} b, impressions i, clicks c, orders o, spend s, in_stock t
 from daily_campaign join inventory using (campaign_id, ds) where campaign_id in (from c))
, s as (select ds, sum(impressions) u, sum(clicks) v, sum(orders) w, sum(spend) x
 from daily_campaign where campaign_id not in (from c) group by ds)
, m as (select '' k, ds, b, unnest(['volume', 'ctr', 'cvr', 'cpc', 'stock', 'xctr', 'xcvr', 'xcpc']) m,
 unnest([i, c, o, s, t, v, w, x]) n, unnest([coalesce(u, i / i), i, c, c, t / t, u, v, v]) e from d left join s using (ds)){_CHANGE}\
select z.m, ((z.d - coalesce(x.d, 0)) / sqrt(z.w + coalesce(x.w, 0)))::int from z left join z x on x.m = 'x' || z.m
 where z.m not like 'x%' order by array_position(['volume', 'ctr', 'cvr', 'cpc', 'stock'], z.m)"""


_SEGMENT = ", ".join(DRIVER_ATTRIBUTES)  # two segments always differ in these
# u: long format (segment, day, half b, metric m) of numerators n and denominators e; a: its sums by half; r: the baseline's
# daily residuals; v: noise beyond the counts, pooled over segments; w: log change d of every segment and its precision p.
# Numbers stand in h: digits are data to the tokenizer, and a query without them is a handful of tokens.
_CHANGES = f"""with h as (select .5 k, 1 o), s as (select *, {_HALF} b, sum(impressions) over (partition by ds) t from segment_daily)
, u as (select {_SEGMENT}, ds, b, unnest(['ctr', 'cvr', 'cpc', 'share']) m,
 unnest([clicks, orders, spend, impressions]) n, unnest([impressions, clicks, clicks, t]) e from s)
, a as (select {_SEGMENT}, m, sum(n) filter (not b) na, sum(n) filter (b) nb, sum(e) filter (not b) ea, sum(e) filter (b) eb
 from u group by all)
, r as (select m, n - e * na / ea r, e * na / ea f from u join a using ({_SEGMENT}, m) where not b and ea::bool)
, y as (select count(distinct ds) filter (not b) i, count(distinct ds) filter (b) j from s)
, v as (select m, sum(r * r) * any_value(i / (i - o)) r, any_value(o / i + o / j) i, sum(f) f, sum(f * f) q from r, y, h group by m)
, x as (select *, ln((nb + k) / (na + k) * ea / eb) d, o / ((na + nb) / (ea + eb) * ea + k) + o / ((na + nb) / (ea + eb) * eb + k) x
 from a, h where (ea * eb * (na + nb))::bool)
, w as (select {_SEGMENT}, m, na n, d, o / (case m when 'cpc' then coalesce(r / nullif(q, k - k), k) * i
 when 'share' then greatest(r / f, o) * x else coalesce(greatest(r - f, k - k) / nullif(q, k - k), k) * i + x end) p
 from x join v using (m))
"""


def _slices(sets: Sequence[Sequence[str]], where: str = "") -> str:
    """Mean change d of every slice in `sets` (name k) with its precision p, and baseline numerator n."""
    grouping = ", ".join(f"({', '.join(s)})" for s in sets)
    names = ", ".join(a for a in DRIVER_ATTRIBUTES if any(a in group for group in sets))
    return f"""{_CHANGES}, g as (select concat_ws(' ', {names}) k, m, sum(p) p, sum(p * d) / sum(p) d, sum(n) n
 from w{where} group by m, grouping sets ({grouping}))
"""


# z of each slice against the rest of the campaign, for slices with 20 clicks inside and outside.
_RATES = """, z as (select k, g.m, g.n, t.n - g.n o, (g.d - (t.d - g.p * g.d) / nullif(t.p - g.p, t.p - t.p))
 * sqrt(greatest(g.p * (t.p - g.p) / t.p, t.p - t.p)) z from g join (select m, sum(p) p, sum(p * d) d, sum(n) n from w group by m) t using (m))
, p as (select k, max(z) filter (m = 'ctr') ctr, max(z) filter (m = 'cvr') cvr, max(z) filter (m = 'cpc') cpc,
 max(z) filter (m = 'share') share from z group by k having min(least(n, o)) filter (m = 'ctr') >= 20)
select k, ctr::int ctr, cvr::int cvr, cpc::int cpc, share::int share from p"""


def single(limit: int = 3, order: str = "ctr") -> str:
    """One-attribute slices against the rest of the campaign; rows `slice ctr cvr cpc share` (z), worst first."""
    return f"{_slices([[a] for a in DRIVER_ATTRIBUTES])}{_RATES} {_order(order)} limit {limit}"


def pairs(attribute: str, value: str, limit: int = 3) -> str:
    """Two-attribute slices inside one value, the value itself first among equals; columns as in `single`."""
    sets = [[attribute]] + [[attribute, other] for other in DRIVER_ATTRIBUTES if other != attribute]
    inside = f" where {attribute} = '{value}'"
    return f"{_slices(sets, inside)}{_RATES} {_order('ctr')} limit {limit}"


def scan(limit: int = 3) -> str:
    """All one- and two-attribute slices at once; columns as in `single`."""
    sets = [[a] for a in DRIVER_ATTRIBUTES]
    sets += [[a, b] for i, a in enumerate(DRIVER_ATTRIBUTES) for b in DRIVER_ATTRIBUTES[i + 1 :]]
    return f"{_slices(sets)}{_RATES} {_order('ctr')} limit {limit}"


def mix(limit: int = 2) -> str:
    """Shares of placements and audiences, columns as in `single`, the largest change of share first."""
    return f"{_slices([['placement'], ['audience']])}{_RATES} {_order('share')} limit {limit}"


def _order(column: str) -> str:
    return "order by p.ctr, k" if column == "ctr" else f"order by abs(p.{column}) desc, k"


def budget() -> str:
    """Spend over budget of the campaign, baseline then second half."""
    return f"""select round(sum(spend) / sum(budget), 2) from budget_log
 where campaign_id = (select any_value(campaign_id) from segment_daily) group by {_HALF} order by {_HALF}"""


def weekly(metric: str, where: str) -> str:
    """A rate (percent, or money for CPC) by week, to see whether a change is sudden or gradual."""
    numerator, denominator = {"ctr": ("100 * sum(clicks)", "impressions"), "cvr": ("100 * sum(orders)", "clicks")}.get(
        metric, ("sum(spend)", "clicks")
    )
    return f"""select round({numerator} / nullif(sum({denominator}), 0), 2) from segment_daily
 where {where} group by (ds - (select min(ds) from segment_daily)) // 7 order by min(ds)"""
