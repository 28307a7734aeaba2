// Markdown of an answer as DOM nodes: headings, lists, quotes, tables, code, emphasis, links. HTML in the text is
// text. Links go to http, https and mailto only, and pictures become links: nothing is fetched because a model said
// so. An answer that grows is drawn again from its last block on.
import { copyText, h, icon } from './dom.js';
import { colourLine, languageOf } from './highlight.js';

const DEEPEST = 10;         // lists and quotes within each other; deeper ones are text
const LONGEST_INLINE = 20000;  // characters of one paragraph that are searched for emphasis and links

// --- blocks: lines become values {kind, from, to, ...}; `to` is one past the last line

const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: +|$)/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const HEADING = /^ {0,3}(#{1,6})(?=[ \t]|$)/;
const QUOTE = /^ {0,3}> ?/;

const isBlank = (line) => line.trim() === '';
const indentOf = (line) => line.length - line.trimStart().length;

function rowOf(line) {
  const text = line.trim().replace(/^\|/, '').replace(/\|$/, '');
  const cells = [''];
  for (let i = 0; i < text.length; ++i) {
    if (text[i] === '\\' && text[i + 1] === '|') cells[cells.length - 1] += text[++i];
    else if (text[i] === '|') cells.push('');
    else cells[cells.length - 1] += text[i];
  }
  return cells.map((cell) => cell.trim());
}

function alignmentOf(line) {
  if (line === undefined || !line.includes('-') || !/^[\s|:-]+$/.test(line)) return null;
  const cells = rowOf(line);
  if (!cells.every((cell) => /^:?-+:?$/.test(cell))) return null;
  return cells.map((cell) => (cell.endsWith(':') ? (cell.startsWith(':') ? 'center' : 'right') : ''));
}

function isTable(lines, i) {
  if (!lines[i].includes('|')) return false;
  const alignment = alignmentOf(lines[i + 1]);
  return alignment !== null && alignment.length === rowOf(lines[i]).length;
}

// Does this line end a paragraph above it?
function interrupts(lines, i) {
  const line = lines[i], item = ITEM.exec(line);
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || isTable(lines, i) ||
    (item !== null && item[0].length < line.length && (item[2].length === 1 || item[2].startsWith('1')));
}

function fenceAt(lines, i) {
  const [, indent, mark, info] = FENCE.exec(lines[i]);
  let end = i + 1;
  const closes = (line) => {
    const text = line.trim();
    return text.length >= mark.length && text === mark[0].repeat(text.length);
  };
  while (end < lines.length && !closes(lines[end])) ++end;
  const strip = (line) => line.slice(Math.min(indent.length, indentOf(line)));
  return { kind: 'code', from: i, to: Math.min(end + 1, lines.length), closed: end < lines.length,
    language: info.trim().split(/\s/)[0], lines: lines.slice(i + 1, end).map(strip) };
}

function quoteAt(lines, i, depth) {
  let end = i;
  const inner = [];
  while (end < lines.length && !isBlank(lines[end]) && (QUOTE.test(lines[end]) || !interrupts(lines, end))) {
    inner.push(lines[end++].replace(QUOTE, ''));
  }
  return { kind: 'quote', from: i, to: end, blocks: blocksOf(inner, depth + 1) };
}

// A list is lenient about how far its inner lists are indented: two columns are enough.
function listAt(lines, i, depth) {
  const [, indent, mark] = ITEM.exec(lines[i]);
  const ordered = mark.length > 1, base = indent.length, items = [];
  let at = i, loose = false;
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length >= base + 2 || (item[2].length > 1) !== ordered || RULE.test(lines[at])) break;
    const width = item[0].length, inner = [lines[at].slice(width)];
    for (++at; at < lines.length; ++at) {
      const line = lines[at];
      if (isBlank(line)) { inner.push(''); continue; }
      const depthOf = indentOf(line), after = inner[inner.length - 1];
      if (depthOf >= base + 2) inner.push(line.slice(Math.min(depthOf, width)));
      else if (after !== '' && !ITEM.test(line) && !interrupts(lines, at)) inner.push(line);
      else break;
    }
    const blanks = inner.length - Math.max(0, inner.findLastIndex((line) => line !== '')) - 1;
    const text = inner.slice(0, inner.length - blanks);
    const more = at < lines.length && ITEM.test(lines[at]);
    if (text.includes('', 1) || (blanks && more)) loose = true;
    items.push(blocksOf(text, depth + 1));
    if (blanks && !more) { at -= blanks; break; }
  }
  return { kind: 'list', from: i, to: at, ordered, start: ordered ? parseInt(mark, 10) : 1, loose, items };
}

function tableAt(lines, i) {
  const alignment = alignmentOf(lines[i + 1]), head = rowOf(lines[i]), rows = [];
  let end = i + 2;
  while (end < lines.length && !isBlank(lines[end]) && lines[end].includes('|')) rows.push(rowOf(lines[end++]));
  return { kind: 'table', from: i, to: end, alignment, head, rows };
}

function paragraphAt(lines, i) {
  let end = i + 1;
  while (end < lines.length && !isBlank(lines[end]) && !interrupts(lines, end)) ++end;
  return { kind: 'paragraph', from: i, to: end, text: lines.slice(i, end).map((line) => line.trimStart()).join('\n') };
}

function blockAt(lines, i, depth) {
  const line = lines[i];
  if (FENCE.test(line)) return fenceAt(lines, i);
  const heading = HEADING.exec(line);
  if (heading) {
    const text = line.slice(heading[0].length).trim().replace(/(?:^|[ \t])#+$/, '');
    return { kind: 'heading', from: i, to: i + 1, level: heading[1].length, text };
  }
  if (RULE.test(line)) return { kind: 'rule', from: i, to: i + 1 };
  if (depth < DEEPEST && QUOTE.test(line)) return quoteAt(lines, i, depth);
  if (depth < DEEPEST && ITEM.test(line)) return listAt(lines, i, depth);
  if (isTable(lines, i)) return tableAt(lines, i);
  return paragraphAt(lines, i);
}

function blocksOf(lines, depth = 0) {
  const blocks = [];
  for (let i = 0; i < lines.length;) {
    if (isBlank(lines[i])) { ++i; continue; }
    blocks.push(blockAt(lines, i, depth));
    i = blocks[blocks.length - 1].to;
  }
  return blocks;
}

// --- text within a block

const SPECIAL = /[\\`*_~[!<\n]|https?:\/\//g;
const ADDRESS = /https?:\/\/[^\s<>"'`]+/y;
const isWord = (c) => c !== undefined && /[\p{L}\p{N}_]/u.test(c);
const isSpace = (c) => c === undefined || /\s/.test(c);

function safeAddress(text) {
  try {
    const url = new URL(text);
    return ['http:', 'https:', 'mailto:'].includes(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

function link(address, ...children) {
  return h('a', { href: address, target: '_blank', rel: 'noopener noreferrer nofollow' }, ...children);
}

// "[label](address "title")" at `at`: {label, address, end}, or null.
function linkAt(text, at) {
  let depth = 0, close = at;
  for (; close < text.length && close < at + 1000; ++close) {
    if (text[close] === '\\') ++close;
    else if (text[close] === '[') ++depth;
    else if (text[close] === ']' && --depth === 0) break;
  }
  if (text[close] !== ']' || text[close + 1] !== '(') return null;
  let end = close + 2;
  for (depth = 1; end < text.length && end < close + 2000; ++end) {
    if (text[end] === '(') ++depth;
    else if (text[end] === ')' && --depth === 0) break;
  }
  if (text[end] !== ')') return null;
  const address = safeAddress(text.slice(close + 2, end).trim().split(/\s/)[0].replace(/^<|>$/g, ''));
  return { label: text.slice(at + 1, close), address, end: end + 1 };
}

// Marks of emphasis that wait for their partner stand among the nodes; pairs become elements.
function pairUp(parts) {
  const bottom = {};  // nothing below this index opens such a mark
  for (let i = 0; i < parts.length; ++i) {
    const closer = parts[i];
    if (!closer.mark || !closer.closes) continue;
    let j = i - 1;
    const stop = bottom[closer.mark] ?? 0;
    while (j >= stop && !(parts[j].mark === closer.mark && parts[j].opens && parts[j].size > 0)) --j;
    if (j < stop) { bottom[closer.mark] = i; continue; }
    const opener = parts[j], tilde = closer.mark === '~';
    const size = tilde ? 2 : Math.min(2, opener.size, closer.size);
    if (tilde && (opener.size !== 2 || closer.size !== 2)) continue;
    const element = h(tilde ? 'del' : size === 2 ? 'strong' : 'em', {}, ...parts.slice(j + 1, i).map(nodeOf));
    opener.size -= size;
    closer.size -= size;
    // Marks that are used up leave the list, so that nobody looks through them again.
    const from = opener.size ? j + 1 : j, to = closer.size ? i : i + 1;
    parts.splice(from, to - from, { node: element });
    i = from;
    for (const mark of Object.keys(bottom)) bottom[mark] = Math.min(bottom[mark], j);
  }
  return parts.map(nodeOf);
}

const nodeOf = (part) => part.node ?? document.createTextNode(part.mark.repeat(part.size));

function markAt(text, at) {
  const mark = text[at];
  let size = 1;
  while (text[at + size] === mark) ++size;
  const before = text[at - 1], after = text[at + size];
  let opens = !isSpace(after), closes = !isSpace(before);
  if (mark === '_') {
    opens = opens && !isWord(before);
    closes = closes && !isWord(after);
  }
  return { mark, size, opens, closes };
}

function codeSpanAt(text, at, unclosed) {
  let size = 1;
  while (text[at + size] === '`') ++size;
  const mark = '`'.repeat(size);
  if (unclosed.has(size)) return { size };
  let end = text.indexOf(mark, at + size);
  while (end >= 0 && (text[end + size] === '`' || text[end - 1] === '`')) {
    while (text[end] === '`') ++end;
    end = text.indexOf(mark, end);
  }
  if (end < 0) { unclosed.add(size); return { size }; }
  let inner = text.slice(at + size, end).replaceAll('\n', ' ');
  if (inner.startsWith(' ') && inner.endsWith(' ') && inner.trim()) inner = inner.slice(1, -1);
  return { size, inner, end: end + size };
}

function bareAddressAt(text, at) {
  if (isWord(text[at - 1])) return null;
  ADDRESS.lastIndex = at;
  let found = ADDRESS.exec(text)?.[0] ?? '';
  while (/[.,;:!?*_~\]]$/.test(found) || (found.endsWith(')') && !found.includes('('))) found = found.slice(0, -1);
  const address = safeAddress(found);
  return address && { found, address };
}

// One special place in the text: what it becomes, and where the text goes on. Null: it is plain.
function specialAt(text, at, state) {
  const c = text[at];
  if (c === '\n') return { node: h('br'), end: at + 1 };
  if (c === '\\') {
    if (text[at + 1] === '\n') return { node: h('br'), end: at + 2 };
    return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? '') ? { text: text[at + 1], end: at + 2 } : null;
  }
  if (c === '`') {
    const { size, inner, end } = codeSpanAt(text, at, state.unclosed);
    return inner === undefined ? { text: '`'.repeat(size), end: at + size } : { node: h('code', {}, inner), end };
  }
  if (c === '*' || c === '_' || c === '~') {
    const mark = markAt(text, at);
    return { ...mark, end: at + mark.size };
  }
  if (c === '[' || c === '!') {
    if (c === '!' && text[at + 1] !== '[') return null;
    const found = state.depth < 3 ? linkAt(text, c === '!' ? at + 1 : at) : null;
    if (!found || !found.address) return null;
    const inner = c === '!' ? [found.label || found.address] : inlineNodes(found.label, state.depth + 1);
    return { node: link(found.address, ...inner), end: found.end };
  }
  if (c === '<') {
    const close = text.indexOf('>', at),
          address = close < 0 || close > at + 500 ? null : safeAddress(text.slice(at + 1, close));
    return address && !/\s/.test(text.slice(at, close))
      ? { node: link(address, text.slice(at + 1, close)), end: close + 1 } : null;
  }
  const bare = state.depth ? null : bareAddressAt(text, at);
  return bare && { node: link(bare.address, bare.found), end: at + bare.found.length };
}

function inlineNodes(text, depth = 0) {
  if (text.length > LONGEST_INLINE) return [document.createTextNode(text)];
  const parts = [], state = { depth, unclosed: new Set() };
  let plain = '', at = 0;
  const flush = () => { if (plain) parts.push({ node: document.createTextNode(plain) }); plain = ''; };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at === text.length) break;
    const found = specialAt(text, at, state);
    if (!found) { plain += text[at++]; continue; }
    at = found.end;
    if (found.text !== undefined) { plain += found.text; continue; }
    flush();
    parts.push(found);
  }
  flush();
  return pairUp(parts);
}

// --- blocks as nodes

// Code that may still grow: finished lines stay as they are.
class CodeView {
  constructor(block) {
    this.language = languageOf(block.language);
    this.code = h('code');
    this.done = 0;
    this.state = null;
    const copy = h('button', { class: 'icon small', type: 'button', 'aria-label': 'Copy code', title: 'Copy code',
      onclick: () => copyText(this.text, copy) }, icon('copy'));
    this.node = h('figure', { class: 'code' },
      h('figcaption', {}, h('span', { translate: 'no' }, block.language || 'text'), copy),
      h('pre', { tabindex: '0', translate: 'no' }, this.code));
    this.update(block);
  }

  update(block) {
    this.text = block.lines.join('\n');
    const whole = block.closed ? block.lines.length : block.lines.length - 1;
    while (this.code.childNodes.length > this.done) this.code.lastChild.remove();
    for (; this.done < whole; ++this.done) this.#line(block.lines[this.done], this.done + 1 < block.lines.length, true);
    if (!block.closed && block.lines.length) this.#line(block.lines[this.done], false, false);
  }

  #line(line, more, keep) {
    const [nodes, state] = colourLine(this.language, line, this.state);
    this.code.append(h('span', {}, ...nodes, more || keep ? '\n' : ''));
    if (keep) this.state = state;
  }
}

function itemNode(blocks, loose) {
  const item = h('li'), first = blocks[0];
  let rest = blocks;
  if (first?.kind === 'paragraph') {
    const task = /^\[([ xX])\] /.exec(first.text);
    if (task) {
      item.className = 'task';
      item.append(h('input', {
        type: 'checkbox',
        disabled: true,
        checked: task[1] !== ' ',
        'aria-label': task[1] === ' ' ? 'to do' : 'done'
      }));
    }
    const nodes = inlineNodes(task ? first.text.slice(4) : first.text);
    if (loose) item.append(h('p', {}, ...nodes));
    else item.append(...nodes);
    rest = blocks.slice(1);
  }
  item.append(...rest.map((block) => blockNode(block)));
  return item;
}

function tableNode({ alignment, head, rows }) {
  const cells = (tag, row) => h('tr', {}, ...alignment.map((align, k) =>
    h(tag, { class: align && `to-${align}`, scope: tag === 'th' ? 'col' : undefined }, ...inlineNodes(row[k] ?? ''))));
  return h('div', { class: 'table', tabindex: '0', role: 'region', 'aria-label': 'Table' },
    h('table', {}, h('thead', {}, cells('th', head)), h('tbody', {}, ...rows.map((row) => cells('td', row)))));
}

function blockNode(block) {
  switch (block.kind) {
    case 'code': return new CodeView(block).node;
    case 'heading':
      return h(`h${Math.min(block.level + 2, 6)}`, { class: `level-${block.level}` }, ...inlineNodes(block.text));
    case 'rule': return h('hr');
    case 'quote': return h('blockquote', {}, ...block.blocks.map((inner) => blockNode(inner)));
    case 'list':
      return h(block.ordered ? 'ol' : 'ul', { start: block.ordered && block.start !== 1 ? block.start : undefined },
        ...block.items.map((item) => itemNode(item, block.loose)));
    case 'table': return tableNode(block);
    default: return h('p', {}, ...inlineNodes(block.text));
  }
}

// Draws a text into `root`, and again as it grows. A block is settled once the two lines that begin the one after it
// are whole (two, because a table shows in its second line); only what follows is read again.
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.#reset();
  }

  #reset() {
    this.root.replaceChildren();
    this.text = '';
    this.settled = 0;  // characters that are drawn for good
    this.tail = [];    // [{source, node, code, language}] of the blocks after them
  }

  update(text) {
    if (text === this.text) return;
    if (!text.startsWith(this.text)) this.#reset();
    this.text = text;
    const lines = text.slice(this.settled).split('\n'), blocks = blocksOf(lines);
    while (this.tail.length > blocks.length) this.tail.pop().node.remove();
    blocks.forEach((block, k) => this.#draw(block, lines.slice(block.from, block.to).join('\n'), k));
    const open = blocks.findLastIndex((block) => block.from + 2 < lines.length);
    if (open < 1) return;
    this.tail.splice(0, open);
    for (let k = 0; k < blocks[open].from; ++k) this.settled += lines[k].length + 1;
  }

  #draw(block, source, k) {
    const old = this.tail[k];
    if (old && old.source === source && old.closed === block.closed) return;
    if (old?.code && block.kind === 'code' && old.language === block.language) {
      old.code.update(block);
      Object.assign(old, { source, closed: block.closed });
      return;
    }
    const code = block.kind === 'code' ? new CodeView(block) : null, node = code?.node ?? blockNode(block);
    if (old) old.node.replaceWith(node);
    else this.root.append(node);
    this.tail[k] = { source, node, code, language: block.language, closed: block.closed };
  }
}
