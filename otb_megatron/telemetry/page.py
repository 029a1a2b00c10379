"""The frame of every HTML page that this package writes: one file, no script, nothing to load."""

from __future__ import annotations

import base64
import html
import os
from pathlib import Path
from string import Template


def write_page(path: Path, *, title: str, summary: str, sections: str) -> Path:
    """Writes the page whole or not at all.

    Args:
        title, summary: plain text.
        sections: HTML.
    """
    page = Template(_PAGE).substitute(title=html.escape(title), summary=html.escape(summary), sections=sections)
    partial = path.with_suffix(".partial")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, path)
    return path


def figure(title: str, picture: bytes, *, alt: str, media_type: str = "image/png", note: str = "", wide: bool = False) -> str:
    """HTML of one picture under its title, with a note below it. Title, alternative text and note are plain text."""
    encoded = base64.b64encode(picture).decode("ascii")
    caption = f'<p class="note">{html.escape(note)}</p>' if note else ""
    attribute = ' class="wide"' if wide else ""
    return f'<figure{attribute}><h2>{html.escape(title)}</h2><img src="data:{media_type};base64,{encoded}" alt="{html.escape(alt)}">{caption}</figure>'


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
  :root { color-scheme: light; }
  body { margin: 0 auto; padding: 24px; max-width: 1240px; background: #fff; color: #1c1c1c; font: 15px/1.45 system-ui, sans-serif; }
  h1 { margin: 0; font-size: 26px; overflow-wrap: anywhere; }
  h2 { margin: 0 0 4px; font-size: 16px; }
  .summary { margin: 4px 0 20px; color: #444; }
  .pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 20px; }
  figure { margin: 0; padding: 12px; border: 1px solid #ddd; border-radius: 6px; }
  .wide { grid-column: 1 / -1; overflow-x: auto; }
  img { display: block; width: 100%; height: auto; }
  .wide img { min-width: 760px; }
  .note { margin: 4px 0 0; color: #a33; font-size: 13px; }
  section { margin-top: 28px; overflow-x: auto; }
  table { border-collapse: collapse; }
  th, td { padding: 4px 20px 4px 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e8e8e8; }
  thead th { color: #555; font-weight: 600; }
  tbody th { font-weight: 500; white-space: nowrap; }
  .numbers td { font-variant-numeric: tabular-nums; white-space: nowrap; }
  .step { color: #777; font-size: 12px; }
  details { margin-top: 28px; }
  summary { cursor: pointer; font-weight: 600; }
  pre { padding: 12px; overflow-x: auto; background: #f6f6f6; border-radius: 6px; font-size: 13px; }
</style>
</head>
<body>
<h1>$title</h1>
<p class="summary">$summary</p>
$sections</body>
</html>
"""
