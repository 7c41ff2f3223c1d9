#!/usr/bin/env python3
"""Breaks a run over processes, again and again, and checks how it ends.

usage: faults.py PROGRAM KIND [--runs N] [--netlab TOOL]

KIND: kill (a rank dies), stop (a rank is stopped), mismatch (a rank has other options), cut (a host
loses its network; needs netlab). Every run must end by itself within the deadline plus 5 s, with the
exit code and the message that docs/errors.md promises, and leave no process behind.
Exit code 77: this machine cannot do it; the reason is printed.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import time

TIMEOUT = 2.0  # of a wait, in seconds: --timeout
GRACE = 5.0
RANKS = 3
MPIRUN = ['mpirun', '--allow-run-as-root', '--oversubscribe', '--bind-to', 'none', '--mca',
          'mpi_yield_when_idle', '1']
WORK = ['bench', 'decode', '--context', '4096', '--schedule', 'tree,ring-kv', '--repeats', '10000',
        '--timeout', str(TIMEOUT)]


class Failure(Exception):
    pass


def expect(condition, what, output=''):
    if not condition:
        raise Failure(f'{what}\n{output}')


def processes(program, parents):
    """The processes that run the program, below some others."""
    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            with open(f'/proc/{pid}/environ', 'rb') as file:
                environment = file.read().split(b'\0')
            link = os.readlink(f'/proc/{pid}/exe')
        except OSError:
            continue
        if link == program and parents in environment:
            found.append(int(pid))
    return found


class Run:
    """A run over processes that carry a mark, so that any which stay behind are found."""

    def __init__(self, command, program):
        self.mark = f'TREELINE_FAULT={os.getpid()}-{random.getrandbits(64)}'
        self.program = os.path.realpath(program)
        name, value = self.mark.split('=')
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                        text=True, env={**os.environ, name: value},
                                        start_new_session=True)

    def ranks(self):
        return processes(self.program, self.mark.encode())

    def await_ranks(self, count):
        until = time.monotonic() + 20
        while len(self.ranks()) < count:
            expect(time.monotonic() < until and self.process.poll() is None, 'ranks did not start')
            time.sleep(0.01)
        time.sleep(random.uniform(0.0, 1.5))  # any moment, from the first connection on

    def end(self, within):
        """Waits for the end; returns exit code and output."""
        try:
            output = ''.join(self.process.communicate(timeout=within))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            output = ''.join(self.process.communicate())
            left = self.ranks()
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise Failure(f'did not end within {within:g} s; {len(left)} ranks were left\n{output}')
        # A process that was told to end may need a moment.
        until = time.monotonic() + 1
        while self.ranks() and time.monotonic() < until:
            time.sleep(0.01)
        expect(not self.ranks(), 'processes were left behind', output)
        return self.process.returncode, output


def kill(options):
    run = Run([*MPIRUN, '-n', str(RANKS), options.program, *WORK], options.program)
    run.await_ranks(RANKS)
    os.kill(random.choice(run.ranks()), signal.SIGKILL)
    code, output = run.end(TIMEOUT + GRACE)
    expect(code != 0, 'a killed rank gave exit code 0', output)


def stop(options):
    run = Run([*MPIRUN, '-n', str(RANKS), options.program, *WORK], options.program)
    run.await_ranks(RANKS)
    os.kill(random.choice(run.ranks()), signal.SIGSTOP)
    code, output = run.end(TIMEOUT + GRACE)
    expect_timeout(code, output)


def expect_timeout(code, output):
    expect(code == 3, f'exit code {code}, not 3', output)
    pattern = (r'treeline: error: rank \d+ (failed: it )?waited 2 s for (rank \d+|the other ranks) '
               r'in step \w+')
    expect(re.search(pattern, output), 'no line says who waited for whom', output)


MISMATCHES = (
    (['--seed', '2'], {}, "--seed 2'"),
    (['--heads', '16'], {}, 'they must be the same on all ranks'),
    ([], {'TREELINE_ISA': 'scalar'}, "instruction set '(scalar|\\w+)', rank \\d+ has '\\w+'"),
)


def mismatch(options):
    arguments, environment, pattern = random.choice(MISMATCHES)
    odd = ['env', *(f'{k}={v}' for k, v in environment.items()), options.program, *WORK, *arguments]
    command = [*MPIRUN, '-n', '1', *odd, ':', '-n', str(RANKS - 1), options.program, *WORK]
    if random.random() < 0.5:
        command = [*MPIRUN, '-n', str(RANKS - 1), options.program, *WORK, ':', '-n', '1', *odd]
    code, output = Run(command, options.program).end(TIMEOUT + GRACE)
    expect(code == 3, f'exit code {code}, not 3', output)
    expect(re.search(pattern, output), f"no line matches '{pattern}'", output)


def cut(options):
    seconds = random.uniform(2.0, 4.0)
    command = [options.netlab, '--hosts', str(RANKS), '--cut', f'{random.randrange(RANKS)}@{seconds}',
               '--deadline', str(seconds + TIMEOUT + GRACE), '--', options.program, *WORK]
    code, output = Run(command, options.program).end(seconds + TIMEOUT + GRACE + 5)
    # mpirun itself may not notice that its own link is gone; netlab ends it then.
    expect(code in (3, 124), f'exit code {code}, not 3', output)
    expect_timeout(3, output)
    names = os.listdir('/run/netns') if os.path.isdir('/run/netns') else []
    expect(not [n for n in names if n.startswith('netlab-')], 'a namespace was left', output)


def main():
    kinds = {'kill': kill, 'stop': stop, 'mismatch': mismatch, 'cut': cut}
    parser = argparse.ArgumentParser()
    parser.add_argument('program')
    parser.add_argument('kind', choices=kinds)
    parser.add_argument('--runs', type=int, default=int(os.environ.get('TREELINE_FAULT_RUNS', 2)))
    parser.add_argument('--netlab')
    options = parser.parse_args()
    if options.kind == 'cut':
        check = subprocess.run([options.netlab, '--check'], capture_output=True, text=True)
        if check.returncode != 0:
            print(f'skipped: {check.stderr.strip()}')
            return 77
    for index in range(options.runs):
        random.seed(index)
        start = time.monotonic()
        try:
            kinds[options.kind](options)
        except Failure as failure:
            print(f'{options.kind}, run {index}: {failure}')
            return 1
        print(f'{options.kind}, run {index}: ended as it should after '
              f'{time.monotonic() - start:.1f} s', flush=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
