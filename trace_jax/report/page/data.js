// The data inside the page: base64 of gzipped JSON in script elements of no script type. Texts from it are only ever put
// into text nodes and attributes; nothing here or in the other files makes markup of them.

const MINUS = "\u2212";

/** An element with attributes and children (elements or texts; null is left out). */
function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key === "cls" ? "class" : key, value === true ? "" : value);
  }
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
}

/** Decompresses the JSON in an element. */
async function unpacked(element) {
  const binary = atob(element.textContent.trim());
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

/** A number as people read it: `digits` significant ones, thousands apart. */
function spell(x, digits = 3) {
  if (x === null || x === undefined || !Number.isFinite(x)) return "-";
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return x.toExponential(1).replace("-", MINUS).replace("e+", "e");
  if (size >= 1000) return Math.round(x).toLocaleString("en-US").replace("-", MINUS);
  return String(Number(x.toPrecision(digits))).replace("-", MINUS);
}

/** A number of things. */
function several(n, what) {
  return `${n.toLocaleString("en-US")} ${what}${n === 1 ? "" : "s"}`;
}

/** With its sign, to three decimals. */
function signed(x) {
  if (x === null || x === undefined) return "-";
  return (x < 0 ? MINUS : "+") + Math.abs(x).toFixed(3);
}

/** The trajectories of the page: columns by name, one row each. Parts are unpacked once, when first asked for. */
class Store {
  constructor(index, parts) {
    this.words = index.words;
    this.runs = index.runs;
    this.outcomes = index.outcomes;
    this.asked = index.asked;
    this.unread = index.unread;
    this.columns = index.columns;
    this.size = index.columns.run.length;
    this._elements = parts;
    this._parts = new Map();
    this._episodes = new Map();
    for (let i = 0; i < this.size; i++) {
      const key = index.columns.episode[i];
      if (!this._episodes.has(key)) this._episodes.set(key, []);
      this._episodes.get(key).push(i);
    }
  }

  /** The word in a named column of a row. */
  word(name, row) {
    return this.words[this.columns[name][row]];
  }

  /** The part with a row's episode. */
  part(row) {
    return this.partNumber(this.columns.part[row]);
  }

  partNumber(number) {
    if (!this._parts.has(number)) this._parts.set(number, unpacked(this._elements[number]));
    return this._parts.get(number);
  }

  get partCount() {
    return this._elements.length;
  }

  /** All rows of the same episode, whatever run or stage tried it. */
  sameEpisode(row) {
    return this._episodes.get(this.columns.episode[row]);
  }

  /** One trajectory with its texts. */
  async trajectory(row) {
    const part = await this.part(row);
    const entry = part.entries[this.columns.entry[row]];
    const text = (i) => (i === null ? null : part.words[i]);
    return {
      row,
      series: part.series[this.columns.episode[row]] ?? null,
      prompt: entry.prompt.map(([role, said]) => ({ role: text(role), text: text(said) })),
      answer: text(entry.answer),
      rewards: entry.rewards,
      advantage: entry.advantage,
      first: entry.first,
      steps: entry.steps.map((s) => ({
        kind: text(s[0]), text: text(s[1]), reason: text(s[2]), tokens: s[3], logprob: s[4], unlikely: text(s[5]),
        unlikelyLogprob: s[6], version: s[7], observation: text(s[8]), observed: s[9], value: s[10], delta: s[11],
        credit: s[12], advantage: s[13],
      })),
    };
  }

  /** Rows in whose turns, observations or answer a text occurs, whatever its case. `tell(share)` says how far it is;
   *  it returns true when nobody wants the answer any more. */
  async search(wanted, tell) {
    const needle = wanted.toLowerCase();
    const byPart = Array.from({ length: this.partCount }, () => []);
    for (let i = 0; i < this.size; i++) byPart[this.columns.part[i]].push(i);
    const found = new Set();
    for (let number = 0; number < this.partCount; number++) {
      if (tell(number / this.partCount)) return null;
      const part = await this.partNumber(number);
      const hit = part.words.map((w) => w.toLowerCase().includes(needle));
      for (const row of byPart[number]) {
        const entry = part.entries[this.columns.entry[row]];
        // Not the prompt: its first part is the same everywhere.
        const asked = entry.prompt.slice(1).some(([, said]) => hit[said]);
        if (asked || entry.steps.some((s) => hit[s[1]] || (s[8] !== null && hit[s[8]]))) found.add(row);
      }
    }
    return found;
  }
}
