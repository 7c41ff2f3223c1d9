"""Other engines that run SmolLM2's file on a CPU: transformers, mistral.rs, OpenVINO GenAI.

Each runs as it comes, with all threads; transformers in f32 and in bf16. OpenVINO rounds activations, keys
and values to 8 bits unless it is told not to, so it runs a second time as ours does: in f32, with keys and
values in f16. A try is bounded in time. An engine that crashes, hangs or cannot be installed gets rows that
say so.
"""

from comparison import generation, kernels, measure, results

# Name: environment, script, options.
ENGINES = {
    'transformers f32': ('torch', 'run_transformers.py', {'dtype': 'float32'}),
    'transformers bf16': ('torch', 'run_transformers.py', {'dtype': 'bfloat16'}),
    'mistral.rs': ('mistralrs', 'run_mistralrs.py', {}),
    'OpenVINO GenAI': ('openvino', 'run_openvino.py', {'properties': {}}),
    'OpenVINO GenAI f32': ('openvino', 'run_openvino.py', {'properties': {
        'INFERENCE_PRECISION_HINT': 'f32', 'DYNAMIC_QUANTIZATION_GROUP_SIZE': 0, 'KV_CACHE_PRECISION': 'f16'}}),
}


def environment(options):
    """Threads as each library wants to be told; and nothing is to be fetched by itself."""
    threads = str(options.threads)
    return {'OMP_NUM_THREADS': threads, 'RAYON_NUM_THREADS': threads, 'HF_HUB_OFFLINE': '1', 'NO_COLOR': '1'}


def run_engine(options, name, prompt, tokens, torch):
    group, script, more = ENGINES[name]
    question = {'model': str(options.model), 'prompt': prompt, 'tokens': tokens, 'threads': options.threads} | more
    if group == 'torch':
        return torch.ask(script, question)
    return measure.run_peer(group, script, question, options.limit, environment(options))


def engine_row(key, what, phase, name, found, failures, note):
    return results.make_row(
        f'engines {key} {phase} {name}', f'SmolLM2, {generation.NAMES[phase]} {what}', 'tokens/s',
        ('treeline f16', [each[phase] for each in found['treeline f16']]),
        (name, [each[phase] for each in found[name]]), note=failures.get(name) or note,
        # To be read: an engine that computes something else may be as fast as it likes.
        our_text=found['treeline f16'][0]['text'], their_text=found[name][0]['text'] if found[name] else None,
        their_prompt_tokens=found[name][0]['prompt_tokens'] if found[name] else None)


def compare_prompt(options, key, prompt, tokens, phases):
    torch = kernels.Torch(options, env=environment(options))
    runners = {'treeline f16': lambda: generation.run_ours(options, prompt, tokens, 'f16')}
    runners |= {name: lambda name=name: run_engine(options, name, prompt, tokens, torch) for name in ENGINES}
    length = generation.count_tokens(options, prompt)
    found, failures = measure.alternate(runners, options.rounds, f'engines: {length} tokens')
    return [engine_row(key, f'{length:,} tokens', phase, name, found, failures,
                       torch.note() if ENGINES[name][0] == 'torch' else None)
            for phase in phases for name in ENGINES]


def compare(options):
    generation.small_model(options)
    length = 48 if options.quick else generation.LONG
    return compare_prompt(options, 'short', generation.SHORT, options.tokens, ('decode',)) + compare_prompt(
        options, str(length), generation.text_of(options, length), options.tokens, ('prefill', 'decode'))
