// The picture of expert activity: one row for each layer, one column for each expert, coloured by its share of the
// recent tokens against an even share. Values glide to new ones. Every cell can be asked by pointer or arrow keys.
import { h, reducedMotion, setText } from './dom.js';

// Lightness falls (light theme) or rises (dark) all the way, so that the order survives colour blindness and grey.
const SCALES = {
  light: ['#e9eeef', '#f8e7bd', '#f8c274', '#ee8850', '#cc4b59', '#8c2a68', '#43164f'],
  dark: ['#1f262b', '#37214f', '#70266a', '#b1364f', '#e06a33', '#f6ab3d', '#fbeaa0'],
};
const HOTTEST = 8;  // even shares; the end of the scale
const position = (share) => Math.min(1, Math.log2(1 + Math.max(0, share)) / Math.log2(1 + HOTTEST));
const TICKS = [0, 1, 3, HOTTEST];
const MANY = 2000;  // cells that are drawn one by one
const GLIDE_MS = 220, FRAME_MS = 40;  // a glide needs no more than 25 pictures a second

function channels(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

// 256 colours, [r, g, b] each.
function ramp(anchors) {
  const stops = anchors.map(channels), colours = [];
  for (let i = 0; i < 256; ++i) {
    const x = (i / 255) * (stops.length - 1), k = Math.min(Math.floor(x), stops.length - 2);
    colours.push(stops[k].map((from, c) => Math.round(from + (stops[k + 1][c] - from) * (x - k))));
  }
  return colours;
}
const RAMPS = { light: ramp(SCALES.light), dark: ramp(SCALES.dark) };
const BYTES = Object.fromEntries(Object.entries(RAMPS).map(([name, colours]) =>
  [name, new Uint8Array(colours.flatMap((rgb) => [...rgb, 255]))]));
const CSS = Object.fromEntries(
  Object.entries(RAMPS).map(([name, colours]) => [name, colours.map((rgb) => `rgb(${rgb.join()})`)]));

export function isDark() {
  const { theme } = document.documentElement.dataset;
  return theme ? theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
}

export class ExpertMap {
  // room: how high the picture may become, in CSS pixels.
  constructor(root, { room, largestCell }) {
    Object.assign(
      this, { root, room, largestCell, shape: null, shown: null, wanted: null, cursor: null, frame: 0, before: 0 });
    this.canvas = h('canvas', {
      tabindex: '0',
      role: 'application',
      'aria-label': 'No activity yet',
      'aria-roledescription': 'picture of expert activity'
    });
    this.readout = h('p', { class: 'readout', 'aria-live': 'polite' });
    this.bar = h('canvas', { class: 'legend-bar', width: '256', height: '1', 'aria-hidden': 'true' });
    this.ticks = h('div', { class: 'legend-ticks', 'aria-hidden': 'true' });
    this.empty = h('p', { class: 'note' }, 'No expert activity yet: it appears while the model answers.');
    this.legend = h('div', { class: 'legend' }, this.bar, this.ticks);
    this.filled = h('div', { hidden: true }, this.canvas, this.readout, this.legend);
    root.append(this.empty, this.filled);
    this.#listen();
    this.#legend();
  }

  #listen() {
    const { canvas } = this;
    canvas.addEventListener('pointermove', (event) => this.#point(event));
    canvas.addEventListener('pointerdown', (event) => this.#point(event));
    canvas.addEventListener('pointerleave', () => this.#setCursor(null));
    canvas.addEventListener('focus', () => { if (canvas.matches(':focus-visible')) this.#setCursor(this.#hottest()); });
    canvas.addEventListener('blur', () => this.#setCursor(null));
    canvas.addEventListener('keydown', (event) => this.#key(event));
    new ResizeObserver(() => this.#draw()).observe(this.root);
    const repaint = () => { this.#legend(); this.#draw(); };
    addEventListener('themechange', repaint);
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', repaint);
  }

  // experts: the object of kt/status, or null.
  update(experts) {
    const rows = experts?.layers?.length ?? 0, columns = experts?.experts ?? 0;
    this.filled.hidden = !(rows && columns && experts.tokens > 0);
    this.empty.hidden = !this.filled.hidden;
    if (this.filled.hidden) return;
    const wanted = new Float32Array(rows * columns);
    for (let r = 0; r < rows; ++r) {
      for (let c = 0; c < columns; ++c) wanted[r * columns + c] = Number(experts.heat[r]?.[c]) || 0;
    }
    if (this.shape?.rows !== rows || this.shape?.columns !== columns) this.shown = new Float32Array(rows * columns);
    this.shape = { rows, columns, layers: experts.layers };
    this.wanted = wanted;                            // shares
    this.target = wanted.map((share) => 255 * position(share));  // colours; `shown` glides to them
    this.#describe(experts);
    if (reducedMotion.matches || document.hidden) {
      this.shown.set(this.target);
      this.#draw();
    } else {
      if (!this.frame) this.before = performance.now();
      this.frame ||= requestAnimationFrame((now) => this.#glide(now));
    }
  }

  #glide(now) {
    if (now - this.before < FRAME_MS) {
      this.frame = requestAnimationFrame((later) => this.#glide(later));
      return;
    }
    const step = 1 - Math.exp(-Math.max(0, now - this.before) / GLIDE_MS), { shown, target } = this;
    this.before = now;
    let far = 0;
    for (let i = 0; i < target.length; ++i) {
      shown[i] += (target[i] - shown[i]) * step;
      far = Math.max(far, Math.abs(target[i] - shown[i]));
    }
    this.#draw();
    this.frame = far > 0.5 ? requestAnimationFrame((later) => this.#glide(later)) : 0;
  }

  #hottest() {
    let best = 0;
    this.wanted.forEach((share, i) => { if (share > this.wanted[best]) best = i; });
    return best;
  }

  #name(i) {
    const { columns, layers } = this.shape;
    return `layer ${layers[Math.floor(i / columns)]}, expert ${i % columns}: ${this.wanted[i].toFixed(1)}× even share`;
  }

  #describe(experts) {
    const { rows, columns } = this.shape, hot = this.#hottest();
    let cold = 0;
    for (const share of this.wanted) if (share < 0.1) ++cold;
    const text =
      `${columns} experts in each of ${rows} layers, ${experts.top_k} for each token. Hottest: ${this.#name(hot)}. ` +
      `${Math.round((100 * cold) / this.wanted.length)} % of them are cold.`;
    if (this.canvas.getAttribute('aria-label') !== text) this.canvas.setAttribute('aria-label', text);
    this.idleText = `hottest: layer ${this.shape.layers[Math.floor(hot / columns)]}, ` +
      `expert ${hot % columns} (${this.wanted[hot].toFixed(1)}×)`;
    // Screen readers hear the cell they asked for, not each change of the hottest one.
    this.readout.setAttribute('aria-live', this.cursor === null ? 'off' : 'polite');
    setText(this.readout, this.cursor === null ? this.idleText : this.#name(this.cursor));
  }

  #setCursor(i) {
    if (this.cursor === i || !this.shape) return;
    this.cursor = i;
    this.readout.setAttribute('aria-live', i === null ? 'off' : 'polite');
    setText(this.readout, i === null ? this.idleText : this.#name(i));
    this.#draw();
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect(), { left, top, cell, height } = this.grid;
    const column = Math.floor((event.clientX - box.left - left) / cell),
          row = Math.floor((event.clientY - box.top - top) / height);
    const { rows, columns } = this.shape;
    this.#setCursor(column >= 0 && column < columns && row >= 0 && row < rows ? row * columns + column : null);
  }

  #key(event) {
    const { rows, columns } = this.shape, at = this.cursor ?? this.#hottest();
    const row = Math.floor(at / columns), column = at % columns;
    const to = { ArrowLeft: [row, column - 1], ArrowRight: [row, column + 1], ArrowUp: [row - 1, column],
      ArrowDown: [row + 1, column], Home: [row, 0], End: [row, columns - 1] }[event.key];
    if (!to) return;
    event.preventDefault();
    const clamp = (x, last) => Math.max(0, Math.min(last, x));
    this.#setCursor(clamp(to[0], rows - 1) * columns + clamp(to[1], columns - 1));
  }

  // Sizes in CSS pixels. Cells that are wide enough keep whole device pixels and a gap.
  #measure(dpr) {
    const { rows, columns } = this.shape, gutter = 24, width = Math.max(80, this.filled.clientWidth);
    let cell = Math.min(this.largestCell, (width - gutter) / columns);
    const gap = cell >= 3 ? (cell >= 10 ? 2 : 1) : 0;
    if (gap) cell = Math.floor(cell * dpr) / dpr;
    const height = Math.max(3, Math.round(Math.min(cell >= 6 ? cell : 12, this.room / rows) * dpr) / dpr);
    const top = height < 12 ? 5 : 0;  // half a label
    return { left: gutter, top, cell, height, gap, width, total: Math.ceil(height * rows) + top + 16 };
  }

  #draw() {
    if (!this.shape || this.filled.hidden || !this.filled.clientWidth) return;
    const dpr = devicePixelRatio || 1, grid = (this.grid = this.#measure(dpr)), { canvas } = this;
    const wide = Math.round(grid.width * dpr), high = Math.round(grid.total * dpr);
    if (canvas.width !== wide || canvas.height !== high) {
      canvas.width = wide;
      canvas.height = high;
      canvas.style.width = `${grid.width}px`;
      canvas.style.height = `${grid.total}px`;
      this.legend.style.width = `${Math.max(160, grid.cell * this.shape.columns)}px`;
    }
    const pen = canvas.getContext('2d');
    pen.setTransform(dpr, 0, 0, dpr, 0, 0);
    pen.clearRect(0, 0, grid.width, grid.total);
    if (grid.gap && this.shown.length <= MANY) this.#cells(pen);
    else this.#pixels(pen);
    this.#labels(pen);
    if (this.cursor !== null) this.#outline(pen);
  }

  #cells(pen) {
    const { left, top, cell, height, gap } = this.grid, { columns } = this.shape;
    const colours = CSS[isDark() ? 'dark' : 'light'];
    const down = height >= 6 ? gap : height >= 4 ? 1 : 0;
    for (let i = 0; i < this.shown.length; ++i) {
      pen.fillStyle = colours[Math.round(this.shown[i])];
      const x = left + (i % columns) * cell, y = top + Math.floor(i / columns) * height;
      if (cell < 10) { pen.fillRect(x, y, cell - gap, height - down); continue; }
      pen.beginPath();
      pen.roundRect(x, y, cell - gap, height - down, 2.5);
      pen.fill();
    }
  }

  // Narrow cells, or many: one pixel each, stretched; then the gaps are cut.
  #pixels(pen) {
    const { left, top, cell, height, gap } = this.grid, { rows, columns } = this.shape;
    const image = new ImageData(columns, rows), pixels = new Uint32Array(image.data.buffer);
    const colours = new Uint32Array(BYTES[isDark() ? 'dark' : 'light'].buffer);
    for (let i = 0; i < this.shown.length; ++i) pixels[i] = colours[Math.round(this.shown[i])];
    this.small ??= document.createElement('canvas');
    this.small.width = columns;
    this.small.height = rows;
    this.small.getContext('2d').putImageData(image, 0, 0);
    pen.imageSmoothingEnabled = false;
    pen.drawImage(this.small, left, top, cell * columns, height * rows);
    if (!gap) return;
    for (let c = 1; c <= columns; ++c) pen.clearRect(left + c * cell - gap, top, gap, height * rows);
    if (height < 4) return;
    for (let r = 1; r <= rows; ++r) pen.clearRect(left, top + r * height - gap, cell * columns, gap);
  }

  #labels(pen) {
    const { left, top, cell, height } = this.grid, { rows, columns, layers } = this.shape;
    const style = getComputedStyle(this.root);
    pen.fillStyle = style.getPropertyValue('--ink-3');
    pen.font = `10px ${style.fontFamily}`;
    pen.textBaseline = 'middle';
    pen.textAlign = 'right';
    const every = Math.max(1, Math.ceil(14 / height));
    for (let r = 0; r < rows; ++r) {
      if (r % every === 0 && (r + every <= rows || r === rows - 1))
        pen.fillText(String(layers[r]), left - 7, top + (r + 0.5) * height);
    }
    const bottom = top + rows * height + 9, each = columns <= 8 ? 1 : 2 ** Math.ceil(Math.log2(columns / 8));
    pen.textAlign = 'center';
    for (let c = 0; c < columns; c += each) pen.fillText(String(c), left + (c + 0.5) * cell, bottom);
  }

  #outline(pen) {
    const { left, top, cell, height, gap } = this.grid, { columns } = this.shape;
    const x = left + (this.cursor % columns) * cell, y = top + Math.floor(this.cursor / columns) * height;
    const grow = gap ? 0 : 1.5;
    pen.strokeStyle = getComputedStyle(this.root).getPropertyValue('--ink');
    pen.lineWidth = 2;
    pen.strokeRect(
      x - grow - 0.5, y - grow - 0.5, cell - gap + 2 * grow + 1, height - (gap ? Math.min(gap, 1) : 0) + 2 * grow + 1);
  }

  #legend() {
    const pen = this.bar.getContext('2d'), colours = CSS[isDark() ? 'dark' : 'light'];
    for (let x = 0; x < 256; ++x) {
      pen.fillStyle = colours[x];
      pen.fillRect(x, 0, 1, 1);
    }
    this.ticks.replaceChildren(...TICKS.map((share) => {
      const name = share === 0 ? 'cold' : share === 1 ? 'even' : `${share}×`;
      const tick = h('span', {}, name);
      tick.style.left = `${100 * position(share)}%`;
      return tick;
    }));
  }
}
