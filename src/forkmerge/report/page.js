"use strict";
(() => {
  const { figures, scales } = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const night = matchMedia("(prefers-color-scheme: dark)");
  const coloured = new Set(["color", "fillcolor", "gridcolor", "linecolor", "zerolinecolor", "colorscale"]);
  const drawn = new Set();

  const remembered = () => { try { return localStorage.getItem("forkmerge-theme"); } catch { return null; } };
  const remember = (value) => { try { localStorage.setItem("forkmerge-theme", value); } catch { /* not kept */ } };
  root.dataset.theme = remembered() || (night.matches ? "dark" : "light");

  // "$word" under the name of a colour becomes the colour of the theme; "~" makes it a tint.
  const resolve = (word) => {
    if (typeof word !== "string" || word[0] !== "$") return word;
    const tint = word.endsWith("~");
    const name = tint ? word.slice(1, -1) : word.slice(1);
    const found = scales[root.dataset.theme][name] ?? getComputedStyle(root).getPropertyValue("--" + name).trim();
    return tint ? found + "22" : found;
  };
  const paint = (value, key) => {
    if (coloured.has(key)) return Array.isArray(value) ? value.map(resolve) : resolve(value);
    if (Array.isArray(value)) {
      return value.length && typeof value[0] === "object" ? value.map((item) => paint(item)) : value;
    }
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, paint(v, k)]));
    }
    return value;
  };

  const isNarrow = (plot) => plot.clientWidth < 480; // names take fewer letters to a line there
  const draw = (plot) => {
    const shape = paint(figures[plot.dataset.figure][+plot.dataset.panel]);
    const narrow = isNarrow(plot), data = shape.data, layout = narrow ? shape.narrow : shape.layout;
    plot.dataset.narrow = narrow;
    plot.style.minHeight = layout.height + "px";
    const hidden = new Set([...plot.closest("figure").querySelectorAll('[aria-pressed="false"]')].map((b) => b.dataset.series));
    for (const trace of data) if (trace.meta !== undefined) trace.visible = !hidden.has(trace.meta);
    const ink = resolve("$ink"), card = resolve("$card");
    const common = {
      autosize: true, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      margin: { l: 48, r: 12, t: 10, b: 44 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: ink },
      hoverlabel: { bgcolor: card, bordercolor: resolve("$edge"), font: { color: ink }, namelength: -1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: resolve("$muted"), activecolor: ink },
      showlegend: false, bargap: 0.35,
    };
    const config = { displaylogo: false, responsive: true, displayModeBar: true, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
    drawn.add(plot);
    return Plotly.react(plot, data, { ...common, ...layout }, config).then(() => {
      plot.dataset.drawn = "";
      root.dataset.drawn = document.querySelectorAll(".plot[data-drawn]").length;
    });
  };

  const plots = [...document.querySelectorAll(".plot")];
  for (const plot of plots) {
    const { layout, narrow, least } = figures[plot.dataset.figure][+plot.dataset.panel];
    plot.style.minWidth = least + "px";
    plot.style.minHeight = (isNarrow(plot) ? narrow : layout).height + "px";
  }
  const widths = new ResizeObserver((entries) => {
    for (const { target } of entries) if (drawn.has(target) && target.dataset.narrow !== String(isNarrow(target))) draw(target);
  });
  plots.forEach((plot) => widths.observe(plot));
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) { seen.unobserve(entry.target); draw(entry.target); }
  }, { rootMargin: "800px" });
  plots.forEach((plot) => seen.observe(plot));
  addEventListener("beforeprint", () => plots.filter((plot) => !drawn.has(plot)).forEach(draw));

  const dress = (theme) => { root.dataset.theme = theme; drawn.forEach(draw); };
  document.getElementById("theme").addEventListener("click", () => {
    const theme = root.dataset.theme === "dark" ? "light" : "dark";
    remember(theme);
    dress(theme);
  });
  night.addEventListener("change", () => { if (!remembered()) dress(night.matches ? "dark" : "light"); });

  for (const button of document.querySelectorAll(".legend button")) {
    button.addEventListener("click", () => {
      button.setAttribute("aria-pressed", button.getAttribute("aria-pressed") !== "true");
      button.closest("figure").querySelectorAll(".plot").forEach((plot) => { if (drawn.has(plot)) draw(plot); });
    });
  }

  const order = (a, b) => a.localeCompare(b, undefined, { numeric: true });
  for (const table of document.querySelectorAll("table")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
      const rows = [...table.tBodies[0].rows];
      const numeric = rows.some((row) => row.cells[column].dataset.value !== undefined);
      const before = head.getAttribute("aria-sort");
      const down = before ? before === "ascending" : numeric; // the largest number first, words from A
      const known = (row) => (numeric ? row.cells[column].dataset.value !== undefined : row.cells[column].textContent !== "");
      const compare = (a, b) => numeric
        ? a.cells[column].dataset.value - b.cells[column].dataset.value
        : order(a.cells[column].textContent, b.cells[column].textContent);
      const filled = rows.filter(known).sort((a, b) => (down ? compare(b, a) : compare(a, b)));
      table.tBodies[0].append(...filled, ...rows.filter((row) => !known(row))); // what is missing stays last
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
    }));
  }
})();
