"""Chat templates against `transformers` itself, over many random conversations (where the `parity` extra is installed).
The plain run compares with golden values, see tests/test_policy_template_chat.py."""

import random
import sys
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from helpers_chat import NAMES, chat_of  # noqa: E402

from trace_jax.policy import tool_calls  # noqa: E402

sys.path.insert(0, str(Path(__file__).parent / "parity"))
from chat_goldens import messages  # noqa: E402

pytestmark = pytest.mark.parity
POOLS = ["abc xyz\n 0123456789.,;:!?'\"{}[]()<>=+-*/\\|_ \t\r", "éüñß\u0301\u0308ﬁ", "北京三🙂\u200d \u202e", "  \n\n"]


@pytest.mark.parametrize("name", NAMES)
def test_any_conversation_has_the_ids_of_transformers(name, tmp_path):
    """Texts without spellings of control tokens, which `transformers` would take for the tokens."""
    chat, rng = chat_of(name), random.Random(name)
    chat.tokenizer.save(tmp_path)
    other = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)

    def text() -> str:
        return "".join(rng.choice(rng.choice(POOLS)) for _ in range(rng.randrange(1, 40)))

    for _ in range(60):
        steps = [(text(), text()) for _ in range(rng.randrange(4))]
        said = {"system": text(), "user": text(), "steps": steps, "answer": "{" + text() + "}"}
        ids = other.apply_chat_template(
            messages(said, chat.native, chat.native, tool_calls.description("json")),
            tools=[tool_calls.SCHEMA] if chat.native else None,
            enable_thinking=False,
            return_dict=False,
        )
        ours, _, _ = chat.encode_transcript(**said)
        assert ours.tolist() == ids[: len(ours)] and len(ids) - len(ours) == 1, said
