// Elements and texts. Whatever a job holds becomes text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

// h("a.link", {href: "#/"}, "text", child): an element with classes, attributes and children.
export function h(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  return fill(document.createElement(tag), classes, attributes, children);
}

// The same for SVG.
export function s(kind, attributes = {}, ...children) {
  const [tag, ...classes] = kind.split(".");
  return fill(document.createElementNS(SVG, tag), classes, attributes, children);
}

function fill(element, classes, attributes, children) {
  if (classes.length) element.classList.add(...classes);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// Sets the text where it is another one: what is selected, or read aloud, stays.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function set(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}
