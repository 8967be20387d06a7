"""What platforms call the columns and values of their exports, as data.

Names are compared without case, blanks, punctuation and what stands in parentheses ("Amount spent (USD)"), so one
spelling here stands for many. Of several columns that fit a field the earlier spelling wins: Meta's "Link clicks"
before its "Clicks (all)". Sources: the public help pages of Amazon Ads, Google Ads and Meta Ads Manager, and exports
seen in public code.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

COUNTS = ("impressions", "clicks", "orders")
AMOUNTS = ("spend", "sales")
LEVELS = ("budget", "in_stock")  # of a day, not summed over rows
METRICS = COUNTS + AMOUNTS + LEVELS
DIMENSIONS = ("placement", "audience", "device", "geo")  # what the agent looks at: `vocabulary.DRIVER_ATTRIBUTES`
FIELDS = ("date", "campaign", *DIMENSIONS, *METRICS)

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "date": (
        "date", "day", "ds", "dt", "report date", "segments date", "reporting starts", "date start", "start date",
        "datum", "tag", "fecha", "jour", "dia", "timestamp", "datetime", "time", "event time", "hour", "week", "month",
    ),
    "campaign": (
        "campaign name", "campaign", "campaign id", "kampagne", "kampagnenname", "campaña", "nombre de la campaña",
        "nom de la campagne", "campagne",
    ),
    "placement": (
        "placement", "placement type", "ad placement", "placement classification", "top vs other",
        "network with search partners", "network", "ad network type", "publisher platform", "platform",
        "platform position", "platzierung", "position",
    ),
    "audience": (
        "audience", "audience segment", "audience segments", "audience segment type", "audience type", "user segment",
        "customer segment", "customer type", "new vs returning", "zielgruppe", "ad set name", "adset name",
    ),
    "device": (
        "device", "device type", "device category", "impression device", "device platform", "gerät", "gerate",
        "geräte", "dispositivo", "appareil",
    ),
    "geo": (
        "geo", "country", "country territory", "country code", "marketplace", "region", "user location",
        "location", "land", "país", "pays", "state", "dma region",
    ),
    "impressions": ("impressions", "impr", "imps", "impressionen", "impresiones", "views", "impression"),
    "clicks": ("link clicks", "clicks", "click", "outbound clicks", "clicks all", "klicks", "clics"),
    "orders": (
        "7 day total orders", "14 day total orders", "30 day total orders", "1 day total orders", "total orders",
        "orders", "purchases", "website purchases", "conversions", "conv", "all conv", "results", "sales count",
        "units ordered", "konversionen", "conversiones",
    ),
    "spend": (
        "spend", "amount spent", "cost", "total cost", "ad spend", "cost micros", "metrics cost micros", "kosten",
        "ausgaben", "coste", "importe gastado", "dépenses", "spent",
    ),
    "sales": (
        "7 day total sales", "14 day total sales", "30 day total sales", "1 day total sales", "total sales", "sales",
        "revenue", "purchases conversion value", "website purchases conversion value", "conv value",
        "conversion value", "total conversion value", "umsatz", "ventas",
    ),
    "budget": ("budget", "daily budget", "campaign budget", "budget amount", "ad set budget", "tagesbudget"),
    "in_stock": ("in stock", "in stock rate", "in stock share", "instock rate", "availability", "buyable rate"),
}  # fmt: skip

# Follow from counts and amounts as ratios of sums; an average of them over rows would be wrong.
DERIVED = (
    "ctr", "click thru rate", "click through rate", "cpc", "cost per click", "avg cpc", "average cpc", "cpm",
    "cvr", "conversion rate", "conv rate", "acos", "total advertising cost of sales", "roas",
    "total return on advertising spend", "purchase roas", "cost per purchase", "cost per result", "cost conv",
    "frequency", "reach",
)  # fmt: skip
CURRENCY = ("currency", "currency code", "account currency", "währung", "moneda")
FACTORS: Mapping[str, float] = {"costmicros": 1e-6, "metricscostmicros": 1e-6}  # columns in another unit

# User's value -> the word of the agent's vocabulary that means the same, by dimension.
VALUES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "placement": {
        "TOP_OF_SEARCH": (
            "top of search", "top", "placement top", "top of search on amazon", "top of search first page",
            "google search top", "search top", "search results top", "absolute top",
        ),
        "REST_OF_SEARCH": (
            "rest of search", "rest", "other on amazon", "placement rest of search", "google search other",
            "rest of search on amazon", "search other", "search partners", "search partners other",
            "search partners top",
        ),
        "PRODUCT_PAGE": (
            "product page", "product pages", "detail page", "detail page on amazon", "placement product page",
            "product page on amazon", "google display network", "display network", "content", "off amazon",
        ),
    },
    "audience": {
        "PROSPECTING": (
            "prospecting", "new", "new audience", "new customers", "new users", "cold", "acquisition", "lookalike",
            "new visitors", "new to brand",
        ),
        "RETARGETING": (
            "retargeting", "remarketing", "engaged audience", "engaged", "website visitors", "cart abandoners",
            "returning visitors", "your data segments",
        ),
        "LOYAL": (
            "loyal", "existing customers", "existing", "customers", "returning customers", "returning", "loyalty",
            "repeat customers",
        ),
    },
    "device": {
        "MOBILE": (
            "mobile", "mobile phones", "mobile phone", "mobile devices with full browsers", "smartphone",
            "smartphones", "phone", "mobile app", "mobile web", "iphone", "android smartphone", "handy",
        ),
        "DESKTOP": ("desktop", "computers", "computer", "pc", "web", "desktops", "computadora"),
        "TABLET": (
            "tablet", "tablets", "tablets with full browsers", "ipad", "android tablet",
        ),
    },
    "geo": {
        "US": ("us", "usa", "united states", "united states of america", "amazon com", "estados unidos"),
        "UK": ("uk", "gb", "united kingdom", "great britain", "amazon co uk", "gbr"),
        "DE": ("de", "germany", "deutschland", "amazon de", "deu", "alemania"),
        "JP": ("jp", "japan", "amazon co jp", "jpn"),
    },
}  # fmt: skip

CURRENCY_SIGNS = {"$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY", "₹": "INR", "US$": "USD", "C$": "CAD", "A$": "AUD"}


def squash(text: str) -> str:
    """A name without case, accents of width, blanks, punctuation and parentheses."""
    text = unicodedata.normalize("NFKC", text).casefold()
    text = re.sub(r"\([^)]*\)|\[[^\]]*\]", "", text) or text
    return "".join(c for c in text if c.isalnum())


_RANK = {squash(s): (field, rank) for field, names in COLUMNS.items() for rank, s in reversed(list(enumerate(names)))}
_DERIVED = {squash(s) for s in DERIVED}
_CURRENCY = {squash(s) for s in CURRENCY}
_WORDS = {d: {squash(s): word for word, names in words.items() for s in (word, *names)} for d, words in VALUES.items()}


def field_of(column: str) -> tuple[str, int] | None:
    """Field that a column's name means and the rank of its spelling (lower: more specific); None if none."""
    return _RANK.get(squash(column))


def is_derived(column: str) -> bool:
    """Whether a column is a ratio of others."""
    return squash(column) in _DERIVED


def is_currency(column: str) -> bool:
    """Whether a column names the currency of a row."""
    return squash(column) in _CURRENCY


def spelling(value: str) -> str:
    """A value or the name of a campaign without case and blanks at its ends; what differs in more is another one:
    "Broad (US)" is not "Broad (DE)", and "25" not "25+"."""
    return " ".join(unicodedata.normalize("NFKC", value).casefold().split())


def letters(value: str) -> str:
    """A value without case, blanks and punctuation, but with what stands in parentheses."""
    return "".join(c for c in spelling(value) if c.isalnum())


def word_of(dimension: str, value: str) -> str | None:
    """The vocabulary's word for a user's value, None if the table has none."""
    return _WORDS[dimension].get(letters(value))
