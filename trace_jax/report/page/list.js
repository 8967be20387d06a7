// The list of trajectories: filters, order, and only those rows as elements that can be seen.

const ROW = 48;
const SPARE = 6; // rows beyond the edges
const FILTERS = ["run", "stage", "outcome", "group", "answered", "type", "status"];
const SORTS = {
  "as recorded": null,
  reward: (s, i) => s.columns.reward[i] ?? -Infinity,
  "tool calls": (s, i) => s.columns.calls[i],
  tokens: (s, i) => s.columns.tokens[i],
  "log-probability": (s, i) => s.columns.logprob[i] ?? -Infinity,
  episode: (s, i) => s.columns.task[i],
};

class List {
  /** `open(row, how)` shows a trajectory: how is "read" (go there), "look" (stay in the list) or "first" (nobody asked). */
  constructor(store, root, open) {
    Object.assign(this, { store, open, rows: [], chosen: -1, found: null, searched: "" });
    this.form = root.querySelector("form");
    this.box = root.querySelector("#list");
    this.space = this.box.querySelector(".space");
    this.count = root.querySelector("#count");
    this.fields = this.form.elements;
    this.reversed = false;
    this._fill();
    this._listen();
    this.apply();
  }

  value(name, row) {
    return name === "run" ? this.store.runs[this.store.columns.run[row]] : this.store.word(name, row);
  }

  /** What can be chosen, with how many there are; outcomes in their order, everything else by its first appearance. */
  _fill() {
    for (const name of FILTERS) {
      const select = this.fields[name];
      if (!select) continue;
      const counts = new Map();
      for (let i = 0; i < this.store.size; i++) {
        const value = this.value(name, i);
        if (value !== "") counts.set(value, (counts.get(value) ?? 0) + 1);
      }
      let values = [...counts.keys()];
      if (name === "outcome") values.sort((a, b) => place(this.store.outcomes, a) - place(this.store.outcomes, b));
      else if (name !== "stage" && name !== "run") values.sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
      select.append(el("option", { value: "" }, "any"));
      if (name === "outcome" && values.length > 1) select.append(el("option", { value: "!right" }, "not right"));
      select.append(...values.map((v) => el("option", { value: `=${v}` }, `${v} (${counts.get(v)})`)));
      if (values.length < 2) select.closest("label").hidden = true;
    }
    this.fields.sort.append(...Object.keys(SORTS).map((name) => el("option", {}, name)));
  }

  _listen() {
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.form.addEventListener("input", (event) => (event.target.name === "search" ? this._search() : this.apply()));
    this.form.addEventListener("reset", () => setTimeout(() => {
      this.reversed = false;
      this._search();
    }));
    this.fields.direction.addEventListener("click", () => {
      this.reversed = !this.reversed;
      this.apply();
    });
    this.box.addEventListener("scroll", () => this._draw(), { passive: true });
    new ResizeObserver(() => this._draw()).observe(this.box);
    this.box.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.choose(Number(row.dataset.place), "read");
    });
    this.box.addEventListener("keydown", (event) => this._key(event));
  }

  _key(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / ROW) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, j: 1, k: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key === "Enter" && this.chosen >= 0) this.open(this.rows[this.chosen], "read");
    else if (event.key in moves && !event.ctrlKey && !event.metaKey && !event.altKey) {
      this.choose(Math.min(Math.max(this.chosen + moves[event.key], 0), this.rows.length - 1), "look");
    } else return;
    event.preventDefault();
  }

  /** Sets some filters, all others to "any". */
  only(wanted) {
    this.form.reset();
    for (const [name, value] of Object.entries(wanted)) {
      const select = this.fields[name];
      if (select) select.value = `=${value}`;
      if (select && select.selectedIndex < 0) select.value = "";
    }
  }

  /** Searches the texts; the list follows when that is done. */
  async _search() {
    const wanted = this.fields.search.value.trim();
    this.searched = wanted;
    if (!wanted) {
      this.found = null;
      return this.apply();
    }
    const stale = () => this.searched !== wanted;
    const found = await this.store.search(wanted, (share) => {
      if (!stale() && share > 0) this.count.textContent = `searching, ${Math.round(100 * share)} %`;
      return stale();
    });
    if (found && !stale()) {
      this.found = found;
      this.apply();
    }
  }

  /** Filters and sorts again. */
  apply() {
    const { store, fields } = this;
    const tests = [];
    for (const name of FILTERS) {
      const choice = fields[name]?.value;
      fields[name]?.classList.toggle("set", Boolean(choice));
      if (!choice) continue;
      if (choice === "!right") tests.push((i) => this.value(name, i) !== store.outcomes[0]);
      else tests.push((i) => this.value(name, i) === choice.slice(1));
    }
    for (const [name, holds] of [["least", (r, x) => r >= x], ["most", (r, x) => r <= x]]) {
      const bound = fields[name].valueAsNumber;
      fields[name].classList.toggle("set", !Number.isNaN(bound));
      if (!Number.isNaN(bound)) tests.push((i) => store.columns.reward[i] !== null && holds(store.columns.reward[i], bound));
    }
    fields.search.classList.toggle("set", Boolean(this.found));
    if (this.found) tests.push((i) => this.found.has(i));
    const before = this.rows[this.chosen];
    this.rows = [];
    for (let i = 0; i < store.size; i++) if (tests.every((test) => test(i))) this.rows.push(i);
    const key = SORTS[fields.sort.value];
    // Descending first: the largest are what one looks for; equal ones stay as recorded.
    if (key) this.rows.sort((a, b) => key(store, b) - key(store, a) || a - b);
    if (this.reversed) this.rows.reverse();
    fields.direction.setAttribute("aria-pressed", this.reversed);
    fields.direction.textContent = this.reversed ? "↑" : "↓";
    this.chosen = this.rows.indexOf(before);
    const all = store.size.toLocaleString("en-US");
    this.count.textContent = `${this.rows.length.toLocaleString("en-US")} of ${all} trajectories`;
    this.space.style.height = `${this.rows.length * ROW}px`;
    this.box.scrollTop = this.chosen >= 0 ? Math.max(0, this.chosen * ROW - this.box.clientHeight / 3) : 0;
    this._draw();
  }

  /** Chooses the row at a place of the list and shows it. */
  choose(at, how) {
    if (at < 0 || at >= this.rows.length) return;
    this.chosen = at;
    const top = at * ROW, height = this.box.clientHeight;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + ROW > this.box.scrollTop + height) this.box.scrollTop = top + ROW - height;
    this._draw();
    this.open(this.rows[at], how);
  }

  /** Chooses a trajectory wherever it is in the list. */
  reveal(row) {
    const at = this.rows.indexOf(row);
    if (at >= 0) this.choose(at, "look");
    else this.open(row, "look");
  }

  _draw() {
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - SPARE);
    const last = Math.min(this.rows.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / ROW) + SPARE);
    const shown = [];
    for (let at = first; at < last; at++) shown.push(this._row(at));
    this.space.replaceChildren(...shown);
    if (this.chosen >= first && this.chosen < last) this.box.setAttribute("aria-activedescendant", `row-${this.chosen}`);
    else this.box.removeAttribute("aria-activedescendant");
  }

  _row(at) {
    const { store } = this, i = this.rows[at], c = store.columns;
    const where = store.word("where", i);
    const run = store.runs.length > 1 ? el("span", { cls: `mark ${"ab"[c.run[i]]}` }) : null;
    const made = el("div", {
      cls: "row", role: "option", id: `row-${at}`, "data-place": at, "data-row": i, "aria-selected": String(at === this.chosen),
      "aria-setsize": this.rows.length, "aria-posinset": at + 1,
    },
      el("div", {},
        el("span", { cls: "cut" }, run, el("span", { cls: "what" }, store.word("truth", i)), where ? ` ${where}` : ""),
        el("span", { cls: "num" }, c.reward[i] === null ? "-" : c.reward[i].toFixed(2))),
      el("div", { cls: "second" },
        el("span", { cls: "cut tag" }, outcomeDot(store, i), store.word("outcome", i)),
        el("span", { cls: "num" }, `${store.word("stage", i)} · ${c.task[i]}.${c.sample[i]} · ${several(c.calls[i], "call")}`)));
    made.style.top = `${at * ROW}px`;
    return made;
  }
}

function place(names, name) {
  const at = names.indexOf(name);
  return at < 0 ? names.length : at;
}

function outcomeDot(store, row) {
  return el("i", { cls: `o${Math.min(place(store.outcomes, store.word("outcome", row)), 9)}` });
}
