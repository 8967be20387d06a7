"""Peer of `trace-jax bench learner`: GRPO updates with torch and transformers, in a process of its own.

Needs torch and transformers, and nothing of trace-jax. Requests come as JSON objects, one a line, on standard input;
every one is answered by one line on standard output, the first line is a greeting:

    -> {"versions": {"torch": ..., "transformers": ...}}                  or {"error": ...}
    {"op": "load", "name": N, "directory": D}                             -> {"parameters": count}
    {"op": "optimizer", "name": N, learning_rate, b1, ..., clip_high}     -> {}
    {"op": "batches", "name": N, "form": F, "packed": B, "batches": [..]} -> {}
    {"op": "logprobs", "name": N, "form": F, "attention": A}              -> {"logprobs": [batch][row][time]}
    {"op": "step", "name": N, "form": F, "attention": A, "selective": B}  -> {"seconds", "loss", "grad_norm", "threads"}
    {"op": "compare", "name": N, "parameters": file, "moments": file}     -> {"parameter", "gradient"}: differences
    {"op": "forget", "name": N}                                           -> {}

`directory` is a checkpoint (config.json, model.safetensors). A batch holds ids, positions, segments (0: padding),
loss_mask, advantages and old_logprobs, each [rows][time]. Packed rows are told to the model by their positions alone,
others by an attention mask. A step is what a GRPO trainer does: scores of all positions (`selective`: only of those
that predict a trained token), log-probs of the ids, clipped surrogate, mean over the trained tokens of all
micro-batches, clipping of the gradient's norm, AdamW. Everything is float32 on torch's default number of threads. An
error is answered as {"error": ...}.
"""

import json
import os
import sys
import time


def serve(requests, answer):
    try:
        import safetensors
        import torch
        import transformers
    except ImportError as error:
        answer({"error": str(error)})
        return
    transformers.logging.set_verbosity_error()
    answer({"versions": {"torch": torch.__version__, "transformers": transformers.__version__}})
    models, optimizers, settings, held = {}, {}, {}, {}

    def load(name, directory):
        models[name] = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
        return {"parameters": models[name].num_parameters()}

    def optimizer(name, learning_rate, b1, b2, eps, weight_decay, clip_norm, clip_low, clip_high):
        matrices = [p for p in models[name].parameters() if p.ndim > 1]
        gains = [p for p in models[name].parameters() if p.ndim == 1]
        optimizers[name] = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": weight_decay}, {"params": gains, "weight_decay": 0.0}],
            lr=learning_rate,
            betas=(b1, b2),
            eps=eps,
        )
        settings[name] = (clip_norm, clip_low, clip_high)
        return {}

    def batches(name, form, packed, batches):
        def tensors(batch):
            streams = {key: torch.tensor(batch[key]) for key in ("ids", "loss_mask", "advantages", "old_logprobs")}
            if packed:
                return streams | {"how": {"position_ids": torch.tensor(batch["positions"])}}
            return streams | {"how": {"attention_mask": (torch.tensor(batch["segments"]) > 0).long()}}

        held[name, form] = [tensors(batch) for batch in batches]
        return {}

    def score(model, batch, selective):
        """Of ids[t] given those before, from t = 1, with 0 where `selective` leaves an untrained token out."""
        hidden = model.model(input_ids=batch["ids"], use_cache=False, **batch["how"]).last_hidden_state
        targets = batch["ids"].roll(-1, 1)  # all positions, for views instead of copies
        if selective:
            wanted = batch["loss_mask"].roll(-1, 1)  # never the last: no first token is trained
            hidden, chosen = hidden[wanted], targets[wanted]
        else:
            hidden, chosen = hidden.flatten(0, 1), targets.flatten()
        # One fused operation: half the time of gather and logsumexp.
        logprobs = -torch.nn.functional.cross_entropy(model.lm_head(hidden), chosen, reduction="none")
        if selective:
            logprobs = torch.zeros(targets.shape).masked_scatter(wanted, logprobs)
        return logprobs.view(targets.shape)[:, :-1]

    def logprobs(name, form, attention):
        models[name].set_attn_implementation(attention)
        with torch.inference_mode():
            scored = [score(models[name], batch, False) for batch in held[name, form]]
        return {"logprobs": [torch.nn.functional.pad(s, (1, 0)).tolist() for s in scored]}

    def step(name, form, attention, selective):
        model, optimizer = models[name], optimizers[name]
        clip_norm, clip_low, clip_high = settings[name]
        model.set_attn_implementation(attention)
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        trained = sum(batch["loss_mask"].sum() for batch in held[name, form])
        total = 0.0
        for batch in held[name, form]:
            mask, advantages = batch["loss_mask"][:, 1:], batch["advantages"][:, 1:]
            ratio = torch.exp(score(model, batch, selective) - batch["old_logprobs"][:, 1:])
            clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
            losses = -torch.min(ratio * advantages, clipped * advantages)
            loss = torch.where(mask, losses, 0.0).sum() / trained
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        seconds = time.perf_counter() - start
        return {"seconds": seconds, "loss": total, "grad_norm": norm.item(), "threads": torch.get_num_threads()}

    def compare(name, parameters, moments):
        """Largest difference of a parameter; of the first moments (the gradient, after one step) that of the norms."""
        state = optimizers[name].state
        with safetensors.safe_open(parameters, "pt") as ours, safetensors.safe_open(moments, "pt") as gradients:
            largest, apart, whole = 0.0, 0.0, 0.0
            for key, parameter in models[name].named_parameters():
                largest = max(largest, (ours.get_tensor(key) - parameter.detach()).abs().max().item())
                theirs = state[parameter]["exp_avg"]
                apart += (gradients.get_tensor(key) - theirs).double().square().sum().item()
                whole += theirs.double().square().sum().item()
        return {"parameter": largest, "gradient": (apart / whole) ** 0.5}

    def forget(name):
        for kept in (models, optimizers, settings):
            kept.pop(name, None)
        for key in [key for key in held if key[0] == name]:
            del held[key]
        return {}

    operations = (load, optimizer, batches, logprobs, step, compare, forget)
    operations = {operation.__name__: operation for operation in operations}
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
