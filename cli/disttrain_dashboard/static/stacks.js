// Where a rank is at the moment: the calls of all its threads, asked for once with each press of the button.

import { h, say } from "./dom.js";
import { ask } from "./server.js";

export function stacks(key) {
  const rank = h("input", { type: "number", id: "stacks-rank", min: "0", value: "0" });
  const button = h("button", { type: "submit" }, "Show stacks");
  const state = h("p.note", { role: "status" });
  const lines = h("pre.log", { tabindex: "0", role: "region", "aria-label": "Calls of the rank's threads", hidden: "" });
  const form = h("form.bar", { onsubmit: (event) => { event.preventDefault(); take(); } },
    h("label", { for: "stacks-rank" }, "Rank"), rank, button);
  const element = h("section", { "aria-label": "Stacks" }, h("h2", {}, "Stacks"), form, state, lines);
  let asking = new AbortController();

  async function take() {
    asking.abort();
    const mine = new AbortController();
    asking = mine;
    say(state, "Asking …");
    const path = `api/stacks?key=${encodeURIComponent(key)}&rank=${encodeURIComponent(rank.value || "0")}`;
    try {
      const { answer } = await ask(path, null, mine.signal);
      say(lines, answer.lines.join("\n"));
      lines.hidden = false;
      say(state, `Rank ${rank.value || "0"} at ${new Date().toLocaleTimeString()}, the innermost call first.`);
    } catch (error) {
      if (mine.signal.aborted) return;
      lines.hidden = true;
      say(state, error instanceof TypeError ? "The server does not answer." : error.message);
    }
  }

  return {
    element,
    choose(number) {
      rank.value = String(number);
      take();
      element.scrollIntoView({ block: "nearest" });
    },
    close: () => asking.abort(),
  };
}
