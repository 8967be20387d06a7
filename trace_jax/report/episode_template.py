# ruff: noqa: E501 - markup
"""The page of `trace-jax inspect --out`, as a Jinja template: one file, no script, nothing fetched from anywhere."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="trace-jax">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }} - trace-jax</title>
<style>
:root { --ink: #1c2430; --dim: #5f6b7a; --line: #dfe4ea; --page: #ffffff; --panel: #f6f8fa; --window: #e7edf5; --main: #1f6feb;
  --slice: #c2410c; --rest: #6b7785; --good: #1a7f37; --bad: #b42318; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --dim: #9aa7b6; --line: #333c47; --page: #11161c;
  --panel: #1a2129; --window: #232d39; --main: #6ea8ff; --slice: #ff9d5c; --rest: #8d99a8; --good: #57c26f; --bad: #ff8a7a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 24px 20px 60px; max-width: 1180px; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0 0 2px; } h2 { font-size: 18px; margin: 34px 0 8px; } h3 { font-size: 14px; margin: 14px 0 6px; }
.dim, .note { color: var(--dim); } .note { font-size: 13px; margin: 4px 0 10px; } .good { color: var(--good); } .bad { color: var(--bad); }
.ask { font-size: 17px; margin: 10px 0; padding-left: 12px; border-left: 3px solid var(--main); }
.scroll { overflow-x: auto; } ul { margin: 6px 0; padding-left: 20px; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 10px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .left td, .left th { text-align: left; } th { font-weight: 600; } tr.sum td { font-weight: 600; } tr.mark td { color: var(--slice); }
.facts td:first-child { color: var(--dim); } .facts td { white-space: normal; text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); gap: 14px; }
.chart { background: var(--panel); border-radius: 8px; padding: 8px 10px; } .chart h3 { margin: 0; } .chart .note { margin: 0 0 4px; }
svg { width: 100%; height: auto; display: block; } svg .grid { stroke: var(--line); } svg .window { fill: var(--window); }
svg .missing { fill: var(--bad); opacity: .16; } svg .hover { fill: transparent; } svg .hover:hover { fill: var(--dim); opacity: .18; }
svg .onset { stroke: var(--bad); stroke-width: 1.4; stroke-dasharray: 4 3; } svg .tick { fill: var(--dim); font-size: 10.5px; }
svg .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; } svg .level { stroke-width: 1; stroke-dasharray: 2 3; opacity: .8; }
svg .main { stroke: var(--main); } svg .slice { stroke: var(--slice); } svg .rest { stroke: var(--rest); stroke-width: 1.2; } svg .limit { stroke: var(--good); stroke-width: 1.2; }
svg .dot { stroke: none; } svg .dot.main { fill: var(--main); } svg .dot.slice { fill: var(--slice); } svg .dot.rest { fill: var(--rest); } svg .dot.limit { fill: var(--good); }
.key { display: inline-block; width: 18px; height: 0; border-top: 2px solid var(--rest); vertical-align: middle; margin: 0 4px 0 10px; }
.key.main { border-color: var(--main); } .key.slice { border-color: var(--slice); } .key.limit { border-color: var(--good); } .key.onset { border-top: 2px dashed var(--bad); }
.block { display: inline-block; width: 14px; height: 11px; vertical-align: middle; margin: 0 4px 0 10px; background: var(--window); border: 1px solid var(--line); } .block.missing { background: var(--bad); opacity: .3; }
.columns { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 500px), 1fr)); gap: 10px 34px; align-items: start; }
.flow { display: flex; flex-wrap: wrap; gap: 0 30px; } .flow > div { max-width: 100%; }
.bars { display: grid; grid-template-columns: minmax(0, 1fr) 62px 34%; gap: 2px 8px; font-size: 13px; font-variant-numeric: tabular-nums; align-items: center; }
.bars .value { text-align: right; } .bars .bar { height: 10px; border-radius: 2px; background: var(--good); min-width: 1px; } .bars .bar.failed { background: var(--bad); }
details { margin: 8px 0; } summary { cursor: pointer; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<div class="dim">{{ subtitle }}</div>
<div class="ask">{{ question }}</div>
<table class="facts">{% for name, value in truth %}<tr><td>{{ name }}</td><td>{{ value }}</td></tr>
{% endfor %}</table>
{% if accepted %}<p class="good">The oracle accepts this episode: every check below passes.</p>
{% else %}<p class="bad">The oracle rejects this proposal:</p><ul class="bad">{% for reason in failing %}<li>{{ reason }}</li>{% endfor %}</ul>{% endif %}

{% macro panel(charts) %}<div class="charts">{% for c in charts %}<div class="chart"><h3>{{ c.name }}</h3><p class="note">{{ c.note }}</p>{{ c.svg|safe }}</div>
{% endfor %}</div>{% endmacro %}
<h2>The campaign and its siblings</h2>
<p class="note"><span class="key main"></span>campaign<span class="key"></span>siblings together, drawn at the campaign's baseline level<span class="key limit"></span>daily budget
<span class="block"></span>intervention window{% if onset %}<span class="key onset"></span>onset, {{ onset }}{% endif %}{% if missing %}<span class="block missing"></span>missing from the export: {{ missing }}{% endif %}.
Thin dashes: level of the half.</p>
{{ panel(campaign) }}

{% if slice %}<h2>The slice {{ slice }} against the rest of the campaign</h2>
<p class="note"><span class="key slice"></span>slice<span class="key"></span>rest of the campaign, drawn at the slice's baseline level.</p>
{{ panel(local) }}{% endif %}

<h2>Mix and rate</h2>
<p class="note">The change of a ratio, split exactly: mix is what moved because traffic went to other segments, rate what moved inside segments. In the metric's own unit.</p>
<div class="scroll"><table><tr><th>by</th>{% for m in summary.metrics %}<th>{{ m }} before</th><th>after</th><th>mix</th><th>rate</th>{% endfor %}</tr>
{% for row in summary.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<div class="flow">{% for t in breakdowns %}<div><h3>CTR by {{ t.attribute }}</h3>
<div class="scroll"><table><tr><th>{{ t.attribute }}</th><th>share before</th><th>after</th><th>CTR before</th><th>after</th><th>mix</th><th>rate</th><th>deviation</th></tr>
{% for style, row in t.rows %}<tr{{ ' class=' + style if style }}>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>{% if t.warning %}<p class="note">Note: {{ t.warning }}.</p>{% endif %}</div>{% endfor %}</div>
<p class="note">Deviation of the window's clicks: (real - expected) / (real + expected), expected at the segment's baseline CTR.</p>

<h2>Confounders at work</h2>
{% if confounders %}<div class="scroll"><table class="left"><tr><th>confounder</th><th>size</th><th>what it does</th></tr>
{% for c in confounders %}<tr><td>{{ c.name }}</td><td>{{ c.shown }}</td><td>{{ c.description }}</td></tr>
{% endfor %}</table></div>{% else %}<p class="note">None.</p>{% endif %}

<h2>What the oracle saw</h2>
<div class="scroll"><table><tr><th>evidence {{ 'in the slice, against the rest of the campaign' if local_evidence else 'of the campaign, against its siblings' }}</th><th>change</th><th>z (standard errors)</th><th>wanted by the signature</th></tr>
{% for name, change, z, wanted in evidence %}<tr><td>{{ name }}</td><td>{{ change }}</td><td>{{ z }}</td><td>{{ wanted or 'free' }}</td></tr>
{% endfor %}</table></div>
<p class="note">Margins, weakest first; a check passes while its margin is positive. A rival slice must be {{ gap }} log-likelihood units behind the label's; those are taken off.</p>
<div class="columns">{% for heading, unit, rows in margins %}<div><h3>{{ heading }} <span class="dim">({{ unit }})</span></h3><div class="bars">
{% for row in rows %}<span>{{ row.name }}</span><span class="value{{ '' if row.passed else ' bad' }}">{{ row.text }}</span><span><div class="bar{{ '' if row.passed else ' failed' }}" style="width: {{ row.width }}%"></div></span>
{% endfor %}</div></div>{% endfor %}</div>

<h2>Tables</h2>
{% for t in tables %}<details{{ ' open' if loop.first }}><summary>{{ t.name }} <span class="dim">({{ t.rows }} rows{{ ', hidden from the agent' if t.hidden }})</span></summary>
<div class="scroll"><table class="left"><tr>{% for c in t.columns %}<th>{{ c }}</th>{% endfor %}</tr>
{% for row in t.head %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div></details>
{% endfor %}
</body>
</html>
"""
