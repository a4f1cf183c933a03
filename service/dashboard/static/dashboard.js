// Keeps a page up to date, whose live part htmx refetches at each tick from the service, and makes it usable by keyboard.
"use strict";

const WATCH_MS = 5000;
const REACHED = "a[href], button, summary, [tabindex]"; // what the keyboard can reach in the live part
const GO = { o: "/dashboard", b: "/dashboard/batches", f: "/dashboard/files", w: "/dashboard/workers" };
const PAIR_MS = 1500; // between `g` and the key after it

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
  }, WATCH_MS);
}

// Text that is being selected must not disappear under the mouse, nor what is typed into a form.
function isMarked(live) {
  const marked = getSelection();
  const isTyped = [...live.querySelectorAll("input")].some((each) => each.value !== each.defaultValue || each === document.activeElement);
  return isTyped || (!marked.isCollapsed && live.contains(marked.anchorNode));
}

// Keeps the focus and the open details across a swap. The focused element is found again by its name, and by its
// position among the elements of that name.
function keepState() {
  const name = (each) => each.getAttribute("href") ?? each.getAttribute("aria-label") ?? each.textContent;
  const alike = (like) => [...document.querySelectorAll(REACHED)].filter((each) => name(each) === like);
  let focus = null;
  let open = [];
  document.addEventListener("htmx:beforeSwap", ({ target, detail }) => {
    if (target.matches('[hx-trigger="tick"]') && isMarked(target)) {
      detail.shouldSwap = false; // this tick was asked for before
      return;
    }
    const here = document.activeElement;
    open = [...target.querySelectorAll("details[open] > summary")].map(name);
    focus = target.contains(here) ? { like: name(here), at: alike(name(here)).indexOf(here) } : null;
  });
  document.addEventListener("htmx:afterSwap", () => {
    for (const each of document.querySelectorAll("details > summary")) each.parentElement.open ||= open.includes(name(each));
    open = [];
    if (focus) alike(focus.like)[focus.at]?.focus({ preventScroll: true });
    focus = null;
  });
}

// Moves both ends of the scan over the picture of the prefix tree, by the figures in the page's live part.
function followScan() {
  const [plot, scan] = [document.querySelector(".plot"), document.querySelector("[data-scan]")];
  if (!scan) return;
  const { scan: plan, left, right, begun } = scan.dataset;
  if (!plot || plot.dataset.plan !== plan) { // planned, or planned again, since the page was loaded
    const newer = document.querySelector("[data-newer]");
    if (newer) newer.hidden = false;
    else if (document.querySelector("[data-unplanned]")) location.reload();
    return;
  }
  plot.querySelector(".left").setAttribute("width", 1000 * left);
  plot.querySelector(".right").setAttribute("x", 1000 - 1000 * right);
  plot.querySelector(".right").setAttribute("width", 1000 * right);
  document.querySelector(".begun").textContent = begun;
}

// Says what lies under the mouse in the picture of the prefix tree.
function readTree() {
  const plot = document.querySelector(".plot");
  const read = plot?.querySelector(".read");
  plot?.addEventListener("mousemove", (event) => {
    // What the scan has taken lies above the boxes, and is not what one wants to read.
    const box = document.elementsFromPoint(event.clientX, event.clientY).find((each) => each.dataset?.requests);
    read.hidden = !box;
    for (const each of plot.querySelectorAll(".here")) each.classList.remove("here");
    if (!box) return;
    box.classList.add("here");
    const { requests, begin, end, out, text } = box.dataset;
    const what = requests === "1" ? `1 request, tokens ${begin} to ${end}` : `${Number(requests).toLocaleString("en")} requests share tokens ${begin} to ${end}`;
    read.replaceChildren(out ? `${what}; about ${out} tokens of answer each. ` : `${what}. `);
    if (text) read.append(Object.assign(document.createElement("q"), { textContent: text }));
  });
}

function copyIds() {
  const offer = () => {
    for (const button of document.querySelectorAll("[data-copy][hidden]")) button.hidden = !navigator.clipboard;
  };
  offer();
  document.addEventListener("htmx:afterSwap", offer);
  document.addEventListener("click", async ({ target }) => {
    const button = target.closest("[data-copy]");
    if (!button) return;
    await navigator.clipboard.writeText(button.dataset.copy);
    button.dataset.word ??= button.textContent;
    button.textContent = "copied";
    setTimeout(() => { button.textContent = button.dataset.word; }, 1500);
  });
}

// The form's fields apply as they change; the address has them, so a page can be kept and passed on.
function applyFilters() {
  for (const form of document.querySelectorAll("form[data-auto]")) {
    form.addEventListener("change", () => form.requestSubmit());
    form.addEventListener("formdata", ({ formData }) => {
      for (const [name, value] of [...formData]) if (!value) formData.delete(name);
    });
  }
}

// A browser may forbid storage; then a choice holds for the page.
function kept(name) {
  try { return localStorage.getItem(name); } catch { return null; }
}

function keep(name, value) {
  try { localStorage.setItem(name, value); } catch { /* as said above */ }
}

function switchTheme() {
  const button = document.querySelector("[data-theme-switch]");
  if (!button) return;
  const root = document.documentElement;
  const all = ["system", "light", "dark"];
  const say = () => { button.textContent = { system: "Theme: auto", light: "Theme: light", dark: "Theme: dark" }[root.dataset.theme ?? "system"]; };
  button.hidden = false;
  say();
  button.addEventListener("click", () => {
    const next = all[(all.indexOf(root.dataset.theme ?? "system") + 1) % all.length];
    if (next === "system") delete root.dataset.theme;
    else root.dataset.theme = next;
    keep("theme", next);
    say();
    document.dispatchEvent(new Event("themechange"));
  });
}

// A dialog that was just closed keeps the focus until the next frame.
function isTyping(target) {
  const dialog = target.closest("dialog");
  return dialog ? dialog.open : target.closest("input, textarea, select") || target.isContentEditable;
}

// Goes to the row before or after, or, on the page of one request, to the request before or after.
function step(by) {
  const other = document.querySelector(`nav a[rel="${by > 0 ? "next" : "prev"}"]`);
  if (other) return location.assign(other.href);
  const rows = [...document.querySelectorAll("tbody tr")].filter((row) => row.querySelector("a[href]"));
  const at = rows.findIndex((row) => row.contains(document.activeElement));
  rows[at < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(Math.max(at + by, 0), rows.length - 1)]?.querySelector("a[href]").focus();
}

function useKeys() {
  const keys = document.getElementById("keys");
  if (!keys) return;
  const opener = document.querySelector("[data-keys]");
  opener.hidden = false;
  opener.addEventListener("click", () => keys.showModal());
  const single = keys.querySelector("[data-single]"); // speech input may press them by accident
  single.checked = kept("keys") !== "off";
  single.addEventListener("change", () => keep("keys", single.checked ? "on" : "off"));
  let before = { key: "", at: 0 };
  document.addEventListener("keydown", (event) => {
    if (!single.checked || event.ctrlKey || event.metaKey || event.altKey || isTyping(event.target)) return;
    const isPair = before.key === "g" && event.timeStamp - before.at < PAIR_MS;
    const goes = isPair ? GO[event.key] : event.key === "n" ? "/dashboard/new" : undefined;
    before = { key: event.key, at: event.timeStamp };
    if (goes && document.querySelector(`header a[href="${goes}"]`)) location.href = goes;
    else if (event.key === "/") document.querySelector(".search input").focus();
    else if (event.key === "?") keys.showModal();
    else if (event.key === "j" || event.key === "k") step(event.key === "j" ? 1 : -1);
    else return;
    event.preventDefault();
  });
}

document.addEventListener("DOMContentLoaded", () => {
  useKeys();
  switchTheme();
  copyIds();
  applyFilters();
  readTree();
  document.addEventListener("htmx:afterSettle", followScan);
  if (document.querySelector('[hx-trigger="tick"]')) {
    listen();
    document.addEventListener("visibilitychange", listen);
    watch();
    keepState();
  }
});
