"""Times transformers on a GGUF file. Runs in the environment `torch`; see comparison/engines.py."""

import json
import os
import sys
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    ask = json.loads(sys.argv[1])
    torch.set_num_threads(ask['threads'])
    folder, file = os.path.split(ask['model'])
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=getattr(torch, ask['dtype'])).eval()
    tokens = tokenizer(ask['prompt'], return_tensors='pt').input_ids

    def step(ids, cache=None):
        """The likeliest next token, and the cache: without what generate() does around it."""
        result = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return result.logits[:, -1:].argmax(-1), result.past_key_values

    with torch.inference_mode():
        step(step(tokens[:, :4])[0])  # warm-up
        begin = time.perf_counter()
        token, cache = step(tokens)
        prefilled = time.perf_counter()
        answer = [token.item()]
        for _ in range(ask['tokens']):
            token, cache = step(token, cache)
            answer.append(token.item())
        end = time.perf_counter()
    print('ANSWER ' + json.dumps({'prompt_tokens': tokens.shape[1], 'prefill': tokens.shape[1] / (prefilled - begin),
                                  'decode': ask['tokens'] / (end - prefilled), 'text': tokenizer.decode(answer[:-1])}))


main()
