"""`trace-jax import`: a run whose policy is an open checkpoint's, for `sft`, `grpo` or `train` to go on with."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from trace_jax import config_io, config_rules
from trace_jax.config import ConfigError, PolicyConfig, RunConfig
from trace_jax.config_rules_policy import mixers, parameters
from trace_jax.learner import sharding
from trace_jax.learner.checkpoint import CheckpointStore
from trace_jax.learner.checkpoint_files import room
from trace_jax.learner.roles import role_meshes
from trace_jax.policy import chat_files, hf, hf_config, hf_peft, hf_read
from trace_jax.policy.chat import Chat
from trace_jax.policy.fast_tokenizer import FILES, FastTokenizer
from trace_jax.policy.gguf import GgufFile
from trace_jax.policy.gguf_tokenizer import tokenizer_files
from trace_jax.policy.hf_files import DTYPES, SHORT, SafetensorFiles
from trace_jax.policy.template_chat import TemplateChat
from trace_jax.policy.tokenizer import SentencePieceTokenizer
from trace_jax.policy.transformer import Transformer, logical_axes
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import RunDirectory
from trace_jax.recipes.workspace import BASE

Fields = Iterable[tuple[str, str]]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was looked into.

    Attributes:
        path: it was given by.
        cfg: the policy that it says it is.
        tensors: of it, not read yet.
        tokens: ids that its configuration names.
        generation: its generation settings, if it has some.
    """

    path: Path
    cfg: PolicyConfig
    tensors: hf_read.Source
    tokens: Mapping[str, Any]
    generation: bytes | None

    def chat(self, config: RunConfig) -> Chat:
        """Its turn format over its tokenizer.

        Raises:
            ConfigError: there is none, it cannot be used, or it has more tokens than the policy.
        """
        if isinstance(self.tensors, GgufFile):
            chat: Chat = TemplateChat(FastTokenizer(tokenizer_files(self.tensors.metadata)), config.chat)
        else:
            chat = chat_files.open_chat(self.path, config.chat)
        if chat.tokenizer.vocab_size > self.cfg.vocab_size:
            raise ConfigError(
                f"import: the tokenizer of {self.path} has {chat.tokenizer.vocab_size} tokens and the policy "
                f"{self.cfg.vocab_size}: use the files of one model"
            )
        return chat


def command(source: Path, run_dir: Path, file: Path | None, fields: Fields) -> dict[str, Any]:
    """Makes a run directory with the policy, tokenizer and chat template of a checkpoint; whole or not at all.

    Args:
        source: a directory in Hugging Face layout, or a GGUF file.
        file: a configuration of the run. fields: further fields of it, as (name, text).

    Returns:
        `run_dir`, `parameters`, `tensors`, and `notes`, lines about what was not taken over.

    Raises:
        ConfigError: the checkpoint is damaged or not supported, the configuration disagrees with it, or the run cannot
            be made.
        Interrupted: a signal arrived; nothing is left.
    """
    RunDirectory.refuse_taken(run_dir)
    if (run_dir / hf.CONFIG).exists():
        raise ConfigError(f"{run_dir} holds a checkpoint ({hf.CONFIG}): choose another --run-dir")
    progress = Progress()
    with Interrupt() as interrupt:
        opened = open_checkpoint(source)
        config = configuration(opened, file, fields)
        found = hf_read.resolve(opened.tensors, config.policy, opened.cfg.vocab_size)
        chat = opened.chat(config)
        mesh, _ = role_meshes(config.mesh)
        notes = [*found.notes, *chat.notes]
        for note in notes:
            progress.note(note)

        def prepare(run: RunDirectory) -> None:
            if run.checkpoints(BASE).exists():  # left by an import that was killed, perhaps of another tokenizer
                for name in (*FILES, chat_files.SENTENCEPIECE):
                    (run.path / name).unlink(missing_ok=True)
            _save(run, opened, found, config, mesh, progress, interrupt)
            is_one_file = isinstance(chat.tokenizer, SentencePieceTokenizer)
            chat.tokenizer.save(run.path / chat_files.SENTENCEPIECE if is_one_file else run.path)

        with _leaving_nothing(run_dir), RunDirectory.create(run_dir, config, prepare):
            pass
    count = parameters(config.policy, config.policy.vocab_size)
    print(f"imported policy: {run_dir}, {count:,} parameters")
    progress.note(f"continue with: trace-jax sft --run-dir {run_dir} --resume (or grpo)")
    return {"run_dir": str(run_dir), "parameters": count, "tensors": len(found.names), "notes": notes}


def open_checkpoint(source: Path) -> Checkpoint:
    """Looks into a checkpoint; no weights are read.

    Raises:
        ConfigError: it is missing, damaged or not supported.
    """
    if mend := _mend(source):
        raise ConfigError(f"no checkpoint: --from {source}: {mend}")
    if not source.is_dir():
        found = GgufFile(source)
        return Checkpoint(source, found.config, found, {}, None)
    settings = hf.read_settings(source)
    cfg, text = hf.policy_config(settings), hf_config.text_settings(settings)
    tokens = hf_config.tokens(text)
    return Checkpoint(source, cfg, SafetensorFiles(source), tokens, _generation(source / hf.GENERATION))


def _mend(source: Path) -> str | None:
    """What to do where a path is not that of a checkpoint."""
    if not source.exists():
        return "no such path; give a directory with config.json, or a GGUF file"
    if not source.is_dir():
        ours = source.suffix in (".safetensors", ".json", ".bin")
        return f"give the directory that it is in, {source.parent}" if ours else None
    if (source / hf.CONFIG).exists():
        return None
    if (source / hf_peft.CONFIG).exists():
        return "these are adapters; merge them into their base (`peft`: merge_and_unload) and import that"
    if (source / "config.yaml").exists():
        return "it is a run; give what `trace-jax export` writes, or start from its policy with --init"
    if files := sorted(source.glob("*.gguf")):
        return f"give the file, {files[0]}"
    return f"it has no {hf.CONFIG}; copy it there"


def configuration(opened: Checkpoint, file: Path | None, fields: Fields) -> RunConfig:
    """The run's configuration: what the checkpoint fixes of the policy, and the user's for the rest.

    Without `policy.max_length` it is what `rollout.context` needs.

    Raises:
        ConfigError: the user gave another value for what the checkpoint fixes, more positions than it was made for, or
            an invalid combination.
    """
    data = {} if file is None else config_io.read_yaml(file)
    given = config_io.parse_overrides(fields)
    config = config_io.build(RunConfig, data, str(file))
    config = config_io.build(RunConfig, given, "the command line", config)
    named = [part.get("policy") for part in (data, given)]
    mine = {name for part in named if isinstance(part, Mapping) for name in part}
    theirs = opened.cfg
    for name in sorted(mine - set(hf_config.RUNTIME)):
        asked, fixed = getattr(config.policy, name), getattr(theirs, name)
        same = asked == fixed or (name == "vocab_size" and asked == 0)
        if name == "mixers" and asked:
            same = mixers(dataclasses.replace(theirs, mixers=asked)) == mixers(theirs)
        if not same:
            asked, fixed = (config_rules.shown(list(v) if isinstance(v, tuple) else v) for v in (asked, fixed))
            raise ConfigError(f"`policy.{name}` is {asked}, but the checkpoint {opened.path} has {fixed}: leave it out")
    kept = {name: getattr(config.policy, name) for name in hf_config.RUNTIME}
    if "max_length" not in mine:
        kept["max_length"] = min(theirs.max_length, config.rollout.context)
    if kept["max_length"] > theirs.max_length:
        raise ConfigError(
            f"`policy.max_length` is {kept['max_length']}, but the checkpoint {opened.path} was made for "
            f"{theirs.max_length} positions: lower it"
        )
    config = config.replace(policy=dataclasses.replace(theirs, **kept))
    if "name" not in data and "name" not in given:
        stem = opened.path.resolve().stem if opened.path.is_file() else opened.path.resolve().name
        with contextlib.suppress(ConfigError):
            named_so = config.replace(name=stem)
            config_rules.validate(named_so)
            config = named_so
    config_rules.validate(config)
    return config


def _generation(path: Path) -> bytes | None:
    if not path.is_file():
        return None
    content = path.read_bytes()
    try:
        known = isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        known = False
    if not known:
        raise ConfigError(f"import: {path} is no JSON object: copy it again or delete it")
    return content


def _save(
    run: RunDirectory,
    opened: Checkpoint,
    found: hf_read.Resolved,
    config: RunConfig,
    mesh: jax.sharding.Mesh,
    progress: Progress,
    interrupt: Interrupt,
) -> None:
    """Reads the weights onto the mesh and writes them as the run's base policy."""
    vocab_size = config.policy.vocab_size
    size = room(DTYPES[SHORT[config.policy.param_dtype]].itemsize * parameters(config.policy, vocab_size))
    free = shutil.disk_usage(run.path).free
    if size > free:  # before an hour of reading
        raise ConfigError(
            f"import: no space in {run.path}: {-(-size // 2**20)} MiB needed, {free // 2**20} MiB free; free some or "
            "choose another --run-dir"
        )
    model = nnx.eval_shape(lambda: Transformer(config.policy, vocab_size, rngs=nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)
    placed = nnx.to_pure_dict(sharding.shardings(state, logical_axes(model), mesh))
    with progress.bar("import", len(found.names)) as bar:

        def done(count: int, total: int) -> None:
            bar.update(count)
            interrupt.check()

        params = hf_read.read(opened.tensors, found, config.policy, vocab_size, placed, done)
    nnx.replace_by_pure_dict(state, params)
    origin = dataclasses.replace(found.origin, max_length=opened.cfg.max_length, tokens=opened.tokens)
    files = {} if opened.generation is None else {hf.GENERATION: opened.generation}
    with CheckpointStore(str(run.checkpoints(BASE))) as store:
        store.save(0, {"params": state}, {"total_steps": 0, "origin": origin.to_json()}, files=files)
    interrupt.check()


@contextlib.contextmanager
def _leaving_nothing(path: Path) -> Iterator[None]:
    """Takes away what appeared in a directory, and the directory if it is new, when the block fails."""
    before = {p.name for p in path.iterdir()} if path.is_dir() else None
    try:
        yield
    except BaseException:
        if before is None:
            shutil.rmtree(path, ignore_errors=True)
        for found in [p for p in path.iterdir() if p.name not in (before or ())] if path.is_dir() else ():
            if found.is_dir() and not found.is_symlink():
                shutil.rmtree(found, ignore_errors=True)
            else:
                found.unlink(missing_ok=True)
        raise
