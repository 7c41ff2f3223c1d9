"""Results as a table: on a terminal, and as docs/results.md."""

HEADER = ('what', 'Treeline', 'peer', 'ratio', 'aim', 'limit', 'of limit')

TITLES = {
    'kernels': 'Attention on one device',
    'ranks': 'Decoding over two processes',
    'short': 'SmolLM2 after a short prompt',
    'long': 'SmolLM2 after long prompts',
    '8b': "Four layers of Llama-3.1-8B's shape",
    'hosts': 'Four hosts',
    'engines': 'Other engines',
}


def number(value):
    """Three digits, or all before the point."""
    if value >= 100:
        return f'{value:,.0f}'
    return f'{value:.3g}' if value >= 0.001 else f'{value:.1e}'


def figure(value, unit, name=''):
    if value is None:
        return f'- ({name})' if name else '-'
    return f'{number(value)} {unit}' + (f' ({name})' if name else '')


def label(name, values):
    """Who it is, and the range of its figures."""
    spread = f'{number(min(values))} to {number(max(values))}' if len(values) > 1 else ''
    return ', '.join(part for part in (name, spread) if part)


def cells(row):
    """A row's texts, as HEADER names them."""
    ours = row['ours_is'].removeprefix('treeline').strip(' ,')
    return (row['what'],
            figure(row['ours'], row['unit'], label(ours, row['all_ours'])),
            figure(row['theirs'], row['unit'], label(row['theirs_is'], row['all_theirs'])),
            '-' if row['ratio'] is None else f"{row['ratio']:.2f}x",
            '-' if row.get('aim') is None else f"{row['aim']:g}x",
            figure(row['limit'], row['unit']),
            '-' if row['limit_fraction'] is None else f"{row['limit_fraction']:.2f}")


def missed(row):
    """Whether a row has an aim and does not reach it."""
    return row.get('aim') is not None and row['ratio'] is not None and row['ratio'] < row['aim']


def as_text(sections):
    """One table of all sections, with a note below a row that has one."""
    lines = [HEADER]
    notes = {}
    for name, section in sections.items():
        for row in section['rows']:
            texts = cells(row)
            lines.append((f'{name}: {texts[0]}', *texts[1:]))
            notes[len(lines) - 1] = row['note']
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADER))]
    text = []
    for at, line in enumerate(lines):
        text.append('  '.join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
        if notes.get(at):
            text.append(f'    {notes[at]}')
    return '\n'.join(text) + '\n'


def _markdown_row(texts):
    return '| ' + ' | '.join(text.replace('|', '\\|') for text in texts) + ' |'


def _section(name, section):
    machine = section['machine']
    versions = ', '.join(f'{package} {version}' for package, version in section['versions'].items())
    rounds = max(len(row['all_ours']) for row in section['rows'])
    rounds = 'one round' if rounds == 1 else f'medians of {rounds} rounds'
    lines = [f'## {TITLES[name]}', '',
             f"`tools/compare --only {name}`: {rounds}, {section['threads']} threads. Treeline {machine['commit']}, "
             f"{machine['compiler']}, {machine['isa']}" + (f'; {versions}.' if versions else '.')]
    lines += ['', _markdown_row([*HEADER, "Treeline's side alone"]), '|---' * (len(HEADER) + 1) + '|']
    for row in section['rows']:
        texts = list(cells(row))
        if row['note']:
            texts[0] += f": {row['note']}"
        command = f"`{row['command']}`" if row['command'] else ''
        lines.append(_markdown_row([*texts, command]))
    return lines


HEAD = """Treeline and its peer take turns, each measurement in a process of its own, with the same threads in all. A
figure is the median of all rounds, with the range in brackets. `ratio` is how many times as fast Treeline
is. `limit` is what the machine would allow, measured by Treeline's own benchmark next to its figure:
bandwidth for decoding, multiply-adds for the rest. `-`: there is none. `docs/bench.md` says how each peer
is run.

`$model` is what `treeline model get smollm2` prints; `llama-8b-4.gguf` is written by
`treeline model random --like llama-3.1-8b --layers 4 --type Q4_K llama-8b-4.gguf`."""


def _aims(sections):
    rows = [row for section in sections.values() for row in section['rows']
            if row.get('aim') is not None and row['ratio'] is not None]
    short = [row['what'] for row in rows if missed(row)]
    line = f'Aims: {len(rows) - len(short)} of {len(rows)} are reached.'
    return line + (f" Short of theirs: {'; '.join(short)}." if short else '')


def as_markdown(sections):
    """docs/results.md. Sections must be of one machine."""
    machine = next(iter(sections.values()))['machine']
    amx = 'with AMX' if machine['amx'] else 'without AMX'
    lines = ['# Results', '', f"Measured on {machine['cores']} cores of {machine['cpu']}, {amx}. `tools/compare` writes "
             'this file; what changes here is measured, not edited.', '', HEAD, '', _aims(sections)]
    for name, section in sections.items():
        lines += ['', *_section(name, section)]
    return '\n'.join(lines) + '\n'
