"""Tables of the warehouse: names, columns, DuckDB types. Source of the tables: arXiv 2609.10315.

Grain (the unique key) of each visible table:

    daily_campaign, budget_log, inventory   campaign_id, ds
    segment_daily                           campaign_id, ds and the eight attributes

so a join of `segment_daily` with a campaign-level table on (campaign_id, ds) repeats the campaign's row once a
segment: aggregate before joining. `ds` is a DATE in the account's own calendar, never a timestamp. Orders are
counted on the day of the click. With late conversions (`SimulatorParams.late_conversions_probability`, off by default)
the last days' orders are still incomplete, for all campaigns alike; with missing days some dates have no rows anywhere.
"""

from __future__ import annotations

from trace_jax.simulator.vocabulary import ATTRIBUTE_NAMES

VISIBLE_TABLES: tuple[str, ...] = ("daily_campaign", "segment_daily", "budget_log", "inventory")
HIDDEN_TABLES: tuple[str, ...] = ("gt_episode", "gt_evidence", "gt_validation")

_KEYS = {"advertiser_id": "VARCHAR", "campaign_id": "VARCHAR", "ds": "DATE"}

COLUMNS: dict[str, dict[str, str]] = {
    # The campaign in question and its siblings of the same advertiser.
    "daily_campaign": {
        **_KEYS,
        "category": "VARCHAR",
        "budget": "DOUBLE",  # daily budget, account currency
        "spend": "DOUBLE",
        "impressions": "BIGINT",
        "clicks": "BIGINT",
        "orders": "BIGINT",
        "sales": "DOUBLE",
        "page_views": "BIGINT",
        "brand_searches": "BIGINT",
    },
    # The campaign in question only; active segments without impressions on a day keep their row of zeros.
    "segment_daily": {
        **_KEYS,
        "category": "VARCHAR",
        **dict.fromkeys(ATTRIBUTE_NAMES, "VARCHAR"),
        "impressions": "BIGINT",
        "clicks": "BIGINT",
        "orders": "BIGINT",
        "spend": "DOUBLE",
        "sales": "DOUBLE",
    },
    "budget_log": {**_KEYS, "budget": "DOUBLE", "spend": "DOUBLE"},
    "inventory": {**_KEYS, "category": "VARCHAR", "in_stock": "DOUBLE"},  # in_stock: fraction of the catalogue
    # Hidden: never in a database that an agent can query.
    "gt_episode": {
        "campaign_id": "VARCHAR",
        "cause": "VARCHAR",
        "level": "VARCHAR",
        "type": "VARCHAR",
        "segments": "VARCHAR",  # "attribute=value & attribute=value", empty if none
        "dimensions": "BIGINT",
        # NULL for NO_SIGNAL: nothing happened.
        "strength": "DOUBLE",
        "profile": "VARCHAR",
        "onset": "DATE",
    },
    "gt_evidence": {
        "campaign_id": "VARCHAR",
        "table_name": "VARCHAR",
        "metric": "VARCHAR",
        "segment": "VARCHAR",
        "direction": "VARCHAR",  # up | down | flat
        # Second half over the baseline half, a slice against the rest of its campaign,
        # a campaign against its siblings; 0.1 is +10 %.
        "change": "DOUBLE",
        "z": "DOUBLE",  # the same comparison in standard errors
    },
    # Only checks that apply: `rival_slice` is of segment causes alone.
    "gt_validation": {
        "campaign_id": "VARCHAR",
        "check_name": "VARCHAR",
        "margin": "DOUBLE",  # positive when the check passes
        "passed": "BOOLEAN",
    },
}

GRAIN: dict[str, tuple[str, ...]] = {
    "daily_campaign": ("campaign_id", "ds"),
    "segment_daily": ("campaign_id", "ds", *ATTRIBUTE_NAMES),
    "budget_log": ("campaign_id", "ds"),
    "inventory": ("campaign_id", "ds"),
}
