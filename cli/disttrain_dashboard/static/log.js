// The last lines of a rank's log, followed while they are open.

import { h, say } from "./dom.js";
import { poll } from "./server.js";

const LINES = 200;

export function log(key) {
  const rank = h("input", { type: "number", id: "rank", min: "0", value: "0" });
  const button = h("button", { type: "submit" }, "Show log");
  const close = h("button", { type: "button", hidden: "", onclick: () => end() }, "Close");
  const state = h("p.note", { role: "status" });
  const lines = h("pre.log", { tabindex: "0", role: "log", "aria-label": "Log", hidden: "" });
  const form = h("form.bar", { onsubmit: (event) => { event.preventDefault(); open(); } },
    h("label", { for: "rank" }, "Rank"), rank, button, close);
  const element = h("section", { "aria-label": "Log" }, h("h2", {}, "Log"), form, state, lines);
  let stop = null;

  function open() {
    end();
    close.hidden = lines.hidden = false;
    const path = `api/log?key=${encodeURIComponent(key)}&rank=${encodeURIComponent(rank.value || "0")}&tail=${LINES}`;
    stop = poll(path, show, (sentence) => say(state, sentence));
  }

  function show(answer) {
    const atEnd = lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 8;
    say(lines, answer.lines.join("\n"));
    if (atEnd) lines.scrollTop = lines.scrollHeight;
    say(state, answer.lines.length ? "" : "No line yet.");
  }

  function end() {
    stop?.();
    stop = null;
    say(lines, "");
    say(state, "");
    close.hidden = lines.hidden = true;
  }

  return {
    element,
    choose(number) {
      rank.value = String(number);
      open();
      lines.scrollIntoView({ block: "nearest" });
    },
    close: end,
  };
}
