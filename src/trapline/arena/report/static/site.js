"use strict";

// Everything a submission wrote reaches the page through textContent, never through innerHTML.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children.map((child) => (child instanceof Node ? child : String(child))));
  return element;
}

// --- dark and light ---------------------------------------------------------------------------
function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function themeButton() {
  const button = document.querySelector("[data-theme-button]");
  const show = () => {
    button.setAttribute("aria-pressed", String(isDark()));
    button.querySelector("span").textContent = isDark() ? "Light" : "Dark";
  };
  button.addEventListener("click", () => {
    const next = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try { localStorage.setItem("trapline-theme", next); } catch { /* it holds for this page only */ }
    show();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
  show();
}

// --- filter, sort, copy: delegated, so that swapped sections need no new listeners ----------------
function words(item) {
  return (item.dataset.name ?? item.textContent).toLowerCase();
}

function filterItems(input) {
  const wanted = input.value.trim().toLowerCase().split(/\s+/);
  const shown = new Set();
  for (const item of (input.closest(".page") ?? document).querySelectorAll(input.dataset.filter)) {
    const text = words(item);
    const gone = !wanted.every((word) => text.includes(word));
    item.toggleAttribute("hidden", gone);
    if (gone) continue;
    shown.add(item.dataset.name ?? item);
    if (wanted[0]) item.closest("details")?.setAttribute("open", "");
  }
  const status = input.parentElement.querySelector("[data-filter-status]");
  if (status) status.textContent = wanted[0] ? `${shown.size} shown` : "";
}

function sortKey(row, column) {
  const cell = row.cells[column];
  const text = (cell?.dataset.value ?? cell?.textContent ?? "").trim();
  const number = Number(text.replace(/[,%$+]/g, "").replace("−", "-"));
  return text === "" || text === "–" || text === "—" ? null : Number.isNaN(number) ? text.toLowerCase() : number;
}

function compare(a, b) {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

// Unknown values stay last in both directions.
function sortBy(head) {
  const body = head.closest("table").tBodies[0];
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const rows = [...body.rows].map((row) => [sortKey(row, head.cellIndex), row]);
  rows.sort(([a], [b]) => (a === null || b === null ? (a === null) - (b === null) : (up ? 1 : -1) * compare(a, b)));
  body.append(...rows.map(([, row]) => row));
}

function sortable(root = document) {
  for (const head of root.querySelectorAll("[data-sortable] thead th:not([data-no-sort])")) {
    if (head.querySelector("button")) continue;
    const button = make("button", { type: "button", class: "sort" });
    button.append(...head.childNodes);
    head.append(button);
  }
}

async function copy(button) {
  const { copyLink } = button.dataset;
  const link = new URL(copyLink ? `#${copyLink}` : location.hash || "#", location.href);
  const text = button.dataset.copy ?? (link.hash ? link.href : link.href.replace(/#$/, ""));
  const label = button.dataset.label ?? (button.dataset.label = button.textContent);
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    prompt("Copy this:", text);
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}

function tools() {
  sortable();
  document.addEventListener("input", (event) => {
    if (event.target.matches("[data-filter]")) filterItems(event.target);
  });
  document.addEventListener("click", (event) => {
    const sort = event.target.closest?.("button.sort");
    if (sort) sortBy(sort.closest("th"));
    const button = event.target.closest?.("button.copy");
    if (button) copy(button);
  });
}

// A link to something folded unfolds it.
function unfold() {
  const target = location.hash.length > 1 ? document.getElementById(decodeURIComponent(location.hash.slice(1))) : null;
  for (let at = target; at; at = at.parentElement) if (at.tagName === "DETAILS") at.open = true;
  target?.scrollIntoView();
}

// Print shows what is folded.
function print() {
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => { for (const one of opened) one.open = false; });
}

// --- the matrix: walk with the arrow keys ------------------------------------------------------

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

function neighbour(cell, [down, right]) {
  const rows = [...cell.closest("tbody").rows].filter((row) => !row.hidden);
  let row = rows.indexOf(cell.parentElement);
  let column = cell.cellIndex;
  for (;;) {
    row += down;
    column += right;
    const next = rows[row]?.cells[column];
    if (!next) return null;
    const link = next.querySelector("a");
    if (link) return link;
  }
}

function matrixKeys() {
  document.addEventListener("keydown", (event) => {
    const cell = event.target.closest?.(".matrix tbody td, .matrix tbody th");
    if (!cell || !STEPS[event.key]) return;
    const link = neighbour(cell, STEPS[event.key]);
    if (!link) return;
    event.preventDefault();
    link.focus();
  });
}

// --- duel: two entrants side by side, from the data in the page ----------------------------------
function word(difference, rule) {
  const size = Math.round(Math.abs(difference) * 1e6) / 1e6;
  if (size < rule.tie) return "tie";
  if (size < rule.narrow) return "narrow";
  return size < rule.decisive ? "moderate" : "decisive";
}

function edge(a, b, names, rule) {
  if (a === null || b === null) return make("td", { class: "edge-tie" }, "not both measured");
  const how = word(a - b, rule);
  if (how === "tie") return make("td", { class: "edge-tie" }, "tie");
  const left = a > b;
  return make("td", { class: left ? "edge-left" : "edge-right" }, `${left ? names[0] : names[1]} (${how})`);
}

// As Python rounds: an exact half to the even digit, 77.25 to 77.2.
function points(value) {
  return (value % 1 === 0.25 ? value - 0.01 : value).toFixed(1);
}

function figure(value) {
  return make("td", {}, value === null ? "–" : points(value));
}

function table(caption, heads, rows) {
  const head = make("thead", {}, make("tr", {}, ...heads.map((text) => make("th", { scope: "col" }, text))));
  const box = make("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": caption });
  box.append(make("table", { class: "wide" }, make("caption", {}, caption), head, make("tbody", {}, ...rows)));
  return box;
}

// In the single file, pages are sections.
const SINGLE = document.documentElement.hasAttribute("data-single");

function linked(text, href) {
  const section = `#${href?.replace(/\.html.*/, "").replaceAll("/", "--")}`;
  return href ? make("a", { href: SINGLE ? section : href }, text) : text;
}

function mean(values) {
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}

function challengeRow(column, place, pair, names, rule) {
  const [a, b] = pair.map((entrant) => entrant.squares[place]);
  const cells = [a, b].map((square) =>
    make("td", {}, square ? linked(`${square.shown}${square.score === null ? "" : ` · ${points(square.score)}`}`, square.href) : "—"));
  return make("tr", {}, make("th", { scope: "row" }, column.title), ...cells,
    edge(a?.score ?? null, b?.score ?? null, names, rule));
}

function record(pair, columns, rule) {
  const count = { won: 0, lost: 0, tied: 0 };
  columns.forEach((_, place) => {
    const [a, b] = pair.map((entrant) => entrant.squares[place]?.score ?? null);
    if (a === null || b === null) return;
    count[word(a - b, rule) === "tie" ? "tied" : a > b ? "won" : "lost"] += 1;
  });
  return count;
}

function verdict({ won, lost, tied }, names) {
  if (won + lost + tied === 0) return "They share no graded challenge and cannot be compared.";
  const score = `${Math.max(won, lost)}–${Math.min(won, lost)}–${tied}`;
  if (won === lost) return `${names[0]} and ${names[1]} are level, ${score} (won–lost–tied).`;
  return `${won > lost ? names[0] : names[1]} leads ${score} (won–lost–tied).`;
}

function dimensionRows(data, pair, names) {
  return data.dimensions.flatMap((name, index) => {
    const values = data.columns
      .map((_, place) => pair.map((entrant) => entrant.squares[place]?.dimensions[index] ?? null))
      .filter((both) => both.every((value) => value !== null));
    if (!values.length) return [];
    const [a, b] = [0, 1].map((side) => mean(values.map((both) => both[side])));
    return make("tr", {}, make("th", { scope: "row" }, name), figure(a), figure(b), edge(a, b, names, data.rule));
  });
}

function trapRows(data, pair) {
  const rows = [];
  data.columns.forEach((column, place) => {
    const [a, b] = pair.map((entrant) => new Set(entrant.squares[place]?.fallen ?? []));
    if (!pair.every((entrant) => entrant.squares[place])) return;
    for (const trap of new Set([...a, ...b])) {
      if (a.has(trap) === b.has(trap)) continue;
      rows.push(make("tr", {}, make("th", { scope: "row" }, data.bugs[trap] ?? trap), make("td", {}, column.title),
        ...[a, b].map((fallen) => make("td", { class: fallen.has(trap) ? "edge-right" : "edge-left" }, fallen.has(trap) ? "found" : "–"))));
    }
  });
  return rows;
}

function showDuel(data, target, pair) {
  const names = pair.map((entrant) => entrant.name);
  const rows = data.columns.map((column, place) => challengeRow(column, place, pair, names, data.rule));
  const traps = trapRows(data, pair);
  const parts = [
    make("p", { class: "lede", "data-verdict": "" }, verdict(record(pair, data.columns, data.rule), names)),
    table("Challenge by challenge", ["Challenge", ...names, "Edge"], rows),
    table("Dimension by dimension, mean over the challenges that both took", ["Dimension", ...names, "Edge"], dimensionRows(data, pair, names)),
  ];
  if (traps.length) parts.push(table("Bugs that one has and the other has not", ["Bug", "Challenge", ...names], traps));
  target.replaceChildren(...parts);
}

function duel() {
  const source = document.getElementById("duel-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const selects = ["duel-a", "duel-b"].map((id) => document.getElementById(id));
  const target = document.getElementById("duel-result");
  const fromAddress = new URLSearchParams(location.hash.slice(1));
  ["a", "b"].forEach((name, side) => {
    const place = data.entrants.findIndex((entrant) => entrant.slug === fromAddress.get(name));
    selects[side].value = String(place >= 0 ? place : Math.min(side, data.entrants.length - 1));
  });
  const show = () => showDuel(data, target, selects.map((select) => data.entrants[Number(select.value)]));
  const changed = () => {
    const [a, b] = selects.map((select) => data.entrants[Number(select.value)].slug);
    if (!SINGLE) history.replaceState(null, "", `#${new URLSearchParams({ a, b })}`);
    show();
  };
  for (const select of selects) select.addEventListener("change", changed);
  show();
}

// --- a run that goes on: squares change in place, the rest is fetched when a grade came in --------
function updateSquare(id, now) {
  const holder = document.getElementById(id);
  if (!holder || holder.dataset.shown === `${now.heat} ${now.shown} ${now.score}`) return;
  holder.dataset.shown = `${now.heat} ${now.shown} ${now.score}`;
  holder.dataset.state = now.state;
  const focused = holder.contains(document.activeElement);
  const { graded, attempts } = now;
  const letter = make("b", {}, now.shown);
  if (now.mark) letter.append(" ", make("i", {}, now.mark));
  const square = make(now.href ? "a" : "span", { class: `square ${now.heat}${graded ? "" : " word"}` }, letter);
  if (graded) square.append(make("small", {}, points(now.score) + (attempts.length > 1 ? ` · ${attempts.length}×` : "")));
  if (now.href) square.setAttribute("href", now.href);
  const tries = attempts.map((href, index) => make("a", { href, "aria-label": `attempt ${index + 1}` }, index + 1));
  holder.replaceChildren(square, ...(tries.length > 1 ? [make("span", { class: "tries" }, ...tries)] : []));
  if (focused) square.focus();
}

async function swapSections() {
  const answer = await fetch(location.pathname, { cache: "no-store" });
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const old of document.querySelectorAll("[data-swap]")) {
    const next = fresh.querySelector(`[data-swap="${old.dataset.swap}"]`);
    if (next && !old.contains(document.activeElement)) old.replaceWith(document.adoptNode(next));
  }
  sortable();
}

function live() {
  const address = document.documentElement.dataset.live;
  if (!address) return;
  const status = document.querySelector("[data-progress]");
  let version = document.documentElement.dataset.version;
  const poll = async () => {
    try {
      const now = await (await fetch(address, { cache: "no-store" })).json();
      for (const [id, square] of Object.entries(now.squares)) updateSquare(id, square);
      const { graded, running, waiting } = now.progress;
      const text = running + waiting ? `${graded} graded, ${running} running, ${waiting} waiting` : `finished: ${graded} graded`;
      if (status && status.textContent !== text) status.textContent = text;
      if (now.version !== version) { version = now.version; await swapSections(); }
    } catch {
      if (status) status.textContent = "the server does not answer; trying again";
    }
    setTimeout(poll, 700);
  };
  poll();
}

themeButton();
tools();
unfold();
print();
addEventListener("hashchange", unfold);
matrixKeys();
duel();
live();
