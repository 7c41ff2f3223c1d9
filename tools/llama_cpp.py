"""What tools/compare and tools/check-model share: llama.cpp beside Treeline, and texts of some length.

llama.cpp is the one of the package that tools/peers.txt pins, in a virtual environment of its own,
build/peers/llama.cpp. It runs as a server in a process of its own, which ends with the one that started it.
"""

import array
import json
import math
import pathlib
import struct
import subprocess
import tempfile
import urllib.error
import urllib.request

import peers

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / 'build'


class LlamaCppError(Exception):
    """llama.cpp could not be had, or did not do what it was asked for; the message says what."""


def require():
    """Makes the virtual environment, unless it is there with what is pinned."""
    try:
        peers.require('llama.cpp')
    except peers.PeerInstallError as error:
        raise LlamaCppError(str(error)) from error


# Runs in the virtual environment, until its standard input ends.
SCRIPT = '''
import json, os, sys
import xllamacpp as peer
options = json.loads(sys.argv[1])
params = peer.CommonParams()
params.model.path = options['model']
params.n_ctx = options['context']
params.n_parallel = 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options['threads']
params.n_gpu_layers = 0
params.flash_attn_type = getattr(peer.llama_flash_attn_type,
                                 'LLAMA_FLASH_ATTN_TYPE_' + options['flash'])
params.cache_type_k = params.cache_type_v = getattr(peer.ggml_type,
                                                    'GGML_TYPE_' + options['kv_type'].upper())
params.cache_ram_mib = 0  # no copies of contexts beside the one in use
params.slot_save_path = options['folder'] + '/'
params.verbosity = -1
server = peer.Server(params)
print('ADDRESS ' + server.listening_address, flush=True)
sys.stdin.read()
os._exit(0)
'''


class Server:
    """llama.cpp with one model and one context. A context manager: the process lives as long.

    flash: with its flash attention. Without that, and with f32 keys and values, its attention rounds
    to f32 alone.
    """

    def __init__(self, model, threads, context=8192, kv_type='f16', flash=True):
        self._options = {'model': str(model), 'threads': threads, 'context': context, 'kv_type': kv_type,
                         'flash': 'ENABLED' if flash else 'DISABLED'}

    def __enter__(self):
        self._folder = tempfile.TemporaryDirectory(prefix='llama-cpp-', dir=BUILD)
        self.folder = pathlib.Path(self._folder.name)
        self._errors = open(self.folder / 'stderr', 'w+')
        self._process = subprocess.Popen(
            [peers.PLACE / 'llama.cpp/bin/python', '-c', SCRIPT, json.dumps(self._options | {'folder': str(self.folder)})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        for line in self._process.stdout:
            if line.startswith('ADDRESS '):
                self._address = line.split()[1]
                return self
        error = LlamaCppError(f'llama.cpp did not start: {self._last_words()}')
        self.__exit__()
        raise error

    def __exit__(self, *_):
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()
        self._folder.cleanup()

    def _last_words(self):
        self._errors.seek(0)
        return self._errors.read()[-500:].strip() or 'it said nothing'

    def _ask(self, path, question):
        request = urllib.request.Request(self._address + path, json.dumps(question).encode(),
                                         {'Content-Type': 'application/json'})
        # The server is on this machine: no proxy.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=3600) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise LlamaCppError(f'llama.cpp refused {path}: {error.read().decode()[:500]}') from error
        except (OSError, ValueError) as error:
            raise LlamaCppError(f'llama.cpp gave no answer to {path}: {error}; {self._last_words()}') from error

    def tokenize(self, text, special=False, start=False):
        """Tokens of a text. special: names of special tokens are those tokens; start: with what the
        model wants at the start of a text."""
        return self._ask('/tokenize', {'content': text, 'parse_special': special,
                                       'add_special': start})['tokens']

    def complete(self, prompt, tokens, **options):
        """The server's answer to a prompt, a text or a list of tokens, with the likeliest tokens."""
        return self._ask('/completion', {'prompt': prompt, 'n_predict': tokens, 'temperature': 0,
                                         'samplers': ['temperature'], 'ignore_eos': True,
                                         'cache_prompt': False, 'return_tokens': True} | options)

    def log_probabilities(self, tokens, done=lambda count: None):
        """Of every token but the first, after those before it: one request and one step of decoding
        each. The server gives no log-probabilities of a prompt. It gives those of the token that it
        generated, before any bias: so a bias makes it generate the next one of `tokens`."""
        result = []
        for i in range(1, len(tokens)):
            answer = self.complete(tokens[:i], 1, cache_prompt=True, n_probs=1,
                                   logit_bias=[[tokens[i], 1000]])
            first = answer['completion_probabilities'][0]
            if first['id'] != tokens[i]:
                raise LlamaCppError(f"llama.cpp generated token {first['id']} instead of {tokens[i]}")
            result.append(first['logprob'])
            done(i)
        return result

    def decode_at(self, depth, tokens):
        """Tokens a second with `depth` tokens in the cache before.

        A prompt of that length would take llama.cpp many minutes for a figure of seconds. Instead a
        short prompt's context is saved, its keys and values are repeated to the depth, and the result
        is loaded as a saved context. They are as fast to read as others.
        """
        short = [1 + i % 200 for i in range(256)]
        self.complete(short, 1, cache_prompt=True)
        self._ask('/slots/0?action=save', {'filename': 'short'})
        before = repeat_context(self.folder / 'short', self.folder / 'long', depth)
        restored = self._ask('/slots/0?action=restore', {'filename': 'long'})['n_restored']
        (self.folder / 'long').unlink()
        # The first token counts as the prompt's; as many as asked for are timed.
        timings = self.complete(before + [1], tokens + 1, cache_prompt=True)['timings']
        if restored != depth or timings['cache_n'] != depth or timings['predicted_n'] != tokens + 1:
            raise LlamaCppError(f'llama.cpp decoded after {timings["cache_n"]} tokens instead of {depth}')
        return timings['predicted_per_second']


class _Reader:
    """Takes a file's content piece by piece."""

    def __init__(self, path):
        self._data = memoryview(path.read_bytes())
        self.at = 0

    def take(self, count):
        if count > len(self._data) - self.at:
            raise LlamaCppError('a file ends too early')
        self.at += count
        return self._data[self.at - count:self.at]

    def numbers(self, layout):
        return struct.unpack('<' + layout, self.take(struct.calcsize('<' + layout)))

    def at_end(self):
        return self.at == len(self._data)


def repeat_context(source, target, tokens):
    """Writes to `target` the context saved in `source`, repeated until it has so many tokens; returns
    them. Raises LlamaCppError when the file is laid out in another way than the pinned version does it.

    The layout, in numbers of 32 bits unless said otherwise: "ggsq", version, count of words, words:
    -1, 1, count of tokens, tokens, 0. Then 1 stream, count of cells, and (position, 1, sequence) of
    each. Then 0 (values are not transposed), layers, two words that are kept as they are, and of every
    layer's keys, then of every layer's values: type, bytes of a row (64 bits), rows.
    """
    reader = _Reader(source)

    def expect(what, found, wanted):
        if found != wanted:
            raise LlamaCppError(f'a saved context of llama.cpp has {what} {found}, not {wanted}')

    header = reader.numbers('3I')
    expect('magic and version', header[:2], (0x67677371, 4))
    words = reader.numbers(f'{header[2]}i')
    count = words[2]
    expect('words', (words[:2], len(words), words[-1]), ((-1, 1), count + 4, 0))
    expect('streams and cells', reader.numbers('2I'), (1, count))
    expect('cells', reader.numbers(f'{3 * count}I'),
           tuple(word for position in range(count) for word in (position, 1, 0)))
    transposed, layers, *kept = reader.numbers('4I')
    expect('transposed values', transposed, 0)

    def repeat(items):
        return (items * (tokens // count + 1))[:tokens]

    result = repeat(list(words[3:-1]))
    with open(target, 'wb') as file:
        file.write(struct.pack(f'<3I{tokens + 4}i', *header[:2], tokens + 4, -1, 1, tokens, *result, 0))
        file.write(struct.pack(f'<2I{3 * tokens}I', 1, tokens, *(
            word for position in range(tokens) for word in (position, 1, 0))))
        file.write(struct.pack('<4I', 0, layers, *kept))
        for _ in range(2 * layers):
            kind, row = reader.numbers('iQ')
            file.write(struct.pack('<iQ', kind, row))
            rows = bytes(reader.take(row * count))
            for begin in range(0, tokens, count):
                file.write(rows[:row * min(count, tokens - begin)])
    expect('an end', reader.at_end(), True)
    return result


class WeightsError(LlamaCppError):
    """A model has weights of a type that write_f32 does not know."""


# Types of GGUF's values: bytes of each. Texts (8) and arrays (9) have a length of their own.
_VALUE_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_TEXT, _ARRAY = 8, 9


def _take_text(reader):
    return bytes(reader.take(reader.numbers('Q')[0]))


def _skip_value(reader, kind):
    if kind == _TEXT:
        _take_text(reader)
    elif kind == _ARRAY:
        kind, count = reader.numbers('IQ')
        if kind in _VALUE_BYTES:
            reader.take(_VALUE_BYTES[kind] * count)
        else:
            for _ in range(count):
                _skip_value(reader, kind)
    else:
        reader.take(_VALUE_BYTES[kind])


def _q4_1(blocks):
    for scale, least, quants in struct.iter_unpack('<ee16s', blocks):
        values = [scale * i + least for i in range(16)]
        yield [values[byte & 15] for byte in quants] + [values[byte >> 4] for byte in quants]


def _q8_0(blocks):
    for scale, *quants in struct.iter_unpack('<e32b', blocks):
        yield [scale * quant for quant in quants]


# Types of weights: elements and bytes of a block, and what makes lists of numbers of blocks.
_WEIGHTS = {0: (1, 4, lambda blocks: [blocks.cast('f')]), 3: (32, 20, _q4_1), 8: (32, 34, _q8_0)}


def write_f32(source, target):
    """Writes a model with the same weights in f32, with which llama.cpp does not round activations.

    The numbers are the same bits that ggml makes of the weights. Raises WeightsError for types other
    than f32, Q4_1 and Q8_0.
    """
    alignment = 32
    reader = _Reader(pathlib.Path(source))
    magic, version, tensors, values = reader.numbers('4s I Q Q')
    if magic != b'GGUF':
        raise WeightsError(f'{source} is no GGUF file')
    begin = reader.at
    for _ in range(values):
        key, kind = _take_text(reader), reader.numbers('I')[0]
        if key == b'general.alignment':
            alignment, = reader.numbers('I')
        else:
            _skip_value(reader, kind)
    end, reader.at = reader.at, begin
    header = struct.pack('<4s I Q Q', magic, version, tensors, values) + reader.take(end - begin)
    parts = []
    size = 0
    for _ in range(tensors):
        name, dimensions = _take_text(reader), reader.numbers('I')[0]
        shape = reader.numbers(f'{dimensions}Q')
        kind, offset = reader.numbers('IQ')
        if kind not in _WEIGHTS:
            raise WeightsError(f'{name.decode()} has weights of type {kind}')
        parts.append((kind, offset, math.prod(shape)))
        header += struct.pack(f'<Q{len(name)}sI{dimensions}QIQ', len(name), name, dimensions, *shape, 0, size)
        size += 4 * math.prod(shape)
        size += -size % alignment
    begin = reader.at + -reader.at % alignment
    with open(target, 'wb') as file:
        file.write(header + bytes(-len(header) % alignment))
        for kind, offset, count in parts:
            elements, block_bytes, decode = _WEIGHTS[kind]
            reader.at = begin + offset
            numbers = array.array('f')
            for block in decode(reader.take(count // elements * block_bytes)):
                numbers.extend(block)
            file.write(numbers.tobytes() + bytes(-4 * count % alignment))


def document(count_tokens, most):
    """The project's own documents, cut at the end of a line so that they have `most` tokens or a few
    less. count_tokens: a function that counts those of a text. Tables of results are none of them: what
    is measured would change what is measured next."""
    lines = '\n\n'.join(path.read_text(encoding='utf-8') for path in sorted((ROOT / 'docs').glob('*.md'))
                        if not path.name.startswith('results')).splitlines(keepends=True)
    fits, too_many = 0, len(lines) + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if count_tokens(''.join(lines[:middle])) <= most:
            fits = middle
        else:
            too_many = middle
    if fits == len(lines):
        raise ValueError(f'the documents have fewer than {most} tokens')
    return ''.join(lines[:fits])
