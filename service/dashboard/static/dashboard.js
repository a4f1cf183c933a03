// Keeps a page up to date: draws its charts, and has htmx fetch again what is live at each tick of the service.
"use strict";

const COLORS = ["--leased", "--tight", "--soft", "--good"];
const EVERY_MS = 10000;
const REACHED = "a[href], button, summary, [tabindex]"; // by keyboard, in what is live

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Points are objects by name, or lists by position; the time is `at`, or the first of a list.
function columns(points, names) {
  const at = (point, name) => (point[name] == null ? null : Number(point[name]));
  return [points.map((p) => at(p, Array.isArray(p) ? 0 : "at")), ...names.map((n) => points.map((p) => at(p, n)))];
}

function draw(element, points) {
  const series = element.dataset.series.split(",").map((each) => each.split(":"));
  const data = columns(points, series.map(([name]) => name));
  if (element.chart) {
    element.chart.setData(data);
    return;
  }
  const isTime = element.dataset.x !== "steps";
  const moment = (at) => new Date(1000 * at).toISOString().slice(5, 16).replace("T", " "); // UTC, as all pages say it
  const times = (chart, ticks) => ticks.map((at) => moment(at).slice(chart.data[0].at(-1) - chart.data[0][0] > 86400 ? 0 : 6));
  const axis = { stroke: color("--soft"), grid: { stroke: color("--line") }, ticks: { stroke: color("--line") } };
  const short = (value) => (value === null ? "-" : Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 }).format(value));
  element.chart = new uPlot({
    width: element.clientWidth,
    height: 190,
    scales: { x: { time: isTime, range: (_, low, high) => (low === high ? [low - 60, high + 60] : [low, high]) }, y: { range: (_, low, high) => [0, high > 0 ? high * 1.05 : 1] } },
    axes: [isTime ? { ...axis, values: times } : axis, { ...axis, size: 72, values: (_, ticks) => ticks.map(short) }],
    series: [isTime ? { value: (_, at) => (at === null ? "-" : `${moment(at)} UTC`) } : {}, ...series.map(([, label], n) => ({ label, stroke: color(COLORS[n]), width: 1.5, value: (_, v) => short(v) }))],
  }, data, element);
}

// A browser opens six connections to a host at most: a page that nobody looks at gives its own back.
let ticks = null;

function listen() {
  if (document.hidden || ticks?.readyState === EventSource.CLOSED) {
    ticks?.close();
    ticks = null;
  }
  if (document.hidden || ticks) return;
  ticks = new EventSource("/dashboard/events");
  ticks.addEventListener("tick", () => {
    for (const live of document.querySelectorAll('[hx-trigger="tick"]')) if (!isMarked(live)) htmx.trigger(live, "tick");
  });
}

// Says so when the service has been silent twice in a row: once is a stream that ended and is opened again.
function watch() {
  let silent = 0;
  setInterval(() => {
    silent = document.hidden || ticks?.readyState === EventSource.OPEN ? 0 : silent + 1;
    document.getElementById("away").hidden = silent < 2;
    listen();
  }, EVERY_MS / 2);
}

// Text that is being selected must not go away below the mouse.
function isMarked(live) {
  const marked = getSelection();
  return !marked.isCollapsed && live.contains(marked.anchorNode);
}

// What has the focus has it after the swap too: that of the same name, the first, second, ... of it. What is open stays so.
function keepState() {
  const name = (each) => each.getAttribute("href") ?? each.getAttribute("aria-label") ?? each.textContent;
  const alike = (like) => [...document.querySelectorAll(REACHED)].filter((each) => name(each) === like);
  let focus = null;
  let open = [];
  document.addEventListener("htmx:beforeSwap", ({ target }) => {
    const here = document.activeElement;
    open = [...target.querySelectorAll("details[open] > summary")].map(name);
    focus = target.contains(here) ? { like: name(here), at: alike(name(here)).indexOf(here) } : null;
  });
  document.addEventListener("htmx:afterSettle", () => {
    for (const each of document.querySelectorAll("details > summary")) each.parentElement.open ||= open.includes(name(each));
    open = [];
    if (focus) alike(focus.like)[focus.at]?.focus({ preventScroll: true });
    focus = null;
  });
}

async function refresh(group) {
  if (document.hidden) return;
  const answer = await fetch(group.dataset.points, { headers: { Accept: "application/json" } });
  if (!answer.ok || answer.redirected) return;
  const points = await answer.json();
  for (const element of group.querySelectorAll(".chart")) draw(element, points);
}

document.addEventListener("DOMContentLoaded", () => {
  if (document.querySelector('[hx-trigger="tick"]')) {
    listen();
    document.addEventListener("visibilitychange", listen);
    watch();
    keepState();
  }
  for (const group of document.querySelectorAll("[data-points]")) {
    const again = () => refresh(group).catch(() => undefined); // the service may be away for a while
    again();
    setInterval(again, EVERY_MS);
    document.addEventListener("visibilitychange", again);
    new ResizeObserver(() => {
      for (const element of group.querySelectorAll(".chart")) element.chart?.setSize({ width: element.clientWidth, height: 190 });
    }).observe(group);
  }
});
