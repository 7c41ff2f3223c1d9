#!/usr/bin/env python3
"""Tests of what tools/compare does with figures, without any peer."""

import argparse
import copy
import importlib.machinery
import importlib.util
import json
import pathlib
import signal
import sys
import tempfile
import threading
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / 'tools'))

import peers  # noqa: E402  pylint: disable=wrong-import-position
from comparison import (engines, generation, kernels, large, measure, results,  # noqa: E402
                        table)  # pylint: disable=wrong-import-position


def load_compare():
    loader = importlib.machinery.SourceFileLoader('compare', str(ROOT / 'tools/compare'))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader('compare', loader))
    loader.exec_module(module)
    return module


compare = load_compare()
MACHINE = {'cpu': 'A CPU', 'cores': 2, 'isa': 'avx2', 'commit': 'abc1234', 'compiler': 'GNU 12.2.0', 'amx': False}


def section(ours, theirs, key='kernels decode bf16 65536', what='decode', **more):
    rows = [results.make_row(key, what, 'GB/s', ('treeline', ours), ('PyTorch', theirs), 0.5,
                             command='treeline bench kernel', **more)]
    results.set_aims(rows, MACHINE['amx'])
    return {'machine': dict(MACHINE), 'versions': {'torch': '1.0'}, 'threads': 2, 'load_before': 0.0, 'rows': rows}


class RowTest(unittest.TestCase):
    def test_medians_and_ratio(self):
        row = results.make_row('key', 'what', 'GB/s', ('treeline', [1.0, 9.0, 6.0]), ('peer', [2.0, 4.0]), 0.5)
        self.assertEqual((row['ours'], row['theirs'], row['ratio']), (6.0, 3.0, 2.0))
        self.assertEqual((row['limit'], row['limit_fraction']), (12.0, 0.5))

    def test_less_time_is_better(self):
        row = results.make_row('key', 'what', 'ms', ('treeline', [2.0]), ('peer', [10.0]), 0.5)
        self.assertEqual((row['ratio'], row['limit']), (5.0, 1.0))

    def test_peer_without_figure(self):
        row = results.make_row('key', 'what', 'GB/s', ('treeline', [2.0]), ('peer', []), note='it ended by SIGILL')
        self.assertIsNone(row['theirs'])
        self.assertIsNone(row['ratio'])
        self.assertIn('it ended by SIGILL', table.as_text({'kernels': {'rows': [row]}}))

    def test_best(self):
        forms = {'a': [1.0, 5.0, 1.0], 'b': [2.0], 'none': []}
        self.assertEqual(results.best_of(forms), 'b')
        self.assertEqual(results.best_of(forms, 'ms'), 'a')
        self.assertIsNone(results.best_of({'none': []}))

    def test_aims_depend_on_the_machine(self):
        self.assertEqual(results.aim_of('long 7000 prefill best', amx=True), 6.0)
        self.assertEqual(results.aim_of('long 7000 prefill best', amx=False), 2.0)
        self.assertEqual(results.aim_of('kernels backward bf16 4096', amx=False), 3.5)
        self.assertIsNone(results.aim_of('kernels backward f32 4096', amx=True))

    def test_aims_are_those_of_rows_that_are_measured(self):
        keys = {f'kernels {case.kernel} {case.dtype} {case.context}' for case in kernels.cases(quick=False)}
        keys |= {'ranks tree 16384', 'short decode best', 'hosts tree 32768', '8b 32768 decode best',
                 f'8b {large.PREFILL} prefill best'}
        keys |= {f'long {generation.LONG} {phase} best' for phase in ('prefill', 'decode')}
        self.assertLessEqual(set(results.AIMS), keys)


class MergeTest(unittest.TestCase):
    ORDER = ('kernels', 'ranks', 'short')

    def test_new_sections_replace_old_ones(self):
        before = {'ranks': section([1.0], [1.0]), 'kernels': section([1.0], [1.0])}
        merged = results.merge(before, {'kernels': section([4.0], [1.0])}, MACHINE, self.ORDER)
        self.assertEqual(list(merged), ['kernels', 'ranks'])
        self.assertEqual([each['rows'][0]['ours'] for each in merged.values()], [4.0, 1.0])

    def test_other_commits_stay_and_other_machines_go(self):
        before = {'kernels': section([1.0], [1.0]), 'ranks': section([1.0], [1.0]), 'short': section([1.0], [1.0])}
        before['kernels']['machine']['commit'] = 'older'
        before['ranks']['machine']['cpu'] = 'Another CPU'
        before['short']['machine']['cores'] = 64
        self.assertEqual(list(results.merge(before, {}, MACHINE, self.ORDER)), ['kernels'])

    def test_files(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / 'new/compare.json'
            self.assertEqual(results.load(path), {})
            sections = {'kernels': section([4.0], [2.0])}
            results.save(path, sections)
            self.assertEqual(results.load(path), sections)
            for other in ('{', '[]', json.dumps({'rows': []})):
                path.write_text(other, encoding='utf-8')
                self.assertEqual(results.load(path), {})


class TableTest(unittest.TestCase):
    def test_numbers(self):
        self.assertEqual([table.number(value) for value in (0.00012, 0.0661, 1.5, 99.96, 100.4, 12345.6)],
                         ['1.2e-04', '0.0661', '1.5', '100', '100', '12,346'])

    def test_cells(self):
        self.assertEqual(table.cells(section([4.0, 5.0, 6.0], [2.0])['rows'][0]),
                         ('decode', '5 GB/s (4 to 6)', '2 GB/s (PyTorch)', '2.50x', '2x', '10 GB/s', '0.50'))

    def test_text_is_aligned(self):
        lines = table.as_text({'kernels': section([4.0], [2.0]), 'ranks': section([400.0], [2.0])}).splitlines()
        self.assertEqual(len(lines), 3)
        self.assertEqual({line.index('GB/s (PyTorch)') for line in lines[1:]}, {lines[1].index('GB/s (PyTorch)')})

    def test_document(self):
        sections = {'kernels': section([3.0, 4.0], [2.0], note='a | b'), 'ranks': section([5.0], [2.0], what='tree')}
        text = table.as_markdown(copy.deepcopy(sections))
        self.assertIn('2 cores of A CPU, without AMX', text)
        self.assertIn('`tools/compare --only kernels`: medians of 2 rounds, 2 threads. Treeline abc1234, GNU 12.2.0',
                      text)
        self.assertIn('`tools/compare --only ranks`: one round', text)
        self.assertIn('torch 1.0', text)
        self.assertIn('Aims: 1 of 2 are reached. Short of theirs: decode.', text)
        self.assertIn('decode: a \\| b', text)
        for line in text.splitlines():
            if line.startswith('|'):
                self.assertEqual(line.replace('\\|', '').count('|'), 9, line)


class TurnsTest(unittest.TestCase):
    def test_by_turns_without_those_that_failed_or_are_far_behind(self):
        ran = []

        def runner(name, rate=None):
            def run():
                ran.append(name)
                if rate is None:
                    raise measure.PeerError('no answer within 1 s')
                return {'rate': rate}
            return run

        found, failures = measure.alternate(
            {'treeline': runner('treeline', 1.0), 'fast': runner('fast', 10.0), 'slow': runner('slow', 5.0),
             'broken': runner('broken')}, 2, 'test', ('rate',))
        self.assertEqual(ran, ['treeline', 'fast', 'slow', 'broken', 'treeline', 'fast'])
        self.assertEqual([len(values) for values in found.values()], [2, 2, 1, 0])
        self.assertEqual(failures, {'broken': 'no answer within 1 s'})

    def test_answers(self):
        self.assertEqual(measure.answer_in('loading\nANSWER {"a": 1}\nbye\n'), {'a': 1})
        with self.assertRaisesRegex(measure.PeerError, 'no answer'):
            measure.answer_in('loading\n')
        with self.assertRaisesRegex(measure.PeerError, 'its values are wrong'):
            measure.answer_in('ANSWER {"error": "its values are wrong"}')

    def test_ends(self):
        self.assertEqual(measure.why_it_ended(-4, ''), 'it ended by SIGILL')
        self.assertEqual(measure.why_it_ended(1, 'Traceback\nValueError: no\n\n'), 'it ended with 1: ValueError: no')


class PairTest(unittest.TestCase):
    def test_same_types_and_best_of_each(self):
        found = {'treeline f16': [4.0], 'treeline bf16': [6.0], 'treeline q8_0': [5.0], 'treeline f32': [1.0],
                 'treeline f16, 2 x 1': [2.0], 'llama.cpp f16': [2.0], 'llama.cpp bf16': [], 'llama.cpp q8_0': [3.0]}
        rows = generation.pair_rows('long 7000 decode', 'what', found, {'llama.cpp bf16': 'it hangs'},
                                    (*generation.TYPES, 'f32'), {'bf16': 12.0}, lambda kind: kind, 'f16, 2 x 1')
        self.assertEqual([(row['ours_is'], row['theirs_is'], row['ratio']) for row in rows], [
            ('treeline bf16', 'llama.cpp q8_0', 2.0), ('treeline f16', 'llama.cpp f16', 2.0),
            ('treeline bf16', 'llama.cpp bf16', None), ('treeline q8_0', 'llama.cpp q8_0', 5.0 / 3.0),
            ('treeline f32', None, None), ('treeline f16, 2 x 1', 'treeline f16', 0.5)])
        self.assertEqual([row['limit_fraction'] for row in rows[:3]], [0.5, None, 0.5])
        self.assertEqual((rows[0]['key'], rows[0]['command']), ('long 7000 decode best', 'bf16'))
        self.assertEqual(rows[2]['note'], 'it hangs')

    def test_without_any_peer(self):
        found = {f'treeline {kind}': [1.0] for kind in generation.TYPES} | {
            f'llama.cpp {kind}': [] for kind in generation.TYPES}
        rows = generation.pair_rows('key', 'what', found, {'llama.cpp f16': 'it hangs'}, generation.TYPES)
        self.assertEqual((rows[0]['theirs'], rows[0]['note']), (None, 'llama.cpp: it hangs'))
        table.as_text({'long': {'rows': rows}})


class CasesTest(unittest.TestCase):
    def test_no_cache_holds_what_is_decoded(self):
        for case in kernels.cases(quick=False):
            if case.kernel == 'decode':
                size = case.batch * 2 * case.context * 8 * 128 * kernels.BYTES[case.dtype]
                self.assertGreaterEqual(size, 512e6, case)
                self.assertLess(size, 1024e6, case)


class PinsTest(unittest.TestCase):
    def test_groups(self):
        text = '# a x==0\na x==1 --hash=sha256:0\n\nb y==2 --hash=sha256:1\na z==3 --hash=sha256:2\n'
        self.assertEqual(peers.requirements(text, 'a'), ['x==1 --hash=sha256:0', 'z==3 --hash=sha256:2'])
        self.assertEqual(peers.versions(text, 'a'), {'x': '1', 'z': '3'})
        self.assertEqual(peers.requirements(text, 'c'), [])

    def test_every_line_has_a_group_that_is_used_a_version_and_a_hash(self):
        groups = {group for _, used in compare.SECTIONS.values() for group in used}
        for line in peers.PINS.read_text(encoding='utf-8').splitlines():
            if line and not line.startswith('#'):
                self.assertRegex(line, r'\A(' + '|'.join(groups) +
                                 r') [A-Za-z0-9_.-]+==\S+ --hash=sha256:[0-9a-f]{64}\Z')

    def test_every_section_names_what_it_runs(self):
        self.assertEqual(set(compare.SECTIONS), set(table.TITLES))
        for name in compare.SECTIONS:
            self.assertEqual(set(compare.versions(name)), set(compare.NAMED[name]))
        for group, script, _ in engines.ENGINES.values():
            self.assertTrue(peers.requirements(peers.PINS.read_text(encoding='utf-8'), group))
            self.assertTrue((measure.SCRIPTS / script).exists())


class OptionsTest(unittest.TestCase):
    def test_sections(self):
        self.assertEqual(compare.section_list('kernels,8b'), ['kernels', '8b'])
        with self.assertRaises(argparse.ArgumentTypeError):
            compare.section_list('kernels,other')



class RunProgramTest(unittest.TestCase):
    """A program that fails, or is interrupted, ends the comparison: nobody waits for it any more."""

    def setUp(self):
        self.place, measure.PLACE = measure.PLACE, pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.addCleanup(setattr, measure, 'PLACE', self.place)

    def program(self, script):
        path = measure.PLACE / 'program'
        path.write_text(f'#!/bin/sh\n{script}\n')
        path.chmod(0o700)
        return argparse.Namespace(program=path)

    def test_ends_before_it_has_read_all(self):
        with self.assertRaisesRegex(measure.CompareError, 'ended with 4: treeline: error: no'):
            measure.run_program(self.program("echo 'treeline: error: no' >&2; exit 4"), 'tokenize', text='x' * 1000000)

    def interrupt(self, script):
        options = self.program(script)
        signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with self.assertRaises(KeyboardInterrupt):
            measure.run_program(options, 'info')
        self.assertEqual(threading.active_count(), 1)  # nobody watches a process that is gone

    def test_interrupted(self):
        down = measure.PLACE / 'down'
        self.interrupt(f"trap 'echo down > {down}; exit 1' TERM; while :; do sleep 0.1; done")
        self.assertEqual(down.read_text(), 'down\n')  # what it had built up

    def test_interrupted_and_does_not_end(self):
        self.addCleanup(setattr, measure, 'GRACE', measure.GRACE)
        measure.GRACE = 0.2
        self.interrupt("trap '' TERM; while :; do sleep 0.1; done")


if __name__ == '__main__':
    unittest.main()
