"""Writes the golden values of tests/test_policy_template_chat.py: what `transformers` makes of conversations.

Run where the `parity` extra is installed: `python tests/parity/chat_goldens.py`. Each file holds the tokenizer's files
(a small byte-level BPE trained here), conversations, their ids by `apply_chat_template`, ids of plain texts, and the
versions that made them.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import tokenizers
import transformers
from tokenizers import decoders, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

TESTS = Path(__file__).parents[1]
CHAT, TOOLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["tool_call", "tool_response", "think"]
TAGS = [tag for name in TOOLS for tag in (f"<{name}>", f"</{name}>")]
TEXTS = [
    "Find why the metric moved. Query, then answer.",
    "impressions +3%, clicks -41%. Why?",
    "print(sql(\"SELECT geo, sum(clicks) AS n FROM t WHERE day >= '2024-01-05' GROUP BY 1\"))",
    "geo | n\nUS | 1204\nDE | 17\n(2 rows)",
    '{"decision": {"root_cause": "BID_CUT"}, "evidence": ["CTR 0.12"], "explanation": "it\'s so"}',
    "café naïve résumé 北京 🙂\tx\r\n  y",
]
STEPS = [(TEXTS[2], TEXTS[3]), ("x = 3\nprint(f'{x:>5}')\n", "    3"), ("1 / 0", "ZeroDivisionError: \"a\" <b> & 'c'")]
CONVERSATIONS = [
    {"system": TEXTS[0], "user": TEXTS[1], "steps": [], "answer": TEXTS[4]},
    {"system": TEXTS[0], "user": TEXTS[1], "steps": STEPS[:1], "answer": TEXTS[4]},
    {"system": "Be\nbrief.", "user": "北京 why?", "steps": STEPS, "answer": "none: no change"},
]


def train(qwen: bool) -> tokenizers.Tokenizer:
    """A tokenizer with the pieces of Qwen (NFC, its pattern, tool tags as tokens), or of SmolLM2."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    if qwen:
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(tokenizers.Regex(PRETOKENIZE_REGEX), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    else:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    # SmolLM2's special tokens come first and are in the vocabulary, Qwen's after it.
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[] if qwen else CHAT,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, *(text for step in STEPS for text in step)] * 3, trainer)
    if qwen:
        tokenizer.add_special_tokens(CHAT)
        tokenizer.add_tokens(TAGS)
    return tokenizer


def messages(conversation: dict, thoughts: bool, native: bool, describe: str) -> list[dict]:
    """The messages of a conversation; with an empty thought in each turn of the assistant, if asked."""
    system = conversation["system"] + ("" if native else f"\n\n{describe}")
    result = [{"role": "system", "content": system}, {"role": "user", "content": conversation["user"]}]
    for code, seen in conversation["steps"]:
        call = {"name": "python", "arguments": {"code": code}}
        if native:
            result.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
            result.append({"role": "tool", "content": seen})
        else:
            written = json.dumps(call, ensure_ascii=False)
            result.append({"role": "assistant", "content": f"<tool_call>\n{written}\n</tool_call>"})
            result.append({"role": "user", "content": f"<tool_response>\n{seen}\n</tool_response>"})
    result.append({"role": "assistant", "content": conversation["answer"]})
    return [m | {"reasoning_content": "\n"} if thoughts and m["role"] == "assistant" else m for m in result]


def write(name: str, tools: list[dict], describe: str) -> None:
    native = name != "smollm2"
    with tempfile.TemporaryDirectory() as folder:
        train(native).save(str(Path(folder) / "tokenizer.json"))
        fast = transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(Path(folder) / "tokenizer.json"), eos_token=CHAT[2], pad_token=CHAT[0]
        )
        fast.chat_template = (TESTS / "data" / "chat" / f"{name}.jinja").read_text()
        fast.save_pretrained(folder)
        names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
        files = {file: (Path(folder) / file).read_text() for file in names}
        fast = transformers.PreTrainedTokenizerFast.from_pretrained(folder)

    def ids(conversation: dict, count: int | None, thinking: bool) -> list[int]:
        said = messages(conversation, native, native, describe)[:count]
        asking = {"tools": tools if native else None, "enable_thinking": thinking}
        return fast.apply_chat_template(
            said, tokenize=True, return_dict=False, add_generation_prompt=count is not None, **asking
        )

    content = {
        "versions": {"transformers": transformers.__version__, "tokenizers": tokenizers.__version__},
        "files": files,
        "tools": tools,
        "texts": [{"text": text, "ids": fast.encode(text, add_special_tokens=False)} for text in TEXTS],
        "conversations": [
            c | {"ids": ids(c, None, False), "prompt": ids(c, 2, False), "thinking_prompt": ids(c, 2, True)}
            for c in CONVERSATIONS
        ],
    }
    path = TESTS / "golden" / f"chat_{name}.json"
    path.write_text(json.dumps(content, indent=None, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(path, path.stat().st_size)


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(TESTS.parent))
    from trace_jax.policy import tool_calls  # no JAX is needed for it

    for model in ("qwen3", "qwen3_5", "smollm2"):
        write(model, [tool_calls.SCHEMA], tool_calls.description("json"))
