// The page: which view the address names, and the line that says whether the server answers.

import { access } from "./access.js";
import { say } from "./dom.js";
import { jobView } from "./job.js";
import { listView } from "./list.js";
import { listPath, poll, takeToken } from "./server.js";

const main = document.getElementById("main");
const link = document.getElementById("link");
const own = access();
let leave = () => {};

function state(sentence, wanted) {
  say(link, sentence);
  document.body.classList.toggle("away", sentence !== "");
  if (wanted) own.want(wanted);
}

function open() {
  leave();
  const match = /^#\/job\/(.+)$/.exec(location.hash);
  const key = match ? decoded(match[1]) : null;
  const view = key === null ? listView() : jobView(key, state);
  main.replaceChildren(view.element);
  window.scrollTo(0, 0);
  const path = key === null ? listPath() : `api/job?key=${encodeURIComponent(key)}`;
  const stop = poll(path, (answer) => {
    if (answer.asksForToken) own.offer();
    view.show(answer);
  }, state);
  // Ages and times that are left go on between two answers.
  const timer = setInterval(view.tick, 1000);
  leave = () => {
    stop();
    clearInterval(timer);
    view.close?.();
  };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

window.addEventListener("hashchange", () => {
  takeToken();
  open();
  main.focus({ preventScroll: true });
});
document.querySelector(".skip").addEventListener("click", (event) => {
  // Not a place of its own in the history.
  event.preventDefault();
  main.focus();
});
takeToken();
document.getElementById("title").after(own.button);
main.before(own.form);
open();
