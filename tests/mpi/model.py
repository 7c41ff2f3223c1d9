#!/usr/bin/env python3
"""A model over processes: the same text as over threads, contexts that go between numbers of ranks,
errors that all processes share, and cores of which each has its own.

usage: model.py PROGRAM MPIRUN
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

EXACT = ['--activations', 'f32', '--kv-type', 'f32']


def expect(condition, what, done):
    if not condition:
        sys.exit(f'{what}\nexit code {done.returncode}\n{done.stdout}{done.stderr}')


class Check:
    def __init__(self, program, mpirun, folder):
        self.program, self.mpirun, self.folder = program, mpirun, folder
        self.model = self.make_model('m.gguf', 1)

    def make_model(self, name, seed):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        done = subprocess.run([self.program, 'model', 'random', '--like', 'tiny', '--type', 'Q8_0',
                               '--seed', str(seed), path], capture_output=True, text=True)
        expect(done.returncode == 0, 'no model was written', done)
        return path

    def processes(self, ranks, *arguments):
        return subprocess.run([self.mpirun, '-n', str(ranks), *arguments], capture_output=True,
                              text=True, errors='replace', timeout=300)

    def generate(self, ranks, *arguments):
        return self.processes(ranks, self.program, 'generate', '-m', self.model, '--threads', '1',
                              *EXACT, *arguments)

    def same_text(self):
        prompt = ['-p', 'Any text that is longer than the ranks are many', '-n', '20']
        one = subprocess.run([self.program, 'generate', '-m', self.model, *EXACT, *prompt],
                             capture_output=True, text=True, errors='replace')
        expect(one.returncode == 0 and len(one.stdout) > 20, 'one rank failed', one)
        for ranks in (1, 2, 3):
            done = self.generate(ranks, *prompt)
            expect(done.returncode == 0 and done.stdout == one.stdout,
                   f'{ranks} processes wrote something else than one rank: {one.stdout}', done)

    def saved_context(self):
        saved = self.folder / 'context'
        whole = self.generate(1, '-p', 'A beginning', '-n', '16')
        first = self.generate(3, '-p', 'A beginning', '-n', '8', '--save-context', saved)
        expect(first.returncode == 0 and whole.stdout.startswith(first.stdout.rstrip('\n')),
               'a context could not be saved', first)
        rest = self.generate(2, '-p', '', '-n', '8', '--load-context', saved)
        # What was saved ends with a token whose successor is computed anew.
        expect(rest.returncode == 0 and
               first.stdout.rstrip('\n') + rest.stdout.rstrip('\n') == whole.stdout.rstrip('\n'),
               f'2 processes went on with something else than {whole.stdout}', rest)

    def shared_errors(self):
        missing = self.generate(2, '-f', '/nowhere')
        expect(missing.returncode == 4 and "cannot read '/nowhere'" in missing.stderr,
               'a prompt that cannot be read should end all with 4', missing)
        empty = self.generate(2, '-p', '')
        expect(empty.returncode == 2 and 'is empty' in empty.stderr,
               'an empty prompt should end all with 2', empty)
        # The same path, and not the same model.
        for rank in range(2):
            self.make_model(f'{rank}/other.gguf', rank + 1)
        other = self.processes(2, 'sh', '-c', f'cd {self.folder}/$OMPI_COMM_WORLD_RANK && exec '
                               f'{self.program} generate -m other.gguf -p text -n 4 --threads 1')
        expect(other.returncode == 3 and 'different' in other.stderr,
               'models that differ should be refused', other)

    def own_cores(self):
        """Each rank is held to a core; limits and figures are those of all of them."""
        cores = sorted(os.sched_getaffinity(0))[:2]
        report = self.folder / 'report.json'
        bench = f'{self.program} bench model -m {self.model} --depth 4 --prefill 0 --tokens 2 --json {report}'
        pick = f'set -- {" ".join(map(str, cores))} {cores[0]}; shift $OMPI_COMM_WORLD_RANK'  # of one, both get it
        done = self.processes(2, '--bind-to', 'none', 'sh', '-c', f'{pick}; exec taskset -c $1 {bench}')
        expect(done.returncode == 0, 'ranks with cores of their own failed', done)
        reported = json.loads(report.read_text())['machine']['cores']
        expect(reported == len(cores), f'{reported} cores were reported, of {len(cores)}', done)


def main():
    program, mpirun = (pathlib.Path(each).resolve() for each in sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        check = Check(program, mpirun, pathlib.Path(folder))
        for part in (check.same_text, check.saved_context, check.shared_errors, check.own_cores):
            part()
            print(f'{part.__name__}: ok')


if __name__ == '__main__':
    main()
