"""A campaign made with NumPy, as rows, and the files that people would have of it."""

import csv
import datetime
import hashlib
import io
import itertools
import json

import numpy as np

from trace_jax import cli

FIRST = datetime.date(2026, 10, 5)  # a Monday
VALUES = {
    "placement": ("Top of Search on-Amazon", "Other on-Amazon", "Detail Page on-Amazon"),
    "audience": ("New audience", "Engaged audience", "Existing customers"),
    "device": ("Mobile phones", "Computers", "Tablets"),
    "geo": ("United States", "United Kingdom", "Germany", "Japan"),
}
NUMBERS = ("impressions", "clicks", "orders", "spend")


def rows(
    dimensions=("device", "geo"),
    days=28,
    *,
    seed=0,
    impressions=4000,
    ctr=0.02,
    cvr=0.1,
    effect=lambda t, cell: {},
    campaign="Brand",
    values=VALUES,
    noise=0.05,
):
    """One row a day and cell. `effect(day, cell)` gives factors of impressions, ctr, cvr and cpc."""
    rng = np.random.default_rng(seed)
    cells = [dict(zip(dimensions, c, strict=True)) for c in itertools.product(*(values[d] for d in dimensions))]
    base = rng.uniform(0.7, 1.3, len(cells))
    out = []
    for t in range(days):
        weekday = 1 + 0.1 * np.sin(2 * np.pi * t / 7)
        for cell, size in zip(cells, base, strict=True):
            f = {"impressions": 1.0, "ctr": 1.0, "cvr": 1.0, "cpc": 1.0} | effect(t, cell)
            shown = int(impressions * size * weekday * f["impressions"] * rng.lognormal(0, noise))
            clicks = int(rng.binomial(shown, min(ctr * f["ctr"] * rng.lognormal(0, noise), 1)))
            orders = int(rng.binomial(clicks, min(cvr * f["cvr"] * rng.lognormal(0, noise), 1)))
            spend = round(clicks * 0.9 * f["cpc"] * rng.lognormal(0, noise), 2)
            day = FIRST + datetime.timedelta(t)
            figures = {"impressions": shown, "clicks": clicks, "orders": orders, "spend": spend}
            out.append({"date": day, "campaign": campaign} | cell | figures)
    return out


def falls(where, onset=14, **factors):
    """The effect of a cause inside the slice `where` from a day on."""
    return lambda t, cell: factors if t >= onset and all(cell[d] == v for d, v in where.items()) else {}


def text(
    table,
    *,
    delimiter=",",
    date="%Y-%m-%d",
    number=str,
    names=None,
    above=(),
    below=(),
    newline="\n",
):
    """A table as the text of a file."""
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, lineterminator=newline)
    writer.writerows(above)
    columns = list(table[0])
    writer.writerow([(names or {}).get(c, c) for c in columns])
    for row in table:
        cells = []
        for column in columns:
            value = row[column]
            cells.append(
                value.strftime(date)
                if isinstance(value, datetime.date)
                else number(value)
                if isinstance(value, (int, float))
                else value
            )
        writer.writerow(cells)
    writer.writerows(below)
    return out.getvalue()


def result(out):
    """The JSON object that a command printed last."""
    return json.loads(out.splitlines()[-1])


MIDDLE = FIRST + datetime.timedelta(14)
HALVES = (
    "--before",
    f"{FIRST}:{MIDDLE - datetime.timedelta(1)}",
    "--after",
    f"{MIDDLE}:{MIDDLE + datetime.timedelta(13)}",
)
MOBILE = falls({"device": "Mobile phones"}, ctr=0.6)


def runner(tmp_path, capsys):
    """Runs the command on files of text, bytes or paths: exit status, JSON or None, stdout, stderr. The scripted
    analyst investigates unless `argv` names another agent or a run."""

    def run(*files, argv=(), yes=True):
        agent = () if {"--agent", "--run-dir"} & {*argv} else ("--agent", "analyst")
        paths = []
        for number, content in enumerate(files):
            path = content
            if isinstance(content, (str, bytes)):
                path = tmp_path / f"file{number}.csv"
                path.write_bytes(content if isinstance(content, bytes) else content.encode())
            paths.append(path)
        before = [hashlib.sha256(p.read_bytes()).digest() if p.is_file() else None for p in paths]
        words = ["diagnose", *map(str, paths), *(["--yes"] if yes else []), "--json", "--samples", "3", *agent, *argv]
        status = cli.main(words)
        assert before == [hashlib.sha256(p.read_bytes()).digest() if p.is_file() else None for p in paths]
        out, err = capsys.readouterr()
        return status, result(out) if status == 0 else None, out, err

    return run


def said(found):
    return found["cause"], {s["dimension"]: s["value"] for s in found["slice"]}
