// A job: why it is where it is, its figures, ranks, curves, time, attempts, events and logs.

import { chart } from "./chart.js";
import { h, say, set } from "./dom.js";
import { progressBar, showPhase } from "./list.js";
import { log } from "./log.js";
import { ranks } from "./ranks.js";
import { stacks } from "./stacks.js";
import { age, clock, count, duration, figure, left, time } from "./words.js";

export function jobView(key, state) {
  const name = h("h1", {}, key);
  const phase = h("span.phase");
  const why = h("p.why");
  const todo = h("ul.todo");
  const bar = progressBar();
  const numbers = h("dl.numbers");
  const facts = h("dl.facts");
  const curves = h("div.charts");
  const spent = h("div.spent", { role: "img" });
  const states = h("ul.legend");
  const time_ = h("section", { "aria-label": "Goodput" }, h("h2", {}, "Where the time went"), spent, states);
  const attempts = h("ol.attempts");
  const tries = h("section", { "aria-label": "Attempts" }, h("h2", {}, "Attempts"), attempts);
  const events = h("tbody");
  const happened = h("section", { "aria-label": "Events" }, h("h2", {}, "Events"),
    h("table.events", {}, h("thead", {}, h("tr", {}, ...["Last seen", "Reason", "Object", "Message"].map((title) => h("th", { scope: "col" }, title)))), events));
  const lines = log(key);
  const calls = stacks(key);
  const mesh = ranks((rank) => lines.choose(rank), (rank) => calls.choose(rank));
  const charts = [];
  const element = h("div.job", {},
    h("nav", { "aria-label": "Places" }, h("a", { href: "#/" }, "All jobs")),
    h("div.bar", {}, name, phase), why, todo, bar.element, numbers, curves,
    h("div.halves", {}, time_, tries), mesh.element, happened, lines.element, calls.element,
    h("section", { "aria-label": "Details" }, h("h2", {}, "Details"), facts));
  element.hidden = true;
  let data = null;

  function showNumbers() {
    const job = data.job;
    const known = [
      ["Loss", figure(job.loss)], ["Samples/s", figure(job.rate)], ["Left", left(job)],
      ["Goodput", job.goodput === null ? "" : `${job.goodput}%`], ["Ranks", count(job.ranks)], ["Strategy", job.strategy],
      [job.finished ? "Finished" : "Age", job.finished ? `${age(job.finished)} ago` : age(job.created)],
    ];
    pairs(numbers, known.filter(([, value]) => value !== ""));
  }

  function showCurves() {
    data.panels.forEach((panel, at) => {
      if (charts.length <= at) {
        charts.push(chart());
        curves.append(charts[at].element);
      }
      charts[at].update(panel);
    });
    while (charts.length > data.panels.length) {
      const last = charts.pop();
      last.close();
      last.element.remove();
    }
  }

  function showSpent() {
    const known = data.goodput;
    time_.hidden = known === null || !known.spent.length;
    if (time_.hidden) return;
    const now = Date.now() / 1000;
    // It goes on counting where the last count ended.
    const more = known.state ? Math.max(now - (time(known.at) ?? now), 0) : 0;
    const seconds = new Map(known.spent);
    if (known.state) seconds.set(known.state, (seconds.get(known.state) ?? 0) + more);
    const all = [...seconds.values()].reduce((sum, each) => sum + each, 0) || 1;
    const longest = [...seconds].sort((a, b) => b[1] - a[1]).filter(([, each]) => each > 0);
    const words = longest.map(([kind, each]) => `${kind} ${duration(each)} (${Math.round((100 * each) / all)}%)`);
    if (spent.children.length !== longest.length) spent.replaceChildren(...longest.map(() => h("span")));
    if (states.children.length !== longest.length) states.replaceChildren(...longest.map(() => h("li")));
    longest.forEach(([kind, each], at) => {
      set(spent.children[at], "data-kind", kind);
      spent.children[at].style.width = `${(100 * each) / all}%`;
      set(states.children[at], "data-kind", kind);
      say(states.children[at], words[at]);
    });
    set(spent, "aria-label", words.join(", "));
  }

  function showAttempts() {
    tries.hidden = !data.attempts.length;
    const now = Date.now() / 1000;
    const interrupted = data.job.phase === "Interrupted";
    // Of what was interrupted the last count of its time is the last that is known.
    const over = time(data.job.finished) ?? (interrupted ? time(data.goodput?.at) : null) ?? now;
    const ends = data.attempts.map((each) => time(each.end) ?? over);
    const first = Math.min(...data.attempts.map((each) => time(each.start) ?? now));
    const whole = Math.max(...ends) - first || 1;
    attempts.replaceChildren(...data.attempts.map((each, at) => {
      const start = time(each.start) ?? first;
      const ran = time(each.running) ?? ends[at];
      const piece = (kind, from, to) => {
        const made = h(`span.${kind}`);
        made.style.left = `${(100 * (from - first)) / whole}%`;
        made.style.width = `${Math.max((100 * (to - from)) / whole, 0.5)}%`;
        return made;
      };
      const words = [
        `${clock(start)}, ${duration(ends[at] - start)}`, each.inPlace ? `restarted in place: ${each.inPlace}` : "",
        each.checkpoint === null ? "" : `checkpoint of step ${count(each.checkpoint)}`,
      ].filter(Boolean).join(", ");
      return h("li", {},
        h("div.bar", {}, h("strong", {}, `Attempt ${each.number}`), h("span.note", {}, words)),
        h("div.track", { "aria-hidden": "true" }, piece("start", start, ran), piece(each.failed ? "bad" : "run", ran, ends[at])),
        h("p", {}, each.reason ? `${each.reason}: ${each.message}` : under(each)));
    }));
  }

  function under(attempt) {
    if (attempt.end || data.job.finished) return "It has ended.";
    return data.job.phase === "Interrupted" ? "It was interrupted." : "It is under way.";
  }

  function showEvents() {
    happened.hidden = !data.events.length;
    events.replaceChildren(...[...data.events].reverse().map((each) => h(`tr${each.type === "Warning" ? ".warning" : ""}`, {},
      h("td", {}, `${age(each.time)} ago${each.count > 1 ? ` (x${each.count})` : ""}`),
      h("td", {}, each.reason), h("td", {}, each.about), h("td", {}, each.message))));
  }

  return {
    element,
    show(answer) {
      data = answer;
      element.hidden = false;
      const job = data.job;
      say(name, job.name || key);
      lines.element.hidden = job.deleted;
      calls.element.hidden = job.deleted || Boolean(job.finished);
      document.title = `${job.name} – disttrain`;
      showPhase(phase, job.phase);
      say(why, data.why);
      todo.hidden = !data.todo.length;
      todo.replaceChildren(...data.todo.map((sentence) => h("li", {}, sentence)));
      bar.update(job);
      pairs(facts, data.facts);
      mesh.update(data.ranks);
      showNumbers();
      showCurves();
      showSpent();
      showAttempts();
      showEvents();
    },
    tick() {
      if (data === null) return;
      showNumbers();
      showSpent();
    },
    close() {
      lines.close();
      calls.close();
      charts.forEach((each) => each.close());
      state("");
    },
  };
}

// A description list whose entries stay where they are.
function pairs(list, entries) {
  if (list.children.length !== entries.length) {
    list.replaceChildren(...entries.map(() => h("div", {}, h("dt"), h("dd"))));
  }
  entries.forEach(([label, value], at) => {
    say(list.children[at].firstChild, label);
    say(list.children[at].lastChild, value);
  });
}
