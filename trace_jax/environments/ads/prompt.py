"""System and user prompts of the advertising task, in a compact and a full wording.

The user prompt describes the observed change of one campaign, computed from its visible totals by one recipe whatever
the cause: averages a day, since days may be missing from either half.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping

import numpy as np

from trace_jax.config import ConfigError
from trace_jax.environments.python_helpers import DOCUMENTATION
from trace_jax.simulator.causes import CAUSES
from trace_jax.simulator.vocabulary import ATTRIBUTES
from trace_jax.warehouse.materialize import advertiser_name, campaign_name, day
from trace_jax.warehouse.schema import COLUMNS, VISIBLE_TABLES
from trace_jax.warehouse.splits import EpisodeRecord

STYLES = ("compact", "full")
ASKED = ("impressions", "clicks", "orders", "spend")  # metrics whose change the question tells
NUDGE = {
    "compact": "Answer now.",
    "full": "This was your last tool call. Give the final answer now, as the JSON object described above.",
}


def check_style(style: str) -> str:
    """The style itself; ConfigError if there is no such style."""
    if style not in STYLES:
        raise ConfigError(f"environment.prompt: {style!r} is not a prompt style; use one of {', '.join(STYLES)}")
    return style


def system_prompt(style: str) -> str:
    """The instructions, the same for every episode. ConfigError on an unknown style."""
    return _COMPACT_SYSTEM if check_style(style) == "compact" else _full_system()


def user_prompt(record: EpisodeRecord, style: str) -> str:
    """The question about one campaign. ConfigError on an unknown style."""
    batch, i = record.batch, record.position
    days = batch.impressions.shape[1]
    half = days // 2
    mask, days_present = batch.segment_mask[i], np.asarray(batch.day_mask[i])
    present = max(days_present[:half].sum(), 1), max(days_present[half:].sum(), 1)
    change = {}
    for metric in ASKED:
        series = np.asarray(getattr(batch, metric)[i][:, mask], np.float64).sum(1)
        # Averages a day: a half from which days are missing has not lost their volume (case 5 of the data cases).
        change[metric] = (series[:half].sum() / present[0], series[half:].sum() / present[1])
    name, advertiser = campaign_name(batch.campaign_id[i]), advertiser_name(batch.advertiser_id[i])
    return question(change, style, name, advertiser, (day(batch, i, 0), day(batch, i, half), day(batch, i, days - 1)))


def question(
    change: Mapping[str, tuple[float, float]],
    style: str,
    campaign: str,
    advertiser: str,
    days: tuple[datetime.date, datetime.date, datetime.date],
) -> str:
    """The question about the observed change of a campaign. ConfigError on an unknown style.

    Args:
        change: of each of `ASKED`, its mean a day in the baseline and in the period in question.
        days: first day, first day of the period in question, last day.
    """
    texts = [f"{metric} {_percent(*change[metric])}" for metric in ASKED]
    if check_style(style) == "compact":
        # No ids or dates: segment_daily holds this campaign only, and the middle of its dates splits the halves.
        return f"{', '.join(texts)}. Why?"
    start, middle, end = days
    return (
        f"Campaign {campaign}, advertiser {advertiser}. Days {start} to {end}; the baseline is the first half, the "
        f"period in question starts on {middle}. A day of the second half against one of the first: "
        f"{'; '.join(texts)}. What caused the change?"
    )


def _percent(before: float, after: float) -> str:
    return f"{100 * (after / before - 1):+.0f}%" if before > 0 else "n/a"


_COMPACT_SYSTEM = "Find why the metric moved. Query, then answer."


def _full_system() -> str:
    causes = "\n".join(f"- {cause.name} ({cause.level}): {cause.description}" for cause in CAUSES)
    tables = "\n".join(f"- {table}({', '.join(COLUMNS[table])})" for table in VISIBLE_TABLES)
    values = "\n".join(f"- {name}: {', '.join(options)}" for name, options in ATTRIBUTES.items())
    return f"""You investigate why the results of one advertising campaign changed. At most one cause acted, in the
second half of the days; often nothing did. Use the Python tool, then give the final answer.

Causes (level): signature in the second half against the first
{causes}

Tool: Python with state kept between calls. `sql(query)` runs one read-only DuckDB query and returns a list of dicts;
the value of the last expression and printed text come back to you, rows as a table cut to a few dozen.
{DOCUMENTATION}

Tables
{tables}
segment_daily holds the campaign in question only, one row a day and combination of the eight attributes;
daily_campaign, budget_log and inventory have one row a campaign and day and also hold sibling campaigns of the same
advertiser. Aggregate segment_daily before you join it with them. Compute rates as ratios of sums, for example CTR is
sum(clicks) / nullif(sum(impressions), 0); CVR is orders over clicks, CPC spend over clicks. Values are upper case.

Attributes
{values}

Final answer: one JSON object and nothing else,
{{"decision": {{"root_cause": CAUSE, "driver_segments": [{{"dimension": ATTRIBUTE, "value": VALUE}}]}},
"evidence": [...], "explanation": "..."}}
Leave driver_segments out unless the cause is a segment-level one. A driver slice fixes one attribute, or two at once
if only their intersection changed."""
