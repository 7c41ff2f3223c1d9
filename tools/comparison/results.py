"""Rows of a comparison, what they aim at, and results of several runs in one file."""

import json
import pathlib
import statistics

# Times the peer's rate, by the key of a row: everywhere, or with AMX and without.
AIMS = {
    'kernels decode bf16 65536': 2.0,
    'kernels forward bf16 8192': 1.7,
    'kernels backward bf16 4096': 3.5,
    'ranks tree 16384': 5.0,
    'short decode best': 1.0,
    'long 7000 prefill best': (6.0, 2.0),
    'long 7000 decode best': (3.5, 3.0),
    '8b 2048 prefill best': 1.5,
    '8b 32768 decode best': (2.5, 2.0),
    'hosts tree 32768': 4.0,
}


def aim_of(key, amx):
    aim = AIMS.get(key)
    return aim[0 if amx else 1] if isinstance(aim, tuple) else aim


def times_as_fast(ours, theirs, unit):
    """More is better, except of a time."""
    if ours is None or theirs is None:
        return None
    return theirs / ours if unit == 'ms' else ours / theirs


def limit_of(ours, fraction, unit):
    """What the machine would allow, from what we reach and the fraction that is."""
    if ours is None or not fraction:
        return None
    return ours * fraction if unit == 'ms' else ours / fraction


def median(values):
    return statistics.median(values) if values else None


def make_row(key, what, unit, ours, theirs, fraction=None, ratio=None, note=None, command=None, **more):
    """A row of a report. ours, theirs: (name, values of all rounds); no values: there was no figure.
    ratio: unless it is that of the medians."""
    our_median, their_median = median(ours[1]), median(theirs[1])
    if ratio is None:
        ratio = times_as_fast(our_median, their_median, unit)
    return {'key': key, 'what': what, 'unit': unit,
            'ours': our_median, 'ours_is': ours[0], 'all_ours': list(ours[1]),
            'theirs': their_median, 'theirs_is': theirs[0], 'all_theirs': list(theirs[1]),
            'ratio': ratio, 'limit': limit_of(our_median, fraction, unit), 'limit_fraction': fraction,
            'note': note, 'command': command, **more}


def set_aims(rows, amx):
    for row in rows:
        row['aim'] = aim_of(row['key'], amx)


def best_of(results, unit='tokens/s'):
    """The name of the fastest: of lists of figures, by name. None if all lists are empty."""
    medians = {name: median(values) for name, values in results.items() if values}
    choose = min if unit == 'ms' else max
    return choose(medians, key=medians.get) if medians else None


def load(path):
    """Sections that were measured before, by name. A file of another kind counts as none."""
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding='utf-8'))
    except (FileNotFoundError, ValueError):
        return {}
    sections = content.get('sections') if isinstance(content, dict) else None
    return sections if isinstance(sections, dict) else {}


def merge(before, now, machine, order):
    """Sections in order: those of now, and those measured before on the same machine."""
    def same(section):
        return all(section['machine'].get(name) == machine[name] for name in ('cpu', 'cores'))

    kept = {name: section for name, section in before.items() if same(section)}
    both = kept | now
    return {name: both[name] for name in order if name in both}


def save(path, sections):
    """Replaces the file at once: an interrupted run leaves what was there."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + '.part')
    part.write_text(json.dumps({'sections': sections}, indent=2) + '\n', encoding='utf-8')
    part.replace(path)
