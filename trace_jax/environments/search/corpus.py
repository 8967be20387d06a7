"""Worlds of the search environment: a small corpus of linked documents and a question about a chain of its facts.

The setting is that of arXiv 2607.13988, multi-hop search over an offline corpus, with corpora made by a procedure. A
world is a function of (sizes, seed, index). Every fact is a function (one mayor to a city), so that a chain of them
has exactly one answer. Distractors are part of the procedure: every entity has a twin, of the same type and with a name
that begins (or, a person's, ends) like its own, and facts come in kinds that nearly match (birthplace and home,
founder and head), always with different values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from trace_jax.config import SearchConfig

_STREAM = 0x5EA2C4  # keeps these draws apart from others with the same seed
_STEMS = [
    "Bal",
    "Cor",
    "Dun",
    "Fel",
    "Gan",
    "Hul",
    "Kir",
    "Lam",
    "Mor",
    "Nev",
    "Pel",
    "Ros",
    "Sul",
    "Tor",
    "Vel",
    "Zan",
]
_ENDINGS = ("a", "en", "i", "o", "us", "ta", "dra", "mi")
# All words that names are made of. They are few so that a tokenizer can keep each as one piece, which a small policy
# can copy.
WORDS: tuple[str, ...] = tuple(stem + ending for stem in _STEMS for ending in _ENDINGS)
# Share of the documents; persons have the rest. Even numbers of each, because of the twins.
_SHARES = {"city": 0.2, "company": 0.14, "book": 0.1, "river": 0.08, "ship": 0.08}
TYPES: tuple[str, ...] = ("person", *_SHARES)


@dataclass(frozen=True)
class Relation:
    """A kind of fact: `name` (also its compact wording) leads from entities of type `source` to one of type `target`.

    `phrase` names its value in a question, `sentence` states it in a document, both in the full wording.
    """

    name: str
    source: str
    target: str
    phrase: str
    sentence: str


RELATIONS: tuple[Relation, ...] = (
    Relation("birthplace", "person", "city", "the city where {} was born", "{} was born in {}."),
    Relation("home", "person", "city", "the city where {} lives", "{} lives in {}."),
    Relation("teacher", "person", "person", "the teacher of {}", "The teacher of {} is {}."),
    Relation("employer", "person", "company", "the company that employs {}", "{} works for {}."),
    Relation("mayor", "city", "person", "the mayor of {}", "The mayor of {} is {}."),
    Relation("architect", "city", "person", "the architect of {}", "The architect of {} is {}."),
    Relation("river", "city", "river", "the river on which {} lies", "{} lies on {}."),
    Relation("founder", "company", "person", "the founder of {}", "{} was founded by {}."),
    Relation("head", "company", "person", "the head of {}", "The head of {} is {}."),
    Relation("seat", "company", "city", "the city where {} has its seat", "{} has its seat in {}."),
    Relation("author", "book", "person", "the author of {}", "{} was written by {}."),
    Relation("editor", "book", "person", "the editor of {}", "{} was edited by {}."),
    Relation("setting", "book", "city", "the city where {} is set", "{} is set in {}."),
    Relation("publisher", "book", "company", "the company that publishes {}", "{} is published by {}."),
    Relation("source", "river", "city", "the city where {} rises", "{} rises in {}."),
    Relation("mouth", "river", "city", "the city where {} ends", "{} ends in {}."),
    Relation("surveyor", "river", "person", "the surveyor of {}", "{} was surveyed by {}."),
    Relation("captain", "ship", "person", "the captain of {}", "The captain of {} is {}."),
    Relation("owner", "ship", "company", "the company that owns {}", "{} is owned by {}."),
    Relation("port", "ship", "city", "the home port of {}", "The home port of {} is {}."),
)
RELATION: Mapping[str, Relation] = {relation.name: relation for relation in RELATIONS}


@dataclass(frozen=True)
class Entity:
    """One document's subject. `facts` are (name of a relation, name of its value), in the order they are told."""

    id: int  # of its document, from 1; says nothing about what it holds
    name: str
    type: str
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class World:
    """A corpus and its question: the entity that `chain`, names of relations, leads to from the entity `start`."""

    entities: tuple[Entity, ...]  # by id
    start: str
    chain: tuple[str, ...]
    answer: str = field(repr=False)


def make_world(sizes: SearchConfig, seed: int, index: int) -> World:
    """World `index` of a seed, a function of the arguments alone.

    Args:
        sizes: number of documents and bounds of the number of hops.
        seed: >= 0. index: >= 0, any size.
    """
    rng = np.random.default_rng([_STREAM, seed, index])
    hops = int(rng.integers(sizes.min_hops, sizes.max_hops + 1))
    while True:  # a corpus in which no walk of that length was found is drawn again; that is rare
        entities = _entities(sizes.documents, rng)
        found = _walk({e.name: e for e in entities}, hops, rng)
        if found is not None:
            return World(entities, *found)


def _counts(documents: int) -> dict[str, int]:
    counts = {kind: 2 * max(1, round(share * documents / 2)) for kind, share in _SHARES.items()}
    return {"person": documents - sum(counts.values()), **counts}


def _entities(documents: int, rng: np.random.Generator) -> tuple[Entity, ...]:
    names = _names(_counts(documents), rng)
    ids = iter(1 + rng.permutation(documents))
    entities = []
    for kind, own in names.items():
        relations = [r for r in RELATIONS if r.source == kind]
        for name in own:
            # Without replacement: facts that nearly match have different values, and nobody is their own teacher.
            values = {t: iter(rng.permutation([n for n in names[t] if n != name])) for t in TYPES}
            facts = [(r.name, str(next(values[r.target]))) for r in relations]
            told = tuple(facts[i] for i in rng.permutation(len(facts)))
            entities.append(Entity(int(next(ids)), name, kind, told))
    return tuple(sorted(entities, key=lambda e: e.id))


def _names(counts: Mapping[str, int], rng: np.random.Generator) -> dict[str, list[str]]:
    """Names by type, each with its twin beside it; no two in a corpus are equal."""
    pairs = []
    for stem in _STEMS:
        words = [stem + _ENDINGS[i] for i in rng.permutation(len(_ENDINGS))]
        pairs += zip(words[::2], words[1::2], strict=True)
    shuffled = iter([pairs[i] for i in rng.permutation(len(pairs))])
    names = {kind: [n for _ in range(counts[kind] // 2) for n in next(shuffled)] for kind in _SHARES}
    given, family = rng.permutation(WORDS), rng.permutation(WORDS)
    families = counts["person"] // 2  # of an odd number of persons three share one
    names["person"] = [f"{given[i]} {family[i % families]}" for i in range(counts["person"])]
    return {kind: names[kind] for kind in TYPES}


def _walk(
    by_name: Mapping[str, Entity], hops: int, rng: np.random.Generator
) -> tuple[str, tuple[str, ...], str] | None:
    """(start, relations, end) of a random walk along facts that meets no entity twice; None if it ran into itself."""
    at = start = str(rng.choice(list(by_name)))
    seen, chain = {start}, []
    for _ in range(hops):
        open_facts = [fact for fact in by_name[at].facts if fact[1] not in seen]
        if not open_facts:
            return None
        relation, at = open_facts[rng.integers(len(open_facts))]
        seen.add(at)
        chain.append(relation)
    return start, tuple(chain), at
