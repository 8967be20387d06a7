# ruff: noqa: E501 - markup
"""The page of `trace-jax diagnose --html`, as a Jinja template: one file, nothing fetched from anywhere."""

# Copies the text of the elements that a button names. Without it, a click on a query selects it as a whole.
SCRIPT = """
document.querySelectorAll('button[data-copy]').forEach(function (button) {
  var label = button.textContent;
  button.hidden = false;
  function say(text) { button.textContent = text; setTimeout(function () { button.textContent = label; }, 1600); }
  button.addEventListener('click', function () {
    var text = button.dataset.copy.split(' ').map(function (id) { return document.getElementById(id).textContent; }).join('\\n');
    function byHand() {
      var area = document.createElement('textarea');
      area.value = text; document.body.appendChild(area); area.select();
      say(document.execCommand('copy') ? 'Copied' : 'Cannot copy here: select the text');
      area.remove();
    }
    if (navigator.clipboard) navigator.clipboard.writeText(text).then(function () { say('Copied'); }, byHand);
    else byHand();
  });
});
"""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="trace-jax">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ headline }} - diagnosis of {{ campaign }}</title>
<style>
:root { --ink: #1c2430; --dim: #5a6675; --line: #dfe4ea; --page: #ffffff; --panel: #f6f8fa; --before: #e4e9ef; --window: #d5e4f8; --main: #1f6feb;
  --slice: #c2410c; --rest: #6b7785; --good: #1a7f37; --warn: #9a5b00; --bad: #b42318; color-scheme: light dark; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --dim: #9aa7b6; --line: #333c47; --page: #11161c;
  --panel: #1a2129; --before: #28323d; --window: #233c5c; --main: #6ea8ff; --slice: #ff9d5c; --rest: #8d99a8; --good: #57c26f; --warn: #e0a84a; --bad: #ff8a7a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 20px 60px; max-width: 1080px; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 27px; line-height: 1.25; margin: 4px 0 8px; overflow-wrap: anywhere; } h2 { font-size: 19px; margin: 38px 0 8px; } h3 { font-size: 15px; margin: 16px 0 6px; overflow-wrap: anywhere; }
p { margin: 6px 0; overflow-wrap: anywhere; } .dim, .note { color: var(--dim); } .note { font-size: 14px; } .warn { color: var(--warn); }
.answer { border: 1px solid var(--line); border-left: 5px solid var(--rest); border-radius: 8px; padding: 14px 20px 16px; margin: 10px 0 0; }
.answer.high { border-left-color: var(--good); } .answer.medium { border-left-color: var(--warn); } .answer.low { border-left-color: var(--bad); }
.answer .meaning { font-size: 17px; max-width: 72ch; }
.votes { display: inline-flex; gap: 4px; margin-right: 10px; vertical-align: middle; } .votes i { width: 18px; height: 10px; border-radius: 3px; background: var(--line); } .votes i.for { background: var(--main); }
ul { margin: 6px 0; padding-left: 22px; } li { margin: 3px 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; background: linear-gradient(90deg, var(--page) 30%, transparent) left / 40px 100% no-repeat local, linear-gradient(270deg, var(--page) 30%, transparent) right / 40px 100% no-repeat local, linear-gradient(90deg, var(--line), transparent) left / 10px 100% no-repeat scroll, linear-gradient(270deg, var(--line), transparent) right / 10px 100% no-repeat scroll; } table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px 5px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top; } th { font-weight: 600; white-space: nowrap; }
.n { text-align: right; white-space: nowrap; padding-left: 12px; padding-right: 4px; } td.t { min-width: 9ch; max-width: 34ch; overflow-wrap: anywhere; } .sum td { font-weight: 600; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 440px), 1fr)); gap: 14px; margin-top: 10px; }
.chart { background: var(--panel); border-radius: 8px; padding: 10px 12px; } .chart h3 { margin: 0; } .chart .note { margin: 0 0 4px; font-size: 13px; }
svg { width: 100%; height: auto; display: block; } svg .grid { stroke: var(--line); } svg .before { fill: var(--before); } svg .window { fill: var(--window); }
svg .missing { fill: var(--bad); opacity: .16; } svg .hover { fill: transparent; } svg .hover:hover { fill: var(--dim); opacity: .18; } svg .tick { fill: var(--dim); font-size: 11px; }
svg .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; } svg .level { stroke-width: 1.2; stroke-dasharray: 3 3; opacity: .85; }
svg .main { stroke: var(--main); } svg .slice { stroke: var(--slice); } svg .rest { stroke: var(--rest); stroke-width: 1.3; } svg .limit { stroke: var(--good); stroke-width: 1.3; }
svg .dot { stroke: none; } svg .dot.main { fill: var(--main); } svg .dot.slice { fill: var(--slice); } svg .dot.rest { fill: var(--rest); } svg .dot.limit { fill: var(--good); }
.key { display: inline-block; width: 18px; border-top: 2.5px solid var(--rest); vertical-align: middle; margin: 0 5px 0 0; } .keys span + span { margin-left: 14px; }
.key.main { border-color: var(--main); } .key.slice { border-color: var(--slice); } .key.limit { border-color: var(--good); }
.block { display: inline-block; width: 15px; height: 11px; vertical-align: middle; margin: 0 5px 0 0; background: var(--window); border: 1px solid var(--rest); } .block.before { background: var(--before); } .block.missing { background: var(--bad); opacity: .3; }
pre { margin: 6px 0; padding: 10px 14px; background: var(--panel); border-radius: 8px; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, monospace; }
pre.sql { user-select: all; } pre.seen { background: none; border: 1px solid var(--line); white-space: pre; overflow-x: auto; overflow-wrap: normal; max-height: 22em; }
details { margin: 8px 0; } summary { cursor: pointer; overflow-wrap: anywhere; } details > summary + * { margin-top: 6px; }
button { font: inherit; font-size: 13.5px; color: inherit; background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 4px 12px; cursor: pointer; } button:hover, button:focus-visible { border-color: var(--main); }
ol.steps { padding-left: 24px; } footer { margin-top: 44px; padding-top: 14px; border-top: 1px solid var(--line); font-size: 13.5px; color: var(--dim); } footer code { overflow-wrap: anywhere; font-size: 12px; }
@media (max-width: 520px) { body { padding: 18px 14px 40px; } h1 { font-size: 23px; } .answer { padding: 12px 14px; } svg .tick { font-size: 15px; } }
@media print { button { display: none; } .chart, .answer { break-inside: avoid; } }
</style>
</head>
<body>
<div class="dim">What happened to {{ campaign }}: {{ windows.after[0] }} to {{ windows.after[1] }}, against {{ windows.before[0] }} to {{ windows.before[1] }}</div>
<main>
<section class="answer {{ diagnosis.level }}">
<h1>{{ headline }}</h1>
{% if meaning %}<p class="meaning">{{ meaning|line }}</p>
{% endif %}
{% if diagnosis.doubts %}<ul>{% for doubt in diagnosis.doubts %}<li>{{ doubt|line }}</li>{% endfor %}</ul>
{% endif %}
{% if in_figures %}<p>{{ in_figures }}</p>
{% endif %}
<p><span class="votes" aria-hidden="true">{% for n in range(diagnosis.of) %}<i{{ ' class=for' if n < diagnosis.votes and (diagnosis.cause or diagnosis.undecided) }}></i>{% endfor %}</span><b>Confidence: {{ diagnosis.level }}.</b> {{ agreement|capitalize }}.</p>
{% if diagnosis.why %}<ul class="note">{% for why in diagnosis.why %}<li>{{ why|line }}</li>{% endfor %}</ul>{% endif %}
{% if diagnosis.others %}<p class="note">Other answers: {% for text, votes in diagnosis.others %}{{ votes }} of {{ diagnosis.of }} {{ text|line }}{{ '; ' if not loop.last }}{% endfor %}.</p>{% endif %}
<p class="note">Agreement is not certainty: an agent can be wrong every time, and what moved together need not be the cause.</p>
</section>

<h2>What moved</h2>
<div class="scroll"><table><tr><th></th><th class="n">before</th><th class="n">after</th><th class="n">change</th>{% if moved and moved[0].other %}<th class="n">{{ 'the rest' if diagnosis.pairs else 'other campaigns' }}: before</th><th class="n">after</th><th class="n">change</th>{% endif %}</tr>
{% for m in moved %}<tr><td>{{ m.name }}</td><td class="n">{{ m.before }}</td><td class="n">{{ m.after }}</td><td class="n"><b>{{ m.change }}</b></td>{% for cell in m.other or ([''] * 3 if moved[0].other else []) %}<td class="n">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<p class="note">{{ 'Of the slice' if diagnosis.pairs else 'Of the campaign' }}. Rates are ratios of sums. Windows {{ windows.how }}.</p>
<p class="note keys"><span><i class="block before"></i>before</span><span><i class="block"></i>after</span><span><i class="block missing"></i>day without rows</span><span>thin dashes: level of a window</span></p>
<div class="charts">{% for c in charts %}<div class="chart"><h3>{{ c.name }}</h3><p class="note keys">{% for style, label in c.keys %}<span><i class="key {{ style }}"></i>{{ label|line }}</span>{% endfor %}</p>{{ c.svg|safe }}</div>
{% endfor %}</div>

<h2>Evidence</h2>
<p class="note">Each table comes from your files by the query under it. The button copies all that an empty DuckDB needs to give the same rows, in the folder that the command ran in.</p>
{% for e in evidence %}<h3>{{ e.title|line|capitalize }}</h3>
<div class="scroll"><table><tr>{% for kind, name in e.columns %}<th class="{{ kind }}">{{ name }}</th>{% endfor %}</tr>
{% for row in e.rows %}<tr>{% for kind, cell in row %}<td class="{{ kind }}">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
<details><summary>The query</summary><pre class="sql" id="sql-{{ loop.index }}">{{ e.sql }};</pre></details>
<button type="button" hidden data-copy="setup sql-{{ loop.index }}">Copy SQL</button>
{% endfor %}
<details><summary>What the queries need first: how your files are read</summary><pre class="sql" id="setup">{{ setup }}</pre></details>

{% if parts %}<h2>Mix and rate</h2>
<p class="note">The change of each rate, split exactly: mix is what moved because traffic went to other values, rate what moved inside values; by the dimension whose mix explains the most. pp: percentage points.</p>
<div class="scroll"><table><tr><th>rate</th><th class="n">before</th><th class="n">after</th><th class="n">change</th><th class="n">mix</th><th class="n">rate</th><th class="n">by</th></tr>
{% for p in parts %}<tr>{% for cell in p[:7] %}<td{{ ' class=n' if not loop.first }}>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% for p in parts if p[7] %}<p class="note">{{ p[0] }}: {{ p[7] }}.</p>{% endfor %}{% endif %}

<h2>Quality of the data</h2>
<ul>{% for f in quality %}<li{{ ' class=warn' if f.serious }}>{{ 'Doubtful: ' if f.serious }}{{ f.text|line }}</li>
{% endfor %}</ul>

<h2>What could not be checked</h2>
<ul>{% for text in opens %}<li>{{ text|line }}</li>
{% endfor %}</ul>

<h2>How your tables were understood</h2>
{% for name, rows in columns %}<h3>{{ name|line }}</h3>
<div class="scroll"><table><tr><th>field</th><th>column</th><th>read as</th></tr>
{% for row in rows %}<tr>{% for cell in row %}<td class="t">{{ cell|line }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
{% endfor %}
{% if words %}<h3>Your values in the agent's words</h3>
<p class="note">The agent knows a closed vocabulary. Answers above are in your values.</p>
<div class="scroll"><table><tr><th>dimension</th><th>word</th><th>your values</th><th></th></tr>
{% for dimension, lines in words %}{% for line in lines %}<tr><td>{{ dimension if loop.first }}</td>{% for cell in line %}<td class="t">{{ cell|line }}</td>{% endfor %}</tr>
{% endfor %}{% endfor %}</table></div>{% endif %}

<h2>The investigation</h2>
<p class="note">By {{ agent|line }}. Figures of slices and metrics are z: the change in standard errors of the days before; below -4 or above 4 is loud.</p>
<p>Asked: {{ question|line }}</p>
{% for one in investigations %}<details{{ ' open' if loop.index <= shown }}><summary>Investigation {{ loop.index }}: <b>{{ one.said|line }}</b> after {{ one.steps|length }} call{{ 's' if one.steps|length != 1 }}</summary>
<ol class="steps">{% for words, code, seen in one.steps %}<li>{{ words }}
<details><summary class="note">what it ran</summary><pre>{{ code }}</pre></details>
<pre class="seen" tabindex="0">{{ seen }}</pre></li>
{% endfor %}</ol>
<p class="note">Its answer, in its own words; figures in it are the agent's, nothing has checked them:</p><pre>{{ one.answer or 'It ended without an answer.' }}</pre></details>
{% endfor %}
</main>
<footer><p>Made by {{ made }}. Files, with SHA-256:</p>
<ul>{% for name, digest in files %}<li>{{ name|line }}<br><code>{{ digest }}</code></li>
{% endfor %}</ul></footer>
<script>{{ script|safe }}</script>
</body>
</html>
"""
