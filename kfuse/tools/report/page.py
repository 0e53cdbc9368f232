"""The page: summaries, charts, settings and events of runs in one HTML file that needs no network."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from itertools import chain

from bokeh.embed import components
from bokeh.resources import Resources

from kfuse.observe.recorder import figure, summary_rows
from kfuse.settings.tree import show
from kfuse.tools.report.charts import Chart, charts
from kfuse.tools.report.recorded import Recorded, differing

_HEAD = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
:root {{ --ink: #1a1a1a; --soft: #595959; --line: #d0d0d0; --ground: #fff; --link: #0057a8; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e8e8e8; --soft: #b0b0b0; --line: #444; --ground: #161616; --link: #7cb8ff; }}
}}
body {{ margin: 0 auto; max-width: 1400px; padding: 1rem; color: var(--ink); background: var(--ground);
  font: 1rem/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.4rem; }}
h2 {{ font-size: 1.1rem; margin: 1.2rem 0 0; }}
a {{ color: var(--link); }}
p, summary {{ color: var(--soft); margin: 0.3rem 0; }}
summary {{ cursor: pointer; }}
.charts {{ display: grid; gap: 1.5rem; margin-top: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 34rem), 1fr)); }}
section {{ min-width: 0; }}
section h2 {{ margin-top: 0; }}
.scroll {{ overflow: auto; max-height: 30rem; }}
table {{ border-collapse: collapse; font-size: 0.85rem; }}
th, td {{ border-bottom: 1px solid var(--line); padding: 0.15rem 0.7rem 0.15rem 0; text-align: left; }}
th {{ color: var(--soft); font-weight: 600; }}
td {{ overflow-wrap: anywhere; max-width: 24rem; font-variant-numeric: tabular-nums; }}
td:first-child {{ overflow-wrap: normal; }}
:focus-visible {{ outline: 2px solid var(--link); outline-offset: 2px; }}
</style>
"""

# Bokeh has its own colours: axes and legends take the page's, also when the system turns dark.
_COLOURS = """\
<script>
(() => {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const paint = () => {
    const of = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const ink = of("--ink"), line = of("--line");
    const colours = {
      axis_label_text_color: ink, major_label_text_color: ink, label_text_color: ink, axis_line_color: line,
      major_tick_line_color: line, minor_tick_line_color: line, grid_line_color: line, border_line_color: null,
    };
    for (const found of Bokeh.documents) {
      for (const model of found.all_models) {
        for (const [name, colour] of Object.entries(colours)) {
          if (name in model.properties) model[name] = colour;
        }
      }
    }
  };
  const first = () => Bokeh.documents.length ? paint() : requestAnimationFrame(first);
  first();
  dark.addEventListener("change", paint);
})();
</script>
"""


def page(runs: Sequence[Recorded]) -> str:
    """Returns the HTML page about these runs, at least one."""
    made = charts(runs)
    script, places = components({f"chart{index}": chart.figure for index, chart in enumerate(made)})
    names = dict.fromkeys(name for run in runs for name in run.settings)
    title = "kfuse: " + ", ".join(run.name for run in runs)
    parts = [
        _HEAD.format(title=escape(title)),
        *(f"<script>{code}</script>\n" for code in Resources(mode="inline", components=["bokeh"]).js_raw),
        "</head>\n<body>\n<main>\n",
        f"<h1>{escape(title)}</h1>\n",
        _settings("<h2>Settings that differ</h2>", runs, differing(runs)),
        _summaries(runs),
        '<div class="charts">\n',
        *(_section(chart, places[f"chart{index}"]) for index, chart in enumerate(made)),
        "</div>\n",
        _events(runs),
        f"<details><summary>All settings</summary>\n{_settings('', runs, names)}</details>\n",
        f"</main>\n{script}\n{_COLOURS}</body>\n</html>\n",
    ]
    return "".join(parts)


def _section(chart: Chart, place: str) -> str:
    heading = escape(chart.title)
    return (
        f"<section>\n<h2>{heading}</h2>\n<p>{escape(chart.text)}</p>\n"
        f'<div role="group" aria-label="{heading}. {escape(chart.text)}">{place}</div>\n</section>\n'
    )


def _events(runs: Sequence[Recorded]) -> str:
    rows = [
        [run.name, str(each.step), figure(run.steps["seconds"][each.row]), each.text]
        for run in runs
        for each in run.events
    ]
    table = _table(["run", "step", "seconds of training", "what happened"], rows)
    return f"<details><summary>Events</summary>\n{table}</details>\n"


def _summaries(runs: Sequence[Recorded]) -> str:
    steps = [str(len(run.steps["step"])) for run in runs]
    found = [dict(summary_rows(run.summary)) for run in runs]
    rows = [[name, *(each.get(name, "-") for each in found)] for name in dict.fromkeys(chain(*found))]
    return _table(["", *(run.name for run in runs)], [["steps recorded", *steps], *rows])


def _settings(heading: str, runs: Sequence[Recorded], names: Collection[str]) -> str:
    rows = [[name, *(show(run.settings.get(name, "-")) for run in runs)] for name in names]
    return f"{heading}\n{_table(['setting', *(run.name for run in runs)], rows)}" if rows else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    # It scrolls, so it must be reached by the keyboard.
    table = f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
    return f'<div class="scroll" tabindex="0">{table}</div>\n'
