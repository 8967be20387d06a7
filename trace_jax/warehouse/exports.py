"""An episode as a platform's report would show it: column names, spellings, number and date formats, file habits.

For tests and demonstrations of `trace-jax diagnose`: the truth about the file is known. Three platforms, each with
other dimensions and other habits; what they stand for is in `PLATFORMS`. The figures are those of the visible tables,
summed over the attributes that a platform does not report. Real reports seldom cross so many breakdowns at once.
"""

from __future__ import annotations

import csv
import datetime
import io
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trace_jax.simulator.causes import LEVELS, NO_SIGNAL
from trace_jax.warehouse.files import replace
from trace_jax.warehouse.splits import EpisodeRecord

Row = Mapping[str, Any]  # ds, campaign, attributes, counts and amounts of one line of a report
_SUMMED = ("impressions", "clicks", "orders", "spend", "sales")
_COUNTRIES = {"US": "United States", "UK": "United Kingdom", "DE": "Germany", "JP": "Japan"}


@dataclass(frozen=True)
class Column:
    """One column: its name, and how a row's value is written."""

    name: str
    text: Callable[[Row], str]


@dataclass(frozen=True)
class Platform:
    """How one platform exports.

    Attributes:
        dimensions: attribute -> the platform's word for each value.
        columns: of the report by slice. totals: of the report by campaign, empty if there is none.
        delimiter, encoding: of the files.
        above, below: lines before the names and after the rows.
        drops_empty: rows without impressions are left out.
    """

    dimensions: Mapping[str, Mapping[str, str]]
    columns: tuple[Column, ...]
    totals: tuple[Column, ...] = ()
    delimiter: str = ","
    encoding: str = "utf-8"
    above: Callable[[Sequence[Row]], list[list[str]]] = lambda rows: []
    below: Callable[[Sequence[Row]], list[list[str]]] = lambda rows: []
    drops_empty: bool = False

    def shows(self, record: EpisodeRecord) -> bool:
        """Whether the episode's slice, if it has one, can be seen in the report."""
        return {a for a, _ in record.driver} <= self.dimensions.keys() or LEVELS[record.cause] in ("campaign", "none")


def _day(form: str) -> Callable[[Row], str]:
    return lambda row: row["ds"].strftime(form)


def _of(key: str, form: str = "{}") -> Callable[[Row], str]:
    return lambda row: form.format(row[key])


def _ratio(n: str, d: str, form: str, empty: str) -> Callable[[Row], str]:
    return lambda row: form.format(row[n] / row[d]) if row[d] else empty


def _blank_zero(key: str, form: str) -> Callable[[Row], str]:
    return lambda row: form.format(row[key]) if row[key] else ""


def _same(text: str) -> Callable[[Row], str]:
    return lambda row: text


def _google_above(rows: Sequence[Row]) -> list[list[str]]:
    first, last = (f(r["ds"] for r in rows) for f in (min, max))
    return [["Segment report"], [f"{first:%B %d, %Y} - {last:%B %d, %Y}"]]


def _google_below(rows: Sequence[Row]) -> list[list[str]]:
    total = {k: sum(r[k] for r in rows) for k in _SUMMED}
    figures = [
        f"{total['impressions']:,}",
        f"{total['clicks']:,}",
        " --",
        f"{total['spend']:,.2f}",
        f"{total['orders']:,.2f}",
    ]
    return [["Total: Account", " --", " --", " --", " --", " --", *figures, f"{total['sales']:,.2f}"]]


PLATFORMS: Mapping[str, Platform] = {
    # Two files: by placement and country, and by campaign with budgets. US dates, dollar signs, percent strings.
    "amazon": Platform(
        dimensions={
            "placement": {
                "TOP_OF_SEARCH": "Top of Search on-Amazon",
                "REST_OF_SEARCH": "Other on-Amazon",
                "PRODUCT_PAGE": "Detail Page on-Amazon",
            },
            "geo": _COUNTRIES,
        },
        columns=(
            Column("Date", _day("%b %d, %Y")),
            Column("Portfolio name", _same("Portfolio 1")),
            Column("Currency", _same("USD")),
            Column("Campaign Name", _of("campaign")),
            Column("Country", _of("geo")),
            Column("Placement", _of("placement")),
            Column("Impressions", _of("impressions")),
            Column("Clicks", _of("clicks")),
            Column("Click-Thru Rate (CTR)", _ratio("clicks", "impressions", "{:.4%}", "")),
            Column("Cost Per Click (CPC)", _ratio("spend", "clicks", "${:,.2f}", "")),
            Column("Spend", _of("spend", "${:,.2f}")),
            Column("7 Day Total Sales ", _of("sales", "${:,.2f}")),
            Column("Total Advertising Cost of Sales (ACOS) ", _ratio("spend", "sales", "{:.4%}", "")),
            Column("7 Day Total Orders (#)", _of("orders")),
        ),
        totals=(
            Column("Date", _day("%b %d, %Y")),
            Column("Campaign Name", _of("campaign")),
            Column("Status", _same("ENABLED")),
            Column("Budget", _of("budget", "${:,.2f}")),
            Column("Impressions", _of("impressions")),
            Column("Clicks", _of("clicks")),
            Column("Spend", _of("spend", "${:,.2f}")),
            Column("7 Day Total Orders (#)", _of("orders")),
            Column("7 Day Total Sales ", _of("sales", "${:,.2f}")),
            Column("In-stock rate", _of("in_stock", "{:.2%}")),
        ),
        encoding="utf-8-sig",
    ),
    # UTF-16 with tabs, two lines above the names, thousands separators, a line of totals below.
    "google": Platform(
        dimensions={
            "device": {"MOBILE": "Mobile phones", "DESKTOP": "Computers", "TABLET": "Tablets"},
            "geo": _COUNTRIES,
            "placement": {
                "TOP_OF_SEARCH": "Google search: Top",
                "REST_OF_SEARCH": "Google search: Other",
                "PRODUCT_PAGE": "Google Display Network",
            },
        },
        columns=(
            Column("Day", _day("%Y-%m-%d")),
            Column("Campaign", _of("campaign")),
            Column("Device", _of("device")),
            Column("Country/Territory", _of("geo")),
            Column("Top vs. Other", _of("placement")),
            Column("Currency code", _same("EUR")),
            Column("Impr.", _of("impressions", "{:,}")),
            Column("Clicks", _of("clicks", "{:,}")),
            Column("CTR", _ratio("clicks", "impressions", "{:.2%}", " --")),
            Column("Cost", _of("spend", "{:,.2f}")),
            Column("Conversions", _of("orders", "{:,.2f}")),
            Column("Conv. value", _of("sales", "{:,.2f}")),
        ),
        delimiter="\t",
        encoding="utf-16",
        above=_google_above,
        below=_google_below,
    ),
    # Zeros are blanks, rows without impressions are missing; every click beside the link clicks.
    "meta": Platform(
        dimensions={
            "audience": {
                "PROSPECTING": "New audience",
                "RETARGETING": "Engaged audience",
                "LOYAL": "Existing customers",
            },
            "device": {"MOBILE": "Android smartphone", "DESKTOP": "Desktop", "TABLET": "iPad"},
            "placement": {"TOP_OF_SEARCH": "Feed", "REST_OF_SEARCH": "Stories", "PRODUCT_PAGE": "Reels"},
        },
        columns=(
            Column("Reporting starts", _day("%Y-%m-%d")),
            Column("Reporting ends", _day("%Y-%m-%d")),
            Column("Day", _day("%Y-%m-%d")),
            Column("Campaign name", _of("campaign")),
            Column("Audience segments", _of("audience")),
            Column("Impression device", _of("device")),
            Column("Placement", _of("placement")),
            Column("Impressions", _of("impressions")),
            Column("Clicks (all)", lambda row: str(round(row["clicks"] * 1.3))),
            Column("Link clicks", _blank_zero("clicks", "{}")),
            Column("Amount spent (USD)", _blank_zero("spend", "{:.2f}")),
            Column("Purchases", _blank_zero("orders", "{}")),
            Column("Purchases conversion value", _blank_zero("sales", "{:.2f}")),
        ),
        drops_empty=True,
    ),
}  # fmt: skip


def _summed(rows: Sequence[Row], keys: Sequence[str]) -> list[dict[str, Any]]:
    sums: dict[tuple, dict[str, Any]] = defaultdict(lambda: dict.fromkeys(_SUMMED, 0))
    for row in rows:
        entry = sums[tuple(row[k] for k in keys)]
        for name in _SUMMED:
            entry[name] += row[name]
    return [dict(zip(keys, key, strict=True)) | entry for key, entry in sorted(sums.items(), key=lambda kv: str(kv[0]))]


def words(platform: str) -> tuple[str, ...]:
    """What the files of an episode are called besides its stem: one report, or one by slice and one by campaign."""
    return ("slices", "campaigns") if PLATFORMS[platform].totals else ("report",)


def name(stem: str, word: str) -> str:
    """Name of a file."""
    return f"{stem}-{word}.csv"


def files(record: EpisodeRecord, platform: str) -> dict[str, bytes]:
    """The files that a platform would give out for an episode, by a word for each."""
    spec, tables = PLATFORMS[platform], record.visible()
    cells = [row | {"campaign": row["campaign_id"]} for row in tables["segment_daily"].to_pylist()]
    rows = _summed(cells, ["ds", "campaign", *spec.dimensions])
    for row in rows:
        row |= {a: words[row[a]] for a, words in spec.dimensions.items()}
    if spec.drops_empty:
        rows = [row for row in rows if row["impressions"]]
    made = {words(platform)[0]: _bytes(spec, spec.columns, rows)}
    if spec.totals:
        stock = {(r["campaign_id"], r["ds"]): r["in_stock"] for r in tables["inventory"].to_pylist()}
        totals = [r | {"campaign": r["campaign_id"]} for r in tables["daily_campaign"].to_pylist()]
        totals = [r | {"in_stock": stock[r["campaign_id"], r["ds"]]} for r in totals]
        made[words(platform)[1]] = _bytes(spec, spec.totals, totals)
    return made


def _bytes(spec: Platform, columns: Sequence[Column], rows: Sequence[Row]) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=spec.delimiter, lineterminator="\n")
    writer.writerows(spec.above(rows))
    writer.writerow([c.name for c in columns])
    writer.writerows([c.text(row) for c in columns] for row in rows)
    writer.writerows(spec.below(rows))
    return out.getvalue().encode(spec.encoding)


def truth(record: EpisodeRecord, platform: str) -> dict[str, Any]:
    """What happened, in the platform's words: campaign, cause, slice, first day of the second half, onset."""
    spec, tables = PLATFORMS[platform], record.visible()
    days = record.batch.impressions.shape[1]
    first: datetime.date = tables["segment_daily"]["ds"][0].as_py()
    slices = record.driver if LEVELS[record.cause] == "segment" else ()
    return {
        "platform": platform,
        "campaign": record.campaign_id,
        "cause": record.cause,
        "slice": {a: spec.dimensions.get(a, {}).get(v, v) for a, v in slices},
        "first": str(first),
        "middle": str(first + datetime.timedelta(days=days // 2)),
        "onset": None if record.cause == NO_SIGNAL else str(first + datetime.timedelta(days=int(record.onset))),
        "last": str(first + datetime.timedelta(days=days - 1)),
    }


def write(record: EpisodeRecord, platform: str, folder: Path, stem: str) -> list[Path]:
    """Writes the files of `files` as STEM-WORD.csv; OSError if the disk does not take them."""
    paths = []
    for word, content in files(record, platform).items():
        paths.append(folder / name(stem, word))
        replace(paths[-1], content)
    return paths
