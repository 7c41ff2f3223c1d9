"""Tree decoding over two processes against tree_attn_decode of ring-attention-pytorch, over gloo.

The keys are half on each side of both. tree_attn_decode has as many key heads as query heads, so those
of a group are copies of each other; that is how it is called. It also computes the right thing when a
group's heads are rows of one query, which its documents do not say and which reads a fourth of the bytes:
a row of its own.
"""

import os

from comparison import kernels, measure, results

RANKS = 2
HEADS = (32, 8)
HEAD_DIM = 128
FORMS = {'heads expanded': 'tree', 'group in query rows': 'tree, group in query rows'}


def arguments(context, threads, repeats):
    return ('bench', 'decode', '--schedule', 'tree', '--context', str(context), '--dtype', 'bf16', '--threads',
            str(threads), '--repeats', str(repeats))


def mpirun():
    """How mpirun wants to be called here."""
    more = ['--allow-run-as-root'] if os.geteuid() == 0 else []
    if (os.cpu_count() or 1) < RANKS:
        more += ['--oversubscribe', '--bind-to', 'none']
    return ['mpirun', *more, '-n', str(RANKS)]


def run_ours(options, context, threads, repeats):
    report, _ = measure.run_program(options, *arguments(context, threads, repeats), before=mpirun())
    row, = (row for row in report['rows'] if row['case'] == 'decode')
    return {'ms': row['median_us'] / 1e3, 'fraction': row['limit_fraction']}


def compare(options):
    context, repeats = (1024, 3) if options.quick else (16384, 41)
    threads = max(1, options.threads // RANKS)
    torch = kernels.Torch(options, threads)
    question = {'ranks': RANKS, 'threads': threads, 'context': context, 'heads': HEADS[0], 'kv_heads': HEADS[1],
                'head_dim': HEAD_DIM, 'repeats': repeats, 'forms': list(FORMS)}
    found, failures = measure.alternate(
        {'treeline': lambda: run_ours(options, context, threads, repeats),
         'ring-attention-pytorch': lambda: torch.ask('run_tree_attention.py', question)},
        options.rounds, f'ranks: {context} keys')
    ours, theirs = found['treeline'], found['ring-attention-pytorch']
    command = ' '.join([*mpirun(), measure.shown(*arguments(context, threads, repeats))])
    return [results.make_row(
        f'ranks {key} {context}',
        f'tree decoding bf16, {HEADS[0]}/{HEADS[1]} heads x {HEAD_DIM}, {context:,} keys, {RANKS} processes, {form}',
        'ms',
        ('treeline', [each['ms'] for each in ours]),
        ('tree_attn_decode', [1e3 * each['seconds'][form] for each in theirs]),
        results.median([each['fraction'] for each in ours]), command=command,
        note=failures.get('ring-attention-pytorch') or torch.note(),
        their_error=max((each['max_error'] for each in theirs), default=None)) for form, key in FORMS.items()]
