"""A drawing of what ran when: lanes of bars over one axis in milliseconds, as SVG."""

import html

WIDTH, LEFT, LANE = 900, 130, 44
COLOURS = {"cpu": "#2f6f4f", "gpu": "#3b5fa0", "copy": "#b8863b", "wait": "#c9ccd1"}


def svg(title, lanes):
    """lanes: [(name, [(kind, words, from ms, to ms)])]; kinds are those of COLOURS."""
    end = max(to for _, bars in lanes for *_, to in bars) * 1.02 or 1.0
    height = 60 + LANE * len(lanes) + 30
    scale = (WIDTH - LEFT - 40) / end
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif" '
           'font-size="12">',
           f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
           f'<text x="10" y="24" font-size="14">{html.escape(title)}</text>']
    for at, (name, bars) in enumerate(lanes):
        y = 44 + LANE * at
        out.append(f'<text x="10" y="{y + 20}">{html.escape(name)}</text>')
        for kind, label, start, to in bars:
            x, width = LEFT + start * scale, max((to - start) * scale, 1)
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 14}" fill="{COLOURS[kind]}">'
                       f"<title>{html.escape(label)}: {start:.3f} to {to:.3f} ms</title></rect>")
            if width > 7 * len(label):
                out.append(f'<text x="{x + 4:.1f}" y="{y + 20}" fill="white">{html.escape(label)}</text>')
    y = 44 + LANE * len(lanes)
    for tick in range(6):
        value = end * tick / 5
        x = LEFT + value * scale
        out.append(f'<line x1="{x:.1f}" y1="40" x2="{x:.1f}" y2="{y}" stroke="#00000022"/>')
        out.append(f'<text x="{x:.1f}" y="{y + 16}" text-anchor="middle">{value:.2f} ms</text>')
    return "\n".join([*out, "</svg>", ""])
