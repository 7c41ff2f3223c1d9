#!/usr/bin/env python3
"""Tests of the scripts in tools/: each must catch what it is there to catch."""

import json
import os
import pathlib
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]


class ScriptTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, path, text, mode=0o644):
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding='utf-8')
        file.chmod(mode)
        return file

    def run_script(self, *command, env=None):
        return subprocess.run(command, capture_output=True, text=True, check=False, env=env,
                              stdin=subprocess.DEVNULL)


class CheckLayeringTest(ScriptTest):
    def setUp(self):
        super().setUp()
        self.write('src/core/spec.cc', '#include <vector>\n#include "core/check.h"\n')
        self.write('src/kernels/cpu/merge.cc', '#include <hwy/highway.h>\n')
        self.write('src/backend/cpu/merge.cc', '#include "kernels/cpu/kernel_table.h"\n')
        self.write('include/treeline/spec.h', '#include <vector>\n#include "treeline/dtype.h"\n')

    def check(self):
        return self.run_script(ROOT / 'tools/check-layering', self.folder)

    def assert_violation(self, path, include, line=1):
        self.write(path, '\n' * (line - 1) + include + '\n')
        result = self.check()
        self.assertEqual(result.returncode, 1, result.stdout)
        self.assertIn(f'{path}:{line}: ', result.stdout)

    def test_downward_arrows_pass(self):
        self.write('src/schedule/ring.cc',
                   '#include "backend/backend.h"\n#include "comm/communicator.h"\n')
        self.write('src/cli/main.cc', '#include <CLI/CLI.hpp>\n#include "model/engine.h"\n')
        self.write('src/c_api/treeline.cc', '#include "backend/cpu/parallel.h"\n')
        result = self.check()
        self.assertEqual((result.returncode, result.stdout), (0, ''))

    def test_upward_and_sideways_arrows_fail(self):
        for path, include in [
                ('src/core/a.cc', '#include "kernels/cpu/kernel_table.h"'),
                ('src/kernels/cpu/a.cc', '#include "backend/cpu/parallel.h"'),
                ('src/kernels/cpu/b.cc', '#include "comm/communicator.h"'),
                ('src/backend/a.cc', '#include "schedule/ring.h"'),
                ('src/comm/a.cc', '#include "backend/backend.h"'),
                ('src/schedule/a.cc', '#include "cache/cache.h"'),
                ('src/schedule/b.cc', '#include "kernels/cpu/kernel_table.h"'),
                ('src/model/a.cc', '#include "plan/cluster.h"'),
                ('src/plan/a.cc', '  #  include <cli/command.h>'),
                ('src/c_api/a.cc', '#include "model/engine.h"'),
        ]:
            with self.subTest(path=path):
                self.assert_violation(path, include, line=3)

    def test_include_without_layer_fails(self):
        self.assert_violation('src/core/a.cc', '#include "check.h"')
        self.assert_violation('src/core/a.cc', '#include "../kernels/cpu/kernel_table.h"')

    def test_unknown_folder_fails(self):
        self.assert_violation('src/misc/a.cc', '')
        self.assert_violation('src/a.cc', '')

    def test_foreign_header_in_installed_header_fails(self):
        for header in ['mpi.h', 'cuda_runtime.h', 'nccl.h', 'ggml.h', 'hwy/highway.h', 'Python.h',
                       'core/check.h']:
            for quotes in ['<>', '""']:
                with self.subTest(header=header, quotes=quotes):
                    self.assert_violation('include/treeline/a.h',
                                          f'#include {quotes[0]}{header}{quotes[1]}')

    def test_folder_without_sources_is_an_error(self):
        result = self.run_script(ROOT / 'tools/check-layering', self.folder / 'include')
        self.assertEqual(result.returncode, 1)


class TestSummaryTest(ScriptTest):
    GTEST_SKIP = '[ RUN      ] A.B\n/a/b_test.cc:5: Skipped\nno AMX here\n[  SKIPPED ] A.B (0 ms)\n'

    def summary(self, cases, expect=('unit',), listed=None):
        """cases: (name, labels, status, skip message, output); `listed` if CTest knew of others."""
        tests = [{'name': name, 'properties': [{'name': 'LABELS', 'value': labels}]}
                 for name, labels in listed or [case[:2] for case in cases]]
        xml = ''.join(
            f'<testcase name="{name}" status="{status}">' +
            (f'<skipped message="{skip}"/>' if skip else '') +
            f'<system-out>{output}</system-out></testcase>'
            for name, _, status, skip, output in cases)
        result = self.run_script(ROOT / 'tools/test-summary',
                                 self.write('tests.json', json.dumps({'tests': tests})),
                                 self.write('junit.xml', f'<testsuite>{xml}</testsuite>'),
                                 '--expect', *expect)
        return result.returncode, result.stdout.splitlines()

    def test_counts_by_label(self):
        code, lines = self.summary([('a', ['unit'], 'run', '', ''), ('b', ['unit'], 'run', '', ''),
                                    ('c', ['ranks'], 'run', '', '')], expect=['unit', 'ranks'])
        self.assertEqual(code, 0)
        self.assertEqual(lines[-1], '3 passed, 0 failed, 0 skipped')
        self.assertEqual([line.split() for line in lines if line][:2],
                         [['ranks', '1', 'passed', '0', 'failed', '0', 'skipped'],
                          ['unit', '2', 'passed', '0', 'failed', '0', 'skipped']])

    def test_failure_is_named(self):
        code, lines = self.summary([('a', ['unit'], 'fail', '', ''), ('b', ['unit'], 'run', '', '')])
        self.assertEqual((code, lines[-1]), (1, '1 passed, 1 failed, 0 skipped'))
        self.assertIn('failed: a', lines)

    def test_skips_give_their_reason(self):
        code, lines = self.summary([
            ('a', ['unit'], 'run', '', ''),
            ('b', ['unit'], 'notrun', 'SKIP_REGULAR_EXPRESSION_MATCHED', self.GTEST_SKIP),
            ('c', ['unit'], 'notrun', 'SKIP_RETURN_CODE=77', 'skip: no mpirun\n'),
            ('d', ['unit'], 'disabled', '', 'Disabled')])
        self.assertEqual((code, lines[-1]), (0, '1 passed, 0 failed, 3 skipped'))
        self.assertIn('skipped: b: no AMX here', lines)
        self.assertIn('skipped: c: no mpirun', lines)
        self.assertIn('skipped: d: disabled', lines)

    def test_missing_program_is_a_failure(self):
        code, lines = self.summary([('a', ['unit'], 'notrun', 'Unable to find executable', '')])
        self.assertEqual((code, lines[-1]), (1, '0 passed, 1 failed, 0 skipped'))

    def test_test_without_result_is_a_failure(self):
        code, lines = self.summary([('a', ['unit'], 'run', '', '')],
                                   listed=[('a', ['unit']), ('b', ['unit'])])
        self.assertEqual((code, lines[-1]), (1, '1 passed, 1 failed, 0 skipped'))
        self.assertIn('failed: b: did not run', lines)

    def test_expected_label_must_run(self):
        code, lines = self.summary(
            [('a', ['unit'], 'run', '', ''), ('b', ['mpi'], 'notrun', 'SKIP_RETURN_CODE=77', '')],
            expect=['unit', 'mpi', 'ranks'])
        self.assertEqual((code, lines[-1]), (1, '1 passed, 0 failed, 1 skipped'))
        self.assertIn("failed: no test with label 'mpi' ran", lines)
        self.assertIn("failed: no test with label 'ranks' ran", lines)

    def test_unreadable_input_is_one_line(self):
        result = self.run_script(ROOT / 'tools/test-summary', self.folder / 'none', '/dev/null')
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, r'\Atest-summary: error: .*none.*\n\Z')


class SetupTest(ScriptTest):
    """Runs tools/setup with stand-ins for the system's programs."""

    def setUp(self):
        super().setUp()
        for program in ['bash', 'dirname', 'env', 'grep', 'mktemp', 'rm', 'tail']:
            for place in os.environ['PATH'].split(':'):
                if os.path.exists(f'{place}/{program}'):
                    (self.folder / program).symlink_to(f'{place}/{program}')
                    break
        self.log = self.write('log', '')

    def system(self, installed, user):
        """Debian with these packages; `user` is root, sudoer or nobody."""
        listing = ''.join(f'{name} installed\\n' for name in installed)
        self.program('dpkg-query', f"printf '{listing}'; exit 1")
        self.program('apt-get', f'echo apt-get "$@" >>{self.log}')
        self.program('id', f"echo {0 if user == 'root' else 1000}")
        self.program('sudo', 'shift; "$@"' if user == 'sudoer' else 'exit 1')

    def program(self, name, body):
        self.write(name, f'#!/usr/bin/env bash\n{body}\n', 0o755)

    def setup_script(self, *args):
        return self.run_script(ROOT / 'tools/setup', *args, env={'PATH': str(self.folder)})

    def packages(self, *groups):
        with open(ROOT / 'tools/packages.txt', encoding='utf-8') as file:
            words = [line.split() for line in file]
        return [w[1] for w in words if w and w[0] in groups]

    def test_nothing_missing_is_silent(self):
        self.system(self.packages('build'), 'root')
        result = self.setup_script()
        self.assertEqual((result.returncode, result.stdout, result.stderr), (0, '', ''))
        self.assertEqual(self.log.read_text(), '')

    def test_installs_only_what_is_missing(self):
        for user in ['root', 'sudoer']:
            with self.subTest(user=user):
                self.log.write_text('')
                self.system([p for p in self.packages('build') if p != 'cmake'], user)
                result = self.setup_script()
                self.assertEqual((result.returncode, result.stderr), (0, ''))
                self.assertEqual(result.stdout, 'setup: installing cmake\n')
                update, install = self.log.read_text().splitlines()
                self.assertTrue(update.endswith(' update'))
                self.assertTrue(install.endswith(' cmake'))

    def test_lint_adds_its_group(self):
        self.system(self.packages('build'), 'root')
        result = self.setup_script('lint')
        self.assertEqual(result.stdout, f"setup: installing {' '.join(self.packages('lint'))}\n")

    def test_without_rights_prints_the_command(self):
        self.system([p for p in self.packages('build') if p != 'cmake'], 'nobody')
        result = self.setup_script()
        self.assertEqual(result.returncode, 1)
        self.assertIn('sudo apt-get install -y --no-install-recommends cmake\n', result.stderr)
        self.assertEqual(self.log.read_text(), '')

    def test_failing_apt_is_reported(self):
        self.system([], 'root')
        self.program('apt-get', 'echo no network; exit 100')
        result = self.setup_script()
        self.assertEqual(result.returncode, 1)
        self.assertIn('no network', result.stderr)
        self.assertIn("setup: error: 'apt-get update' failed", result.stderr)

    def test_other_systems_are_told_what_is_needed(self):
        result = self.setup_script()
        self.assertEqual(result.returncode, 0)
        self.assertIn(' '.join(self.packages('build')), result.stderr)

    def test_wrong_arguments(self):
        self.assertEqual(self.setup_script('everything').returncode, 2)


if __name__ == '__main__':
    unittest.main()
