#!/usr/bin/env python3
"""Breaks a run over processes, again and again, and checks how it ends.

usage: faults.py PROGRAM KIND [--runs N] [--netlab TOOL]

KIND: kill (a rank dies), stop (a rank is stopped), interrupt (Ctrl-C), mismatch (a rank has other
options), cut (a host loses its network; needs netlab). A run that nothing breaks must succeed, with the same deadline;
every other must end by itself within the deadline plus 5 s, with the exit code and the message that
docs/errors.md promises, and leave no process behind.
Exit code 77: this machine cannot do it; the reason is printed.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

TIMEOUT = 3.0  # of a wait, in seconds: --timeout
GRACE = 5.0
RANKS = 3
MPIRUN = ['mpirun', '--allow-run-as-root', '--oversubscribe', '--bind-to', 'none', '--mca',
          'mpi_yield_when_idle', '1']
WORK = ['bench', 'decode', '--context', '4096', '--schedule', 'tree,ring-kv', '--timeout',
        str(TIMEOUT)]
LONG = ['--repeats', '10000']  # minutes
SHORT = ['--repeats', '1']


class Failure(Exception):
    pass


def expect(condition, what, output=''):
    if not condition:
        raise Failure(f'{what}\n{output}')


def processes(program, mark):
    """The processes that run the program, with a mark in their environment."""
    found = []
    for pid in filter(str.isdigit, os.listdir('/proc')):
        try:
            with open(f'/proc/{pid}/environ', 'rb') as file:
                environment = file.read().split(b'\0')
            link = os.readlink(f'/proc/{pid}/exe')
        except OSError:
            continue
        if link == program and mark in environment:
            found.append(int(pid))
    return found


class Run:
    """A run over processes that carry a mark, so that any which stay behind are found."""

    def __init__(self, command, program):
        self.mark = f'TREELINE_FAULT={os.getpid()}-{random.getrandbits(64)}'
        self.program = os.path.realpath(program)
        name, value = self.mark.split('=')
        self.file = tempfile.TemporaryFile('w+')
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.file,
                                        stderr=subprocess.STDOUT, start_new_session=True,
                                        env={**os.environ, name: value})

    def output(self):
        with open(f'/proc/self/fd/{self.file.fileno()}', encoding='utf-8') as file:
            return file.read()

    def ranks(self):
        return processes(self.program, self.mark.encode())

    def await_moment(self, come):
        """Waits until come(), and then until some moment after it."""
        until = time.monotonic() + 60
        while not come():
            expect(time.monotonic() < until and self.process.poll() is None,
                   'the run did not start', self.output())
            time.sleep(0.01)
        time.sleep(random.uniform(0.0, 1.5))
        expect(self.process.poll() is None, 'the run ended before its fault', self.output())

    def await_ranks(self):
        self.await_moment(lambda: len(self.ranks()) >= RANKS)

    def end(self, within):
        """Waits for the end; returns exit code and output."""
        try:
            self.process.wait(timeout=within)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            left = self.ranks()
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise Failure(f'did not end within {within:g} s; {len(left)} ranks were left\n'
                          f'{self.output()}') from None
        # A process that was told to end may need a moment.
        until = time.monotonic() + 1
        while self.ranks() and time.monotonic() < until:
            time.sleep(0.01)
        expect(not self.ranks(), 'processes were left behind', self.output())
        return self.process.returncode, self.output()


def over_processes(options):
    return [*MPIRUN, '-n', str(RANKS), options.program, *WORK]


def kill(options):
    run = Run([*over_processes(options), *LONG], options.program)
    run.await_ranks()
    os.kill(random.choice(run.ranks()), signal.SIGKILL)
    code, output = run.end(TIMEOUT + GRACE)
    expect(code != 0, 'a killed rank gave exit code 0', output)


def stop(options):
    run = Run([*over_processes(options), *LONG], options.program)
    run.await_ranks()
    os.kill(random.choice(run.ranks()), signal.SIGSTOP)
    code, output = run.end(TIMEOUT + GRACE)
    expect(code == 3, f'exit code {code}, not 3', output)
    expect_line(output)


def interrupt(options):
    run = Run([*over_processes(options), *LONG], options.program)
    run.await_ranks()
    os.killpg(run.process.pid, signal.SIGINT)
    code, output = run.end(GRACE)
    expect(code != 0, 'an interrupted run gave exit code 0', output)


def expect_line(output):
    pattern = (rf'treeline: error: rank \d+ (failed: it )?waited {TIMEOUT:g} s for '
               r'(rank \d+|the other ranks) in step \w+')
    expect(re.search(pattern, output), 'no line says who waited for whom', output)


MISMATCHES = (
    (['--seed', '2'], {}, "--seed 2'"),
    ([], {'TREELINE_ISA': 'scalar'},
     "instruction set '(scalar', rank \\d+ has '(?!scalar)|(?!scalar)[\\w-]+', rank \\d+ has 'scalar')"),
    (['--heads', '16'], {}, "--heads 16'"),
)


def mismatch(options):
    arguments, environment, pattern = MISMATCHES[options.run % len(MISMATCHES)]
    work = [options.program, *WORK, *LONG]
    odd = ['env', *(f'{k}={v}' for k, v in environment.items()), *work, *arguments]
    command = [*MPIRUN, '-n', '1', *odd, ':', '-n', str(RANKS - 1), *work]
    if random.random() < 0.5:
        command = [*MPIRUN, '-n', str(RANKS - 1), *work, ':', '-n', '1', *odd]
    code, output = Run(command, options.program).end(TIMEOUT + GRACE)
    expect(code == 3, f'exit code {code}, not 3', output)
    expect(re.search(pattern, output), f"no line matches '{pattern}'", output)


def over_hosts(options):
    return [options.netlab, '--hosts', str(RANKS), '--cut', str(random.randrange(RANKS)),
            '--deadline', '120', '--']


def left_over():
    """What netlab makes and must take down: namespaces, and folders of its own and of Open MPI."""
    return {os.path.join(folder, name)
            for folder in ('/run/netns', tempfile.gettempdir()) if os.path.isdir(folder)
            for name in os.listdir(folder) if name.startswith(('netlab-', 'ompi.netlab-'))}


def cut(options):
    before = left_over()
    with tempfile.NamedTemporaryFile('r') as codes:
        # What each rank ends with: mpirun, which has lost a host as well, may wait for it for ever.
        script = f'"$0" "$@"; echo $? >>{codes.name}'
        run = Run([*over_hosts(options), 'sh', '-c', script, options.program, *WORK, *LONG],
                  options.program)
        run.await_moment(lambda: 'case ' in run.output())
        os.kill(run.process.pid, signal.SIGUSR1)
        code, output = run.end(TIMEOUT + GRACE)
        ends = codes.read().split()
    expect(code in (3, 125), f'exit code {code}', output)
    expect(ends == ['3'] * RANKS, f'ranks ended with {ends}, not all with 3', output)
    expect_line(output)
    left = left_over() - before
    expect(not left, f'{left} were left', output)


def control(options):
    """Without a fault, the same work succeeds."""
    work = over_processes(options)
    if options.kind == 'cut':
        work = [*over_hosts(options), options.program, *WORK]
    code, output = Run([*work, *SHORT], options.program).end(60)
    expect(code == 0 and ' ok' in output, f'exit code {code} without a fault', output)


def main():
    kinds = {f.__name__: f for f in (kill, stop, interrupt, mismatch, cut)}
    parser = argparse.ArgumentParser()
    parser.add_argument('program')
    parser.add_argument('kind', choices=kinds)
    parser.add_argument('--runs', type=int, default=int(os.environ.get('TREELINE_FAULT_RUNS', 3)))
    parser.add_argument('--netlab')
    options = parser.parse_args()
    if options.kind == 'cut':
        check = subprocess.run([options.netlab, '--check'], capture_output=True, text=True)
        if check.returncode != 0:
            print(f'skipped: {check.stderr.strip()}')
            return 77
    runs = [('no fault', control)]
    runs += [(f'{options.kind}, run {index}', kinds[options.kind]) for index in range(options.runs)]
    for index, (name, run) in enumerate(runs):
        random.seed(index)
        options.run = index
        start = time.monotonic()
        try:
            run(options)
        except Failure as failure:
            print(f'{name}: {failure}')
            return 1
        print(f'{name}: ended as it should after {time.monotonic() - start:.1f} s', flush=True)
    return 0


if __name__ == '__main__':
    sys.exit(main())
