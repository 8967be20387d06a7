"""Data sets that were interrupted: continued, held by one process, damaged, refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_dataset import SETTINGS, contents, write_parts
from helpers_episodes import fake_set

from trace_jax.config import ConfigError
from trace_jax.warehouse.dataset import Writer, read
from trace_jax.warehouse.dataset_log import LOG


@pytest.fixture(scope="module")
def episodes():
    return fake_set(12, missing=True)


@pytest.fixture(scope="module")
def unfinished(episodes, tmp_path_factory):
    root = tmp_path_factory.mktemp("unfinished") / "d"
    write_parts(root, episodes, upto=2, finish=False)
    return root


def test_an_interrupted_set_continues_to_the_same_bytes(tmp_path, episodes):
    write_parts(tmp_path / "whole", episodes)
    assert write_parts(tmp_path / "d", episodes, upto=2, finish=False) == 0
    assert not (tmp_path / "d/manifest.json").exists()
    with pytest.raises(ConfigError, match="unfinished: continue it with"):
        read(tmp_path / "d")
    # A third part was being written, and its line in the log was cut short.
    half = tmp_path / "d/test/visible/inventory/part-00002.parquet"
    half.write_bytes(b"PAR1")
    with open(tmp_path / "d/unfinished.jsonl", "a") as log:
        log.write('{"split": "test", "chu')
    assert write_parts(tmp_path / "d", episodes, upto=2, resume=True, finish=False) == 2
    write_parts(tmp_path / "d", episodes, resume=True)
    assert contents(tmp_path / "d") == contents(tmp_path / "whole")


def test_what_is_there_is_not_overwritten(tmp_path, episodes):
    root = tmp_path / "d"
    write_parts(root, episodes, upto=1, finish=False)
    before = contents(root)
    for options, message in (
        ({}, "unfinished data set: continue it with --resume, remove it"),
        (
            {"resume": True, "settings": {**SETTINGS, "seed": 8}},
            r"of other settings or another version \(`seed` is 7 there, 8 here\): rem",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            write_parts(root, episodes, **options)
    assert contents(root) == before
    altered = root / "test/hidden/gt_episode/part-00000.parquet"
    altered.write_bytes(b"")
    with pytest.raises(ConfigError, match="part-00000.parquet is missing or altered: remove"):
        write_parts(root, episodes, resume=True)
    write_parts(tmp_path / "e", episodes)
    with pytest.raises(ConfigError, match="already holds a data set"):
        write_parts(tmp_path / "e", episodes, resume=True)
    (tmp_path / "g").mkdir()
    (tmp_path / "g/README.md").write_text("mine")
    for resume in (False, True):
        with pytest.raises(ConfigError, match="is not empty: choose a new or an empty directory"):
            write_parts(tmp_path / "g", episodes, resume=resume)
    assert contents(tmp_path / "g") == {"README.md": b"mine"}
    (tmp_path / "f").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        write_parts(tmp_path / "f", episodes)


def altered(content, **changes):
    """The log with other fields in its second chunk; None takes a field out."""
    header, first, second = content.splitlines()
    entry = {k: v for k, v in (json.loads(second) | changes).items() if v is not None}
    return b"\n".join([header, first, json.dumps(entry).encode(), b""])


DAMAGES = {
    "bytes": lambda c: c + b"\xff\xfe\n",
    "number": lambda c: c + b"3\n",
    "empty entry": lambda c: c + b"{}\n",
    "no JSON": lambda c: c + b"{oops\n",
    "list": lambda c: c + b"[1]\n",
    "deep": lambda c: c + b"[" * 100_000 + b"\n",
    "header": lambda c: b"3\n" + c.partition(b"\n")[2],
    "header without splits": lambda c: b"{}\n" + c.partition(b"\n")[2],
    "only a number": lambda c: b"3\n",
    "no line": lambda c: b"",
    "split": lambda c: altered(c, split="train"),
    "split of another type": lambda c: altered(c, split=["test"]),
    "no place": lambda c: altered(c, accepted=None),
    "short place": lambda c: altered(c, accepted=[1]),
    "place of text": lambda c: altered(c, accepted="1234"),
    "place with a float": lambda c: altered(c, accepted=[2.0, 2, 2, 1, 1]),
    "place of others": lambda c: altered(c, accepted=[0, 0, 0, 0, 0]),
    "too few proposals": lambda c: altered(c, proposed=[0, 0, 0, 0, 0]),
    "gap": lambda c: altered(c, chunk=2),
    "twice": lambda c: altered(c, chunk=0),
    "first is missing": lambda c: b"\n".join(c.splitlines()[::2]) + b"\n",
    "count": lambda c: altered(c, episodes=5),
    "no files": lambda c: altered(c, sha256={}),
    "files of another type": lambda c: altered(c, sha256=[]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_log_is_one_line(tmp_path, unfinished, episodes, damage):
    root = tmp_path / "d"
    shutil.copytree(unfinished, root)
    (root / LOG).write_bytes(DAMAGES[damage]((root / LOG).read_bytes()))
    before = contents(root)
    with pytest.raises(ConfigError) as caught:
        write_parts(root, episodes, resume=True)
    assert str(caught.value) == f"{root / LOG} is damaged: remove {root} and start again"
    assert contents(root) == before


def test_altering_without_change_is_no_damage(tmp_path, unfinished, episodes):
    """What the damages above begin with is a sound log."""
    root = tmp_path / "d"
    shutil.copytree(unfinished, root)
    (root / LOG).write_bytes(altered((root / LOG).read_bytes()))
    assert write_parts(root, episodes, resume=True)["splits"]["test"]["parts"] == 3


def test_the_first_other_setting_is_named(tmp_path, unfinished, episodes):
    root = tmp_path / "d"
    shutil.copytree(unfinished, root)
    other = {**SETTINGS, "simulator": {"difficulty": "hard"}}
    with pytest.raises(ConfigError, match=r"\(`simulator.difficulty` is paper there, hard here\)"):
        write_parts(root, episodes, resume=True, settings=other)
    with pytest.raises(ConfigError, match=r"\(`extra` is not set there, 1 here\)"):
        write_parts(root, episodes, resume=True, settings={**SETTINGS, "extra": 1})
    with pytest.raises(ConfigError, match=r"\(`episodes of test` is 12 there, 4 here\)"):
        write_parts(root, episodes, resume=True, upto=1)


def test_a_directory_in_the_place_of_a_part(tmp_path, unfinished, episodes):
    root = tmp_path / "d"
    shutil.copytree(unfinished, root)
    part = root / "test/hidden/gt_episode/part-00001.parquet"
    part.unlink()
    part.mkdir()
    with pytest.raises(ConfigError) as caught:
        write_parts(root, episodes, resume=True)
    assert str(caught.value) == f"{part} is a directory: remove {root} and start again"
    part.rmdir()
    shutil.copy(unfinished / part.relative_to(root), part)
    (part.parent / "part-00002.parquet").mkdir()  # the next one
    with pytest.raises(ConfigError, match=r"gt_episode/part-00002.parquet: is a directory; remove it or") as caught:
        write_parts(root, episodes, resume=True)
    (part.parent / "part-00002.parquet").rmdir()
    write_parts(root, episodes, resume=True)


def test_nothing_is_left_of_a_set_without_a_chunk(tmp_path, episodes):
    """A run that failed before its first chunk is in nobody's way, also when it was killed."""
    root = tmp_path / "d"
    with pytest.raises(RuntimeError), Writer(root, SETTINGS, {"test": {"BUDGET_CAP/0": 1}}):
        raise RuntimeError
    assert list(root.iterdir()) == []
    for left in (b"", b'{"form', json.dumps({"format": 1, "settings": {}, "splits": {}}).encode() + b"\n"):
        (root / LOG).write_bytes(left)
        with Writer(root, SETTINGS, {"test": {"BUDGET_CAP/0": 1}}):
            pass
        assert list(root.iterdir()) == []
    write_parts(root, episodes)


def test_one_process_at_a_time(tmp_path, episodes):
    """Another process is refused, with and without --resume; a killed one lets go."""
    root = tmp_path / "d"
    code = (
        "import sys; from pathlib import Path; from helpers_dataset import *; from helpers_episodes import fake_set\n"
        "episodes, root = fake_set(12, missing=True), Path(sys.argv[1])\n"
        "write_parts(root, episodes, upto=1, finish=False)\n"
        "with Writer(root, SETTINGS, {'test': episodes.composition()}, True):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(root)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent
    ) as other:
        assert other.stdout.readline() == "held\n"
        before = contents(root)
        for resume in (False, True):
            with pytest.raises(ConfigError) as caught:
                write_parts(root, episodes, resume=resume)
            assert str(caught.value).startswith(f"{root} is being written by another process: wait for it or")
        assert contents(root) == before
        other.kill()
    write_parts(root, episodes, resume=True)
    write_parts(tmp_path / "whole", episodes)
    assert contents(root) == contents(tmp_path / "whole")


def test_a_set_with_other_episodes_than_its_composition_is_not_finished(tmp_path, episodes):
    wanted = {"test": episodes.composition()}
    for numbers in ((0, 1), (0, 2, 1)):
        root = tmp_path / "-".join(map(str, numbers))
        with Writer(root, SETTINGS, wanted) as writer:
            for number in numbers:
                part = episodes.slice(number * 4, (number + 1) * 4)
                writer.append("test", part.batch, part.verdict, number, None)
            with pytest.raises(ConfigError, match="is damaged: test has .* not the 12 of its composition"):
                writer.finish()
        assert not (root / "manifest.json").exists()
