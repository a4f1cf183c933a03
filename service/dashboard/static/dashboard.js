// Keeps a page up to date: draws its charts, and makes htmx refetch its live part at each tick from the service.
"use strict";

const COLORS = ["--leased", "--tight", "--soft", "--good"];
const EVERY_MS = 10000;
const REACHED = "a[href], button, summary, [tabindex]"; // what the keyboard can reach in the live part

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Points are objects with named fields, or lists; the time is the field `at`, or the first item of the list.
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
  const moment = (at) => new Date(1000 * at).toISOString().slice(5, 16).replace("T", " "); // UTC, as on all pages
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

// A browser opens at most six connections to a host, so a hidden page closes its own.
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

// Shows the notice when two checks in a row find no open stream: a single one may be a stream that ended and is reopening.
function watch() {
  let silent = 0;
  setInterval(() => {
    silent = document.hidden || ticks?.readyState === EventSource.OPEN ? 0 : silent + 1;
    document.getElementById("away").hidden = silent < 2;
    listen();
  }, EVERY_MS / 2);
}

// Text that is being selected must not disappear under the mouse.
function isMarked(live) {
  const marked = getSelection();
  return !marked.isCollapsed && live.contains(marked.anchorNode);
}

// Keeps the focus and the open details across a swap. The focused element is found again by its name, and by its
// position among the elements of that name.
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
    const again = () => refresh(group).catch(() => undefined); // the service may be unavailable for a while
    again();
    setInterval(again, EVERY_MS);
    document.addEventListener("visibilitychange", again);
    new ResizeObserver(() => {
      for (const element of group.querySelectorAll(".chart")) element.chart?.setSize({ width: element.clientWidth, height: 190 });
    }).observe(group);
  }
});
