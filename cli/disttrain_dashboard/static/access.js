// The form for the reader's own token, and for the namespaces whose jobs are listed.

import { h, say } from "./dom.js";
import { forget, keep, namespaces } from "./server.js";

export function access() {
  const token = h("input", { type: "password", id: "token", autocomplete: "off", spellcheck: "false" });
  const names = h("input", { type: "text", id: "namespaces", autocomplete: "off", spellcheck: "false", placeholder: "all" });
  const out = h("button", { type: "button", onclick: () => leave() }, "Forget the token");
  const note = h("p.note");
  const form = h("form.access", { "aria-label": "Access", hidden: "", onsubmit: (event) => { event.preventDefault(); enter(); } },
    h("label", { for: "token" }, "Token"), token, h("label", { for: "namespaces" }, "Namespaces"), names,
    h("button", { type: "submit" }, "Show jobs"), out, note);
  const button = h("button", { type: "button", hidden: "", onclick: () => toggle() }, "Token and namespaces");
  names.value = namespaces();

  function enter() {
    keep(token.value.trim(), names.value.split(/[\s,]+/).filter(Boolean).join(","));
    // Nothing of what another token has shown stays.
    location.reload();
  }

  function leave() {
    forget();
    location.reload();
  }

  function toggle() {
    form.hidden = !form.hidden;
    if (!form.hidden) token.focus();
  }

  return {
    form,
    button,
    // The server has readers with tokens of their own.
    offer() {
      button.hidden = false;
    },
    // wanted: "token" or "namespaces".
    want(wanted) {
      button.hidden = false;
      say(note, wanted === "token" ? "The token is kept in this tab alone, and ends with it." : "Name the namespaces whose jobs you may see, with commas between.");
      if (!form.hidden) return;
      form.hidden = false;
      (wanted === "token" ? token : names).focus();
    },
  };
}
