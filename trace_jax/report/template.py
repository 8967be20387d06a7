# ruff: noqa: E501 - markup
"""The page of `trace-jax report`, as a Jinja template: one file, no script, nothing fetched from anywhere."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="trace-jax">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ name }} - trace-jax</title>
<style>
:root { --ink: #1c2430; --dim: #5f6b7a; --line: #dfe4ea; --page: #ffffff; --panel: #f6f8fa; --curve: #1f6feb;
  --heat: 31, 111, 235; --good: #1a7f37; --bad: #b42318; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --dim: #9aa7b6; --line: #333c47; --page: #11161c;
  --panel: #1a2129; --curve: #6ea8ff; --heat: 110, 168, 255; --good: #57c26f; --bad: #ff8a7a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 20px 60px; max-width: 1180px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 2px; } h2 { font-size: 18px; margin: 36px 0 10px; } h3 { font-size: 14px; margin: 18px 0 6px; }
p, .dim { color: var(--dim); } .note { font-size: 13px; margin: 6px 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; } th.paper, td.paper { color: var(--dim); }
td.heat { background: rgba(var(--heat), var(--share, 0)); } td.hit { outline: 1px solid var(--good); outline-offset: -1px; }
.matrix th.up { writing-mode: vertical-rl; transform: rotate(180deg); text-align: left; padding: 8px 2px; }
.matrix td { text-align: center; padding: 4px 6px; min-width: 34px; } .matrix td:first-child { text-align: left; }
.figures { display: flex; flex-wrap: wrap; gap: 12px; margin: 14px 0 0; }
.figure { background: var(--panel); border-radius: 8px; padding: 10px 16px; min-width: 150px; }
.figure b { font-size: 24px; display: block; } .figure span { font-size: 12px; color: var(--dim); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(300px, 1fr)); gap: 14px; }
.chart { background: var(--panel); border-radius: 8px; padding: 8px 10px; } .chart h3 { margin: 0; font-weight: 600; }
.chart .last { float: right; font-weight: 400; color: var(--dim); }
svg { width: 100%; height: auto; display: block; } svg .grid { stroke: var(--line); fill: none; }
svg .curve { stroke: var(--curve); fill: none; stroke-width: 1.6; stroke-linejoin: round; } svg .dot { fill: var(--curve); }
svg .tick { fill: var(--dim); font-size: 10.5px; }
.case { border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; margin: 12px 0; }
.case header { font-size: 13px; color: var(--dim); margin-bottom: 6px; } .good { color: var(--good); } .bad { color: var(--bad); }
.turn { display: grid; grid-template-columns: 76px 1fr; gap: 8px; font-size: 12.5px; }
.turn .role { color: var(--dim); text-align: right; } pre { margin: 0 0 6px; white-space: pre-wrap; overflow-wrap: anywhere;
  font: 12.5px/1.45 ui-monospace, monospace; } .sampled pre { background: var(--panel); border-radius: 6px; padding: 2px 8px; }
details pre { background: var(--panel); padding: 10px 14px; border-radius: 8px; }
</style>
</head>
<body>
<h1>{{ name }}</h1>
<p>{{ subtitle }}</p>
{% if figures %}<div class="figures">{% for f in figures %}
<div class="figure"><b>{{ f.value }}</b>{{ f.label }}<br><span>{{ f.detail }}</span></div>{% endfor %}</div>{% endif %}

<h2>Held-out results</h2>
{% if table %}
<div class="scroll"><table><tr><th>metric</th>{% for c in table.columns %}<th{{ ' class=paper' if c.startswith('paper') }}>{{ c }}</th>{% endfor %}</tr>
{% for label, cells in table.rows %}<tr><td>{{ label }}</td>{% for cell in cells %}<td{{ ' class=paper' if table.columns[loop.index0].startswith('paper') }}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% for note in table.notes %}<p class="note">{{ note }}</p>{% endfor %}
{% for note in differences %}<p class="note">{{ note }}</p>{% endfor %}
{% else %}<p>Nothing was evaluated in this run directory yet.</p>{% endif %}

{% if breakdown %}<h2>{{ breakdown.title }}</h2>
<div class="scroll"><table><tr><th>{{ breakdown.category }}</th>{% for c in breakdown.columns %}<th>{{ c }}</th>{% endfor %}</tr>
{% for label, cells in breakdown.rows %}<tr><td>{{ label }}</td>{% for text, share in cells %}<td class="heat" style="--share:{{ share }}">{{ text }}</td>{% endfor %}</tr>
{% endfor %}</table></div>{% endif %}

{% if matrix %}<h2>Confusion matrix: {{ matrix.agent }}</h2>
<p class="note">Rows: hidden cause; columns: answered cause; share of the row's answers, with the number of answers at the right.</p>
<div class="scroll"><table class="matrix"><tr><th></th>{% for c in matrix.columns %}<th class="up">{{ c }}</th>{% endfor %}<th class="up">answers</th></tr>
{% for row in matrix.rows %}<tr><td>{{ row.cause }}</td>{% for text, share, hit in row.cells %}<td class="heat{{ ' hit' if hit }}" style="--share:{{ share }}">{{ text }}</td>{% endfor %}<td class="dim">{{ row.total }}</td></tr>
{% endfor %}</table></div>{% endif %}

{% for stage, charts in stages %}<h2>Training curves: {{ stage }}</h2>
<div class="charts">{% for c in charts %}<div class="chart"><h3>{{ c.name }}<span class="last">{{ c.last }}</span></h3>{{ c.svg|safe }}</div>
{% endfor %}</div>{% endfor %}
{% if skipped %}<p class="note">Note: {{ skipped }}.</p>{% endif %}

{% if cases %}<h2>Investigations</h2>
<p class="note">From {{ cases_from }}. Shaded: what the agent wrote; the rest is what it was shown.</p>
{% for case in cases %}<div class="case"><header>episode {{ case.index }} · {{ case.type }} · {{ case.asked }} <b>{{ case.truth }}</b>{{ ' in ' + case.where if case.where }} ·
<span class="{{ 'good' if case.right else 'bad' }}">{{ case.outcome }}</span> · reward {{ case.reward }}</header>
{% for role, text, sampled in case.turns %}<div class="turn{{ ' sampled' if sampled }}"><div class="role">{{ role }}</div><pre>{{ text }}</pre></div>
{% endfor %}</div>
{% endfor %}{% endif %}

<h2>Configuration</h2>
<details><summary>config.yaml</summary><pre>{{ config }}</pre></details>
</body>
</html>
"""
