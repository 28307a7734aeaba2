// Making and finding elements. Text only ever becomes text nodes: nothing on this page parses HTML at run time.

const SVG = 'http://www.w3.org/2000/svg';

export const find = (id) => document.getElementById(id);

// h('button', {class: 'x', onclick: f, hidden: true}, 'text', node, ...): properties that begin with "on" are
// listeners, true and false are present and absent attributes.
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (typeof value === 'boolean') element.toggleAttribute(name, value);
    else if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, 'svg');
  svg.setAttribute('aria-hidden', 'true');
  const use = document.createElementNS(SVG, 'use');
  use.setAttribute('href', `#i-${name}`);
  svg.append(use);
  return svg;
}

export function iconButton(name, label, onclick) {
  return h('button', { class: 'icon small', type: 'button', 'aria-label': label, title: label, onclick }, icon(name));
}

// Writing the same text again would make the browser lay out again.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Copies; the button shows a tick for a moment. Pages that are not from localhost or https have no clipboard
// object, so the old way stands behind it.
export async function copyText(text, button) {
  let done = false;
  try {
    await navigator.clipboard.writeText(text);
    done = true;
  } catch {
    const area = h('textarea', { class: 'hidden-text', readonly: true });
    area.value = text;
    document.body.append(area);
    area.select();
    done = document.execCommand('copy');
    area.remove();
    button.focus();
  }
  announce(done ? 'Copied' : 'The browser does not allow copying');
  if (!done) return;
  const use = button.querySelector('use');
  use.setAttribute('href', '#i-check');
  setTimeout(() => use.setAttribute('href', '#i-copy'), 1400);
}

// Said once by screen readers, when they are free. Emptied first: the same words again would not be heard.
export function announce(text) {
  find('announce').textContent = '';
  setTimeout(() => { find('announce').textContent = text; }, 50);
}

let toastTimer = 0;
// A line at the bottom, with at most one thing to do about it.
export function toast(text, action, onclick) {
  const box = find('toast');
  const hide = () => { box.hidden = true; };
  clearTimeout(toastTimer);
  box.replaceChildren(h('span', {}, text));
  const act = () => { hide(); onclick(); };
  if (action) box.append(h('button', { type: 'button', class: 'plain', onclick: act }, action));
  box.hidden = false;
  toastTimer = setTimeout(hide, 7000);
}

export const reducedMotion = matchMedia('(prefers-reduced-motion: reduce)');

const whole = new Intl.NumberFormat('en');
export const count = (n) => whole.format(Math.round(n));
export function rate(n) {
  if (!Number.isFinite(n)) return '–';
  return n > 0 && n < 10 ? n.toFixed(1) : count(n);
}
