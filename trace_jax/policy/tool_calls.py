"""How a policy writes a call of its tool `python`, in the two forms of Qwen, and what reads it.

"json" (Qwen3)

    <tool_call>
    {"name": "python", "arguments": {"code": "..."}}
    </tool_call>

"xml" (Qwen3.5)

    <tool_call>
    <function=python>
    <parameter=code>
    ...
    </parameter>
    </function>
    </tool_call>
"""

from __future__ import annotations

import json
import re
from typing import Any

NAME, ARGUMENT = "python", "code"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"

# What a template is given. What the environment adds to Python stands in its system message.
SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": NAME,
        "description": "Runs Python. State is kept between calls; printed text and the last value come back.",
        "parameters": {
            "type": "object",
            "properties": {ARGUMENT: {"type": "string", "description": "Python source"}},
            "required": [ARGUMENT],
        },
    },
}

_XML = re.compile(r"\s*<function=([^>\n]*)>\s*<parameter=([^>\n]*)>\n?(.*?)\n?</parameter>\s*</function>\s*", re.DOTALL)
_MORE = re.compile(r"</parameter>\s*<parameter=|</function>\s*(</tool_call>\s*<tool_call>\s*)?<function=")


def write(code: str, form: str) -> str:
    """A call with its tags, for templates that have no form of their own."""
    if form == "json":
        body = json.dumps({"name": NAME, "arguments": {ARGUMENT: code}}, ensure_ascii=False)
    else:
        body = f"<function={NAME}>\n<parameter={ARGUMENT}>\n{code}\n</parameter>\n</function>"
    return f"{OPEN}\n{body}\n{CLOSE}"


def description(form: str) -> str:
    """The tool in words, for the system message where the template knows no tools."""
    schema = json.dumps(SCHEMA["function"], ensure_ascii=False)
    return (
        f"# Tool\n\nYou may call one tool:\n<tools>\n{schema}\n</tools>\n\nTo call it, end your turn with\n"
        f"{write('...', form)}\nIts result comes back within {RESULT_OPEN}{RESULT_CLOSE}."
    )


def read(text: str, form: str) -> tuple[str, str]:
    """The code of a call, and what follows the call's body.

    Args:
        text: after the opening tag.

    Raises:
        ValueError: the body is no call of the tool with its one argument; the message says why.
    """
    name, arguments, rest = (_read_json if form == "json" else _read_xml)(text)
    if name != NAME:
        raise ValueError(f"no tool is named {name!r}")
    if not isinstance(arguments, dict) or set(arguments) != {ARGUMENT} or not isinstance(arguments[ARGUMENT], str):
        raise ValueError(f"the tool takes one argument, {ARGUMENT}, a text")
    # JSON can spell half a character; no UTF-8 text can hold one.
    return arguments[ARGUMENT].encode("utf-8", "replace").decode(), rest


def _read_json(text: str) -> tuple[Any, Any, str]:
    start = len(text) - len(text.lstrip())
    try:
        body, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise ValueError("the call is not JSON") from error
    if not isinstance(body, dict) or set(body) != {"name", "arguments"}:
        raise ValueError("the call has not exactly a name and arguments")
    return body["name"], body["arguments"], text[end:]


def _read_xml(text: str) -> tuple[Any, Any, str]:
    end = text.rfind(CLOSE)
    found = _XML.fullmatch(text, 0, end) if end >= 0 else None
    if found is None:
        raise ValueError("the call is not a function with one parameter")
    name, argument, value = found.groups()
    if _MORE.search(value):
        raise ValueError("more than one parameter or call")
    return name, {argument: value}, text[end:]
