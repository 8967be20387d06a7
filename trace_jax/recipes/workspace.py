"""What the stages of a run share: tokenizer, policy, mesh, environments, engine. Each is made at first use."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from trace_jax.config import ConfigError, MeshConfig, RunConfig
from trace_jax.environments.base import Environment
from trace_jax.evaluation import sets
from trace_jax.learner import sharding
from trace_jax.learner.checkpoint import CheckpointStore
from trace_jax.learner.objectives import Objective
from trace_jax.learner.roles import role_meshes
from trace_jax.learner.step import Learner, Params, transformer_logprobs
from trace_jax.learner.stream import Stream
from trace_jax.policy import chat_files, hf, lora, mixture
from trace_jax.policy.chat import CONTROL, Chat
from trace_jax.policy.tokenizer import SentencePieceTokenizer
from trace_jax.policy.transformer import Transformer, logical_axes
from trace_jax.recipes import processes, schedule, shipped
from trace_jax.recipes.domain import domain_of
from trace_jax.recipes.interrupt import Interrupt
from trace_jax.recipes.progress import Progress
from trace_jax.recipes.rundir import ADAPTERS, BASE, RunDirectory, writing
from trace_jax.recipes.teacher import Lesson
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.placement import owners
from trace_jax.rollout.sampling import Sampling, check_training

TOKENIZER = chat_files.SENTENCEPIECE


def on_this_machine(config: RunConfig) -> RunConfig:
    """The configuration of a run to look at: with all devices there are, where its mesh, perhaps a pod's, does not fit
    them. For commands whose results do not depend on it."""
    try:
        role_meshes(config.mesh)
    except ConfigError:
        return config.replace(mesh=MeshConfig())
    return config


@dataclass
class Workspace:
    """One run being worked on."""

    run: RunDirectory
    progress: Progress
    interrupt: Interrupt
    _environments: dict[str, Environment] = field(default_factory=dict)
    _learners: dict[Any, Learner] = field(default_factory=dict)  # the last one, for runs that `share` its programs

    @property
    def config(self) -> RunConfig:
        """The run's configuration."""
        return self.run.config

    # Tokenizer

    def train_tokenizer(self, lessons: list[Lesson]) -> None:
        """Trains the tokenizer on transcripts unless the run has one."""
        if chat_files.tokenizer_files(self.run.path):
            return
        path = self.run.path / TOKENIZER
        texts = [text for lesson in lessons[: self.config.tokenizer.transcripts] for text in lesson.messages()]
        tokenizer = SentencePieceTokenizer.train(
            texts, self.config.tokenizer, list(CONTROL), domain_of(self.config).atoms
        )
        partial = path.with_suffix(".partial")
        with writing(path):
            tokenizer.save(partial)
            partial.replace(path)
        self.progress.note(f"tokenizer: {tokenizer.vocab_size} pieces")

    @cached_property
    def chat(self) -> Chat:
        """Turn format over the run's tokenizer; `ConfigError` before the tokenizer was trained or imported."""
        path = self.run.path / TOKENIZER
        if not chat_files.tokenizer_files(self.run.path):
            if self.store("sft").latest() is not None:
                raise ConfigError(f"{path} is missing: restore it, {self.run.path}/export may hold a copy")
            raise ConfigError(f"{self.run.path} has no tokenizer yet: {self._first('sft')}")
        chat = chat_files.open_chat(self.run.path, self.config.chat)
        for note in chat.notes if "sft" not in self.run.begun() else ():  # later it was said, and cannot be changed
            self.progress.note(note)
        return chat

    # Policy

    @cached_property
    def model(self) -> Transformer:
        """The policy: its structure and the shapes of its parameters, without numbers."""
        return nnx.eval_shape(self._drawn)

    def _drawn(self) -> Transformer:
        key = jax.random.key(schedule.collection_seed(self.config.seed, "policy", 0))
        vocab_size = self.config.policy.vocab_size or self.chat.tokenizer.vocab_size
        return Transformer(self.config.policy, vocab_size, rngs=nnx.Rngs(key))

    @property
    def imported(self) -> bool:
        """Whether the run's policy came from somewhere else (`trace-jax import`, or --init of a run with adapters)."""
        return self.store(BASE).latest() is not None

    @cached_property
    def base_params(self) -> Params:
        """Parameters before any training here: imported ones, on the learner's mesh, or a function of the seed."""
        if self.imported:
            return self._restored(self.store(BASE), nnx.state(self.model, nnx.Param), logical_axes(self.model))
        return nnx.state(self._drawn(), nnx.Param)

    @cached_property
    def frozen(self) -> lora.Frozen | None:
        """What adapters, or a gate over adapters, are trained on, on the learner's mesh; None where all parameters are
        trained.

        Raises:
            ConfigError: the run trains a gate and has no adapters for it.
        """
        adapters = self.config.lora
        if not adapters.rank:
            return None
        placed = sharding.shardings(self.base_params, logical_axes(self.model), self.mesh)
        # the scale, too, or the sampler could not gather them by one program on the mesh
        scale = lora.scale(adapters, max(1, len(adapters.gate)))
        scale = jax.device_put(scale, NamedSharding(self.mesh, PartitionSpec()))
        return lora.Frozen(jax.device_put(self.base_params, placed), scale, self._mixed())

    def _mixed(self) -> lora.Pairs | None:
        """The adapters that the run's gate mixes, side by side."""
        policy, adapters = self.config.policy, self.config.lora
        if not adapters.gate:
            return None
        like = jax.eval_shape(lambda key: lora.init(policy, adapters, key, len(adapters.gate)), jax.random.key(0))
        return self._restored(self.store(ADAPTERS), like, lora.axes(policy, adapters))

    @cached_property
    def initial_params(self) -> Params:
        """What is trained, before any training: all parameters, or fresh adapters, a function of the seed, or a gate
        that prefers none."""
        if not self.config.lora.rank:
            return self.base_params
        if self.config.lora.gate:
            return mixture.init(self.config.policy, len(self.config.lora.gate))
        key = jax.random.key(schedule.collection_seed(self.config.seed, "adapters", 0))
        return jax.jit(lambda key: lora.init(self.config.policy, self.config.lora, key))(key)

    @property
    def axes(self) -> Any:
        """Logical axes of what is trained."""
        policy, adapters = self.config.policy, self.config.lora
        if adapters.gate:
            return mixture.axes()
        return lora.axes(policy, adapters) if adapters.rank else logical_axes(self.model)

    def merged(self, params: Params, exact: bool = False) -> Params:
        """All parameters of a policy, from what was trained of it; `exact` as in `lora.merged`.

        Raises:
            ConfigError: a gate was trained.
        """
        if self.config.lora.gate:
            raise ConfigError(
                f"{self.run.path} mixes adapters {', '.join(self.config.lora.gate)} by what each prompt says, which no "
                "single set of weights does: export the adapters one by one, or serve the run from here"
            )
        if self.frozen is None:
            return params
        factor = self.config.lora.alpha / self.config.lora.rank
        whole = nnx.state(self.model, nnx.Param)
        nnx.replace_by_pure_dict(whole, lora.merged(nnx.to_pure_dict(self.frozen.base), params, factor, exact=exact))
        return whole

    @property
    def start_params(self) -> Params:
        """What GRPO begins with: the finished SFT policy, or an imported one without SFT.

        Raises:
            ConfigError: SFT is not finished.
        """
        if self.is_finished("sft"):
            return self.trained_params("sft")
        if self.imported and self.store("sft").latest() is None:
            return self.initial_params
        raise ConfigError(
            f"SFT of {self.run.path} is not finished: run `trace-jax sft --run-dir {self.run.path} --resume` first"
        )

    @cached_property
    def _meshes(self) -> tuple[jax.sharding.Mesh, jax.sharding.Mesh]:
        meshes = role_meshes(self.config.mesh)
        processes.introduce(meshes[0])
        return meshes

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """The learner's devices."""
        return self._meshes[0]

    @property
    def sampling_mesh(self) -> jax.sharding.Mesh:
        """The sampler's devices; the learner's unless some are set apart."""
        return self._meshes[1]

    def learner(self, objective: Objective, optimizer: Any, total_steps: int, sampling: Sampling) -> Learner:
        """A learner for the policy, of trajectories that are sampled so.

        Raises:
            ConfigError: a sampler whose distribution it does not reproduce.
        """
        check_training(sampling)
        key = (objective, optimizer, total_steps, sampling)
        if key not in self._learners:
            logprobs = transformer_logprobs(nnx.graphdef(self.model), sampling.temperature)
            self._learners.clear()
            self._learners[key] = Learner(
                logprobs, objective, optimizer, total_steps, self.mesh, self.axes, self.frozen
            )
        return self._learners[key]

    def share(self, other: Workspace, adapters: bool = True) -> None:
        """Takes the policy on the devices, the sampler and the compiled programs of another run of the same base.

        Both runs must have the same `policy`, `rollout` and `mesh` sections, and the same imported base.

        Args:
            adapters: both have the same `lora` section, too; without it only the base is shared.
        """
        for name in ("chat", "model", "_meshes", "base_params", *(("frozen", "engine") if adapters else ())):
            self.__dict__[name] = getattr(other, name)
        if adapters:
            self._learners = other._learners

    def furnish(self, folder: Path | None = None) -> None:
        """Gives an empty run with the configuration of a shipped policy its tokenizer, and its parameters as those
        before any training.

        Raises:
            ConfigError: a file is missing or damaged.
        """
        folder = shipped.check(folder)
        self.__dict__["chat"] = chat_files.open_chat(folder, self.config.chat)
        self.__dict__["base_params"] = nnx.state(hf.load_model(folder), nnx.Param)

    def store(self, stage: str) -> CheckpointStore:
        """The checkpoints of a stage."""
        return CheckpointStore(
            str(self.run.checkpoints(stage)),
            self.config.keep_checkpoints,
            keep_best=self.config.grpo.keep_best if stage == "grpo" else 0,
            background=self.config.save_in_background,
        )

    def is_finished(self, stage: str) -> bool:
        """Whether a stage has made its last step (its checkpoints say how many there are)."""
        store = self.store(stage)
        step = store.latest()
        return step is not None and step == store.extra(step)["total_steps"]

    def trained_params(self, stage: str) -> Params:
        """Parameters of a stage's newest checkpoint, on the mesh; "best": of GRPO's with the best validation reward.

        Raises:
            ConfigError: the stage has no checkpoint, or a damaged one.
        """
        store = self.store("grpo" if stage == "best" else stage)
        step = store.best() if stage == "best" else store.latest()
        if step is None and stage == "best":
            raise ConfigError(
                f"{self.run.path} has no validated GRPO checkpoint: take the newest (--stage grpo, --agent grpo), or "
                "train with grpo.validation_episodes and grpo.keep_best above 0"
            )
        if step is None:
            raise ConfigError(f"{self.run.path} has no {stage} checkpoint: {self._first(stage)}")
        return self._restored(store, self.initial_params, self.axes, step)

    def _restored(self, store: CheckpointStore, like: Any, axes: Any, step: int | None = None) -> Params:
        placed = sharding.shardings(like, axes, self.mesh)

        def shape(array, where):
            return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=where)

        wanted = {"params": jax.tree.map(shape, like, placed)}
        return store.restore(store.latest() if step is None else step, wanted)[0]["params"]

    def latest_stage(self) -> str:
        """The most advanced stage that has a checkpoint.

        Raises:
            ConfigError: no stage has one, or the most advanced stage has only incomplete ones: falling back to the
                stage before it would pass off one policy as another.
        """
        for stage in ("grpo", "sft"):
            if self.store(stage).latest() is not None:
                return stage
            folder = self.run.checkpoints(stage)
            if stage == "grpo" and folder.is_dir() and any(folder.iterdir()):
                raise ConfigError(
                    f"{folder} holds no complete checkpoint: continue the run with `trace-jax grpo --run-dir "
                    f"{self.run.path} --resume`, or choose the SFT policy (export --stage sft, eval --agent sft)"
                )
        own = ", or score the imported policy by --agent untrained" if self.imported else ""
        raise ConfigError(f"{self.run.path} has no checkpoint: {self._first('sft')}{own}")

    def _first(self, stage: str) -> str:
        again = " --resume" if stage == "sft" else ""
        return f"run `trace-jax {stage} --run-dir {self.run.path}{again}` first"

    # Rollout

    def environment(self, split: str) -> Environment:
        """The tasks of a split; what is expensive to make is kept under `data/` of the run directory."""
        if split not in self._environments:
            make, config = domain_of(self.config).split, sets.applied(self.config) if split == "test" else self.config
            self._environments[split] = processes.in_turn(
                self.interrupt,
                f"environment-{split}",
                lambda: make(config, split, self.run.folder("data"), self.interrupt.check),
            )
        return self._environments[split]

    @cached_property
    def engine(self) -> Engine:
        """The sampling engine on its devices; give it parameters with `set_params`. With several processes each that
        leads a lane has its share of the slots."""
        rollout = self.config.rollout
        leaders = {found[0] for found in owners(self.sampling_mesh)}
        rollout = dataclasses.replace(rollout, slots=-(-rollout.slots // len(leaders)))
        axes, like = logical_axes(self.model), nnx.state(self.model, nnx.Param)

        def frozen_specs(mesh):
            base, pairs = sharding.shardings(like, axes, mesh), None
            if self.config.lora.gate:
                pairs = self.frozen.pairs
                pairs = sharding.shardings(pairs, lora.axes(self.config.policy, self.config.lora), mesh)
            return lora.Frozen(base, NamedSharding(mesh, PartitionSpec()), pairs)

        return Engine(
            self.model,
            rollout,
            self.chat.stop_id,
            mesh=self.sampling_mesh,
            specs=lambda mesh: sharding.shardings(self.initial_params, self.axes, mesh),
            frozen=self.frozen,
            frozen_specs=frozen_specs,
            channel=lambda place: Stream(f"lane-{place.lane}", place.processes),
        )
