// The list of jobs: sorted, filtered by text, and drawn in parts as they are scrolled to.

import { h, say, set } from "./dom.js";
import { age, count, figure, left, percent, time } from "./words.js";

const PART = 100;
const ORDER = ["Running", "Restarting", "Starting", "Pending", "Suspending", "Suspended", "Interrupted", "Failed", "Succeeded"];

const COLUMNS = [
  { id: "name", title: "Name", value: (job) => job.name },
  { id: "namespace", title: "Namespace", value: (job) => job.namespace },
  { id: "phase", title: "Phase", value: (job) => place(job.phase) },
  { id: "strategy", title: "Strategy", value: (job) => job.strategy },
  { id: "progress", title: "Progress", value: (job) => percent(job) ?? -1 },
  { id: "loss", title: "Loss", value: (job) => job.loss ?? Infinity },
  { id: "left", title: "Left", value: (job) => job.left ?? Infinity },
  { id: "goodput", title: "Goodput", value: (job) => job.goodput ?? -1 },
  { id: "age", title: "Age", value: (job) => -(time(job.created) ?? 0) },
];

// What the reader has chosen, which outlives a look at a job.
const chosen = { filter: "", sort: null, down: false };

function place(phase) {
  const at = ORDER.indexOf(phase);
  return at < 0 ? ORDER.length : at;
}

function compare(a, b) {
  if (chosen.sort !== null) {
    const [one, other] = [chosen.sort.value(a), chosen.sort.value(b)];
    const order = typeof one === "string" ? one.localeCompare(other) : one - other;
    if (order) return chosen.down ? -order : order;
  }
  return place(a.phase) - place(b.phase) || (time(b.created) ?? 0) - (time(a.created) ?? 0) || (a.key < b.key ? -1 : 1);
}

function matches(job) {
  const text = `${job.namespace} ${job.name} ${job.phase} ${job.strategy} ${job.deleted ? "deleted" : ""}`.toLowerCase();
  return chosen.filter.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

export function listView() {
  const rows = new Map();
  let jobs = [];
  let found = [];
  let shown = PART;
  let drawn = "";

  const body = h("tbody");
  const summary = h("p.summary", { role: "status" }, "Reading …");
  const note = h("p.note");
  const more = h("button.more", { type: "button", onclick: () => grow() });
  const filter = h("input", {
    type: "search", id: "filter", placeholder: "Filter by name, namespace, phase, strategy", autocomplete: "off",
    oninput: () => {
      chosen.filter = filter.value.trim();
      shown = PART;
      draw();
    },
  });
  filter.value = chosen.filter;
  const heads = COLUMNS.map((column) => {
    const button = h("button", { type: "button", onclick: () => sortBy(column) }, column.title);
    return h(`th.${column.id}-cell`, { scope: "col" }, button);
  });
  const element = h(
    "div.list", {},
    h("div.bar", {}, h("label.hidden", { for: "filter" }, "Filter"), filter, summary),
    note,
    h("table", {}, h("caption.hidden", {}, "Jobs"), h("thead", {}, h("tr", {}, ...heads)), body),
    more,
  );
  new IntersectionObserver((entries) => {
    if (entries.some((entry) => entry.isIntersecting)) grow();
  }, { rootMargin: "600px" }).observe(more);

  function sortBy(column) {
    chosen.down = chosen.sort === column ? !chosen.down : false;
    chosen.sort = column;
    draw();
  }

  function grow() {
    if (shown < found.length) {
      shown += PART;
      draw();
    }
  }

  function draw() {
    COLUMNS.forEach((column, at) => {
      set(heads[at], "aria-sort", chosen.sort === column ? (chosen.down ? "descending" : "ascending") : null);
    });
    found = jobs.filter(matches).sort(compare);
    const wanted = found.slice(0, shown);
    for (const job of wanted) {
      if (!rows.has(job.key)) rows.set(job.key, row(job.key));
      rows.get(job.key).update(job);
    }
    const keys = wanted.map((job) => job.key).join("\n");
    if (keys !== drawn) {
      // Rows that change their place keep the focus.
      const focused = document.activeElement;
      body.replaceChildren(...wanted.map((job) => rows.get(job.key).element));
      if (body.contains(focused)) focused.focus({ preventScroll: true });
      drawn = keys;
    }
    const running = jobs.filter((job) => job.phase === "Running").length;
    const deleted = jobs.filter((job) => job.deleted).length;
    const hits = found.length === jobs.length ? "" : `${count(found.length)} of `;
    const words = `${hits}${count(jobs.length)} jobs, ${count(running)} running${deleted ? `, ${count(deleted)} deleted` : ""}`;
    say(summary, jobs.length ? words : "No jobs yet");
    more.hidden = shown >= found.length;
    say(more, `Show more (${count(found.length - Math.min(shown, found.length))})`);
  }

  return {
    element,
    show(answer) {
      jobs = answer.jobs;
      const keys = new Set(jobs.map((job) => job.key));
      for (const key of rows.keys()) if (!keys.has(key)) rows.delete(key);
      say(document.getElementById("title"), answer.title);
      document.title = "Jobs – disttrain";
      say(note, answer.more);
      element.classList.toggle("one-namespace", new Set(jobs.map((job) => job.namespace)).size < 2);
      draw();
    },
    tick() {
      for (const job of found.slice(0, shown)) rows.get(job.key)?.tick(job);
    },
  };
}

function row(key) {
  const link = h("a", { href: `#/job/${encodeURIComponent(key)}` });
  const cells = Object.fromEntries(
    COLUMNS.map((column) => [column.id, h(`${column.id === "name" ? "th" : "td"}.${column.id}-cell`, {
      "data-title": column.title, scope: column.id === "name" ? "row" : null,
    })]),
  );
  const phase = h("span.phase");
  const bar = progressBar();
  const gone = h("span.note", { hidden: "" }, " deleted");
  cells.name.append(link, gone);
  cells.phase.append(phase);
  cells.progress.append(bar.element);
  return {
    element: h("tr", {}, ...COLUMNS.map((column) => cells[column.id])),
    update(job) {
      say(link, job.name || key);
      gone.hidden = !job.deleted;
      say(cells.namespace, job.namespace);
      showPhase(phase, job.phase);
      say(cells.strategy, job.strategy);
      bar.update(job);
      say(cells.loss, figure(job.loss));
      say(cells.goodput, job.goodput === null ? "" : `${job.goodput}%`);
      this.tick(job);
    },
    tick(job) {
      say(cells.left, left(job));
      say(cells.age, age(job.created));
    },
  };
}

export function showPhase(element, phase) {
  say(element, phase);
  set(element, "data-phase", phase);
}

export function progressBar() {
  const done = h("span.done");
  const words = h("span.words");
  const bar = h("span.progress", { role: "progressbar", "aria-valuemin": "0", "aria-valuemax": "100" }, done);
  return {
    element: h("span.step", {}, bar, words),
    update(job) {
      const part = percent(job);
      bar.hidden = part === null;
      done.style.width = `${100 * (part ?? 0)}%`;
      const steps = job.total ? `${count(job.step ?? 0)}/${count(job.total)}` : count(job.step);
      set(bar, "aria-valuenow", Math.round(100 * (part ?? 0)));
      set(bar, "aria-label", `Progress of ${job.name}: step ${steps}`);
      say(words, steps);
    },
  };
}
