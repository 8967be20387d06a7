"""Peer of `trace-jax bench rollout`: `transformers` generate, in a process and an environment of its own.

Needs torch and transformers, and nothing of trace-jax. Requests come as JSON objects, one a line, on standard input;
every one is answered by one line on standard output, the first line is a greeting:

    -> {"versions": {"torch": ..., "transformers": ...}}                      or {"error": ...}
    {"op": "load", "name": N, "directory": D}                                 -> {"parameters": count}
    {"op": "logits", "name": N, "prompts": [[id, ...], ...]}                  -> {"logits": [[...], ...]} after the last
    {"op": "generate", "name": N, "prompts": ..., "tokens": n, "seed": s, "threads": t}
                                                                    -> {"seconds": ..., "tokens": sampled in all}

`directory` is a checkpoint (config.json, model.safetensors). Generation samples from the whole vocabulary at
temperature 1, all prompts (of one length, so without padding) as one batch. An error is answered as {"error": ...}.
"""

import json
import os
import sys
import time


def serve(requests, answer):
    try:
        import torch
        import transformers
    except ImportError as error:
        answer({"error": str(error)})
        return
    transformers.logging.set_verbosity_error()
    answer({"versions": {"torch": torch.__version__, "transformers": transformers.__version__}})
    models = {}

    def load(name, directory):
        models[name] = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        return {"parameters": models[name].num_parameters()}

    def logits(name, prompts):
        return {"logits": models[name](torch.tensor(prompts)).logits[:, -1].float().tolist()}

    def generate(name, prompts, tokens, seed, threads):
        torch.set_num_threads(threads)
        ids = torch.tensor(prompts)
        torch.manual_seed(seed)
        start = time.perf_counter()
        out = models[name].generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
        )
        return {"seconds": time.perf_counter() - start, "tokens": (out.shape[1] - ids.shape[1]) * len(out)}

    operations = {"load": load, "logits": logits, "generate": generate}
    with torch.inference_mode():
        for line in requests:
            request = json.loads(line)
            try:
                answer(operations[request.pop("op")](**request))
            except Exception as error:
                answer({"error": f"{type(error).__name__}: {error}"})


def main():
    # Whatever a library prints must not get between the answers.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    serve(sys.stdin, lambda value: print(json.dumps(value), file=answers, flush=True))


if __name__ == "__main__":
    main()
