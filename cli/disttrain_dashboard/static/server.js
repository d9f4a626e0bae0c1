// Requests: the token of the address, polling with ETags, and what is shown while the server is away.

const KEY = "disttrain-token";
const SECONDS = 2;
const LONGEST = 10;

// The token comes behind "#token=" and leaves the address at once. It is kept for this origin alone, port included.
export function takeToken() {
  const match = /^#token=([\w-]+)$/.exec(location.hash);
  if (match) {
    localStorage.setItem(KEY, match[1]);
    history.replaceState(null, "", "#/");
  }
}

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// The answer and its ETag; an answer of null: as it was.
export async function ask(path, etag, signal) {
  const headers = { Authorization: `Bearer ${localStorage.getItem(KEY) ?? ""}` };
  if (etag) headers["If-None-Match"] = etag;
  const response = await fetch(path, { headers, signal, cache: "no-store", credentials: "omit" });
  if (response.status === 304) return { answer: null, etag };
  const answer = await response.json();
  if (!response.ok) throw new Refused(response.status, String(answer.error));
  return { answer, etag: response.headers.get("ETag") };
}

// Asks again and again until the returned function is called. show(answer) at each change, state(sentence) when the
// server goes ("" when it is back).
export function poll(path, show, state) {
  const end = new AbortController();
  let etag = null;
  let failures = 0;
  let timer = null;
  let wake = () => {};
  const pause = (seconds) =>
    new Promise((resolve) => {
      wake = resolve;
      timer = setTimeout(resolve, seconds * 1000);
    });
  const look = async () => {
    while (!end.signal.aborted) {
      try {
        const found = await ask(path, etag, end.signal);
        etag = found.etag;
        failures = 0;
        state("");
        if (found.answer !== null) show(found.answer);
      } catch (error) {
        if (end.signal.aborted) return;
        failures += 1;
        etag = null;
        if (!(error instanceof Refused) && !(error instanceof TypeError)) console.error(error);
        state(error instanceof Refused ? error.message : "The server does not answer. Trying again …");
      }
      await pause(Math.min(SECONDS * Math.max(failures, 1), LONGEST));
      while (document.hidden && !end.signal.aborted) await pause(3600);
    }
  };
  const seen = () => {
    if (!document.hidden) {
      clearTimeout(timer);
      wake();
    }
  };
  document.addEventListener("visibilitychange", seen);
  // Another tab has opened the address of a new start.
  window.addEventListener("storage", seen);
  look();
  return () => {
    end.abort();
    document.removeEventListener("visibilitychange", seen);
    window.removeEventListener("storage", seen);
    clearTimeout(timer);
    wake();
  };
}
