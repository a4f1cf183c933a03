// Draws the charts of a page and keeps them up to date. Everything else is HTML, and htmx that fetches it again.
"use strict";

const COLORS = ["--leased", "--tight", "--soft", "--good"];
const EVERY_MS = 10000;

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Points are objects by name, or lists by position; the time is `at`, or the first of a list.
function columns(points, names) {
  const at = (point, name) => Number(point[name] ?? 0);
  return [points.map((p) => at(p, Array.isArray(p) ? 0 : "at")), ...names.map((n) => points.map((p) => at(p, n)))];
}

function draw(element, points) {
  const series = element.dataset.series.split(",").map((each) => each.split(":"));
  const data = columns(points, series.map(([name]) => name));
  if (element.chart) {
    element.chart.setData(data);
    return;
  }
  const axis = { stroke: color("--soft"), grid: { stroke: color("--line") }, ticks: { stroke: color("--line") } };
  const short = (value) => (value === null ? "-" : Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value));
  element.chart = new uPlot({
    width: element.clientWidth,
    height: 190,
    scales: { x: { time: element.dataset.x !== "steps" }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] } },
    axes: [axis, { ...axis, size: 56, values: (_, ticks) => ticks.map(short) }],
    series: [{}, ...series.map(([, label], n) => ({ label, stroke: color(COLORS[n]), width: 1.5, value: (_, v) => short(v) }))],
  }, data, element);
}

async function refresh(group) {
  const answer = await fetch(group.dataset.points, { headers: { Accept: "application/json" } });
  if (!answer.ok || answer.redirected) return;
  const points = await answer.json();
  for (const element of group.querySelectorAll(".chart")) draw(element, points);
}

document.addEventListener("DOMContentLoaded", () => {
  for (const group of document.querySelectorAll("[data-points]")) {
    const again = () => refresh(group).catch(() => undefined); // the service may be away for a while
    again();
    setInterval(again, EVERY_MS);
    new ResizeObserver(() => {
      for (const element of group.querySelectorAll(".chart")) element.chart?.setSize({ width: element.clientWidth, height: 190 });
    }).observe(group);
  }
});
