"""Times PyTorch's scaled_dot_product_attention. Runs in the environment `torch`; see comparison/kernels.py."""

import json
import math
import statistics
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

DTYPES = {'bf16': torch.bfloat16, 'f16': torch.float16, 'f32': torch.float32}
# Of values, against the largest of their row in float64: roundings of inputs to products and of results.
BOUNDS = {'bf16': 5e-2, 'f16': 1e-2, 'f32': 1e-4}


def error_of(found, expected):
    """The farthest off, over the largest expected value. NaN is as wrong as can be."""
    error = ((found.double() - expected).abs().max() / expected.abs().max()).item()
    return math.inf if math.isnan(error) else error


def row_in_float64(query, keys, values):
    weights = torch.softmax(keys.double() @ query.double() / math.sqrt(len(query)), 0)
    return weights @ values.double()


def time_all(forms, repeats):
    """Median seconds of every form, after a warm-up of each."""
    seconds = {}
    for name, run in forms.items():
        run()
        times = []
        for _ in range(repeats):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        seconds[name] = statistics.median(times)
    return seconds


def decode(ask, dtype):
    batch, heads, kv_heads, dim = ask['batch'], ask['heads'], ask['kv_heads'], ask['head_dim']
    group = heads // kv_heads
    q = torch.randn(batch, heads, 1, dim, dtype=dtype)
    k, v = (torch.randn(batch, kv_heads, ask['context'], dim, dtype=dtype) for _ in range(2))
    folded = q.view(batch, kv_heads, group, dim)

    def one_by_one(query, **options):
        return torch.cat([sdpa(query[i:i + 1], k[i:i + 1], v[i:i + 1], **options) for i in range(batch)])

    forms = {'enable_gqa': lambda: sdpa(q, k, v, enable_gqa=True),
             'group in query rows': lambda: sdpa(folded, k, v)}
    if batch > 1:
        forms |= {'enable_gqa, one by one': lambda: one_by_one(q, enable_gqa=True),
                  'group in query rows, one by one': lambda: one_by_one(folded)}
    error = 0.0
    for run in forms.values():
        out = run().reshape(batch, heads, dim)
        for i, head in ((0, 0), (batch - 1, heads - 1), (batch // 2, heads // 2)):
            expected = row_in_float64(q[i, head, 0], k[i, head // group], v[i, head // group])
            error = max(error, error_of(out[i, head], expected))
    return forms, error


def forward(ask, dtype):
    q, k, v = (torch.randn(1, ask['heads'], ask['context'], ask['head_dim'], dtype=dtype) for _ in range(3))
    out = sdpa(q, k, v, is_causal=True)
    error = 0.0
    for head, row in ((0, ask['context'] - 1), (ask['heads'] - 1, ask['context'] // 2), (1, 7)):
        expected = row_in_float64(q[0, head, row], k[0, head, :row + 1], v[0, head, :row + 1])
        error = max(error, error_of(out[0, head, row], expected))
    return {'is_causal': lambda: sdpa(q, k, v, is_causal=True)}, error


def backward(ask, dtype):
    """Of the gradients alone: the forward pass is done before."""
    inputs = [torch.randn(1, ask['heads'], ask['context'], ask['head_dim'], dtype=dtype, requires_grad=True)
              for _ in range(3)]
    out = sdpa(*inputs, is_causal=True)
    gradient = torch.randn_like(out)

    def run():
        return torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    # One head in float64, by definition and not by the kernel.
    exact = [each.detach()[0, 0].double().requires_grad_() for each in inputs]
    q, k, v = exact
    scores = (q @ k.T / math.sqrt(ask['head_dim'])).masked_fill(
        torch.ones(ask['context'], ask['context'], dtype=torch.bool).triu(1), -math.inf)
    expected = torch.autograd.grad(torch.softmax(scores, 1) @ v, exact, gradient[0, 0].double())
    error = max(error_of(found[0, 0], wanted) for found, wanted in zip(run(), expected))
    return {'is_causal': run}, error


def main():
    ask = json.loads(sys.argv[1])
    torch.manual_seed(1)
    torch.set_num_threads(ask['threads'])
    prepare = {'decode': decode, 'forward': forward, 'backward': backward}[ask['kernel']]
    forms, error = prepare(ask, DTYPES[ask['dtype']])
    if error <= BOUNDS[ask['dtype']]:
        answer = {'seconds': time_all(forms, ask['repeats']), 'max_error': error}
    else:
        answer = {'error': f'its values are wrong: {error:.2g} off'}
    print('ANSWER ' + json.dumps(answer))


main()
