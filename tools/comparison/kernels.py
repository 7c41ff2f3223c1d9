"""Attention on one device against PyTorch's scaled_dot_product_attention.

Both have the same shape, type and threads. PyTorch runs in every form that computes the same: for
decoding, with enable_gqa and with a group's heads as rows of one query; sequences in one call and one
by one. Its keys and values are contiguous for each head, on huge pages. The fastest form counts.
"""

import collections

from comparison import measure, results

HEAD_DIM = 128
DECODE_HEADS = (32, 8)
HEADS = 8
BEYOND_CACHE = 512e6  # bytes of keys and values, as treeline bench kernel has
BYTES = {'bf16': 2, 'f16': 2, 'f32': 4}
# What oneDNN needs on some machines with AMX, where its code for AMX is an illegal instruction.
SWITCH = {'ONEDNN_MAX_CPU_ISA': 'AVX512_CORE_BF16'}

Case = collections.namedtuple('Case', 'kernel dtype context batch')


def batch_of(dtype, context):
    """Sequences whose keys and values no cache holds."""
    one = 2 * context * DECODE_HEADS[1] * HEAD_DIM * BYTES[dtype]
    return max(1, int(-(-BEYOND_CACHE // one)))


def cases(quick):
    """All cases. quick: small ones, which caches may hold."""
    decode, forward, backward = ((2048,), 512, 256) if quick else ((65536, 16384), 8192, 4096)
    for context in decode:
        for dtype in ('bf16', 'f16', 'f32'):
            yield Case('decode', dtype, context, 2 if quick else batch_of(dtype, context))
    for dtype in ('bf16', 'f16', 'f32'):
        yield Case('forward', dtype, forward, 1)
    for dtype in ('bf16', 'f32'):
        yield Case('backward', dtype, backward, 1)


def unit_of(case):
    return 'GB/s' if case.kernel == 'decode' else 'GFLOP/s'


def title(case):
    if case.kernel == 'decode':
        heads = '{}/{}'.format(*DECODE_HEADS)
        return f'decode {case.dtype}, {heads} heads x {HEAD_DIM}, {case.context:,} keys'
    return f'{case.kernel} {case.dtype}, causal, {HEADS} heads x {HEAD_DIM}, {case.context:,} tokens'


def arguments(case, threads, repeats):
    return ('bench', 'kernel', '--case', case.kernel, '--dtype', case.dtype, '--context', str(case.context),
            '--batch', str(case.batch), '--threads', str(threads), '--repeats', str(repeats))


def run_ours(options, case):
    report, _ = measure.run_program(options, *arguments(case, options.threads, options.repeats))
    row, = report['rows']
    rate = row['gbps'] if case.kernel == 'decode' else row['gflops']
    return {'rate': rate, 'fraction': row['limit_fraction'], 'work': rate * row['median_us'] * 1e3}


class Torch:
    """PyTorch as it is, until it crashes; then with the switch that its own documents name."""

    def __init__(self, options, threads=None, env=None):
        self._options = options
        self._switch = {}
        self._env = {'OMP_NUM_THREADS': str(threads or options.threads),
                     'THP_MEM_ALLOC_ENABLE': '1'} | (env or {})  # huge pages, as ours

    def ask(self, script, question):
        env = self._env | self._switch
        try:
            return measure.run_peer('torch', script, question, self._options.limit, env)
        except measure.PeerError as error:
            if not error.crashed or self._switch:
                raise
        self._switch = SWITCH
        return measure.run_peer('torch', script, question, self._options.limit, self._env | SWITCH)

    def note(self):
        if not self._switch:
            return None
        return 'PyTorch crashes here unless it runs with ' + ', '.join(f'{k}={v}' for k, v in SWITCH.items())


def run_theirs(options, case, torch):
    """Seconds of every form, and how far its values are from float64."""
    heads, kv_heads = DECODE_HEADS if case.kernel == 'decode' else (HEADS, HEADS)
    return torch.ask('run_sdpa.py', {'threads': options.threads, 'repeats': options.repeats, 'heads': heads,
                                     'kv_heads': kv_heads, 'head_dim': HEAD_DIM} | case._asdict())


def compare_case(options, case, torch):
    unit = unit_of(case)
    found, failures = measure.alternate(
        {'treeline': lambda: run_ours(options, case), 'PyTorch': lambda: run_theirs(options, case, torch)},
        options.rounds, f'kernels: {title(case)}')
    ours, theirs = found['treeline'], found['PyTorch']
    work = ours[0]['work']  # bytes or operations of one repetition: the same on both sides
    forms = {form: [work / each['seconds'][form] / 1e9 for each in theirs]
             for form in (theirs[0]['seconds'] if theirs else ())}
    best = results.best_of(forms)
    return results.make_row(
        f'kernels {case.kernel} {case.dtype} {case.context}', title(case), unit,
        ('treeline', [each['rate'] for each in ours]), (f'PyTorch, {best}' if best else 'PyTorch', forms.get(best, [])),
        results.median([each['fraction'] for each in ours]), note=failures.get('PyTorch') or torch.note(),
        command=measure.shown(*arguments(case, options.threads, options.repeats)),
        forms={form: results.median(values) for form, values in forms.items()},
        their_error=max((each['max_error'] for each in theirs), default=None))


def compare(options):
    torch = Torch(options)
    return [compare_case(options, case, torch) for case in cases(options.quick)]
