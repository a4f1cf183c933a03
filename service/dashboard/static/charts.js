// Draws the charts of a page: one time axis for all of them, values of now in the legends, and marks for workers.
"use strict";

const COLORS = ["--one", "--two", "--three", "--four"];
const EVERY_MS = 10000;
const HEIGHT = 200;
const LISTED = 6; // marks in words

// A custom property may be a function of the theme, which a canvas cannot read; a real element resolves it.
function color(name) {
  const probe = document.getElementById("main");
  probe.style.setProperty("outline-color", `var(${name})`);
  const found = getComputedStyle(probe).outlineColor;
  probe.style.removeProperty("outline-color");
  return found;
}

// A time without points is a gap, not a line from its beginning to its end.
function withGaps(points) {
  const at = (point) => (Array.isArray(point) ? point[0] : point.at);
  const steps = points.slice(1).map((point, n) => at(point) - at(points[n])).sort((a, b) => a - b);
  const usual = steps[Math.floor(steps.length / 2)] ?? 0;
  return points.flatMap((point, n) => (n && at(point) - at(points[n - 1]) > 4 * usual + 5 ? [{ at: at(points[n - 1]) + 1 }, point] : [point]));
}

// Points are objects with named fields, or lists; the time is the field `at`, or the first item of the list.
function columns(points, names) {
  const at = (point, name) => (point[name] == null ? null : Number(point[name]));
  return [points.map((p) => at(p, Array.isArray(p) ? 0 : "at")), ...names.map((n) => points.map((p) => at(p, n)))];
}

const compact = Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

function told(value, unit) {
  if (value == null) return "-";
  const gap = unit === "%" || unit === "/min" ? "" : " ";
  return unit === "requests" || unit === "tokens" ? compact.format(value) : `${compact.format(value)}${gap}${unit}`;
}

// Times are UTC, as on all pages; the axis has seconds where it covers minutes, and the day where it covers several.
function moment(at, span) {
  const iso = new Date(1000 * at).toISOString();
  if (span < 600) return iso.slice(11, 19);
  return span > 86400 ? iso.slice(5, 16).replace("T", " ") : iso.slice(11, 16);
}

function drawMarks(marks) {
  return {
    hooks: {
      draw: (chart) => {
        for (const { at, kind } of chart.marks ?? marks) {
          const x = Math.round(chart.valToPos(at, "x", true));
          if (x < chart.bbox.left || x > chart.bbox.left + chart.bbox.width) continue;
          chart.ctx.save();
          chart.ctx.strokeStyle = color({ stop: "--soft", death: "--bad", exit: "--bad" }[kind] ?? "--good");
          chart.ctx.setLineDash({ stop: [1, 4], death: [], exit: [] }[kind] ?? [6, 4]);
          chart.ctx.beginPath();
          chart.ctx.moveTo(x, chart.bbox.top);
          chart.ctx.lineTo(x, chart.bbox.top + chart.bbox.height);
          chart.ctx.stroke();
          chart.ctx.restore();
        }
      },
    },
  };
}

function draw(element, found) {
  const { points, marks = [] } = found;
  const series = element.dataset.series.split(",").map((each) => each.split(":"));
  const isOfService = found.from !== undefined; // a batch that rests has no points, and its counts stay
  const data = columns(isOfService ? withGaps(points) : points, series.map(([name]) => name));
  const unit = element.dataset.unit ?? "";
  const isEmpty = !data.slice(1).some((column) => column.some((value) => value != null));
  element.classList.toggle("empty", isEmpty);
  if (isEmpty) {
    element.chart?.destroy();
    element.chart = null;
    element.textContent = "Nothing yet.";
    return;
  }
  if (!element.chart) element.textContent = "";
  const isTime = element.dataset.x !== "steps";
  element.span = isOfService ? [found.from, found.to] : null;
  if (element.chart) {
    element.chart.marks = marks;
    element.chart.setData(data);
    return;
  }
  const axis = { stroke: color("--soft"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 }, font: "12px system-ui" };
  const wide = (low, high) => (low === high ? [low - 60, high + 60] : [low, high]);
  const times = (chart, ticks) => {
    const span = chart.scales.x.max - chart.scales.x.min;
    return ticks.map((at) => moment(at, span));
  };
  const isWhole = unit === "requests" || unit === "tokens";
  element.chart = new uPlot({
    width: element.clientWidth,
    height: HEIGHT,
    scales: {
      x: { time: isTime, range: (_, low, high) => element.span ?? wide(low, high) },
      y: { range: (_, low, high) => [0, high > 0 ? high * 1.08 : 1] },
    },
    axes: [
      { ...axis, space: 90, ...(isTime ? { values: times } : { label: "steps", labelSize: 16, labelFont: "12px system-ui" }) },
      { ...axis, size: 62, space: 36, incrs: isWhole ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6, 2e6, 5e6, 1e7, 1e8, 1e9] : undefined, values: (_, ticks) => ticks.map((value) => told(value, unit === "tokens/s" ? "tokens" : unit)) },
    ],
    cursor: { sync: { key: "time" } },
    series: [
      isTime ? { label: "UTC", value: (_, at) => (at == null ? "now" : moment(at, Infinity)) } : { label: "step" },
      ...series.map(([, label], n) => ({
        label,
        stroke: color(COLORS[n]),
        width: 1.75,
        spanGaps: false,
        // With no cursor over the chart, the legend shows the value of now.
        value: (chart, value, at, index) => told(index == null ? chart.data[at].at(-1) : value, unit),
      })),
    ],
    plugins: [drawMarks(marks)],
  }, data, element);
}

let newest = []; // points of the page's charts, for its small ones, which each refresh of the live part empties

function drawSparks() {
  for (const spark of document.querySelectorAll("[data-spark]")) {
    const values = newest.map((point) => Number(point[spark.dataset.spark] ?? 0));
    const [most, last] = [Math.max(...values, 1e-9), Math.max(values.length - 1, 1)];
    const at = (value, n) => `${((100 * n) / last).toFixed(1)},${(23 - (22 * value) / most).toFixed(1)}`;
    spark.firstElementChild.setAttribute("points", values.map(at).join(" "));
  }
}

async function refresh(group) {
  if (document.hidden) return;
  const answer = await fetch(group.dataset.points, { headers: { Accept: "application/json" } });
  if (!answer.ok || answer.redirected) return;
  const found = await answer.json();
  for (const element of group.querySelectorAll(".chart")) draw(element, found);
  newest = found.points;
  drawSparks();
  const said = (found.marks ?? []).slice(-LISTED).map(({ at, text }) => `${moment(at, found.to - found.from)} ${text}`);
  const items = () => said.map((text) => Object.assign(document.createElement("li"), { textContent: text }));
  for (const each of document.querySelectorAll("[data-marks]")) each.replaceChildren(...items());
}

// A theme has other colours, and a chart keeps those that it was drawn with.
function drawAgain() {
  for (const element of document.querySelectorAll(".chart")) {
    element.chart?.destroy();
    element.chart = null;
  }
  for (const group of document.querySelectorAll("[data-points]")) refresh(group).catch(() => undefined);
}

document.addEventListener("DOMContentLoaded", () => {
  for (const group of document.querySelectorAll("[data-points]")) {
    const again = () => refresh(group).catch(() => undefined); // the service may be unavailable for a while
    again();
    setInterval(again, EVERY_MS);
    document.addEventListener("visibilitychange", again);
    new ResizeObserver(() => {
      for (const element of group.querySelectorAll(".chart")) element.chart?.setSize({ width: element.clientWidth, height: HEIGHT });
    }).observe(group);
  }
  document.addEventListener("htmx:afterSettle", drawSparks);
  document.addEventListener("themechange", drawAgain);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAgain);
});
