#!/usr/bin/env python3
"""Runs over hosts that are network namespaces.

usage: cluster.py PROGRAM NETLAB WHAT

WHAT: ragged (3 + 1 ranks compute what the oracle does), wire (two-level puts at most 0.6 of the flat
tree's bytes on the wire between 2 hosts of 2 ranks, as the interfaces count them).
Exit code 77: this machine cannot do it; the reason is printed.
"""

import json
import subprocess
import sys
import tempfile


def over_hosts(netlab, ranks, rate, *command):
    """Output of a run, and the bytes that went over the wire."""
    with tempfile.NamedTemporaryFile('r') as stats:
        done = subprocess.run([netlab, '--ranks', ranks, '--rate', rate, '--stats', stats.name,
                               '--deadline', '300', '--', *command], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f'exit code {done.returncode}\n{done.stdout}{done.stderr}')
        return done.stdout, sum(host['bytes'] for host in json.load(stats)['hosts'])


def ragged(program, netlab):
    for arguments in (['verify', '--cases', '4'],
                      ['bench', 'decode', '--context', '1001', '--repeats', '1', '--schedule',
                       'two-level,auto', '--explain']):
        output, _ = over_hosts(netlab, '3,1', '0', program, *arguments)
        print(output)


def wire(program, netlab):
    def count(*schedules):
        output, sent = over_hosts(netlab, '2,2', '250', program, 'bench', 'decode', '--context',
                                  '64', '--repeats', '6', '--schedule', ','.join(schedules))
        print(f'{output}{sent} bytes on the wire\n')
        return sent

    # What else a run sends is about the same in all of them: little, over a slow link.
    other = count('tree')
    tree = count('tree', 'tree') - other
    two_level = count('tree', 'two-level') - other
    ratio = two_level / tree
    print(f'tree {tree} bytes, two-level {two_level}: {ratio:.2f}')
    if not 0.3 < ratio <= 0.6:  # half of the messages; less would mean that something was not counted
        sys.exit(f'two-level sends {ratio:.2f} of the bytes of tree; 0.3 to 0.6 are expected')


def main():
    program, netlab, what = sys.argv[1:]
    check = subprocess.run([netlab, '--check'], capture_output=True, text=True)
    if check.returncode != 0:
        print(f'skipped: {check.stderr.strip()}')
        return 77
    {'ragged': ragged, 'wire': wire}[what](program, netlab)
    return 0


if __name__ == '__main__':
    sys.exit(main())
