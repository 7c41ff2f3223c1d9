"""Four layers of Llama-3.1-8B's shape with random weights: against llama.cpp, and over hosts.

Decoding is with 32,768 tokens in the cache. Ours: `treeline bench model`, whose cache starts with random
keys and values. llama.cpp's: a prompt of that length would take it many minutes for each figure, so a
short prompt's context is saved, its keys and values are repeated, and the result is loaded as a saved
context. The steps that are timed are those of any decoding; llama.cpp's include choosing the likeliest
token, ours do not. Also the memory that ours takes.
"""

import os
import subprocess

import llama_cpp
from comparison import generation, measure, results

PREFILL = 2048
HOSTS = 4
RATE = 250  # Mbit/s
HOST_TOKENS = 3  # a step of the ring takes many seconds


def model_of(options):
    """Made once."""
    path = measure.PLACE / 'llama-8b-4.gguf'
    if not path.exists():
        measure.say('8b: writing random weights')
        part = path.with_suffix('.part')
        subprocess.run([options.program, 'model', 'random', '--like', 'llama-3.1-8b', '--layers', '4', '--type',
                        'Q4_K', part], check=True, stdout=subprocess.DEVNULL)
        part.replace(path)
    return path


def arguments(model, depth, prefill, tokens, kind, ranks, threads):
    return ('bench', 'model', '-m', model, '--depth', str(depth), '--prefill', str(prefill), '--tokens', str(tokens),
            '--kv-type', kind, '--ranks', str(ranks), '--threads', str(threads))


def decode_ours(options, model, kind, ranks=1):
    result, memory = measure.run_program(options, *arguments(model, options.depth, 0, options.steps, kind, ranks,
                                                             max(1, options.threads // ranks)))
    row, = result['rows']
    return {'rate': row['tokens_per_second'], 'limit': row['tokens_per_second'] / row['limit_fraction'],
            'cache': row['peak_bytes_per_rank'] * ranks, **memory}


def prefill_ours(options, model, kind, tokens):
    result, _ = measure.run_program(options, *arguments(model, 0, tokens, 1, kind, 1, options.threads))
    row, = (row for row in result['rows'] if row['phase'] == 'prefill')
    return {'rate': row['tokens_per_second']}


def serve(options, model, kind, context, ask):
    try:
        llama_cpp.require()
        with llama_cpp.Server(model, options.threads, kv_type=kind, context=context) as server:
            return {'rate': ask(server)}
    except llama_cpp.LlamaCppError as error:
        raise measure.PeerError(str(error)) from error


def decode_theirs(options, model, kind):
    return serve(options, model, kind, options.depth + 256,
                 lambda server: server.decode_at(options.depth, options.steps))


def prefill_theirs(options, model, kind, tokens):
    prompt = [1 + i % 200 for i in range(tokens)]
    return serve(options, model, kind, tokens + 64,
                 lambda server: server.complete(prompt, 1)['timings']['prompt_per_second'])


def rates(found):
    return {name: [each['rate'] for each in values] for name, values in found.items()}


def memory_row(name, found, weights, depth):
    """The most that was resident, and what of it is neither weights nor cache."""
    most = max(found[name], key=lambda each: each['resident'])
    beyond = most['resident'] - weights - most['cache']
    note = (f"{beyond / 1e6:+.0f} MB beside all weights, {weights / 1e6:.0f} MB, and the cache, "
            f"{most['cache'] / 1e6:.0f} MB")
    private = None
    if most['anonymous'] is not None:
        private = most['anonymous'] - most['cache']
        # The embedding is read by rows: most of it never becomes resident.
        note += f'; {private / 1e6:+.0f} MB beside what it read of the file and the cache'
    return results.make_row(f'8b memory {name}', f'8B shape, resident memory after {depth:,} tokens', 'MB',
                            (name, [most['resident'] / 1e6]), ('', []), note=note, weights=weights,
                            cache=most['cache'], beyond_weights_and_cache=beyond, anonymous_beyond_cache=private)


def shown(*parts):
    return measure.shown(*arguments('llama-8b-4.gguf', *parts))


def compare_decoding(options, model):
    two = generation.two_ranks(options)
    runners = {f'treeline {kind}': lambda kind=kind: decode_ours(options, model, kind) for kind in generation.TYPES}
    runners[f'treeline {two}'] = lambda: decode_ours(options, model, 'f16', 2)
    runners |= {f'llama.cpp {kind}': lambda kind=kind: decode_theirs(options, model, kind) for kind in generation.TYPES}
    found, failures = measure.alternate(runners, options.rounds, '8b: decoding', ('rate',))
    limits = {kind: results.median([each['limit'] for each in found[f'treeline {kind}']]) for kind in generation.TYPES}
    rows = generation.pair_rows(f'8b {options.depth} decode', f'8B shape, decoding after {options.depth:,} tokens',
                                rates(found), failures, generation.TYPES, limits,
                                lambda kind: shown(options.depth, 0, options.steps, kind, 1, options.threads), two)
    weights = model.stat().st_size
    return rows + [memory_row(name, found, weights, options.depth) for name in ('treeline f16', f'treeline {two}')]


def compare_prefill(options, model):
    tokens = 32 if options.quick else PREFILL
    # The type of keys and values is little of this work, and ours takes minutes: one of ours.
    kinds = ('f16',)
    runners = {f'treeline {kind}': lambda kind=kind: prefill_ours(options, model, kind, tokens) for kind in kinds}
    runners |= {f'llama.cpp {kind}': lambda kind=kind: prefill_theirs(options, model, kind, tokens)
                for kind in generation.TYPES}
    found, failures = measure.alternate(runners, options.rounds, '8b: prefill', ('rate',))
    return generation.pair_rows(f'8b {tokens} prefill', f'8B shape, prefill of {tokens:,} tokens', rates(found),
                                failures, kinds, command=lambda kind: shown(0, tokens, 1, kind, 1, options.threads))


def compare_8b(options):
    model = model_of(options)
    return compare_prefill(options, model) + compare_decoding(options, model)


def why_no_hosts():
    if os.geteuid() != 0:
        return 'root is needed'
    check = subprocess.run([measure.ROOT / 'tools/netlab', '--check'], capture_output=True, text=True)
    return check.stderr.strip() if check.returncode != 0 else None


def compare_hosts(options):
    """Decoding over hosts that are network namespaces: the tree against a ring that passes keys and
    values on."""
    reason = why_no_hosts()
    if reason:
        raise measure.NotHereError(f'cannot make hosts: {reason}')
    model = model_of(options)
    lab = ['tools/netlab', '--hosts', str(HOSTS), '--rate', str(RATE), '--']
    command = ('bench', 'model', '-m', model, '--depth', str(options.depth), '--prefill', '0', '--tokens',
               str(HOST_TOKENS), '--threads', '1', '--schedule', 'tree,ring-kv')
    measure.say(f'hosts: tree, then ring-kv, {options.depth} tokens before')
    report, _ = measure.run_program(options, *command, before=[measure.ROOT / lab[0], *lab[1:]])
    measure.say('')
    rate = {row['schedule']: row['tokens_per_second'] for row in report['rows']}
    return [results.make_row(
        f'hosts tree {options.depth}',
        f'8B shape, decoding after {options.depth:,} tokens, {HOSTS} hosts at {RATE} Mbit/s', 'tokens/s',
        ('treeline, tree', [rate['tree']]), ('treeline, ring-kv', [rate['ring-kv']]),
        command=' '.join([*lab, measure.shown(*command).replace(str(model), model.name)]))]
