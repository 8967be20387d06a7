"""Chat templates: Jinja2 as checkpoints ship it, rendered as `transformers` does, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trace_jax.config import ConfigError

Render = Callable[..., str]


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`, which marks what the assistant says; it prints its body."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    # Jinja's own filter escapes HTML and sorts the keys.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(source: str, now: datetime | None = None) -> Render:
    """A function of the template's variables.

    Args:
        source: of the template.
        now: what `strftime_now` formats; the moment of compiling, so that all prompts of a run have one date.

    Raises:
        ConfigError: a template with a syntax error.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    moment = now or datetime.now()
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise, "strftime_now": lambda form: moment.strftime(form)}
    try:
        return environment.from_string(source).render
    except jinja2.TemplateError as error:
        raise ConfigError(
            f"chat template: {error.message} in line {getattr(error, 'lineno', '?')}: copy it again"
        ) from error
