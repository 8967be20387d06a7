"""The frozen reference: how likely is the gold answer after each tool turn (arXiv 2607.13988)?

    l_k = mean over the tokens y of the gold answer of log pi_ref(y_j | S_k, scaffold, y_<j)          teacher forced

`S_k` is a trajectory up to the result of its k-th tool call, the scaffold what comes before any answer. One forward
pass answers all k at once: a row holds the trajectory once, and behind it, for every k, a branch (scaffold and answer)
that sees the trajectory as far as `S_k` and itself, at the positions it would have there (`policy.attention.Branches`).
Of N tokens and T turns the plain way computes about N T / 2 + T a positions (a: tokens of a branch), this one N + T a.
What several trajectories have in common up to a boundary is asked once.

Only the reference's parameters and the batches are on the devices; nothing here has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from trace_jax.config import BatchConfig, ConfigError
from trace_jax.learner import sharding
from trace_jax.learner.packing import plan
from trace_jax.policy import lora
from trace_jax.policy.attention import Branches
from trace_jax.policy.transformer import token_logprobs

CHUNK = 1024  # answer tokens of a device whose scores over the vocabulary exist at a time


@dataclass(frozen=True)
class Question:
    """What is asked about one trajectory.

    Attributes:
        ids: its tokens.
        boundaries: lengths of `S_0 .. S_T`, ascending (`turn_credit.boundaries`).
        scaffold: what stands before an answer, the same for all. Without one, the last token before a boundary is
            given again at its place in the branch, since what scores an answer's first token must be in there.
        answer: the gold answer; at least one token.
    """

    ids: Int[np.ndarray, " n"]
    boundaries: Sequence[int]
    scaffold: Sequence[int]
    answer: Sequence[int]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ProbeBatch:
    """Rows of trajectories with their branches.

    Attributes:
        ids: token ids; padding is 0.
        positions: of each token in its trajectory; a branch's go on from its boundary.
        segments: number of the trajectory in its row, from 1; 0 is padding.
        branch: 0 for the trajectory, else the number of the branch, from 1.
        start: boundary of the branch; the row's length for the trajectory.
        wanted: tokens of gold answers.
    """

    ids: Int[Array, "rows time"]
    positions: Int[Array, "rows time"]
    segments: Int[Array, "rows time"]
    branch: Int[Array, "rows time"]
    start: Int[Array, "rows time"]
    wanted: Bool[Array, "rows time"]


# (params, batch) -> log-prob of each wanted token given what it sees; elsewhere anything
ScoreFn = Callable[[Any, ProbeBatch], Float[Array, "rows time"]]


def transformer_scores(graphdef: nnx.GraphDef, chunk: int = CHUNK) -> ScoreFn:
    """`ScoreFn` of a `policy.Transformer` split by `nnx.split(model, nnx.Param)`, or of adapters on it
    (`lora.Frozen`), at temperature 1."""

    def scores(params, batch):
        base, adapters = lora.parts(params)
        model, placement = nnx.merge(graphdef, base), sharding.placement()
        branches = Branches(batch.branch, batch.start)
        hidden = model(batch.ids, batch.positions, batch.segments, placement, branches, adapters)
        # a branch begins with the scaffold, so the token before a wanted one is always of its own branch
        targets, wanted = (jnp.roll(x, -1, axis=1) for x in (batch.ids, batch.wanted))
        scored, _ = token_logprobs(model, hidden, targets, 1.0, chunk, wanted=wanted, placement=placement)
        return jnp.roll(scored, 1, axis=1)

    return scores


def scoring(score_fn: ScoreFn, mesh: Mesh) -> Any:
    """The jitted program of a probe: (params, frozen, batch) -> scores, everywhere; see `Probe`."""

    def scores(params, frozen, batch):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return score_fn(params if frozen is None else (params, frozen), batch)

    return jax.jit(scores, out_shardings=NamedSharding(mesh, PartitionSpec()))


class Positions(NamedTuple):
    """Work of a probe, in positions of a row."""

    needed: int
    computed: int


class Probe:
    """A frozen reference on a mesh.

        probe = Probe(transformer_scores(nnx.graphdef(model)), params, mesh, axes, config.microbatch)
        values = probe(questions)

    One program is compiled for each shape of a micro-batch (`compilations`).
    """

    def __init__(
        self,
        score_fn: ScoreFn,
        params: Any,
        mesh: Mesh,
        axes: Any,
        config: BatchConfig,
        frozen: Any = None,
        *,
        shared: bool = False,
    ):
        """
        Args:
            params: of the reference; copied, unless they are `shared`: on the mesh already, and kept by others.
            axes: tree of the parameters with the logical axis names of each.
            config: shapes of the micro-batches.
            frozen: arrays on the mesh that others use, too, as the base of adapters. `score_fn` is then given the pair
                of parameters and these.
        """
        self._mesh, self._config = mesh, config
        self._ways = mesh.shape["data"] * mesh.shape["fsdp"]
        self._params = params if shared else sharding.place(params, sharding.shardings(params, axes, mesh))
        self._frozen = frozen
        self._scores = scoring(score_fn, mesh)

    def __call__(self, questions: Sequence[Question]) -> list[Float[np.ndarray, " T+1"]]:
        """`l_0 .. l_T` of every question, float64.

        Raises:
            ConfigError: a trajectory and one branch do not fit a row.
            ValueError: a question is not as `Question` says.
        """
        rows = _Rows(questions, self._config.row_length)
        batches, places = rows.batches(self._config, self._ways)
        # dispatched together, fetched in order
        scored = [self._scores(self._params, self._frozen, sharding.place_batch(b, self._mesh)) for b in batches]
        return rows.means([np.asarray(s, np.float64) for s in scored], places)

    def positions(self, questions: Sequence[Question]) -> Positions:
        """How many positions these questions need, and how many are computed, padding included."""
        rows = _Rows(questions, self._config.row_length)
        batches, _ = rows.batches(self._config, self._ways)
        return Positions(sum(map(len, rows.items)), sum(b.ids.size for b in batches))

    def peak_bytes(self, row_length: int, rows: int) -> int:
        """What the program for a micro-batch of this shape needs: parameters, arguments and everything in between."""
        batch = sharding.place_batch(empty_batch(rows, row_length), self._mesh)
        memory = self._scores.lower(self._params, self._frozen, batch).compile().memory_analysis()
        return memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes

    def compilations(self) -> int:
        """How many programs were compiled so far."""
        return self._scores._cache_size()


@dataclass
class _Item:
    """A trajectory, as far as its branches need it, and these."""

    ids: Int[np.ndarray, " n"]
    boundaries: list[int]
    branch: list[int]  # scaffold and answer
    answer: int  # tokens of it
    bare: bool  # no scaffold: `boundaries` are one less, and a branch begins with the token there

    @property
    def trunk(self) -> int:
        return self.boundaries[-1]

    def __len__(self) -> int:
        return self.trunk + len(self.boundaries) * len(self.branch)


class _Rows:
    """Questions as items that fit rows, and where each question finds its values."""

    def __init__(self, questions: Sequence[Question], row_length: int):
        self.items: list[_Item] = []
        self.found: list[list[tuple[int, int]]] = []  # item and branch of every boundary of every question
        known: dict[Any, tuple[int, int]] = {}
        for number, q in enumerate(questions):
            _check(number, q)
            bare = not len(q.scaffold)
            ids, branch = np.asarray(q.ids, np.int32), [*([0] if bare else q.scaffold), *q.answer]
            ask = (tuple(branch), len(q.answer), bare)
            mine: list[tuple[int, int]] = []
            item: _Item | None = None
            for boundary in q.boundaries:
                key = (ids[:boundary].tobytes(), ask)
                boundary -= bare
                if key not in known:
                    if item is None or boundary + (len(item.boundaries) + 1) * len(branch) > row_length:
                        item = _Item(ids, [], branch, len(q.answer), bare)
                        self.items.append(item)
                    item.boundaries.append(boundary)
                    known[key] = (len(self.items) - 1, len(item.boundaries) - 1)
                    if len(item) > row_length:
                        raise ConfigError(
                            f"`grpo.turn_credit.microbatch.row_length` is {row_length}: a trajectory of {boundary} "
                            f"tokens and an answer of {len(branch)} need {boundary + len(branch)}, raise it"
                        )
                mine.append(known[key])
            self.found.append(mine)

    def batches(self, config: BatchConfig, ways: int) -> tuple[list[ProbeBatch], list[tuple[int, int, int]]]:
        """Micro-batches, and the micro-batch, row and offset of each item."""
        planned = plan([len(i) for i in self.items], config, ways)
        batches = [empty_batch(*shape) for shape in planned.shapes]
        segments = [np.zeros(rows, np.int32) for rows, _ in planned.shapes]
        for n in sorted(range(len(self.items)), key=planned.places.__getitem__):
            item, (number, row, at) = self.items[n], planned.places[n]
            batch = batches[number]
            segments[number][row] += 1
            batch.segments[row, at : at + len(item)] = segments[number][row]
            trunk = slice(at, at + item.trunk)
            batch.ids[row, trunk] = item.ids[: item.trunk]
            batch.positions[row, trunk] = np.arange(item.trunk)
            for k, boundary in enumerate(item.boundaries):
                begin = at + item.trunk + k * len(item.branch)
                where = slice(begin, begin + len(item.branch))
                batch.ids[row, where] = item.branch
                if item.bare:
                    batch.ids[row, begin] = item.ids[boundary]
                batch.positions[row, where] = boundary + np.arange(len(item.branch))
                batch.branch[row, where] = k + 1
                batch.start[row, where] = boundary
                batch.wanted[row, where.stop - item.answer : where.stop] = True
        return batches, planned.places

    def means(self, scored: Sequence[np.ndarray], places: Sequence[tuple[int, int, int]]) -> list[np.ndarray]:
        """Mean log-prob of the answer at every boundary of every question."""

        def mean(number: int, k: int) -> float:
            item, (batch, row, at) = self.items[number], places[number]
            stop = at + item.trunk + (k + 1) * len(item.branch)
            # a sum of rounded logarithms may come out a hair above 0
            return min(float(scored[batch][row, stop - item.answer : stop].mean()), 0.0)

        return [np.array([mean(number, k) for number, k in mine]) for mine in self.found]


def empty_batch(rows: int, length: int) -> ProbeBatch:
    """A micro-batch of padding only."""
    ids, positions, segments, branch = (np.zeros((rows, length), np.int32) for _ in range(4))
    return ProbeBatch(
        ids, positions, segments, branch, np.full((rows, length), length, np.int32), np.zeros((rows, length), bool)
    )


def _check(number: int, q: Question) -> None:
    if not len(q.answer):
        raise ValueError(f"question {number} has no answer")
    ends = list(q.boundaries)
    if not ends or ends[0] < 1 or ends[-1] > len(q.ids) or any(a > b for a, b in zip(ends, ends[1:], strict=False)):
        raise ValueError(f"question {number}: boundaries {ends} do not ascend within its {len(q.ids)} tokens")
