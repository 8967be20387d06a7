// Puts the parts together. Without DecompressionStream the page stays what its markup says, and says so.

async function start() {
  const root = document.getElementById("browser");
  if (typeof DecompressionStream === "undefined") {
    const note = document.getElementById("unsupported");
    if (note && root) {
      note.textContent = "This browser cannot unpack the trajectories: open the page in one of 2023 or later.";
      note.hidden = false;
    }
    return;
  }
  const index = await unpacked(document.getElementById("index"));
  document.documentElement.classList.add("on");
  startCurves(index.curves);
  if (!root || !index.columns.run.length) return;
  root.hidden = false;

  const store = new Store(index, [...document.querySelectorAll("script.part")]);
  const narrow = matchMedia("(max-width: 820px)");
  const pane = document.getElementById("detail");
  const detail = new Detail(store, pane, () => {
    root.querySelector(".filters").scrollIntoView();
    list.box.focus({ preventScroll: true });
  });
  const list = new List(store, root, async (row, how) => {
    await detail.show(row, list.found ? list.searched : "");
    if (how === "first") return;
    try {
      history.replaceState(null, "", `#trajectory-${row}`);
    } catch { /* some viewers do not let a file change its address */ }
    if (how !== "read") return;
    if (narrow.matches) pane.scrollIntoView();
    pane.focus({ preventScroll: true });
  });

  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, select, textarea");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      list.fields.search.focus();
    } else if (event.key === "Escape" && pane.contains(document.activeElement)) {
      list.box.focus();
    }
  });
  startLinks(list);
  performance.mark("ready"); // for those who measure how long a page takes to open
  const asked = /^#trajectory-(\d+)$/.exec(location.hash);
  if (asked && Number(asked[1]) < store.size) {
    document.getElementById("trajectories").scrollIntoView();
    list.reveal(Number(asked[1]));
  } else if (!narrow.matches) {
    // Beside the list there is room for one at once; below it, it would only be in the way.
    const watch = new IntersectionObserver((entries) => {
      if (!entries.some((e) => e.isIntersecting)) return;
      watch.disconnect();
      if (detail.row < 0) list.choose(0, "first");
    });
    watch.observe(root);
  }
}

/** Rows of the failures and cells of the confusion matrix lead to their trajectories. */
function startLinks(list) {
  for (const place of document.querySelectorAll("#failures tr[data-group], #confusion td[data-group]")) {
    place.classList.add("link");
    place.tabIndex = 0;
    const follow = () => {
      const { group, stage, run, answered } = place.dataset;
      list.only({ group, stage, run, ...(answered ? { answered } : {}) });
      if (!answered) list.fields.outcome.value = "!right";
      document.getElementById("trajectories").scrollIntoView();
      list.box.focus({ preventScroll: true });
    };
    place.addEventListener("click", follow);
    place.addEventListener("keydown", (event) => event.key === "Enter" && follow());
  }
}

start();
