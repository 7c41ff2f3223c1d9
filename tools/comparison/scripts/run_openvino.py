"""Times OpenVINO GenAI on a GGUF file. Runs in the environment `openvino`; see comparison/engines.py."""

import json
import sys

import openvino_genai


def main():
    ask = json.loads(sys.argv[1])
    pipeline = openvino_genai.LLMPipeline(ask['model'], 'CPU', INFERENCE_NUM_THREADS=ask['threads'],
                                          **ask['properties'])

    def complete(prompt, tokens):
        # As a list, so that the answer has its times.
        return pipeline.generate([prompt], max_new_tokens=tokens, do_sample=False, ignore_eos=True,
                                 apply_chat_template=False)

    complete('A', 2)  # warm-up
    answer = complete(ask['prompt'], ask['tokens'])
    metrics = answer.perf_metrics
    count = metrics.get_num_input_tokens()
    # Milliseconds: until the first token, and of each that follows.
    print('ANSWER ' + json.dumps({'prompt_tokens': count, 'prefill': 1e3 * count / metrics.get_ttft().mean,
                                  'decode': 1e3 / metrics.get_tpot().mean, 'text': answer.texts[0]}))


main()
