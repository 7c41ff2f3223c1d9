"""Times mistral.rs on a GGUF file. Runs in the environment `mistralrs`; see comparison/engines.py."""

import json
import os
import sys

import mistralrs


def main():
    ask = json.loads(sys.argv[1])
    folder, file = os.path.split(ask['model'])
    runner = mistralrs.Runner(which=mistralrs.Which.GGUF(quantized_model_id=folder, quantized_filename=file))

    def complete(prompt, tokens):
        return runner.send_completion_request(mistralrs.CompletionRequest(
            model='default', prompt=prompt, max_tokens=tokens, temperature=0.0))

    complete('A', 2)  # warm-up, with a text that no prompt begins with: it keeps prompts
    answer = complete(ask['prompt'], ask['tokens'])
    usage = answer.usage
    print('ANSWER ' + json.dumps({'prompt_tokens': usage.prompt_tokens, 'prefill': usage.avg_prompt_tok_per_sec,
                                  'decode': usage.avg_compl_tok_per_sec, 'text': answer.choices[0].text}))


main()
