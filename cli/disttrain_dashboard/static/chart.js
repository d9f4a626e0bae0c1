// A line chart in SVG: axes, a legend, dotted lines where the job began anew, and the values under the pointer.

import { h, s, say } from "./dom.js";
import { figure } from "./words.js";

const HEIGHT = 220;
const MARGIN = { left: 56, right: 12, top: 10, bottom: 26 };

// Round numbers that cut the range into about so many parts.
export function ticks(low, high, parts) {
  const raw = (high - low) / parts || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= raw);
  const found = [];
  for (let at = Math.ceil(low / unit) * unit; at <= high + unit * 1e-9; at += unit) found.push(Math.abs(at) < unit * 1e-9 ? 0 : at);
  return found;
}

export function chart() {
  const drawing = s("svg", { role: "img", height: HEIGHT });
  const values = h("p.values");
  const legend = h("ul.legend");
  const title = h("h3");
  const element = h("figure.chart", {}, title, drawing, h("figcaption", {}, legend, values));
  let panel = null;
  let scale = null;

  const resized = new ResizeObserver(() => draw());
  resized.observe(element);
  drawing.addEventListener("pointermove", (event) => point(event.offsetX));
  drawing.addEventListener("pointerleave", () => point(null));

  function draw() {
    const width = element.clientWidth;
    const points = panel === null ? [] : panel.lines.flatMap((line) => line.points);
    if (!width || !points.length) return;
    const steps = points.map((each) => each[0]);
    const heights = points.map((each) => each[1]);
    const last = Math.max(...steps);
    // From step 0, unless all is seen from far on.
    const first = Math.min(...steps) < last / 4 ? 0 : Math.min(...steps);
    let [low, high] = [Math.min(...heights), Math.max(...heights)];
    if (low >= 0) low = 0;
    if (low === high) [low, high] = [low - 1, high + 1];
    high += (high - low) * 0.04;
    const right = width - MARGIN.right;
    const bottom = HEIGHT - MARGIN.bottom;
    const x = (step) => MARGIN.left + ((right - MARGIN.left) * (step - first)) / (last - first || 1);
    const y = (value) => bottom - ((bottom - MARGIN.top) * (value - low)) / (high - low);
    scale = { x, right, bottom };

    drawing.setAttribute("width", width);
    drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const parts = [];
    for (const at of ticks(low, high, 4)) {
      parts.push(s("line.grid", { x1: MARGIN.left, x2: right, y1: y(at), y2: y(at) }));
      parts.push(s("text.tick", { x: MARGIN.left - 6, y: y(at) + 4, "text-anchor": "end" }, figure(at)));
    }
    for (const at of ticks(first, last, Math.max(2, width / 130)).filter(Number.isInteger)) {
      parts.push(s("text.tick", { x: x(at), y: HEIGHT - 8, "text-anchor": "middle" }, figure(at)));
    }
    for (const step of panel.restarts.filter((each) => each >= first && each <= last)) {
      parts.push(s("line.restart", { x1: x(step), x2: x(step), y1: MARGIN.top, y2: bottom }));
    }
    panel.lines.forEach((line, number) => {
      const path = line.points.map((each) => `${x(each[0]).toFixed(1)},${y(each[1]).toFixed(1)}`);
      if (path.length > 1) parts.push(s(`polyline.line.c${number % 6}`, { points: path.join(" ") }));
      // One evaluation is a point, not a line.
      if (path.length < 12) {
        for (const each of line.points) parts.push(s(`circle.dot.c${number % 6}`, { cx: x(each[0]), cy: y(each[1]), r: 3 }));
      }
    });
    parts.push(s("line.pointer", { y1: MARGIN.top, y2: bottom, visibility: "hidden" }));
    drawing.replaceChildren(...parts);
    drawing.setAttribute("aria-label", `${panel.title} over steps. ${latest()}`);
    say(values, latest());
  }

  function latest() {
    return panel.lines.map((line) => worded(line, line.points[line.points.length - 1])).join(", ");
  }

  function worded(line, at) {
    return `${line.name} ${figure(at[1])} at step ${at[0]}`;
  }

  function point(x) {
    const mark = drawing.querySelector(".pointer");
    if (mark === null || scale === null) return;
    const near = (line) => line.points.reduce((best, each) =>
      Math.abs(scale.x(each[0]) - x) < Math.abs(scale.x(best[0]) - x) ? each : best);
    mark.setAttribute("visibility", x === null ? "hidden" : "visible");
    if (x === null) {
      say(values, latest());
      return;
    }
    const found = panel.lines.map((line) => [line, near(line)]);
    const at = scale.x(found[0][1][0]);
    mark.setAttribute("x1", at);
    mark.setAttribute("x2", at);
    say(values, found.map(([line, each]) => worded(line, each)).join(", "));
  }

  return {
    element,
    update(next) {
      panel = { ...next, lines: next.lines.filter((line) => line.points.length) };
      // A single figure is no curve: it stands among the details.
      element.hidden = !panel.lines.some((line) => line.points.length > 1);
      say(title, panel.title);
      const entries = panel.lines.map((line, number) => h(`li.c${number % 6}`, {}, line.name));
      if (panel.restarts.length) entries.push(h("li.restarts", {}, "restart"));
      legend.replaceChildren(...(panel.lines.length > 1 || panel.restarts.length ? entries : []));
      draw();
    },
    close: () => resized.disconnect(),
  };
}
