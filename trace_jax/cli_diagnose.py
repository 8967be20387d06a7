"""What `trace-jax diagnose` accepts."""

from __future__ import annotations

import argparse
from pathlib import Path

AGENTS = ("shipped", "analyst", "endpoint", "latest", "best", "grpo", "sft")


def build(p: argparse.ArgumentParser) -> None:
    """Adds the arguments of `diagnose` to its parser."""
    p.add_argument("files", type=Path, nargs="+", metavar="FILE", help="CSV, Parquet or DuckDB; only ever read")
    guessed = "take the guessed columns without asking"
    p.add_argument("--yes", action="store_true", help=guessed)
    p.add_argument(
        "--mapping", type=Path, metavar="FILE", help="YAML that says which column is what (docs/diagnose.md)"
    )
    template = "write what was guessed as such a file and stop"
    p.add_argument("--write-mapping", type=Path, metavar="FILE", help=template)
    p.add_argument("--campaign", metavar="NAME", help="which of several campaigns; all: all of them together")
    for name, text in (("before", "baseline"), ("after", "period in question")):
        days = f"{text}, first and last day, e.g. 2026-11-02:2026-11-15 (default: proposed from the data)"
        p.add_argument(f"--{name}", metavar="A:B", help=days)
    p.add_argument("--timezone", metavar="ZONE", help="of the account, for columns of moments (default: as written)")
    lag = "leave out the last N days, whose conversions are incomplete (default: as many as look so)"
    p.add_argument("--lag", type=_days, metavar="N", help=lag)
    who = (
        "who investigates: the small policy that comes with trace-jax (shipped), the scripted analyst, a model behind "
        "an endpoint, or a stage of --run-dir (default: latest with --run-dir, else shipped)"
    )
    p.add_argument("--agent", choices=AGENTS, help=who)
    p.add_argument("--run-dir", type=Path, metavar="DIR", help="a run whose trained policy investigates")
    p.add_argument(
        "--samples", type=_count, default=5, metavar="N", help="investigations, whose agreement is told (default: 5)"
    )
    url = "with --agent endpoint: base URL of an OpenAI-compatible interface; same as --endpoint.url"
    p.add_argument("--endpoint", dest="endpoint_url", metavar="URL", help=url)
    model = "with --agent endpoint: its name there; same as --endpoint.model"
    p.add_argument("--model", dest="endpoint_model", metavar="NAME", help=model)
    send = "with --agent endpoint: send what is said before without asking (--yes is about columns only)"
    p.add_argument("--send", action="store_true", help=send)
    page = "also write the diagnosis as one self-contained HTML page"
    p.add_argument("--html", type=Path, metavar="FILE", help=page)
    keep = "also write the rows as they were read into a new DuckDB file"
    p.add_argument("--keep", type=Path, metavar="FILE", help=keep)


def _count(text: str) -> int:
    if not 1 <= int(text) <= 200:
        raise ValueError(text)
    return int(text)


def _days(text: str) -> int:
    if not 0 <= int(text) <= 60:
        raise ValueError(text)
    return int(text)


_count.__name__ = "number of investigations, 1 to 200"  # argparse: invalid ... value
_days.__name__ = "number of days, 0 to 60"
