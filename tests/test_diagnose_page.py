"""`trace-jax diagnose --html`: what the page says, that no file leads it astray, and how it looks in a browser."""

import os
import re

import duckdb
import helpers_browser
import pytest
from helpers_diagnose import HALVES, MOBILE, VALUES, rows, runner, text

from trace_jax.report.target import MARK

HOSTILE = "</pre></td><script>window.taken=1</script><img src=x onerror=window.taken=2>{{ 7*7 }}\x1b[2J\u202e"


@pytest.fixture
def diagnose(tmp_path, capsys):
    return runner(tmp_path, capsys)


def hostile():
    """CTR falls in a value that is markup; so are a column, the campaign and another value."""
    values = VALUES | {"device": (HOSTILE, "Computers", "Tablets")}
    table = rows(effect=lambda t, cell: {"ctr": 0.5} if t >= 14 and cell["device"] == HOSTILE else {}, values=values)
    return [row | {"campaign": f"Brand {HOSTILE}", f"Note {HOSTILE}": "x"} for row in table]


def mixed():
    """The share of one placement rises."""
    values = {"placement": ("Detail Page on-Amazon", "Top of Search on-Amazon")}
    effect = lambda t, cell: {"impressions": 1.7 if t >= 14 and cell["placement"].startswith("Top") else 1.0}  # noqa: E731
    return rows(("placement",), effect=effect, values=values, impressions=60_000, noise=0.03)


def test_the_page_says_what_the_command_says(diagnose, tmp_path):
    page = tmp_path / "new" / "page.html"
    status, found, out, _ = diagnose(text(rows(effect=MOBILE)), argv=(*HALVES, "--html", str(page)))
    said = page.read_text()
    assert status == 0 and out.splitlines()[-2] == f"page: {page}" and MARK in said
    assert "<h1>Creative fatigue in device = Mobile phones</h1>" in said
    assert "3 of 3 investigations agree" in said and found["files"][str(tmp_path / "file0.csv")]["sha256"] in said
    for line in (*(q["text"] for q in found["quality"]), *found["not_checked"]):
        assert line.replace("'", "&#39;") in said
    assert len(re.findall("<svg ", said)) == 5 and said.count('class="window"') == 5
    assert not re.search(r"(src|href|url)\s*[=(]", said.replace("Content-Security-Policy", ""))  # nothing to be fetched


def test_what_a_file_holds_is_text_on_the_page(diagnose, tmp_path):
    page = tmp_path / "page.html"
    status, found, _, err = diagnose(text(hostile()), argv=(*HALVES, "--html", str(page)))
    assert status == 0, err
    said = page.read_text()
    assert found["slice"][0]["value"].startswith("</pre>")
    assert said.count("<script>") == said.count("</script>") == 1 and "<img" not in said and "{{ 7*7 }}" in said
    shown = re.sub('<pre class="sql".*?</pre>', "", said, flags=re.S)  # a query is exact to the last character
    assert "\x1b" not in shown and "\u202e" not in shown


@pytest.mark.parametrize(
    ("stands", "argv", "part"),
    [
        ("file", (), "--html {page} exists and is no page of trace-jax"),
        ("folder", (), "--html {page} is a directory"),
        ("file/below", (), "cannot write {page}"),
        ("none", ("--write-mapping", "m.yaml"), "leave --html out"),
        ("none", ("--keep", "{page}"), "name two files"),
        ("new/page.html", ("--before", "x:y", "--after", "z:w"), "--before x:y"),
    ],
)
def test_a_page_replaces_nothing_of_the_users(stands, argv, part, diagnose, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    page = tmp_path / stands
    argv = [word.format(page=page) for word in argv]
    status, _, _, err = diagnose(text(rows(("device",))), argv=("--html", str(page), *argv))
    assert status == 2 and part.format(page=page) in err and err.count("\n") == 1
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "file").read_text() == "mine" and not os.listdir(tmp_path / "folder")


def test_a_page_is_put_into_a_new_folder_and_never_over_a_table(diagnose, tmp_path):
    status, _, _, err = diagnose(text(rows()), argv=(*HALVES, "--html", str(tmp_path / "a" / "b" / "page.html")))
    assert status == 0 and (tmp_path / "a" / "b" / "page.html").is_file(), err
    table = tmp_path / "t.csv"
    table.write_text(f"<!-- {MARK} -->\n" + text(rows()))
    status, _, _, err = diagnose(table, argv=(*HALVES, "--html", str(table)))
    assert status == 2 and f"--html {table} is one of the tables" in err


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Pages of a slice, of a mix and of no decision."""
    from trace_jax import cli

    folder = tmp_path_factory.mktemp("pages")
    fewer = rows(effect=lambda t, cell: {"impressions": 0.55} if t >= 14 else {}, noise=0.04)
    for name, table in (("slice", hostile()), ("mix", mixed()), ("undecided", fewer)):
        path = folder / f"{name}.csv"
        path.write_text(text(table))
        words = ("diagnose", str(path), "--yes", "--agent", "analyst", "--samples", "3", *HALVES)
        assert cli.main([*words, "--html", str(folder / f"{name}.html")]) == 0
    return folder


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ("light", "dark"))
@pytest.mark.parametrize("width", helpers_browser.WIDTHS)
def test_the_page_in_a_browser(browser, pages, width, scheme):
    headings = {"slice": "Creative fatigue in device = </pre>", "mix": "Placement shift", "undecided": "Undecided"}
    for name, heading in headings.items():
        with helpers_browser.opened(browser, pages / f"{name}.html", width, scheme=scheme) as page:
            assert page.inner_text("h1").startswith(heading)
            assert page.evaluate("window.taken") is None
            dark = page.evaluate("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)"
            assert dark == (scheme == "dark")
            wide = page.eval_on_selector_all("svg", "all => all.map(e => e.getBoundingClientRect().right)")
            assert len(wide) >= 4 and max(wide) <= width
            # Nor may it scroll sideways with all of it open.
            page.locator("details").evaluate_all("all => all.forEach(e => { e.open = true })")


@pytest.mark.browser
def test_the_button_copies_what_gives_the_rows_again(browser, pages):
    for name in ("slice", "mix"):
        with helpers_browser.opened(browser, pages / f"{name}.html", 1280) as page:
            page.evaluate("navigator.clipboard.writeText = t => { window.copied = t; return Promise.resolve() }")
            button = page.locator("button").last
            button.click()
            assert button.inner_text() == "Copied"
            copied = page.evaluate("window.copied")
            cells = page.locator(".scroll:has(+ details + button)").last.locator("tr:not(:first-child)")
            shown = [row.split("\t") for row in cells.all_inner_texts()]
        with duckdb.connect() as fresh:
            found = fresh.execute(copied).fetchall()
        assert len(found) == len(shown) == 4
        for row, cells in zip(found, shown, strict=True):
            assert [f"{v:,.6g}" if isinstance(v, float) else str(v) for v in row] == cells
