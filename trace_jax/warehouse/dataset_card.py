"""The dataset card: README.md of a data set, written from its manifest alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trace_jax.simulator.causes import CAUSES
from trace_jax.warehouse.schema import COLUMNS, GRAIN, HIDDEN_TABLES, VISIBLE_TABLES

_TABLES = {
    "daily_campaign": "daily totals of the campaign in question and of its siblings of the same advertiser",
    "segment_daily": "the campaign in question by segment; active segments without impressions keep their row of zeros",
    "budget_log": "daily budget and spend of the same campaigns",
    "inventory": "daily share of the catalogue in stock, same campaigns",
    "gt_episode": "one row an episode: the hidden cause, its slice, strength, profile and onset (NULL for NO_SIGNAL, "
    "where nothing happened)",
    "gt_evidence": "what moved, as the verifier measured it at the level of the label: in the slice against the rest "
    "of the campaign, or in the campaign against its siblings",
    "gt_validation": "one row a check of the verifier that applies: summaries, every rival cause and, for segment "
    "causes, every comparable rival slice; accepted episodes have passed them all",
    "episodes": "the arrays of each episode in the order of the set, from which `trace_jax.warehouse.dataset.read` "
    "restores it",
}
_COLUMNS = {
    "advertiser_id": "advertiser; its campaigns share the season",
    "campaign_id": "campaign; those of `gt_episode` are the campaigns in question",
    "ds": "day in the account's calendar; days that an advertiser's export lacks have no row",
    "category": "product category",
    "budget": "daily budget, account currency; not a hard line",
    "spend": "account currency",
    "impressions": "count",
    "clicks": "count",
    "orders": "count, on the day of the click",
    "sales": "account currency",
    "page_views": "of the product pages, all traffic",
    "brand_searches": "searches for the brand",
    "in_stock": "share of the catalogue, 0 to 1",
    "cause": "root cause",
    "level": "where it acts: campaign, mix, segment or none",
    "type": "row of the evaluation tables",
    "segments": "driver slice, `attribute=value & attribute=value`",
    "dimensions": "attributes in the driver slice",
    "strength": "0 to 1, position between the cause's weakest and strongest effect; NULL for NO_SIGNAL",
    "profile": "immediate, delayed or ramp; NULL for NO_SIGNAL",
    "onset": "first affected day; NULL for NO_SIGNAL",
    "table_name": "table that shows the evidence",
    "metric": "what moved",
    "segment": "slice in which it was measured, empty for the whole campaign",
    "direction": "up, down or flat",
    "change": "second half over first half, minus 1, after division by the same of the rest of the campaign (slices) "
    "or of the siblings (campaigns): 0.1 is +10 %; `impressions` of a slice are its share of the campaign's, "
    "`in_stock` is compared with nothing else",
    "z": "the same comparison in standard errors",
    "margin": "positive when the check passes",
    "passed": "whether it did",
    "check_name": "summary (detectability, confounder, rival_cause; rival_slice for segment causes), "
    "`rival_cause:NAME` or `rival_slice:SLICE`",
}
_DEFAULT = "attribute of the segment"


def card(manifest: Mapping[str, Any]) -> str:
    """Markdown with the metadata that dataset hubs read. A function of the manifest (without its hashes)."""
    settings, splits = manifest["settings"], manifest["splits"]
    total = sum(entry["episodes"] for entry in splits.values())
    simulator = settings.get("simulator", {})
    verified = (
        "An independent verifier that reads only those tables has accepted every episode: the cause can be found in "
        "the data."
        if simulator.get("verified", True)
        else "No verifier has looked at them: in some episodes the cause cannot be found in the data."
    )
    difficulty = f" Difficulty: {simulator['difficulty']}." if "difficulty" in simulator else ""
    first = next(iter(splits))
    sections = [
        _metadata(splits),
        f"# Advertising campaigns with a known cause ({total:,} episodes)",
        "Simulated advertising campaigns, each with a hidden intervention (or none) in the second half of its window, "
        f"and the tables an analyst would see. {verified}{difficulty} No real advertiser, campaign or person is in "
        "here. Made by `trace-jax simulate`; the simulator and its sources: `docs/simulator.md` of trace-jax.",
        "**`hidden/` holds the truth.** Give an agent under test the tables in `visible/` only. Ids, order of rows and "
        "file boundaries say nothing about the cause.",
        "## Load\n\n"
        "One DuckDB query, click-through rate of each campaign in question by half of its window:\n\n"
        "```sql\n"
        "select cause, campaign_id, ds >= middle as second_half, sum(clicks) / nullif(sum(impressions), 0) as ctr\n"
        f"from '{first}/visible/segment_daily/*.parquet'\n"
        "join (select campaign_id, min(ds) + ((max(ds) - min(ds) + 1) // 2)::int as middle\n"
        f"      from '{first}/visible/segment_daily/*.parquet' group by campaign_id) using (campaign_id)\n"
        f"join '{first}/hidden/gt_episode/*.parquet' using (campaign_id)\n"
        "group by all order by campaign_id, second_half\n"
        "```\n\n"
        f"`{first}/visible/segment_daily/*.parquet` may be any split and table below; pandas, Polars and `datasets` "
        "read the same files.",
        _composition(splits),
        *_curricula(settings),
        _causes(),
        "## Tables\n\nCampaign ids are unique in a split. `manifest.json` has the SHA-256 of every file; the same seed "
        "and versions give the same bytes.",
        *(_table(name) for name in (*VISIBLE_TABLES, *HIDDEN_TABLES)),
        f"### hidden/episodes\n\n{_TABLES['episodes']}.",
        _settings(settings),
        "## License\n\nApache-2.0, like trace-jax.",
    ]
    return "\n\n".join(sections) + "\n"


def _metadata(splits: Mapping[str, Any]) -> str:
    lines = ["---", "license: apache-2.0", "tags: [synthetic, advertising, root-cause-analysis]", "configs:"]
    for table in (*VISIBLE_TABLES, *HIDDEN_TABLES):
        part = "visible" if table in VISIBLE_TABLES else "hidden"
        lines += [f"- config_name: {table}", "  data_files:"]
        for split in splits:
            lines += [f"  - split: {split}", f'    path: "{split}/{part}/{table}/*.parquet"']
    return "\n".join([*lines, "---"])


def _composition(splits: Mapping[str, Any]) -> str:
    """Episodes by cause and dimensions, and what the verifier made of the proposals."""
    rows = []
    for split, entry in splits.items():
        by_cause: dict[str, list[str]] = {}
        for stratum, count in entry["composition"].items():
            cause, _, dimensions = stratum.partition("/")
            by_cause.setdefault(cause, []).append(f"{count:,} ({dimensions})")
        for cause, counts in by_cause.items():
            seen = entry.get("acceptance", {}).get(cause)
            share = f"{seen['proposed']:,} | {seen['share']:.1%}" if seen and seen["proposed"] else "- | -"
            rows.append(f"| {split} | {cause} | {', '.join(counts)} | {share} |")
    return (
        "## Composition and acceptance\n\n"
        "Episodes by cause, with the number of attributes in the driver slice in brackets; proposals that were "
        "examined up to the last one taken, and the share of them that was taken: those that the verifier "
        "accepted, or all where it was not asked (`simulator.verified`).\n\n"
        "| split | cause | episodes (slice attributes) | proposals | accepted |\n|---|---|---|---|---|\n"
        + "\n".join(rows)
    )


def _curricula(settings: Mapping[str, Any]) -> list[str]:
    """Which episodes of a split have which difficulty."""
    found = []
    for split, stages in settings.get("stages", {}).items():
        rows, first = [], 0
        for stage in stages:
            last = first + stage["parts"] - 1
            rows.append(f"| {stage['difficulty']} | {stage['episodes']:,} | {first:05d} to {last:05d} |")
            first = last + 1
        found.append(
            f"## Curriculum of {split}\n\n`{split}` goes through the stages of `data.curriculum` in this order, each "
            "with its own `simulator.difficulty`; the other splits and `params` below have the difficulty named "
            "above.\n\n| difficulty | episodes | parts |\n|---|---|---|\n" + "\n".join(rows)
        )
    return found


def _causes() -> str:
    rows = "\n".join(f"| {c.name} | {c.level} | {', '.join(c.drivers) or '-'} | {c.description} |" for c in CAUSES)
    return f"## Causes\n\n| cause | level | slice starts from | signature |\n|---|---|---|---|\n{rows}"


def _table(name: str) -> str:
    part = "visible" if name in VISIBLE_TABLES else "hidden"
    rows = "\n".join(f"| {c} | {kind} | {_COLUMNS.get(c, _DEFAULT)} |" for c, kind in COLUMNS[name].items())
    keys = ", ".join(GRAIN[name]) if name in GRAIN else "campaign_id" if name == "gt_episode" else ""
    unique = f" Unique key: {keys}." if keys else ""
    return f"### {part}/{name}\n\n{_TABLES[name]}.{unique}\n\n| column | type | meaning |\n|---|---|---|\n{rows}"


def _settings(settings: Mapping[str, Any]) -> str:
    """Every setting: short ones in a table, tables of numbers as JSON below it."""
    rows, long = [], []
    for name, value in _flat("", settings):
        text = json.dumps(value)
        if len(text) <= 100:
            rows.append(f"| {name} | `{text}` |")
        else:
            long.append(f"`{name}`\n\n```json\n{text}\n```")
    table = "| setting | value |\n|---|---|\n" + "\n".join(rows)
    return "\n\n".join(
        ["## Settings\n\n`params` are the magnitudes of the simulator (`trace_jax/simulator/params.py`).", table, *long]
    )


def _flat(prefix: str, value: Any) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        return [(prefix, value)]
    return [entry for k, v in value.items() for entry in _flat(f"{prefix}.{k}" if prefix else str(k), v)]
