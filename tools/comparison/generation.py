"""A real model, SmolLM2, against llama.cpp, with each type of keys and values on both sides.

A type of ours is paired with the same type of theirs, and the best of ours with the best of theirs. Only
the latter counts for aims. `2 x 1` are two ranks of half the threads each, beside one with all of them.
"""

import subprocess
import tempfile

import llama_cpp
from comparison import measure, results

TYPES = ('f16', 'bf16', 'q8_0')
SHORT = 'Once upon a time'
LONG = 7000  # tokens
CONTEXT = 8192  # that the model was trained for
NAMES = {'prefill': 'prefill of', 'decode': 'decoding after'}


def small_model(options):
    if not options.model:
        options.model = subprocess.run([options.program, 'model', 'get', 'smollm2'], check=True,
                                       capture_output=True, text=True).stdout.strip()
    return options.model


def count_tokens(options, text):
    return len(measure.run_program(options, 'tokenize', '--start', '-m', options.model, text=text)[0])


def text_of(options, tokens):
    """Our documents, so many tokens of them."""
    measure.say(f'a text of {tokens} tokens')
    return llama_cpp.document(lambda text: count_tokens(options, text), tokens)


def with_prompt(prompt, use):
    with tempfile.NamedTemporaryFile('w', suffix='.txt', encoding='utf-8', dir=measure.PLACE) as file:
        file.write(prompt)
        file.flush()
        return use(file.name)


def run_ours(options, prompt, tokens, kind, ranks=1):
    def use(name):
        return measure.run_program(
            options, 'generate', '-m', options.model, '-f', name, '-n', str(tokens), '--kv-type', kind, '--ranks',
            str(ranks), '--threads', str(max(1, options.threads // ranks)))[0]

    result = with_prompt(prompt, use)
    return {'prompt_tokens': result['prompt_tokens'], 'prefill': result['prompt_tokens_per_second'],
            'decode': result['tokens_per_second'], 'text': result['text']}


def run_theirs(options, prompt, tokens, kind):
    """In a process of its own for each measurement, as ours."""
    try:
        llama_cpp.require()
        with llama_cpp.Server(options.model, options.threads, context=CONTEXT, kv_type=kind) as server:
            timings = server.complete(prompt, tokens)['timings']
    except llama_cpp.LlamaCppError as error:
        raise measure.PeerError(str(error)) from error
    return {'prompt_tokens': timings['prompt_n'], 'prefill': timings['prompt_per_second'],
            'decode': timings['predicted_per_second']}


def limit_arguments(options, depth, kind):
    return ('bench', 'model', '-m', options.model, '--depth', str(depth), '--prefill', '0', '--tokens', '8',
            '--kv-type', kind, '--threads', str(options.threads))


def decode_limits(options, section, depth, kinds):
    """Tokens a second that bandwidth allows at a depth, by type."""
    limits = {}
    for kind in kinds:
        measure.say(f'{section}: what bandwidth allows, {kind}')
        row, = measure.run_program(options, *limit_arguments(options, depth, kind))[0]['rows']
        limits[kind] = row['tokens_per_second'] / row['limit_fraction']
    measure.say('')
    return limits


def two_ranks(options):
    return f'f16, 2 x {max(1, options.threads // 2)}'


def runners(options, prompt, tokens, kinds):
    """Everything that takes turns on a prompt. Ours and theirs are named by their type."""
    ours = {f'treeline {kind}': lambda kind=kind: run_ours(options, prompt, tokens, kind) for kind in kinds}
    ours[f'treeline {two_ranks(options)}'] = lambda: run_ours(options, prompt, tokens, 'f16', 2)
    theirs = {f'llama.cpp {kind}': lambda kind=kind: run_theirs(options, prompt, tokens, kind) for kind in TYPES}
    return ours | theirs


def of_ranks(key, what, unit, found, two, one):
    """Ranks against threads. They took turns: the median of the rounds' ratios."""
    ratio = results.median([a / b for a, b in zip(found[two], found[one], strict=True)])
    return results.make_row(f'{key} ranks', f'{what}, ranks against threads', unit, (two, found[two]),
                            (one, found[one]), ratio=ratio)


def pair_rows(key, what, found, failures, kinds, limits=None, command=None, two=None):
    """Rows of one phase. found: tokens a second by runner. limits: by type. command: of a type. two: the
    name of two ranks, if they ran."""
    unit = 'tokens/s'

    def fraction(name):
        limit = (limits or {}).get(name.split()[1].rstrip(','))
        return results.median(found[name]) / limit if limit else None

    def row(suffix, title, ours, theirs, note=None):
        return results.make_row(f'{key} {suffix}', title, unit, (ours, found[ours]),
                                (theirs, found.get(theirs, []) if theirs else []), fraction(ours), note=note,
                                command=command(ours.split()[1]) if command else None)

    best = results.best_of({f'treeline {kind}': found[f'treeline {kind}'] for kind in kinds})
    best_of_theirs = results.best_of({name: values for name, values in found.items() if name.startswith('llama.cpp')})
    rows = [row('best', f'{what}, best of each', best, best_of_theirs,
                None if best_of_theirs else f'llama.cpp: {"; ".join(sorted(set(failures.values())))}')]
    for kind in kinds:
        theirs = f'llama.cpp {kind}' if kind in TYPES else None
        rows.append(row(kind, f'{what}, {kind}', f'treeline {kind}', theirs, failures.get(theirs)))
    if two:
        rows.append(of_ranks(key, what, unit, found, f'treeline {two}', 'treeline f16'))
    return rows


def compare_prompt(options, section, key, prompt, tokens, rounds, phases):
    """Rows of a prompt. phases: 'prefill', 'decode', or both."""
    # Twice the bytes for nothing that others have: only where it takes little time.
    length = count_tokens(options, prompt)
    kinds = (*TYPES, 'f32') if length < 4096 else TYPES
    found, failures = measure.alternate(runners(options, prompt, tokens, kinds), rounds, f'{section}: {length} tokens',
                                        phases)
    limits = decode_limits(options, section, length + tokens // 2, kinds)
    theirs = {each['prompt_tokens'] for name, values in found.items() if name.startswith('llama.cpp')
              for each in values}
    others = ''.join(f' (llama.cpp: {count:,})' for count in sorted(theirs - {length}))
    rows = []
    for phase in phases:
        rates = {name: [each[phase] for each in values] for name, values in found.items()}
        rows += pair_rows(f'{key} {phase}', f'SmolLM2, {NAMES[phase]} {length:,} tokens{others}', rates, failures,
                          kinds, limits if phase == 'decode' else None,
                          lambda kind, phase=phase: command(phase, length, tokens, kind), two_ranks(options))
    return rows


def command(phase, length, tokens, kind):
    """Ours alone, without our text: as many tokens are as fast."""
    if phase == 'prefill':
        sizes = ('--depth', 0, '--prefill', length, '--tokens', 1)
    else:
        sizes = ('--depth', length, '--prefill', 0, '--tokens', tokens)
    return measure.shown('bench', 'model', '-m', '$model', *sizes, '--kv-type', kind)


def compare_short(options):
    small_model(options)
    # A run takes a second or two: more tokens, and more rounds.
    tokens, rounds = (options.tokens, 1) if options.quick else (4 * options.tokens, 3 * options.rounds)
    return compare_prompt(options, 'short', 'short', SHORT, tokens, rounds, ('decode',))


def compare_long(options):
    small_model(options)
    lengths = (48, 96) if options.quick else (2048, LONG, CONTEXT - options.tokens - 8)
    rows = []
    for length in lengths:
        rows += compare_prompt(options, 'long', f'long {length}', text_of(options, length), options.tokens,
                               options.rounds, ('prefill', 'decode'))
    return rows
