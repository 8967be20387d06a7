// Training curves: drawn again from the data, so that the axis can be switched and values read off.

/** `curves`: of each run, by stage and name, {step, time, value}. */
function startCurves(curves) {
  const figures = [...document.querySelectorAll("#curves .chart")];
  const drawn = new WeakMap();

  function draw(figure, axis) {
    const { stage, name } = figure.dataset;
    const output = figure.querySelector("output");
    const last = (figure.dataset.last ??= output.textContent);
    const byTime = axis === "time";
    const chart = lineChart({
      title: `${stage}: ${name} by ${axis}`,
      curves: curves
        .map((run, i) => ({ style: i ? "other" : "", own: run[stage]?.[name] }))
        .filter((c) => c.own)
        .map((c) => ({ style: c.style, points: c.own[axis].map((x, i) => [x ?? NaN, c.own.value[i] ?? NaN]) })),
      xTicks: byTime ? timeTicks : niceTicks,
      spellX: byTime ? spellTime : (x) => spell(x, 6),
      spellY: (y) => spell(y, 4),
      say: (text) => (output.textContent = text ?? last),
    });
    if (chart) figure.querySelector("svg")?.replaceWith(chart);
    drawn.set(figure, axis);
  }

  function axis() {
    return document.querySelector("#curves input[name=axis]:checked")?.value ?? "step";
  }

  // Only what comes into view: a run has a hundred figures.
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting && drawn.get(entry.target) !== axis()) draw(entry.target, axis());
  }, { rootMargin: "200px" });
  figures.forEach((figure) => watch.observe(figure));
  document.querySelectorAll("#curves input[name=axis]").forEach((input) =>
    input.addEventListener("change", () => {
      figures.forEach((figure) => {
        watch.unobserve(figure);
        watch.observe(figure); // says again whether it is in view
      });
    }));
}
