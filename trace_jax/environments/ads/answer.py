"""The answer contract (arXiv 2609.10315): canonical form, lenient and exact parser.

    {"decision": {"root_cause": CAUSE, "driver_segments": [{"dimension": ATTRIBUTE, "value": VALUE}, ...]},
     "evidence": [...], "explanation": "..."}

`driver_segments` is present only for segment causes. Scoring uses `parse_lenient`; `parse_exact` is a sensitivity
analysis. Neither parser raises, whatever the text.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trace_jax.simulator.causes import CAUSE_INDEX, CAUSE_NAMES, SEGMENT_CAUSES
from trace_jax.simulator.vocabulary import ATTRIBUTES

Pair = tuple[str, str]

MAX_CHARACTERS = 20_000  # only the tail of a longer text is searched for an answer
MAX_OBJECTS = 64  # at most so many "{" are tried as the start of the answer, from the end
MAX_DRIVER_PAIRS = 2  # a driver slice fixes one or two attributes

# Spellings of ad platforms and everyday names (written without separators, see `_squash`).
_VALUE_ALIASES: dict[str, dict[str, str]] = {
    "placement": {
        "TOP": "TOP_OF_SEARCH",
        "PLACEMENTTOP": "TOP_OF_SEARCH",
        "TOPOFSEARCHONAMAZON": "TOP_OF_SEARCH",
        "REST": "REST_OF_SEARCH",
        "PLACEMENTRESTOFSEARCH": "REST_OF_SEARCH",
        "OTHERONAMAZON": "REST_OF_SEARCH",
        "DETAILPAGE": "PRODUCT_PAGE",
        "DETAILPAGEONAMAZON": "PRODUCT_PAGE",
        "PLACEMENTPRODUCTPAGE": "PRODUCT_PAGE",
    },
    "geo": {
        "USA": "US",
        "UNITEDSTATES": "US",
        "GB": "UK",
        "UNITEDKINGDOM": "UK",
        "GERMANY": "DE",
        "JAPAN": "JP",
    },
}


@dataclass(frozen=True)
class Answer:
    """A parsed decision: a known cause and known (attribute, value) pairs, sorted and without repetition."""

    root_cause: str
    driver_segments: tuple[Pair, ...] = ()


def _squash(text: str) -> str:
    """Upper case without separators: "top-of search" and TOP_OF_SEARCH become the same key."""
    return re.sub(r"[^A-Z0-9]", "", unicodedata.normalize("NFKC", text).upper())


_CAUSES = {_squash(name): name for name in CAUSE_NAMES}
_NAMES = {_squash(name): name for name in ATTRIBUTES}
_VALUES = {
    name: {**{_squash(v): v for v in values}, **_VALUE_ALIASES.get(name, {})} for name, values in ATTRIBUTES.items()
}


def normalise_cause(text: Any) -> str | None:
    """The vocabulary's spelling of a cause, or None if it is none of the twelve."""
    return _CAUSES.get(_squash(text)) if isinstance(text, str) else None


def normalise_pair(attribute: Any, value: Any) -> Pair | None:
    """The vocabulary's spelling of an (attribute, value) pair, or None if either is unknown."""
    if not isinstance(attribute, str) or not isinstance(value, str):
        return None
    name = _NAMES.get(_squash(attribute))
    code = _VALUES[name].get(_squash(value)) if name else None
    return (name, code) if name and code else None


def format_answer(cause: str, driver: Iterable[Pair] = (), evidence: Sequence[Any] = (), explanation: str = "") -> str:
    """The canonical answer as one line of compact JSON.

    Args:
        cause: one of the twelve names.
        driver: (attribute, value) pairs of the driver slice; written only for segment causes, in sorted order.
        evidence: strings or flat dicts, in the order given.
        explanation: free text.
    """
    decision: dict[str, Any] = {"root_cause": cause}
    pairs = sorted(set(driver))
    if pairs and cause in SEGMENT_CAUSES:
        decision["driver_segments"] = [{"dimension": a, "value": v} for a, v in pairs]
    body = {"decision": decision, "evidence": list(evidence), "explanation": explanation}
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False)


def probe_of(answer: str) -> tuple[str, str]:
    """A canonical answer without evidence as what a probe asks for: all before the name of the cause, and from there
    through the last value of the driver, the part that differs from episode to episode."""
    decision = answer[: answer.index(',"evidence":')]
    start = len('{"decision":{"root_cause":"')
    return decision[:start], decision[start:].rstrip('"}]')


def parse_lenient(text: str) -> Answer | None:
    """The last decision in the text, or None.

    Extra keys, prose around the JSON, missing evidence and a decision at top level are fine. Case, spaces and hyphens
    do not matter. A malformed or unknown segment counts as absent; an unknown cause means there is no answer.
    """
    for body in _objects(text):
        decision = body.get("decision", body)
        cause = normalise_cause(decision.get("root_cause")) if isinstance(decision, dict) else None
        if cause is not None:
            return Answer(cause, tuple(sorted(set(_pairs(decision.get("driver_segments"))))))
    return None


def parse_exact(text: str) -> Answer | None:
    """The answer if the whole text is the canonical schema in the vocabulary's own spelling, else None.

    Evidence is a list of strings or dicts. Segment causes need one or two segments of different attributes; other
    causes none (null or left out).
    """
    try:
        body = json.loads(text)
        evidence, explanation, decision = body["evidence"], body["explanation"], body["decision"]
        cause, segments = decision["root_cause"], decision.get("driver_segments")
        well_formed = (
            set(body) == {"decision", "evidence", "explanation"}
            and set(decision) <= {"root_cause", "driver_segments"}
            and cause in CAUSE_INDEX
            and isinstance(explanation, str)
            and isinstance(evidence, list)
            and all(isinstance(item, (str, dict)) for item in evidence)
        )
        if not well_formed or (cause in SEGMENT_CAUSES) != bool(segments):
            return None
        if not segments:
            return Answer(cause) if segments is None else None
        if not isinstance(segments, list) or any(set(item) != {"dimension", "value"} for item in segments):
            return None
        pairs = [(item["dimension"], item["value"]) for item in segments]
        if any(value not in ATTRIBUTES.get(attribute, ()) for attribute, value in pairs):
            return None
        if len(pairs) > MAX_DRIVER_PAIRS or len({attribute for attribute, _ in pairs}) < len(pairs):
            return None
        return Answer(cause, tuple(sorted(pairs)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def _objects(text: str) -> Iterator[dict]:
    """JSON objects in the text, the whole text first, then from the last "{" backwards.

    Inner objects come before the object that holds them; they carry no root_cause of their own, except `decision`,
    which is the answer anyway.
    """
    if not isinstance(text, str):
        return
    text = text[-MAX_CHARACTERS:].strip()
    decoder = json.JSONDecoder()
    starts = [0] if text.startswith("{") else []
    starts += [m.start() for m in re.finditer(r"\{", text)][::-1][:MAX_OBJECTS]
    for i, start in enumerate(starts):
        try:
            body, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        whole_text = i > 0 or start > 0 or end == len(text)  # the first try must be the text as a whole
        if isinstance(body, dict) and whole_text:
            yield body


def _pairs(segments: Any) -> Iterator[Pair]:
    """Known (attribute, value) pairs of any of the accepted spellings; the rest is skipped."""
    if isinstance(segments, str):
        for part in re.split(r"&|,|;|\band\b", segments, flags=re.IGNORECASE):
            attribute, found, value = part.partition("=" if "=" in part else ":")
            pair = normalise_pair(attribute, value) if found else None
            if pair:
                yield pair
    elif isinstance(segments, dict):
        attribute = segments.get("dimension", segments.get("attribute"))
        items = [(attribute, segments.get("value"))] if "value" in segments else segments.items()
        for name, value in items:
            pair = normalise_pair(name, value)
            if pair:
                yield pair
    elif isinstance(segments, list):
        for item in segments:
            if not isinstance(item, list):  # nesting has no meaning, and would let depth grow
                yield from _pairs(item)
