// Numbers and times in words, as the command shows them.

export function duration(seconds) {
  const left = Math.max(Math.floor(seconds), 0);
  if (left < 120) return `${left}s`;
  if (left < 3 * 3600) return `${Math.floor(left / 60)}m`;
  const minutes = Math.floor((left % 3600) / 60);
  if (left < 48 * 3600) return `${Math.floor(left / 3600)}h${minutes ? `${minutes}m` : ""}`;
  const hours = Math.floor((left % 86400) / 3600);
  return `${Math.floor(left / 86400)}d${hours && left < 10 * 86400 ? `${hours}h` : ""}`;
}

// Seconds since 1970, null where it is no time.
export function time(text) {
  const at = Date.parse(text);
  return Number.isNaN(at) ? null : at / 1000;
}

export function age(text, until = Date.now() / 1000) {
  const at = time(text);
  return at === null ? "" : duration(until - at);
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" });
}

export function figure(value) {
  if (value === null || value === undefined) return "";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return Number(value.toPrecision(4)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

export function count(value) {
  return value === null || value === undefined ? "" : Math.round(value).toLocaleString("en-US");
}

// Seconds that are left of a row, less what has passed since it was said.
export function left(job) {
  if (job.left === null) return "";
  const said = time(job.leftAt);
  const passed = said === null ? 0 : Date.now() / 1000 - said;
  return duration(Math.max(job.left - passed, 0));
}

export function percent(job) {
  return job.total > 0 && job.step !== null ? Math.min(Math.max(job.step / job.total, 0), 1) : null;
}
