// Line charts as SVG, in the page's colours: of the training curves by any axis, and of an episode's days.

const SVG = "http://www.w3.org/2000/svg";
const FRAME = { width: 340, height: 190, left: 52, right: 10, top: 8, bottom: 26 };

function shape(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

/** Round numbers, 1, 2 or 5 times a power of ten apart, that cover [low, high] from inside. */
function niceTicks(low, high, target = 4) {
  if (!(high > low)) return [low];
  const raw = (high - low) / target;
  const magnitude = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * magnitude).find((s) => s >= raw * (1 - 1e-9));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i <= Math.floor(high / step + 1e-9); i++) ticks.push(i * step);
  return ticks;
}

/** Ticks of a time axis in seconds. */
function timeTicks(low, high, target = 4) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400];
  const raw = (high - low) / target;
  const step = steps.find((s) => s >= raw) ?? Math.ceil(raw / 86400) * 86400;
  const ticks = [];
  for (let x = Math.ceil(low / step) * step; x <= high; x += step) ticks.push(x);
  return ticks;
}

/** A length of time. */
function spellTime(seconds) {
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const rest = minutes % 60;
  return rest ? `${Math.floor(minutes / 60)} h ${rest}` : `${minutes / 60} h`;
}

/**
 * A chart; null if no point is finite.
 * options: curves [{style, label, points [[x, y]]}], the first on top; xTicks(low, high); spellX, spellY; title; xLabel;
 * xRange; most (the highest value there can be); floor (least height of the value axis as a share of the largest value); under(frame, at): shapes below the
 * curves; say(text): told what is under the pointer, and null when it leaves.
 */
function lineChart(options) {
  const { width, height, left, right, top, bottom } = FRAME;
  const known = options.curves.flatMap((c) => c.points).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
  if (!known.length) return null;
  let [x0, x1] = options.xRange ?? extent(known.map((p) => p[0]));
  let [y0, y1] = extent(known.map((p) => p[1]));
  const least = (options.floor ?? 0) * Math.max(Math.abs(y0), Math.abs(y1));
  if (y1 - y0 < least) [y0, y1] = [(y0 + y1 - least) / 2, (y0 + y1 + least) / 2];
  const margin = (y1 - y0) * 0.05 || Math.abs(y1) * 0.05 || 1;
  const positive = options.floor && y0 >= 0;
  [y0, y1] = [positive ? Math.max(y0 - margin, 0) : y0 - margin, Math.min(y1 + margin, Math.max(options.most ?? Infinity, y1))];
  if (!(x1 > x0)) x1 = x0 + 1;
  const atX = (x) => left + ((x - x0) / (x1 - x0)) * (width - left - right);
  const atY = (y) => height - bottom - ((y - y0) / (y1 - y0)) * (height - top - bottom);

  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": options.title });
  svg.append(...(options.under?.({ ...FRAME, atX }) ?? []));
  for (const y of niceTicks(y0, y1)) {
    svg.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: atY(y), y2: atY(y) }));
    svg.append(shape("text", { class: "tick", x: left - 6, y: atY(y) + 4, "text-anchor": "end" }, options.spellY(y)));
  }
  for (const x of (options.xTicks ?? niceTicks)(x0, x1)) {
    const end = atX(x) > width - 30;
    const place = { class: "tick", x: end ? width - right : atX(x), y: height - 8, "text-anchor": end ? "end" : "middle" };
    svg.append(shape("text", place, options.spellX(x)));
  }
  for (const curve of [...options.curves].reverse()) svg.append(...runs(curve, atX, atY));
  if (options.say) follow(svg, options, known, { x0, x1, atX });
  return svg;
}

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const v of values) {
    if (v < low) low = v;
    if (v > high) high = v;
  }
  return [low, high];
}

/** Lines of a curve between its gaps; a single point is a dot, and so is the last one. */
function runs(curve, atX, atY) {
  const made = [];
  const dot = (p) => made.push(shape("circle", { class: `dot ${curve.style}`, cx: p[0], cy: p[1], r: 2.2 }));
  let run = [], last = null;
  for (const [x, y] of [...curve.points, [NaN, NaN]]) {
    if (Number.isFinite(x) && Number.isFinite(y) && x !== null && y !== null) {
      last = [atX(x).toFixed(1), atY(y).toFixed(1)];
      run.push(last);
    } else if (run.length) {
      if (run.length === 1) dot(run[0]);
      else made.push(shape("polyline", { class: `curve ${curve.style}`, points: run.map((p) => p.join(",")).join(" ") }));
      run = [];
    }
  }
  if (last && curve.dotted !== false) dot(last);
  return made;
}

/** Says what is under the pointer: the nearest point of each curve. */
function follow(svg, options, known, { x0, x1, atX }) {
  const cross = shape("line", { class: "cross", x1: 0, x2: 0, y1: FRAME.top, y2: FRAME.height - FRAME.bottom, visibility: "hidden" });
  svg.append(cross);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * FRAME.width;
    const x = x0 + ((inside - FRAME.left) / (FRAME.width - FRAME.left - FRAME.right)) * (x1 - x0);
    const near = (points) => points.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    const place = near(known)[0];
    cross.setAttribute("x1", atX(place));
    cross.setAttribute("x2", atX(place));
    cross.setAttribute("visibility", "visible");
    const said = options.curves
      .map((c) => c.points.filter((p) => Number.isFinite(p[0]) && Number.isFinite(p[1]) && p[1] !== null))
      .filter((points) => points.length)
      .map((points) => options.spellY(near(points)[1]));
    options.say(`${options.spellX(place)}: ${said.join(" / ")}`);
  });
  svg.addEventListener("pointerleave", () => {
    cross.setAttribute("visibility", "hidden");
    options.say(null);
  });
}
