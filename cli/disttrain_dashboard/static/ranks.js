// The mesh: a cell for each rank in the order of pipeline stage, replica, shard, context and tensor.

import { h, say, set } from "./dom.js";
import { count } from "./words.js";

const STATES = { r: "running", w: "waiting", d: "done", f: "failed", s: "stopped", "-": "no pod" };
const NUMBERED = 128;

// showLog(rank), showStacks(rank): what the reader wants of it.
export function ranks(showLog, showStacks) {
  const cells = h("div.cells", { role: "group", "aria-label": "Ranks; arrow keys move, Enter chooses" });
  const counts = h("ul.states");
  const about = h("p.about", { role: "status" });
  const log = h("button", { type: "button", onclick: () => showLog(chosen) }, "Show its log");
  const stacks = h("button", { type: "button", onclick: () => showStacks(chosen) }, "Show its stacks");
  const more = h("span.bar", { hidden: "" }, log, stacks);
  const element = h("section", { "aria-label": "Ranks" }, h("h2", {}, "Ranks"), counts, cells, h("div.bar", {}, about, more));
  let data = null;
  let buttons = [];
  let shape = "";
  let chosen = null;
  let current = 0;

  cells.addEventListener("click", (event) => {
    const cell = event.target.closest("button");
    if (cell !== null) pick(Number(cell.dataset.rank));
  });
  cells.addEventListener("keydown", (event) => {
    const next = neighbour(event.key);
    if (next === null) return;
    event.preventDefault();
    focus(next);
  });

  function focus(rank) {
    buttons[current].tabIndex = -1;
    current = rank;
    buttons[current].tabIndex = 0;
    buttons[current].focus();
  }

  function neighbour(key) {
    const last = buttons.length - 1;
    if (key === "ArrowRight") return Math.min(current + 1, last);
    if (key === "ArrowLeft") return Math.max(current - 1, 0);
    if (key === "Home") return 0;
    if (key === "End") return last;
    if (key !== "ArrowDown" && key !== "ArrowUp") return null;
    // The nearest cell of the next row, as rows are on this screen.
    const way = key === "ArrowDown" ? 1 : -1;
    const { offsetTop: top, offsetLeft: left } = buttons[current];
    let best = null;
    for (let at = current + way; at >= 0 && at <= last; at += way) {
      const cell = buttons[at];
      if (cell.offsetTop === top) continue;
      if (best !== null && cell.offsetTop !== buttons[best].offsetTop) break;
      if (best === null || Math.abs(cell.offsetLeft - left) < Math.abs(buttons[best].offsetLeft - left)) best = at;
    }
    return best;
  }

  function pick(rank) {
    if (chosen !== null) set(buttons[chosen], "aria-pressed", null);
    chosen = rank;
    set(buttons[rank], "aria-pressed", "true");
    if (rank !== current) focus(rank);
    more.hidden = false;
    describe();
  }

  function describe() {
    if (chosen === null) return;
    const [pod, node] = data.pods[data.pod[chosen]] ?? ["", ""];
    const step = data.steps?.[chosen];
    const words = [`Rank ${chosen}: ${STATES[data.states[chosen]]}`, pod && `pod ${pod}`, node && `node ${node}`];
    say(about, [...words, step !== null && step !== undefined && `step ${count(step)}`].filter(Boolean).join(", "));
  }

  // Blocks: ranks of a replica stand together, replicas of a stage below its name.
  function build() {
    const [stages, replicas, ...inner] = data.degrees;
    const size = inner.reduce((product, degree) => product * degree, 1);
    buttons = Array.from({ length: data.world }, (_, rank) => h("button.cell", { type: "button", tabindex: "-1", "data-rank": rank }));
    current = Math.min(current, data.world - 1);
    buttons[current].tabIndex = 0;
    if (data.world <= NUMBERED) buttons.forEach((button, rank) => say(button, String(rank)));
    cells.classList.toggle("small", data.world > NUMBERED);
    const parts = [];
    for (let stage = 0; stage < stages; stage += 1) {
      const first = stage * replicas * size;
      const blocks = [];
      for (let replica = 0; replica < replicas; replica += 1) {
        const own = buttons.slice(first + replica * size, first + (replica + 1) * size);
        if (size > 1) blocks.push(h("div.replica", { title: `replica ${replica}` }, ...own));
        else blocks.push(...own);
      }
      const name = stages > 1 ? h("span.stage-name", {}, `stage ${stage}`) : null;
      parts.push(h("div.stage", {}, name, h("div.blocks", {}, ...blocks)));
    }
    cells.replaceChildren(...parts);
  }

  return {
    element,
    update(next) {
      element.hidden = next === null;
      if (next === null) return;
      if (next.degrees === undefined) {
        say(about, `${count(next.world)} ranks; at most ${count(next.most)} are drawn.`);
        return;
      }
      const before = data?.states ?? "";
      data = next;
      if (shape !== `${data.degrees}`) {
        shape = `${data.degrees}`;
        chosen = null;
        more.hidden = true;
        build();
      }
      buttons.forEach((button, rank) => {
        const state = data.states[rank];
        if (before[rank] === state && button.dataset.state === state) return;
        button.dataset.state = state;
        set(button, "aria-label", `Rank ${rank}, ${STATES[state]}`);
      });
      const sums = {};
      for (const state of data.states) sums[state] = (sums[state] ?? 0) + 1;
      counts.replaceChildren(...Object.entries(sums).map(([state, number]) =>
        h("li", { "data-state": state }, `${count(number)} ${STATES[state]}`)));
      describe();
    },
  };
}
