"""Where results go: nothing of somebody's is replaced, and no study writes over another's tables."""

import dataclasses
import json
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers_episodes import fake_set
from test_evaluation_form import put, summary

from trace_jax import cli, config_io
from trace_jax.config import ConfigError, RunConfig
from trace_jax.evaluation import store
from trace_jax.recipes import export, exports, places, routing, shipped, study_place
from trace_jax.recipes.interrupt import Interrupt, Interrupted


def files(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def one_line(capsys, says):
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1, error


def test_no_directory_can_be_made_where_something_else_is(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "loop").symlink_to(tmp_path / "pool")
    (tmp_path / "pool").symlink_to(tmp_path / "loop")
    for where in (tmp_path / "file", tmp_path / "file" / "x", tmp_path / "loop", Path("/proc/none/x"), tmp_path / "\0"):
        for made in (places.folder, places.existing):
            with pytest.raises(ConfigError, match=r"^[^\n]*--out[^\n]*$"):
                made(where)
    (tmp_path / "link").symlink_to(tmp_path)
    assert places.folder(tmp_path / "link" / "a" / "b") == places.existing(tmp_path / "a" / "b")


@pytest.mark.parametrize(
    "words",
    [
        ["reproduce", "causal"],
        ["reproduce", "objectives"],
        ["reproduce", "planted-deficits"],
        ["reproduce", "capability-targeting", "--init", "RUN"],
        ["eval", "--table", "RUN"],
        ["report", "RUN"],
        *(["capability", action, "--run-dir", "RUN"] for action in ("contrast", "worlds", "train", "route", "eval")),
    ],
)
def test_a_place_that_cannot_be_is_told_before_any_work(words, tmp_path, capsys):
    put(tmp_path / "run" / "config.yaml", config_io.dump(RunConfig()))
    words = [str(tmp_path / "run") if w == "RUN" else w for w in words]
    target = "/proc/none/page.html" if words[0] == "report" else "/proc/none"
    assert cli.main([*words, "--out", target]) == 2
    one_line(capsys, target)


def test_files_replace_others_only_when_all_are_whole(tmp_path):
    folder = tmp_path / "new"
    with pytest.raises(KeyError), places.beside(folder) as partial:
        put(partial / "a", "half")
        raise KeyError
    assert not folder.exists()  # it was made for nothing
    put(folder / "a", "old")
    put(folder / "mine", "mine")
    put(folder / places.PARTIAL / "a", "what a killed process left")
    with places.beside(folder) as partial:
        assert not files(partial)
        put(partial / "a", "new")
        assert (folder / "a").read_text() == "old"
        places.put(partial, folder, "a")
    assert files(folder) == {"a": b"new", "mine": b"mine"}


STUDIES = ["objectives", "turn-credit", "planted-deficits", "capability-targeting", "causal", "abstention"]


@pytest.mark.parametrize("first", STUDIES)
def test_a_study_goes_on_in_its_own_directory_and_in_no_other(first, tmp_path):
    out = tmp_path / "study"
    for _ in range(2):
        assert study_place.claim(out, first) == out
    for second in STUDIES:
        if second == first or {first, second} == {"causal", "abstention"}:
            study_place.claim(out, second)
            continue
        with pytest.raises(ConfigError, match=rf"holds the study {first}: choose another --out for {second}$"):
            study_place.claim(out, second)
    with pytest.raises(ConfigError, match=f"holds the study {first}"):
        study_place.for_table(out)


@pytest.mark.parametrize(
    "file, content, of",
    [
        ("table.json", {"study": "planted-deficits", "runs": {}}, ["planted-deficits"]),
        ("causal.json", {"study": "causal"}, ["abstention", "causal"]),
        ("study.json", {"source": "/x", "steps": 1, "fields": {}}, ["capability-targeting"]),
        ("source.txt", "sft\n", ["objectives", "turn-credit"]),
    ],
)
def test_studies_of_earlier_versions_are_known(file, content, of, tmp_path):
    for i, study in enumerate(STUDIES):
        path = put(tmp_path / str(i) / file, content)
        if study in of:
            study_place.claim(path.parent, study)
        else:
            with pytest.raises(ConfigError, match=f"holds the study .*{of[-1]}"):
                study_place.claim(path.parent, study)


@pytest.mark.parametrize("study", STUDIES)
def test_a_run_and_files_of_others_are_no_place_for_a_study(study, tmp_path):
    put(tmp_path / "run" / "config.yaml", "x")
    with pytest.raises(ConfigError, match="is a run, not a study"):
        study_place.claim(tmp_path / "run", study)
    table = f"{study}.json" if study in ("causal", "abstention") else "table.json"
    for content in ("mine", {"agents": {}}):
        put(tmp_path / "mine" / table, content)
        with pytest.raises(ConfigError, match=f"has a {table} that is not of this study"):
            study_place.claim(tmp_path / "mine", study)
    put(tmp_path / "other" / "study.json", {"mine": 1})
    with pytest.raises(ConfigError, match=r"has a study.json that is not of this study"):
        study_place.claim(tmp_path / "other", study)
    study_place.claim(tmp_path / "own", study)
    (tmp_path / "own" / table).mkdir()
    with pytest.raises(ConfigError, match=table):
        study_place.claim(tmp_path / "own", study)


def test_a_table_replaces_only_an_earlier_one(tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "out"
    store.save(run, "sft", *summary())
    words = ["eval", "--table", str(run), "--out", str(out)]
    assert cli.main(words) == cli.main(words) == 0 and set(files(out)) == {"table.json", "table.md"}
    capsys.readouterr()
    with pytest.raises(ConfigError, match="has a table.json that is not of this study"):
        study_place.claim(out, "objectives")
    put(out / "table.json", {"mine": 1})
    before = files(out)
    assert cli.main(words) == 2 and files(out) == before
    one_line(capsys, "`eval --table` did not write")


def test_bad_seeds_of_a_study_are_refused_first(tmp_path, capsys):
    put(tmp_path / "run" / "config.yaml", config_io.dump(RunConfig()))
    words = ["reproduce", "capability-targeting", "--init", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    for seed in ("-5", "9" * 20):
        assert cli.main([*words, "--seeds", seed]) == 2
        one_line(capsys, "seed")
    assert not (tmp_path / "out").exists()


# Reports of a platform


@pytest.fixture
def simulated(tmp_path, monkeypatch):
    """Writes reports without simulating; how many is the argument."""
    monkeypatch.setattr(exports, "draw", lambda config, platform, size: fake_set(size))
    out = tmp_path / "reports"
    return out, lambda n, *words: cli.main(
        ["simulate", "--export", "meta", "--episodes", str(n), "--out", str(out), *words]
    )


def test_a_second_export_leaves_no_report_without_its_truth(simulated):
    out, write = simulated
    assert write(3) == 0
    put(out / "notes.txt", "mine")
    assert write(1) == 0
    assert set(files(out)) == {"meta-000-report.csv", "truth.json", "notes.txt"}
    assert len(json.loads((out / "truth.json").read_text())) == 1


@pytest.mark.parametrize(
    "there, says",
    [
        ({"truth.json": '{"mine": 1}'}, "holds something else (truth.json)"),
        ({"truth.json": "[]", "meta-000-report.csv": "mine"}, "holds something else"),
        ({"truth.json": [{"platform": "meta", "files": ["../run.csv"]}]}, "holds something else"),
        ({"notes.txt": "mine"}, "holds something else (notes.txt)"),
        (
            {
                "truth.json": [{"platform": "meta", "files": ["meta-000-report.csv"]}],
                "meta-000-report.csv": "",
                "meta-001-report.csv": "mine",
            },
            "meta-001-report.csv is not of the export that lies there",
        ),
    ],
)
def test_an_export_replaces_nothing_of_others(there, says, simulated, capsys):
    out, write = simulated
    for name, content in there.items():
        put(out / name, content)
    before = files(out)
    assert write(2) == 2 and files(out) == before
    one_line(capsys, says)


def test_an_export_can_be_stopped_and_begun_again(simulated, monkeypatch, capsys):
    out, write = simulated
    assert write(2) == 0
    before, whole = files(out), exports.exports.write

    def stopped(record, platform, folder, stem):
        if stem.endswith("001"):
            signal.raise_signal(signal.SIGINT)
        return whole(record, platform, folder, stem)

    monkeypatch.setattr(exports.exports, "write", stopped)
    assert write(3) == 130 and files(out) == before
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith("interrupted; start again with: trace-jax simulate") and "--resume" not in told

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exports.exports, "write", full)
    assert write(3) == 2 and files(out) == before
    one_line(capsys, "no space left")
    monkeypatch.setattr(exports.exports, "write", whole)
    assert write(3) == 0 and len(files(out)) == 4


def test_a_signal_that_comes_after_the_last_look_is_seen_by_what_comes_next():
    with Interrupt() as outer:
        with Interrupt() as inner:
            inner._receive(2, None)
        assert outer.requested
        with Interrupt() as after, pytest.raises(Interrupted):
            after.check()


# The policy that the package carries


def test_an_export_to_ship_takes_the_place_of_an_earlier_one_alone(tmp_path, monkeypatch):
    config, out, made = RunConfig(), tmp_path / "shipped", {"stage": "sft", "measured": {}}
    work = SimpleNamespace(config=config, imported=False, interrupt=Interrupt())

    def written(weights, manifest):
        def write(work, stage, folder, dtype):
            put(folder / "model.safetensors", weights)
            put(folder / "config.yaml", weights)
            if manifest is None:
                work.interrupt.signal = 2
                return {}
            put(folder / shipped.MANIFEST, manifest)
            return manifest

        monkeypatch.setattr(export, "_shipped", write)
        return export.write_shipped(work, "sft", out)

    digests = {"model.safetensors": "x", "config.yaml": "y"}
    export._refuse_unshipped(out)
    assert written("one", made | {"files": digests})["stage"] == "sft"
    put(out / "notes.txt", "mine")
    before = files(out)
    with pytest.raises(Interrupted):
        written("two", None)
    assert files(out) == before
    work.interrupt.signal = None
    export._refuse_unshipped(out)
    written("two", made | {"files": digests})
    assert (out / "model.safetensors").read_text() == "two" and (out / "notes.txt").read_text() == "mine"
    assert not (out / places.PARTIAL).exists()


@pytest.mark.parametrize(
    "there",
    [
        {"manifest.json": {"mine": 1}, "config.yaml": "mine: 1"},
        {"manifest.json": {"files": {"train.parquet": "x"}, "splits": {}}},  # of a data set
        {"manifest.json": [], "model.safetensors": ""},
        {"config.yaml": "name: run"},
        {"notes.txt": "mine"},
    ],
)
def test_an_export_to_ship_replaces_nothing_of_others(there, tmp_path, capsys):
    put(tmp_path / "run" / "config.yaml", config_io.dump(RunConfig()))
    out = tmp_path / "out"
    for name, content in there.items():
        put(out / name, content)
    before = files(out)
    words = ["export", "--run-dir", tmp_path / "run", "--format", "shipped", "--stage", "sft", "--out", out]
    assert cli.main([*map(str, words)]) == 2 and files(out) == before
    one_line(capsys, f"--out {out} holds something else ({min(there)})")


def test_the_policy_of_the_package_is_one():
    assert shipped.is_one(shipped.FOLDER)


# The comparison of adapters


def test_results_of_other_settings_are_not_replaced(tmp_path):
    config = RunConfig()
    work = SimpleNamespace(config=config, environment=lambda split: range(3))
    found, rows = summary()
    asked = routing._asked(work, "test")
    store.save(tmp_path, "base", found | {"settings": asked | {"adapters": {"stopping": 4}}}, rows)
    assert set(routing._known(work, tmp_path, "test")) == {"base"} and routing._others(work, tmp_path, "test") is None
    work.config = config.replace(evaluation=dataclasses.replace(config.evaluation, samples=7))
    assert routing._others(work, tmp_path, "test") is not None  # and so they go into a directory of their own
    assert routing._others(work, tmp_path / "other" / "test,evaluation.samples=7", "test") is None
    with pytest.raises(ConfigError, match=r"base.json is of other settings \(`evaluation.samples` is 5, not 7\)"):
        routing._known(work, tmp_path, "test")
    with pytest.raises(ConfigError, match=r"\(`split` is test, not validation\) and would be lost"):
        routing._known(SimpleNamespace(config=config, environment=work.environment), tmp_path, "validation")


def test_a_copied_adapter_is_left_out_with_a_note(tmp_path, capsys):
    put(tmp_path / "adapters" / "stopping-old" / "config.yaml", "x: 1")
    assert routing.finished(tmp_path, RunConfig()) == []
    assert f"note: {tmp_path / 'adapters' / 'stopping-old'} is left out" in capsys.readouterr().out
    put(tmp_path / "adapters" / "stopping" / "config.yaml", "x: 1")
    with pytest.raises(ConfigError, match="damaged"):
        routing.finished(tmp_path, RunConfig())


def test_a_choice_that_does_not_depend_on_the_task_is_said_to_be_none():
    from trace_jax.recipes import routing

    result = {"adapters": ["drill-down", "abstention"], "split": "test", "agreement": 0.2, "chance": 0.2, "oracle": {}}
    assert "chose drill-down for every episode" in routing.markdown(result | {"chosen": {"drill-down": 9}})
    assert "for every episode" not in routing.markdown(result | {"chosen": {"drill-down": 8, "base": 1}})
