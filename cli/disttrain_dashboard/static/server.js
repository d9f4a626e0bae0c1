// Requests: the reader's token, polling with ETags, and what is shown while the server is away.

const KEY = "disttrain-token";
const NAMESPACES = "disttrain-namespaces";
const SECONDS = 2;
const LONGEST = 10;
const WITHOUT_TOKEN = 60;

// The token comes behind "#token=" and leaves the address at once. It is kept for this origin alone, port included.
export function takeToken() {
  const match = /^#token=([\w-]+)$/.exec(location.hash);
  if (match) {
    localStorage.setItem(KEY, match[1]);
    history.replaceState(null, "", "#/");
  }
}

// A token that was typed in is one of the cluster: it ends with this tab.
export function keep(token, namespaces) {
  if (token) sessionStorage.setItem(KEY, token);
  localStorage.setItem(NAMESPACES, namespaces);
}

export function forget() {
  sessionStorage.removeItem(KEY);
}

export function namespaces() {
  return localStorage.getItem(NAMESPACES) ?? "";
}

export function listPath() {
  return namespaces() ? `api/jobs?namespaces=${encodeURIComponent(namespaces())}` : "api/jobs";
}

export class Refused extends Error {
  // wanted: what the reader is asked for, "token" or "namespaces".
  constructor(status, message, wanted) {
    super(message);
    this.status = status;
    this.wanted = wanted;
  }
}

// The answer and its ETag; an answer of null: as it was.
export async function ask(path, etag, signal) {
  const token = sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);
  // Without one, a proxy before the server may have its own.
  const headers = token === null ? {} : { Authorization: `Bearer ${token}` };
  if (etag) headers["If-None-Match"] = etag;
  const response = await fetch(path, { headers, signal, cache: "no-store", credentials: "omit" });
  if (response.status === 304) return { answer: null, etag };
  const answer = await response.json();
  if (!response.ok) throw new Refused(response.status, String(answer.error), answer.ask);
  return { answer, etag: response.headers.get("ETag") };
}

// Asks again and again until the returned function is called. show(answer) at each change, state(sentence, wanted) when
// the server goes, or wants something of the reader ("" when it is back).
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
      let seconds = SECONDS;
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
        const refused = error instanceof Refused;
        state(refused ? error.message : "The server does not answer. Trying again …", refused ? error.wanted : "");
        seconds = refused && error.wanted === "token" ? WITHOUT_TOKEN : Math.min(SECONDS * failures, LONGEST);
      }
      await pause(seconds);
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
