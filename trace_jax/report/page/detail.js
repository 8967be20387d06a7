// One trajectory, or two of the same episode beside each other: the truth, the answers, the charts, every turn.

const METRICS = [
  ["Impressions a day", "impressions"],
  ["CTR", "clicks", "impressions"],
  ["CVR", "orders", "clicks"],
  ["CPC", "spend", "clicks"],
  ["Spend a day", "spend"],
  ["Catalogue in stock", "in_stock"],
];

class Detail {
  /** `back()` leads to the list. */
  constructor(store, root, back) {
    Object.assign(this, { store, root, back, row: -1, beside: -1, asked: 0, wanted: "" });
  }

  /** Shows a row, on a page of two runs beside the same stage and sample of the other one. */
  show(row, wanted = "") {
    const { columns: c, runs } = this.store;
    let beside = -1;
    if (runs.length > 1) {
      const others = this.store.sameEpisode(row).filter((i) => c.run[i] !== c.run[row]);
      const same = others.filter((i) => c.stage[i] === c.stage[row]);
      beside = same.find((i) => c.sample[i] === c.sample[row]) ?? same[0] ?? others[0] ?? -1;
    }
    return this._render(row, beside, wanted);
  }

  async _render(row, beside, wanted) {
    Object.assign(this, { row, beside, wanted });
    const asked = ++this.asked;
    const sides = await Promise.all([row, beside].filter((i) => i >= 0).map((i) => this.store.trajectory(i)));
    if (asked !== this.asked) return; // another one was chosen meanwhile
    const { store } = this;
    this.root.replaceChildren(
      this._head(row, beside),
      this._gold(sides),
      ...seriesSection(sides[0].series, store.word("where", row)),
      this._prompt(sides[0]),
      el("div", { cls: sides.length > 1 ? "columns two" : "columns" }, ...sides.map((t) => this._side(t, sides.length > 1))));
    this.root.scrollTop = 0;
  }

  _name(i) {
    const { store } = this, c = store.columns;
    const run = store.runs.length > 1 ? `${store.runs[c.run[i]]}: ` : "";
    return `${run}${store.word("stage", i)}, sample ${c.sample[i]}`;
  }

  _head(row, beside) {
    const { store } = this;
    const others = store.sameEpisode(row).filter((i) => i !== row);
    const choice = el("select", { onchange: (event) => this._render(row, Number(event.target.value), this.wanted) },
      el("option", { value: -1 }, "nothing"),
      ...others.map((i) => el("option", { value: i, selected: i === beside }, `${this._name(i)}: ${store.word("outcome", i)}`)));
    return el("div", { cls: "head" },
      el("h3", {}, `Episode ${store.columns.task[row]} `, el("span", { cls: "dim" }, store.word("type", row))),
      el("span", { cls: "tools" },
        others.length ? el("label", {}, "beside it ", choice) : null,
        el("button", { type: "button", cls: "back", onclick: this.back }, "back to the list")));
  }

  _gold(sides) {
    const { store } = this, row = sides[0].row;
    const named = (value, where) => (value === store.unread ? "" : where ? `${value} in ${where}` : value);
    const table = el("table", { cls: "gold" },
      el("tr", {}, el("th", {}, store.asked), el("td", {}, el("b", {}, named(store.word("truth", row), store.word("where", row))))));
    for (const t of sides) {
      const answered = named(store.word("answered", t.row), store.word("place", t.row));
      table.append(el("tr", {}, el("th", {}, sides.length > 1 ? this._mark(t.row) : null, "the agent"), el("td", {},
        el("span", { cls: "tag" }, outcomeDot(store, t.row), el("b", {}, store.word("outcome", t.row))),
        answered ? `  ${answered}` : "", sides.length > 1 ? el("span", { cls: "dim" }, ` (${this._name(t.row)})`) : null,
        t.answer && t.answer.length <= 60 && !answered ? `  ${t.answer}` : "",
        t.answer && (t.answer.length > 60 || answered) ? el("details", {}, el("summary", {}, "as it was written"), el("pre", {}, t.answer)) : null)));
    }
    return table;
  }

  _mark(row) {
    return this.store.runs.length > 1 ? el("span", { cls: `mark ${"ab"[this.store.columns.run[row]]}` }) : null;
  }

  _prompt(t) {
    const size = t.prompt.reduce((n, p) => n + p.text.length, 0);
    return el("details", {}, el("summary", {}, "prompt ", el("span", { cls: "dim" }, `${size.toLocaleString("en-US")} characters`)),
      ...t.prompt.map((p) => el("div", { cls: "turn-card prompt" }, el("header", {}, el("b", {}, p.role)),
        el("div", { cls: "said" }, this._pre(p.text)))));
  }

  _side(t, two) {
    const { store } = this, c = store.columns, i = t.row;
    const parts = Object.entries(t.rewards).map(([name, value]) => `${name} ${spell(value)}`).join(", ");
    const facts = [
      `reward ${spell(c.reward[i])}${parts ? ` (${parts})` : ""}`,
      t.advantage === null ? null : `advantage ${signed(t.advantage)}`,
      several(c.calls[i], "tool call"), several(c.tokens[i], "token"),
      c.logprob[i] === null ? null : `log-probability ${spell(c.logprob[i])} a token`,
      store.word("status", i),
      t.first === null ? null : `reference at first ${spell(t.first)}`,
    ].filter(Boolean).join(" · ");
    const most = Math.max(0, ...t.steps.map((s) => Math.abs(s.credit ?? 0)));
    const side = store.runs.length > 1 ? `side ${"ab"[c.run[i]]}` : "side";
    return el("section", { cls: side },
      el("h4", {}, two ? this._mark(i) : null, this._name(i)),
      el("p", { cls: "facts" }, facts),
      ...t.steps.map((s, k) => this._turn(s, k, most)));
  }

  _turn(s, number, most) {
    const cut = s.kind === "malformed" ? s.reason || "malformed or cut off" : s.kind;
    const figures = [
      s.logprob === null ? null : el("span", { title: "mean log-probability of its tokens" }, `log-prob ${spell(s.logprob)}`),
      s.unlikely === null || s.unlikelyLogprob > -0.7 ? null
        : el("span", { title: "its least likely token" }, `least likely \u201c${s.unlikely}\u201d ${spell(s.unlikelyLogprob)}`),
      el("span", {}, several(s.tokens, "token")),
      s.version === null ? null : el("span", { title: "policy version" }, `v${s.version}`),
      s.credit === null ? null : this._credit(s, most),
      s.advantage === null ? null : el("span", { title: "of each of its tokens" }, `advantage ${signed(s.advantage)}`),
    ];
    return el("div", { cls: `turn-card ${s.kind === "malformed" ? "malformed" : ""}` },
      el("header", {}, el("b", {}, `${number + 1} ${cut}`), ...figures),
      el("div", { cls: "said" }, this._pre(s.text || "(nothing)")),
      s.observation === null ? null : el("div", { cls: "read", tabindex: 0 }, this._pre(s.observation || "(empty)")));
  }

  _credit(s, most) {
    const bar = el("i", {});
    bar.style.width = `${most ? Math.max(2, (40 * Math.abs(s.credit)) / most) : 2}px`;
    const title = `value ${signed(s.value)}, change ${signed(s.delta)}`;
    return el("span", { cls: s.credit < 0 ? "credit minus" : "credit", title }, `credit ${signed(s.credit)}`, bar);
  }

  /** Text, with what was searched for marked. */
  _pre(text) {
    const pre = el("pre");
    const needle = this.wanted.toLowerCase(), lower = text.toLowerCase();
    let from = 0;
    // A letter may change its length with its case: then nothing is marked rather than the wrong thing.
    for (let at; needle && lower.length === text.length && (at = lower.indexOf(needle, from)) >= 0; from = at + needle.length) {
      pre.append(text.slice(from, at), el("mark", {}, text.slice(at, at + needle.length)));
    }
    pre.append(text.slice(from));
    return pre;
  }
}

/** Charts of an episode's days; nothing where it has none. */
function seriesSection(series, where) {
  if (!series) return [];
  const day = (t) => new Date(Date.parse(`${series.start}T00:00:00Z`) + t * 864e5).toISOString().slice(0, 10);
  const { campaign, slice, siblings } = series.groups;
  const local = slice !== undefined;
  const rest = local ? Object.fromEntries(Object.entries(slice).map(([k, v]) =>
    [k, v.map((x, t) => (x === null ? null : campaign[k][t] - x))])) : null;
  const [main, other] = local ? [slice, rest] : [campaign, siblings];
  const charts = METRICS.map(([name, over, under]) => {
    const values = (group) => group?.[over]?.map((x, t) => (x === null || (under && !group[under][t]) ? NaN : under ? x / group[under][t] : x));
    const of = local && over === "in_stock" ? [campaign, undefined] : [main, other];
    return episodeChart(name, series, day, values(of[0]), values(of[1]), over === "in_stock" || under !== undefined,
      over === "spend" && !under && !local ? campaign.budget : undefined, local && over !== "in_stock");
  });
  const missing = campaign.impressions.some((x) => x === null);
  const key = (style, text) => el("span", {}, el("span", { cls: `key ${style}` }), text);
  return [
    el("h4", {}, local ? `The slice ${where} against the rest of the campaign` : "The campaign against its siblings"),
    el("p", { cls: "legend" }, key(local ? "slice" : "", local ? "slice" : "campaign"),
      other ? key("rest", `${local ? "rest" : "siblings"}, at its level before the window`) : null,
      local ? null : key("limit", "budget"), key("window", "window compared"),
      series.onset === null ? null : key("onset", `onset ${day(series.onset)}`),
      missing ? key("missing", "not in the export") : null),
    el("div", { cls: "charts" }, ...charts.filter(Boolean)),
  ];
}

function episodeChart(name, series, day, values, other, ratio, limit, local) {
  if (!values) return null;
  const level = (xs) => {
    const known = xs.slice(0, series.half).filter((x) => Number.isFinite(x));
    return known.reduce((a, b) => a + b, 0) / known.length;
  };
  const scale = other && level(other) > 0 && level(values) > 0 && name !== "Catalogue in stock" ? level(values) / level(other) : 1;
  const curves = [{ style: local ? "slice" : "", points: values.map((y, t) => [t + 0.5, y]), dotted: false }];
  if (other) curves.push({ style: "rest", points: other.map((y, t) => [t + 0.5, y * scale]), dotted: false });
  if (limit) curves.push({ style: "limit", points: limit.map((y, t) => [t + 0.5, y ?? NaN]), dotted: false });
  const spelt = (y) => (ratio && name !== "CPC" ? `${spell(100 * y)} %` : spell(y));
  const output = el("output");
  const svg = lineChart({
    title: `${name} by day`, curves, floor: 0.25, most: ratio && name !== "CPC" ? 1 : Infinity, xRange: [0, series.days], spellY: spelt,
    xTicks: () => Array.from({ length: Math.ceil(series.days / 7) }, (_, w) => w * 7),
    spellX: (x) => day(Math.min(Math.floor(x), series.days - 1)).slice(5),
    say: (text) => (output.textContent = text ?? ""),
    under: ({ top, height, bottom, atX }) => {
      const column = (style, from, to) => shape("rect", { class: style, x: atX(from), y: top, width: atX(to) - atX(from), height: height - top - bottom });
      const made = [column("window", series.half, series.days)];
      series.groups.campaign.impressions.forEach((x, t) => x === null && made.push(column("missing", t, t + 1)));
      if (series.onset !== null) made.push(shape("line", { class: "onset", x1: atX(series.onset), x2: atX(series.onset), y1: top, y2: height - bottom }));
      return made;
    },
  });
  return svg && el("figure", { cls: "chart" }, el("figcaption", {}, el("span", {}, name), output), svg);
}
