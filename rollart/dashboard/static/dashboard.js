// The script of the dashboard's pages: charts, the page's renewal when a run has gone on, and the timeline's zoom.
"use strict";

const COLOURS = 8;
const plots = new Map(); // uPlot by the id of its element

function colour(name, alpha) {
  const value = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  return alpha === undefined ? value : value + Math.round(alpha * 255).toString(16).padStart(2, "0");
}

function text(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit === "%") return Number((100 * value).toFixed(1)) + "%";
  const size = Math.abs(value);
  const digits = size >= 1000 ? value.toLocaleString("en", {maximumFractionDigits: 0}) : String(Number(value.toPrecision(4)));
  return unit === "$" ? "$" + digits : unit ? digits + " " + unit : digits;
}

// The columns of a chart: x, then for each series its values, and the ends of its interval if it has one.
function columns(spec) {
  const found = [spec.x];
  for (const s of spec.series) found.push(s.values, ...(s.low.length ? [s.high, s.low] : []));
  return found;
}

function options(spec, width) {
  const series = [{label: spec.xLabel, value: (u, v) => text(v, "")}];
  const bands = [], whiskers = [];
  spec.series.forEach((s) => {
    const name = `--c${s.paint % COLOURS}`;
    const own = {
      label: s.label, stroke: colour(name), width: s.dots ? 0 : 1.6, spanGaps: true,
      value: (u, v, at, n) => text(v, spec.unit) +
        (s.low.length && n !== null && s.low[n] !== null ? ` (${text(s.low[n], spec.unit)} to ${text(s.high[n], spec.unit)})` : ""),
      points: s.dots ? {show: true, size: 8, fill: colour(name)} : {show: spec.x.length < 3, fill: colour(name)},
    };
    if (s.dots) own.paths = () => null;
    series.push(own);
    if (s.low.length) {
      const at = series.length;
      const edge = {class: "edge", stroke: "transparent", width: 0, spanGaps: true, points: {show: false}};
      series.push(edge, {...edge});
      if (s.dots) whiskers.push(at - 1);
      else bands.push({series: [at, at + 1], fill: colour(name, 0.18)});
    }
  });
  const axis = {stroke: colour("--muted"), grid: {stroke: colour("--grid"), width: 1}, ticks: {stroke: colour("--grid")}};
  return {
    width, height: 230, series, bands, hooks: {draw: [(u) => whiskers.forEach((n) => whisker(u, n))]},
    scales: {x: {time: false}, y: spec.unit === "%" ? {range: [0, 1]} : {}},
    axes: [{...axis, values: (u, ticks) => ticks.map((t) => text(t, ""))},
      {...axis, size: 62, values: (u, ticks) => ticks.map((t) => text(t, spec.unit))}],
  };
}

// The intervals of the dots of series n, whose ends are the two series after it.
function whisker(u, n) {
  const [x, values, high, low] = [u.data[0], u.data[n], u.data[n + 1], u.data[n + 2]];
  u.ctx.save();
  u.ctx.strokeStyle = strokeOf(u, n);
  u.ctx.lineWidth = 1.5 * devicePixelRatio;
  u.ctx.beginPath();
  for (let i = 0; i < x.length; i++) {
    if (!u.series[n].show || values[i] === null || x[i] < u.scales.x.min || x[i] > u.scales.x.max) continue;
    const at = u.valToPos(x[i], "x", true);
    u.ctx.moveTo(at, u.valToPos(low[i], "y", true));
    u.ctx.lineTo(at, u.valToPos(high[i], "y", true));
  }
  u.ctx.stroke();
  u.ctx.restore();
}

function strokeOf(u, n) {
  const {stroke} = u.series[n];
  return typeof stroke === "function" ? stroke(u, n) : stroke;
}

function draw(at) {
  const spec = JSON.parse(at.dataset.plot);
  const plot = new uPlot(options(spec, at.clientWidth || 400), columns(spec), at); // 400: within closed details
  plots.set(at.id, {plot, shape: shape(spec)});
}

function shape(spec) {
  return spec.series.map((s) => s.label + (s.low.length ? "~" : "")).join("|");
}

const sized = new ResizeObserver((entries) => {
  for (const {target} of entries) {
    const known = plots.get(target.id);
    if (known && target.clientWidth) known.plot.setSize({width: target.clientWidth, height: 230});
  }
});

// Puts the charts that are on the page already into its renewed part, so that they keep their zoom.
function dress(main) {
  for (const fresh of main.querySelectorAll(".plot")) {
    const known = plots.get(fresh.id);
    const old = document.getElementById(fresh.id);
    const spec = JSON.parse(fresh.dataset.plot);
    if (known && old && known.shape === shape(spec)) {
      const {min, max} = known.plot.scales.x;
      const before = known.plot.data[0];
      const whole = min === before[0] && max === before[before.length - 1];
      old.dataset.plot = fresh.dataset.plot;
      fresh.replaceWith(old);
      known.plot.setData(columns(spec), whole);
      if (!whole) known.plot.redraw();
    } else {
      if (known) known.plot.destroy();
      plots.delete(fresh.id);
    }
  }
}

function complete() {
  for (const at of document.querySelectorAll(".plot")) if (!plots.has(at.id)) { draw(at); sized.observe(at); }
  for (const at of document.querySelectorAll(".zoom")) zoomable(at);
}

async function renew() {
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = document.importNode(page.querySelector("main"), true);
  const ticked = new Set([...document.querySelectorAll("input:checked")].map((box) => box.value));
  for (const part of fresh.querySelectorAll("details")) part.open = Boolean(document.getElementById(part.id)?.open);
  for (const box of fresh.querySelectorAll("input[type=checkbox]")) box.checked = ticked.has(box.value);
  dress(fresh);
  document.querySelector("main").replaceWith(fresh);
  document.querySelector("header").replaceWith(document.importNode(page.querySelector("header"), true));
  complete();
  document.body.dataset.changes = page.body.dataset.changes || "";
  document.body.dataset.renewed = Number(document.body.dataset.renewed || 0) + 1;
}

// Waits for the event that the run has gone on, renews the page, and waits for the next one. A hidden page has no
// stream: browsers open six connections to a server, over all of its pages.
function follow() {
  let source = null, due = false, busy = false;
  const listen = () => {
    if (source || due || document.hidden || !document.body.dataset.changes) return;
    source = new EventSource(document.body.dataset.changes);
    source.onmessage = () => { rest(); due = true; look(); };
  };
  const rest = () => { source?.close(); source = null; };
  const look = async () => {
    if (document.hidden) return rest();
    const chosen = getSelection().toString() || document.querySelector("main :is(select, input:not([type=checkbox])):focus");
    if (due && !busy && !chosen) {
      busy = true;
      try { await renew(); due = false; } catch { /* the server is gone: again at the next look */ } finally { busy = false; }
    }
    listen();
  };
  document.addEventListener("visibilitychange", look);
  setInterval(look, 1000);
  listen();
}

// Dragging over the chart opens that stretch of the run.
function zoomable(at) {
  const svg = at.querySelector("svg");
  if (!svg || at.dataset.ready) return;
  at.dataset.ready = "yes";
  const {left, right, begins, seconds} = Object.fromEntries(Object.entries(at.dataset).map(([k, v]) => [k, Number(v)]));
  const box = svg.viewBox.baseVal;
  const share = (event) => {
    const {x, width} = svg.getBoundingClientRect();
    return Math.min(1, Math.max(0, ((event.clientX - x) / width - left) / (right - left)));
  };
  let from = null, chosen = null;
  svg.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    from = share(event);
    chosen = document.createElementNS("http://www.w3.org/2000/svg", "rect");
    chosen.setAttribute("class", "chosen");
    chosen.setAttribute("height", box.height);
    svg.append(chosen);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (from === null) return;
    const [a, b] = [from, share(event)].sort((x, y) => x - y);
    const x = (s) => box.width * (left + s * (right - left));
    chosen.setAttribute("x", x(a));
    chosen.setAttribute("width", x(b) - x(a));
  });
  svg.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const [a, b] = [from, share(event)].sort((x, y) => x - y);
    from = null;
    chosen.remove();
    if (b - a < 0.003) return;
    location.search = new URLSearchParams({t0: (begins + a * seconds).toFixed(6), t1: (begins + b * seconds).toFixed(6)});
  });
}

complete();
follow();
document.body.dataset.ready = "yes";
