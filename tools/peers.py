"""Environments of the programs that Treeline is compared with, as tools/peers.txt pins them."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
PINS = ROOT / 'tools/peers.txt'
PLACE = ROOT / 'build/peers'


class PeerInstallError(Exception):
    """A peer could not be installed; the message says which."""


_failed = {}  # groups that this process has tried to install, and the errors


def requirements(text, group):
    """The lines of a group in the text of tools/peers.txt, as pip reads them."""
    words = (line.split(maxsplit=1) for line in text.splitlines() if not line.startswith('#'))
    return [each[1].strip() for each in words if len(each) == 2 and each[0] == group]


def versions(text, group):
    """Versions of a group's packages, by name."""
    return dict(line.split()[0].split('==') for line in requirements(text, group))


def require(group):
    """The Python of a group's environment, which is made unless it is there with what is pinned. What
    could not be installed is not tried again."""
    place = PLACE / group
    lines = requirements(PINS.read_text(encoding='utf-8'), group)
    wanted = ''.join(line + '\n' for line in lines)
    stamp = place / 'pins.txt'
    if not stamp.exists() or stamp.read_text(encoding='utf-8') != wanted:
        if group in _failed:
            raise _failed[group]
        print(f'peers: installing {group} ({len(lines)} packages) in {place.relative_to(ROOT)}', file=sys.stderr,
              flush=True)
        if not _install(place, wanted):
            _failed[group] = PeerInstallError(f'{group} could not be installed')
            raise _failed[group]
        stamp.write_text(wanted, encoding='utf-8')
    return place / 'bin/python'


def _install(place, wanted):
    """Makes an environment anew. Whether all went well; if not, it is said on standard error."""
    if subprocess.run([sys.executable, '-m', 'venv', '--clear', place]).returncode != 0:
        return False
    pins = place / 'wanted.txt'
    pins.write_text(wanted, encoding='utf-8')
    # On a terminal pip shows how far it is with many packages, since those can be gigabytes.
    quiet = [] if sys.stderr.isatty() and wanted.count('\n') > 10 else ['--quiet']
    pip = [place / 'bin/python', '-m', 'pip', 'install', *quiet, '--disable-pip-version-check', '--no-deps',
           '--require-hashes', '-r', pins]
    return subprocess.run(pip, stdout=sys.stderr).returncode == 0
