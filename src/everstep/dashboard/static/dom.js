// The few things about the DOM that every part of the page needs. Text is always text: no part ever writes HTML.

/** Element with properties and children. `class`, `data-*`, `aria-*` and `role` are attributes, `on*` listeners. */
export function h(tag, props = {}, ...children) {
  const svg = tag === "svg" || props.svg;
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false || name === "svg") continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

/** Text that did not change is left alone: no layout, and a selection in it stays. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttributes(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === false) element.removeAttribute(name);
    else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
  }
}

/**
 * Make the children of `parent` those of `items`, by key: what stays keeps its element, and so its focus.
 * `make(item)` gives an element with a method `show(item)`.
 */
export function keyed(parent, items, key, make) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let child = before.get(name);
    if (child) before.delete(name);
    else {
      child = make(item);
      child.dataset.key = name;
    }
    child.show(item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const gone of before.values()) gone.remove();
}

/** Read aloud by screen readers, at most one sentence at a time. */
export function announce(text) {
  setText(document.getElementById("announcer"), text);
}

/** Value of a colour or length of the theme in use, for canvases. */
export function token(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function rem() {
  return parseFloat(getComputedStyle(document.documentElement).fontSize);
}

/** Calls `draw` once per frame however often it is asked, and not at all while the page is hidden. */
export function perFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}

/** Calls `draw` for each new width of the element, and for a new theme. */
export function onResize(element, draw) {
  let width = 0;
  new ResizeObserver((entries) => {
    const now = Math.round(entries[0].contentRect.width);
    if (now === width) return;
    width = now;
    draw();
  }).observe(element);
  document.addEventListener("everstep-theme", draw);
}

/** What this browser remembers of the reader's wishes; null: nothing, or it may not. */
export function kept(name) {
  try {
    return localStorage.getItem(name);
  } catch (error) {
    console.info(`${name} is not known`, error.name);
    return null;
  }
}

export function keep(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch (error) {
    console.info(`${name} is not kept`, error.name);
  }
}
