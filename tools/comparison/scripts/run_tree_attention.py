"""Times tree_attn_decode of ring-attention-pytorch over processes. Runs in the environment `torch`; see
comparison/ranks.py."""

import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from ring_attention_pytorch.tree_attn_decoding import tree_attn_decode

BOUND = 5e-2  # of values, against the largest of their row in float64


def shard(ask, rank):
    """Keys and values of a rank, [1, kv_heads, keys, dim]: the same wherever they are made."""
    generator = torch.Generator().manual_seed(rank)
    keys = ask['context'] // ask['ranks']
    return [torch.randn(1, ask['kv_heads'], keys, ask['head_dim'], generator=generator).bfloat16() for _ in range(2)]


def error_of(ask, q, out):
    """Of some heads, against float64 over the keys of all ranks."""
    shards = [shard(ask, rank) for rank in range(ask['ranks'])]
    group = ask['heads'] // ask['kv_heads']
    worst = 0.0
    for head in (0, ask['heads'] // 2, ask['heads'] - 1):
        k, v = (torch.cat([each[i][0, head // group] for each in shards]).double() for i in range(2))
        weights = torch.softmax(k @ q[0, head, 0].double() / math.sqrt(ask['head_dim']), 0)
        expected = weights @ v
        error = ((out[0, head].double() - expected).abs().max() / expected.abs().max()).item()
        worst = max(worst, math.inf if math.isnan(error) else error)
    return worst


def inputs(ask, form, q, k, v):
    """Query, keys and values as a form wants them."""
    group = ask['heads'] // ask['kv_heads']
    if form == 'heads expanded':
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return q.view(1, ask['kv_heads'], group, ask['head_dim']), k, v


def time_form(tensors, repeats):
    """Seconds of a step, from when all are ready, as this rank sees it; and the result."""
    def step():
        return tree_attn_decode(*tensors, shard_kv_seq=False)

    out = step()
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), out


def run_rank(rank, ask, folder):
    torch.set_num_threads(ask['threads'])
    dist.init_process_group('gloo', init_method=f'file://{folder}/meet', rank=rank, world_size=ask['ranks'])
    q = torch.randn(1, ask['heads'], 1, ask['head_dim'], generator=torch.Generator().manual_seed(99)).bfloat16()
    k, v = shard(ask, rank)
    answer = {'seconds': {}, 'max_error': 0.0}
    for form in ask['forms']:
        seconds, out = time_form(inputs(ask, form, q, k, v), ask['repeats'])
        answer['seconds'][form] = seconds
        if rank == 0:
            answer['max_error'] = max(answer['max_error'],
                                      error_of(ask, q, out.reshape(1, ask['heads'], ask['head_dim'])))
    if rank == 0:
        if not answer['max_error'] <= BOUND:
            answer = {'error': f"its values are wrong: {answer['max_error']:.2g} off"}
        print('ANSWER ' + json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == '__main__':
    os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo')  # a host's name need not resolve
    with tempfile.TemporaryDirectory() as place:
        question = json.loads(sys.argv[1])
        try:
            processes.spawn(run_rank, (question, place), question['ranks'])
        except processes.ProcessExitedException as error:
            if error.signal_name:  # a rank's crash is this program's
                signal.raise_signal(getattr(signal, error.signal_name))
            raise
