"""Runs Treeline and its peers, each measurement in a process of its own, by turns."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading

import peers

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLACE = ROOT / 'build/compare'
SCRIPTS = pathlib.Path(__file__).resolve().parent / 'scripts'
FAR_BEHIND = 0.6  # of the fastest: not run again
GRACE = 10  # seconds that a program has to end by itself


class CompareError(Exception):
    """Something failed that the comparison needs; the message says what."""


class NotHereError(CompareError):
    """This machine cannot do it; the message says why. An error only for who asked for it."""


class PeerError(Exception):
    """A peer gave no figure; the message says why. It becomes a row instead of one."""

    def __init__(self, message, crashed=False):
        super().__init__(message)
        self.crashed = crashed  # ended by a signal that nobody sent


_lines = {'last': ''}


def say(text):
    """How far it is, on standard error: a line that is written over on a terminal, else one a step."""
    if text == _lines['last']:
        return
    _lines['last'] = text
    if sys.stderr.isatty():
        print(f'\r{text}\033[K', end='', file=sys.stderr, flush=True)
    elif text:
        print(f'compare: {text}', file=sys.stderr, flush=True)


class Peak:
    """Watches a process's memory that is no mapped file, while it reads its weights."""

    def __init__(self, pid):
        self._pid = pid
        self._samples = []  # (mapped, anonymous), in bytes
        self._thread = threading.Thread(target=self._watch)
        self._ended = threading.Event()
        self._thread.start()

    def _watch(self):
        while not self._ended.wait(0.02):
            try:
                lines = pathlib.Path(f'/proc/{self._pid}/status').read_text().splitlines()
            except OSError:
                return
            fields = dict(line.split(':', 1) for line in lines if line.startswith('Rss'))
            if fields:
                self._samples.append(tuple(int(fields[name].split()[0]) * 1024
                                           for name in ('RssFile', 'RssAnon')))

    def anonymous(self):
        """The most there was, after the process ended. Before weights are read, it measures the
        machine's limits in memory that it then gives back; that does not count."""
        self._ended.set()
        self._thread.join()
        most = max((mapped for mapped, _ in self._samples), default=0)
        return max((anonymous for mapped, anonymous in self._samples if mapped > most / 2), default=None)


def _give(process, text):
    try:
        process.stdin.write(text)
        process.stdin.close()
    except BrokenPipeError:
        pass  # it ended before it had read all; its exit code says why


def _end(process):
    """As it likes to be ended: hosts and ranks that it has started end with it."""
    process.terminate()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_program(options, *arguments, text='', before=()):
    """Runs Treeline. Returns what it reports as JSON, and its peak of resident memory, in bytes."""
    with tempfile.NamedTemporaryFile('r', suffix='.json', dir=PLACE) as report, \
            tempfile.TemporaryFile('w+') as errors:
        process = subprocess.Popen([*before, options.program, *arguments, '--json', report.name],
                                   stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, text=True)
        peak = Peak(process.pid)
        try:
            _give(process, text)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        except BaseException:  # nobody waits for what was interrupted
            _end(process)
            raise
        finally:
            anonymous = peak.anonymous()
        memory = {'resident': usage.ru_maxrss * 1024, 'anonymous': anonymous}
        if process.returncode != 0:
            errors.seek(0)
            said = [line for line in errors.read().splitlines() if 'error:' in line] or ['it said nothing']
            raise CompareError(f"'treeline {' '.join(map(str, arguments[:2]))}' ended with {process.returncode}: "
                               f'{said[0]}')
        return json.load(report), memory


def shown(*arguments):
    """A command as a reader can type it."""
    return ' '.join(['treeline', *map(str, arguments)])


def machine(options):
    """Where this runs, for records of results."""
    described = run_program(options, 'info')[0]['machine']
    try:
        flags = pathlib.Path('/proc/cpuinfo').read_text().split()
    except OSError:
        flags = []
    return {name: described[name] for name in ('cpu', 'cores', 'isa', 'commit', 'compiler')} | {
        'amx': 'amx_bf16' in flags}


def why_it_ended(code, errors):
    """A peer's end in a few words."""
    if code < 0:
        return f'it ended by {signal.Signals(-code).name}'
    said = [line.strip() for line in errors.splitlines() if line.strip()] or ['it said nothing']
    return f'it ended with {code}: {said[-1][:160]}'


def run_peer(group, script, question, limit, env=None):
    """What a script of comparison/scripts answers to a question, in a group's environment. Both are JSON.

    Raises PeerError when there is no answer after `limit` seconds, or none at all.
    """
    try:
        python = peers.require(group)
    except peers.PeerInstallError as error:
        raise PeerError(str(error)) from error
    with tempfile.TemporaryFile('w+') as errors:
        # A session of its own, so that whatever it started ends with it. -P: the script's folder is no
        # place to import from.
        process = subprocess.Popen([python, '-P', '-B', SCRIPTS / script, json.dumps(question)],
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True,
                                   start_new_session=True, env=os.environ | (env or {}))
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise PeerError(f'no answer within {limit:g} s') from None
        finally:
            _end_session(process)
        if process.returncode != 0:
            errors.seek(0)
            raise PeerError(why_it_ended(process.returncode, errors.read()), crashed=process.returncode < 0)
    return answer_in(output)


def answer_in(output):
    """The last line that is an answer: libraries print, too."""
    for line in reversed(output.splitlines()):
        if line.startswith('ANSWER '):
            answer = json.loads(line.removeprefix('ANSWER '))
            if 'error' in answer:
                raise PeerError(answer['error'])
            return answer
    raise PeerError('it gave no answer')


def _end_session(process):
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # all ended by themselves
    process.wait()
    process.stdout.close()


def far_behind(results, phases, is_peer):
    """Names of peers that were far behind another one in every phase of the first round."""
    firsts = {name: values[0] for name, values in results.items() if is_peer(name) and values}
    best = {phase: max(first[phase] for first in firsts.values()) for phase in phases} if firsts else {}
    return {name for name, first in firsts.items()
            if all(first[phase] < FAR_BEHIND * best[phase] for phase in phases)}


def alternate(runners, rounds, title, phases=(), is_peer=lambda name: not name.startswith('treeline')):
    """Results of every runner, by name: a list, one for each round; and why a peer has none.

    phases: what of a result decides whether a peer takes part in further rounds. A peer that failed
    takes no part in them either.
    """
    results = {name: [] for name in runners}
    failures = {}
    left_out = set()
    for number in range(rounds):
        if number == 1 and phases:
            left_out = far_behind(results, phases, is_peer)
        for name, run in runners.items():
            if name in left_out or name in failures:
                continue
            say(f'{title}: round {number + 1} of {rounds}, {name}')
            try:
                results[name].append(run())
            except PeerError as error:
                failures[name] = str(error)
    say('')
    return results, failures
