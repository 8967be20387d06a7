"""The user's files, looked at before they are read: what kind each is, and the SQL that reads it.

A file is opened for reading only, by this module to see what it is (`look`) and by DuckDB to read its rows. Whatever it
turns out to be, the outcome is a `Source` or one line that says what is wrong with it and what to do.
"""

from __future__ import annotations

import codecs
import csv
import dataclasses
import io
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb

from trace_jax.config import ConfigError
from trace_jax.diagnose import synonyms
from trace_jax.diagnose.encodings import DUCKDB, ICONV, Report, encoding_of, nothing, prepared, utf8_copy
from trace_jax.diagnose.user_files import check_lines, reading

SAMPLE = 1 << 20  # bytes from which encoding, delimiter and header are told
MOST_BROKEN = 10_000  # lines that are counted
FEW_BROKEN = 0.05  # share of the lines that may be left out
_LENIENT = "strict_mode=false, ignore_errors=true, null_padding=true"
HEAD_LINES = 40  # among which the line of names must be
MOST_COLUMNS = 5_000  # a line with more cells lacks its line ends, or has another delimiter
SCORED = 200  # cells of a line that are looked at to tell whether it is the one of names
_DELIMITERS = (",", "\t", ";", "|")
_MAGIC = (
    (b"\x1f\x8b", "a gzip archive: unpack it first"),
    (b"BZh", "a bzip2 archive: unpack it first"),
    (b"\xfd7zXZ\x00", "an xz archive: unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive: unpack it first"),
    (b"Rar!", "a RAR archive: unpack it first"),
    (b"%PDF", "a PDF: export the report as CSV"),
    (b"SQLite format 3\x00", "an SQLite database: export its table as CSV or Parquet"),
    (b"\xd0\xcf\x11\xe0", "an old or password-protected Excel file: save the sheet as CSV"),
)


@dataclass(frozen=True)
class Source:
    """A table of the user's.

    Attributes:
        name: how it is called in what people read.
        relation: SQL of a FROM clause that reads it.
        columns: names as the file spells them. types: DuckDB's, VARCHAR for all of a CSV file.
        notes: what was found about the file besides, in words.
        attach: the statement that makes `relation` known, for tables of a DuckDB database.
        again: `relation` for whoever runs a query again; another one where a copy is read.
        prepare: what they have to do before, as an SQL comment.
    """

    path: Path
    name: str
    relation: str
    columns: tuple[str, ...]
    types: tuple[str, ...]
    notes: tuple[str, ...] = ()
    attach: str = ""
    again: str = ""
    prepare: str = ""


def quoted(name: str) -> str:
    """A name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """A text as SQL writes it."""
    return "'" + text.replace("'", "''") + "'"


def open_sources(
    paths: Sequence[Path], connection: duckdb.DuckDBPyConnection, report: Report = nothing
) -> list[Source]:
    """Every table of the files; DuckDB databases are attached to `connection`, read-only.

    Args:
        report: of passes over a file that are not DuckDB's.

    Raises:
        ConfigError: one line for the first file that is none of CSV, Parquet and DuckDB.
    """
    if not paths:
        raise ConfigError("which tables? name CSV, Parquet or DuckDB files: trace-jax diagnose FILE [FILE ...]")
    seen: set[Path] = set()
    found: list[Source] = []
    for path in paths:
        check_file(path)
        if path.resolve() in seen:
            raise ConfigError(f"{path} is named twice: its rows would count twice; name it once")
        seen.add(path.resolve())
        with reading(path), open(path, "rb") as file:
            head = file.read(SAMPLE)
        found += _open(path, head, connection, report)
    return found


def check_file(path: Path) -> None:
    """ConfigError unless there is a regular file with something in it."""
    try:
        str(path).encode()
    except UnicodeEncodeError:  # DuckDB takes no other names
        raise ConfigError(f"the name of {str(path)!r} is no UTF-8: rename the file") from None
    with reading(path):
        status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        inside = sorted(p.name for p in path.iterdir() if p.suffix.lower() in (".csv", ".parquet", ".duckdb", ".tsv"))
        mend = f"name its files, e.g. {path / inside[0]}" if inside else "it holds no CSV, Parquet or DuckDB file"
        raise ConfigError(f"{path} is a directory: {mend}")
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is no regular file: save the export to a file first")
    if status.st_size == 0:
        raise ConfigError(f"{path} is empty (0 bytes): export it again")


def _open(path: Path, head: bytes, connection: duckdb.DuckDBPyConnection, report: Report) -> list[Source]:
    if head[:4] == b"PAR1":
        return [_described(path, f"read_parquet({literal(_globless(path))})", path.name, connection)]
    if head[8:12] == b"DUCK":
        return _database(path, connection)
    if head[:4] == b"PK\x03\x04":
        raise ConfigError(f"{path} is {_zip(head)}")
    for magic, what in _MAGIC:
        if head.startswith(magic):
            raise ConfigError(f"{path} is {what}")
    return [_text(path, head, connection, report)]


def _zip(head: bytes) -> str:
    if head[6] & 1:
        return "a password-protected archive: unpack it first"
    if b"xl/" in head or b"[Content_Types].xml" in head:
        return "an Excel workbook: save the sheet as CSV"
    return "a zip archive: unpack it first"


def _globless(path: Path | str) -> str:
    """A path that DuckDB takes literally: `*`, `?` and `[` would stand for other files."""
    return re.sub(r"([*?\[])", r"[\1]", str(path))


def _described(path: Path, relation: str, name: str, connection: duckdb.DuckDBPyConnection, *notes: str) -> Source:
    try:
        rows = connection.execute(f"DESCRIBE SELECT * FROM {relation}").fetchall()
    except duckdb.Error as error:
        raise ConfigError(f"cannot read {path}: {_first_line(error)}; export it again") from None
    return Source(path, name, relation, tuple(r[0] for r in rows), tuple(r[1] for r in rows), notes)


def _database(path: Path, connection: duckdb.DuckDBPyConnection) -> list[Source]:
    taken = connection.execute("SELECT count(*) FROM duckdb_databases()").fetchone()[0]
    alias = f"source_{taken}"
    attach = f"ATTACH {literal(str(path))} AS {alias} (READ_ONLY)"
    try:
        connection.execute(attach)
        tables = connection.execute(
            "SELECT schema_name, table_name FROM duckdb_tables() WHERE database_name = $1 AND NOT internal"
            " UNION ALL SELECT schema_name, view_name FROM duckdb_views() WHERE database_name = $1 AND NOT internal"
            " ORDER BY ALL",
            [alias],
        ).fetchall()
    except duckdb.Error as error:
        raise ConfigError(f"cannot open {path} as a DuckDB database: {_first_line(error)}") from None
    if not tables:
        raise ConfigError(f"{path} is a DuckDB database without tables: name another file")
    found, broken = [], []
    for schema, table in tables:
        relation = f"{alias}.{quoted(schema)}.{quoted(table)}"
        try:
            found.append(_described(path, relation, f"{path.name}:{table}", connection))
        except ConfigError as error:  # a view of what is no longer there
            broken.append((table, error))
    if not found:
        raise broken[0][1]
    notes = tuple(f"{table} cannot be read and is left out" for table, _ in broken)
    return [
        dataclasses.replace(source, attach=attach, notes=source.notes + notes * (number == 0))
        for number, source in enumerate(found)
    ]


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split("\n")[0].split())[:200]


# Text


def _text(path: Path, head: bytes, connection: duckdb.DuckDBPyConnection, report: Report) -> Source:
    encoding = encoding_of(path, head, report)
    text = codecs.getincrementaldecoder(encoding)("replace").decode(head).lstrip("\ufeff")
    newline = _newline(text)
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    if not lines.strip():
        raise ConfigError(f"{path} holds nothing but blanks: export it again")
    if encoding.startswith("utf-16") and path.stat().st_size % 2:
        raise ConfigError(f"{path} is UTF-16 and breaks off in the middle of a character: export it again")
    if re.match(r'\s*(\[\s*)?\{\s*"', lines):
        mend = f"save it as CSV or Parquet, e.g. duckdb -c \"COPY (FROM '{path.name}') TO '{path.stem}.parquet'\""
        raise ConfigError(f"{path} is JSON: {mend}")
    delimiter, skip, names = _layout(path, lines)
    check_lines(path, delimiter, len(names), report)
    shown = literal(delimiter.replace("\t", "\\t"))
    options = [f"delim={shown}", "header=true", *([f"skip={skip}"] if skip else [])]
    notes, read, again, prepare = [], str(path), str(path), ""
    if encoding in ICONV:
        folder = Path(connection.execute("SELECT current_setting('temp_directory')").fetchone()[0])
        folder.mkdir(exist_ok=True)
        read, (prepare, again) = str(utf8_copy(path, encoding, folder, report)), prepared(path, encoding)
        notes.append(f"read as {ICONV[encoding]}, from a temporary copy in UTF-8")
    elif (duck := DUCKDB[encoding]) != "utf-8":
        options.append(f"encoding={literal(duck)}")
        notes.append(f"read as {duck.upper()}")
    if newline == "\r":
        options.append("new_line='\\r'")
        notes.append("lines end in carriage returns")
    if skip:
        notes.append(f"{skip} line{'s' * (skip > 1)} above the names left out")
    columns = ", ".join(f"{literal(n)}: 'VARCHAR'" for n in names)
    # compression: by its name a plain file may be taken for a packed one
    fixed = "all_varchar=true, quote='\"', escape='\"', auto_detect=false, compression='none'"

    def reader(more: str, file: str) -> str:
        return f"read_csv({literal(_globless(file))}, {', '.join(options)}, {fixed}, {more}, columns={{{columns}}})"

    strict, lenient = "strict_mode=true, ignore_errors=true", f"{_LENIENT}, parallel=false"
    broken, rows = _broken_lines(
        reader(f"strict_mode=true, store_rejects=true, rejects_limit={MOST_BROKEN}", read), connection
    )
    # no line is as it should be, and none was counted: DuckDB gives up, with an error or without
    unreadable = rows == 0 and broken in (0, MOST_BROKEN) and _count(reader(lenient, read), connection) > 0
    if rows + broken == 0 and not unreadable:
        raise ConfigError(f"{path} has column names and no rows: export it again")
    few = broken <= FEW_BROKEN * (rows + broken) and not unreadable
    how, left = (strict, "left out") if few else (lenient, "read as far as they go")
    if unreadable:
        notes.append("lines end in different ways, or quotes are broken: read as far as they go")
    elif broken:
        count = f"{broken:,} line{'s have' if broken > 1 else ' has'}"
        notes.append(f"{count} more or fewer cells than there are names, or broken quotes: {left}")
    source = _described(path, reader(how, read), path.name, connection, *notes)
    return dataclasses.replace(source, again=reader(how, again), prepare=prepare)


def _broken_lines(relation: str, connection: duckdb.DuckDBPyConnection) -> tuple[int, int]:
    """Number of lines that do not fit the names, and of rows that do."""
    try:
        [(rows,)] = connection.execute(f"SELECT count(*) FROM {relation}").fetchall()  # all: then rejects are written
        [(broken,)] = connection.execute("SELECT count(DISTINCT line) FROM reject_errors").fetchall()
    except duckdb.Error:  # nothing in the file can be read as it should be
        rows, broken = 0, MOST_BROKEN
    connection.execute("DROP TABLE IF EXISTS reject_errors; DROP TABLE IF EXISTS reject_scans")
    return broken, rows


def _count(relation: str, connection: duckdb.DuckDBPyConnection) -> int:
    """Rows of a relation, 0 if it cannot be read."""
    try:
        [(rows,)] = connection.execute(f"SELECT count(*) FROM {relation}").fetchall()
    except duckdb.Error:
        return 0
    return rows


def _newline(text: str) -> str:
    returns = text.count("\r") - text.count("\r\n")
    return "\r" if returns > text.count("\n") else "\n"


def _layout(path: Path, lines: str) -> tuple[str, int, list[str]]:
    """Delimiter, number of lines above the names, and the names."""
    best: tuple[float, str, int, list[str]] | None = None
    for delimiter in _DELIMITERS:
        rows = list(_rows(lines, delimiter))
        head = rows[:HEAD_LINES]
        widths = Counter(len(r) for _, r in rows if len(r) > 1)
        width = widths.most_common(1)[0][0] if widths else 1
        for line, row in head:
            cells = row[:SCORED]
            known = sum(synonyms.field_of(c) is not None or synonyms.is_derived(c) for c in cells)
            fits = len(row) == width and len(row) > 1
            numbers = sum(bool(re.fullmatch(r"[\s$€£¥%.,\d+-]*\d[\s$€£¥%.,\d+-]*", c)) for c in cells)
            score = known + 2.0 * fits - 2.0 * numbers + 0.001 * len(cells) - 0.01 * line
            if len(row) > 1 and (best is None or score > best[0]):
                best = score, delimiter, line, row
    if best is None:
        raise ConfigError(f"{path} has no line of column names: it must be a table with commas, tabs or semicolons")
    if len(best[3]) > MOST_COLUMNS:
        raise ConfigError(
            f"{path}: line {best[2] + 1} has more than {MOST_COLUMNS:,} cells: its line end may be lost; export again, "
            "or only the columns that are needed"
        )
    return best[1], best[2], _unique(best[3])


def _rows(lines: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """First rows of a text with the number of the line each begins on."""
    reader, start = csv.reader(io.StringIO(lines), delimiter=delimiter), 0
    try:
        for row in reader:
            yield start, row
            start = reader.line_num
            if start > 400:
                return
    except csv.Error:
        return


def _unique(names: Sequence[str]) -> list[str]:
    """Names as DuckDB needs them: none empty, none twice (it does not tell case apart)."""
    seen: set[str] = set()
    out = []
    for number, name in enumerate(names, 1):
        name = "".join(c if c.isprintable() else " " for c in name.replace("\ufeff", ""))
        name = own = " ".join(name.split()) or f"column {number}"
        times = 1
        while own.casefold() in seen:  # by a column that is called `name #2` itself, too
            times += 1
            own = f"{name} #{times}"
        seen.add(own.casefold())
        out.append(own)
    return out
