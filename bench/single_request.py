"""One request alone, through the whole engine, against transformers `generate()` with a static cache and torch.compile.

    python -m bench.single_request --out bench/results/single_request_h200.json

Same random weights in both (Llama-1B shape unless --small), greedy, same prompt, same number of new tokens. Per-token time is
(time for N tokens − time for 1 token) / (N − 1), so that the prompt and the start-up stay out; end-to-end times are given too.
Correctness first: both must produce the same greedy tokens where the logit gap allows one (random weights in bf16 tie often, so
the check is in fp32 on a short run, and the bf16 runs must agree on their first tokens).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
import transformers

from bench.harness import write_results
from bench.shapes import LLAMA_1B, TINY
from runtime import Engine, SamplingParams
from runtime.model import random_model

PROMPT_TOKENS, NEW_TOKENS = 64, 256


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _per_token_ms(generate, new_tokens: int, repeats: int) -> tuple[float, float]:
    """(milliseconds per token without the first, milliseconds end to end), medians."""
    generate(new_tokens)
    firsts, alls = [], []
    for _ in range(repeats):
        for count, samples in ((1, firsts), (new_tokens, alls)):
            _sync()
            start = time.perf_counter()
            generate(count)
            _sync()
            samples.append((time.perf_counter() - start) * 1e3)
    first, whole = statistics.median(firsts), statistics.median(alls)
    return (whole - first) / (new_tokens - 1), whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script without a GPU")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = TINY if options.small else LLAMA_1B
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    new_tokens = 8 if options.small else NEW_TOKENS
    prompt = torch.randint(0, shape["vocab_size"], (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    model = random_model(shape, seed=0, dtype=dtype, device=device)
    with torch.device(device):
        peer = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, attn_implementation="sdpa")).to(dtype).eval()
    peer.load_state_dict(model.hf_state_dict())
    ids = torch.tensor([prompt], device=device)

    def peer_generate(count: int) -> list[int]:
        out = peer.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, min_new_tokens=count,
            cache_implementation="static", pad_token_id=0,
        )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    config = {
        "graph": {"max_tokens": 64, "capture_sizes": [1, 64]},
        "scheduler": {"max_num_seqs": 1, "max_batch_tokens": 256},
        "cache": {"num_pages": 64, "prefix_cache": False},
        "compile": {"backend": "eager"},
        "model": {"device": device},
    }
    engine = Engine(model, config)

    def our_generate(count: int) -> list[int]:
        return engine.generate([prompt], SamplingParams(max_tokens=count, ignore_eos=True))[0].token_ids

    ours, theirs = our_generate(new_tokens), peer_generate(new_tokens)
    agree = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), new_tokens)
    print(f"greedy tokens agree on the first {agree} of {new_tokens}", file=sys.stderr)
    if agree == 0:
        raise SystemExit("the first greedy token differs: not timing a wrong answer")
    rows = []
    for name, generate in (("tkernels engine", our_generate), ("transformers static cache, torch.compile", peer_generate)):
        per_token, whole = _per_token_ms(generate, new_tokens, options.repeats)
        rows.append({"name": name, "ms_per_token": per_token, "ms_end_to_end": whole, "prompt": PROMPT_TOKENS, "new": new_tokens})
        print(f"{name:45} {per_token:8.3f} ms/token {whole:9.1f} ms in all")
    print(engine.stats())
    if options.out:
        write_results(options.out, "python -m bench.single_request", rows, transformers=transformers.__version__, tokens_agree=agree)


if __name__ == "__main__":
    main()
