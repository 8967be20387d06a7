"""Wording of the search task, compact (few tokens, for small policies) and full: prompts, documents, results."""

from __future__ import annotations

import re
from collections.abc import Iterable

from trace_jax.config import ConfigError
from trace_jax.environments.search.corpus import RELATION, Entity, World

STYLES = ("compact", "full")
SNIPPET = 60  # characters of a document that a result of a full search shows
NUDGE = {
    "compact": "Answer now.",
    "full": "This was your last tool call. Give the final answer now: the name alone.",
}
_SYSTEM = {
    "compact": "Search, then answer.",
    "full": """You answer a question about a small collection of documents, each of which tells the facts of one
person, city, company, book, river or ship. No document holds the whole answer: follow the facts from one document to
the next, and beware of names that are alike. Every message before the last is one call of a tool:
- search("text"): titles of the documents that match best, with their numbers and how they begin
- open(number): the document
- find("text"): the sentences of the opened document that contain the text
The last message is the final answer: the name alone.""",
}


def check_style(style: str) -> str:
    """The style itself; ConfigError if there is no such style."""
    if style not in STYLES:
        raise ConfigError(f"environment.prompt: {style!r} is not a prompt style; use one of {', '.join(STYLES)}")
    return style


def system_prompt(style: str) -> str:
    """The instructions, the same for every task. ConfigError on an unknown style."""
    return _SYSTEM[check_style(style)]


def user_prompt(world: World, style: str) -> str:
    """The question of a world. ConfigError on an unknown style."""
    if check_style(style) == "compact":
        return f"{':'.join([world.start, *world.chain])}?"
    named = world.start
    for relation in world.chain:
        named = RELATION[relation].phrase.format(named)
    return f"What is the name of {named}?"


def sentences(entity: Entity, style: str) -> tuple[str, ...]:
    """The sentences of an entity's document, lines in the compact wording; the first one says what it is."""
    if style == "compact":
        return (f"{entity.name}:{entity.type}", *(f"{relation}:{value}" for relation, value in entity.facts))
    facts = (RELATION[relation].sentence.format(entity.name, value) for relation, value in entity.facts)
    return (f"{entity.name} is a {entity.type}.", *facts)


def joined(said: Iterable[str], style: str) -> str:
    """Sentences as one text."""
    return ("\n" if style == "compact" else " ").join(said)


def result_line(entity: Entity, style: str) -> str:
    """How a search lists a document: its number, title and beginning."""
    said = sentences(entity, style)
    if style == "compact":
        return f"{entity.id}:{said[0]}"
    text = joined(said, style)
    return f"[{entity.id}] {entity.name}: {text if len(text) <= SNIPPET else text[:SNIPPET] + '...'}"


def stated(text: str, name: str, relation: str, style: str) -> str | None:
    """The value that the document of `name` states for a relation, None if it states none."""
    sentence = f"{relation}:\0" if style == "compact" else RELATION[relation].sentence.format(name, "\0")
    left, right = map(re.escape, sentence.split("\0"))
    found = re.search(rf"(?:^|\. ){left}([A-Z][a-z]+(?: [A-Z][a-z]+)?){right}(?= |$)", text, re.MULTILINE)
    return found[1] if found else None
