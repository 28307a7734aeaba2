// The panel of live figures: asks kt/status while the page is visible, four times a second while the server works
// and every three seconds otherwise. Also the one that notices that the server is gone, and that it is back.
import { announce, count, find, h, rate, setText } from './dom.js';
import { Trouble, getJson, isHealthy } from './api.js';
import { ExpertMap } from './experts.js';

const BUSY_MS = 250, IDLE_MS = 3000, RETRY_MS = 1500, MINUTE = 60000;
// "GPU 0 (NVIDIA H200): 12.1 of 139.8 GiB in use (11.4 here), 63 % of experts’ rows, waits 41 % of the time and is
// waited for 17 %"
const gpuText = (gpu) => {
  const { name, memory, free, held, experts_share: share, waited_s: waits, waited_for_s: awaited, steps_s: all } = gpu;
  const gib = (x) => (number(x) / 2 ** 30).toFixed(1);
  const parts = [`${gib(memory - free)} of ${gib(memory)} GiB in use (${gib(held)} here)`];
  if (Number.isFinite(share)) parts.push(`${percent(share)} of experts’ rows`);
  if (number(all) > 0)
    parts.push(`waits ${percent(number(waits) / all)} of the time and is waited for ${percent(number(awaited) / all)}`);
  return `${name}: ${parts.join(', ')}`;
};
const percent = (x) => `${Math.round(100 * x)} %`;
const number = (x) => (Number.isFinite(x) ? x : 0);

function duration(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`
    : `${Math.floor(seconds / 86400)} days`;
}

// The last minute as a line from (0, height) to (width, 0).
class Sparkline {
  constructor() { this.samples = []; }

  add(value) {
    const now = performance.now();
    this.samples.push({ at: now, value });
    while (this.samples.length > 2 && this.samples[1].at < now - MINUTE) this.samples.shift();
  }

  draw(svg) {
    const { width, height } = svg.viewBox.baseVal, now = performance.now();
    const top = Math.max(1, ...this.samples.map((sample) => sample.value));
    const x = (at) => Math.max(0, width * (1 - (now - at) / MINUTE)).toFixed(1);
    const y = (value) => (height - 1.5 - (height - 3) * (value / top)).toFixed(1);
    const line = this.samples.map(({ at, value }, k) => `${k ? 'L' : 'M'}${x(at)} ${y(value)}`).join('');
    svg.querySelector('.spark-line').setAttribute('d', line);
    const area = svg.querySelector('.spark-area');
    if (area && line) area.setAttribute('d', `${line}V${height}H${x(this.samples[0].at)}Z`);
  }
}

function setBar(bar, ...fractions) {
  bar.querySelectorAll('.bar-fill').forEach((fill, k) => {
    fill.style.width = `${(100 * Math.max(0, Math.min(1, number(fractions[k])))).toFixed(1)}%`;
  });
  bar.setAttribute('aria-valuenow', String(Math.round(100 * number(fractions[0]))));
}

// hooks: {key(), answering(), onStatus(status), onBack()}
export class Live {
  constructor(hooks) {
    Object.assign(this, { hooks, status: null, gone: false, timer: 0, asking: false, sparkline: new Sparkline() });
    this.map = new ExpertMap(find('heat'), { room: 300, largestCell: 26 });
    this.large = new ExpertMap(find('heat-large'), { room: Math.max(200, innerHeight - 260), largestCell: 44 });
    find('open-map').addEventListener('click', () => {
      find('map').showModal();
      this.large.update(this.status?.experts ?? null);
    });
    document.addEventListener('visibilitychange', () => this.poll());
    this.poll();
  }

  // Asks now, and from then on in time.
  async poll() {
    clearTimeout(this.timer);
    if (document.hidden || this.asking) return;
    this.asking = true;
    try {
      if (this.gone) await this.#lookForServer();
      if (!this.gone) await this.#ask();
    } finally {
      this.asking = false;
      const busy = this.hooks.answering() || this.status?.running > 0;
      this.timer = setTimeout(() => this.poll(), this.gone || this.noted ? RETRY_MS : busy ? BUSY_MS : IDLE_MS);
    }
  }

  async #ask() {
    try {
      const status = await getJson('kt/status', this.hooks.key());
      this.status = status;
      this.#note('');
      this.#draw(status);
      this.hooks.onStatus(status);
    } catch (error) {
      if (!(error instanceof Trouble) || error.status === 0) {
        if (!(await isHealthy())) this.serverGone();
      } else {
        this.#note(error.status === 404 ? 'This server has no live figures.' : error.message);
      }
    }
  }

  serverGone() {
    if (this.gone) return;
    this.gone = true;
    const banner = find('banner');
    banner.replaceChildren(h('span', { class: 'pulse', 'aria-hidden': 'true' }),
      'The server is gone. Looking for it; nothing here is lost.');
    banner.hidden = false;
    setText(find('speed'), '–');
    setText(find('pill-speed'), '–');
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.poll(), RETRY_MS);
  }

  async #lookForServer() {
    if (!(await isHealthy())) return;
    this.gone = false;
    find('banner').hidden = true;
    announce('The server is back.');
    this.hooks.onBack();
  }

  #note(text) {
    const note = find('live-note');
    setText(note, text);
    note.hidden = !text;
    this.noted = Boolean(text);
    find('figures').classList.toggle('stale', Boolean(text));
  }

  #draw(status) {
    this.#speed(status);
    this.#limit(status);
    this.#cache(status.kv_tokens ?? {});
    this.#requests(status);
    this.#facts(status);
    this.map.update(status.experts ?? null);
    if (find('map').open) this.large.update(status.experts ?? null);
  }

  #speed(status) {
    const speed = number(status.decode_tokens_per_s), prefill = number(status.prefill_tokens_per_s);
    this.sparkline.add(speed);
    setText(find('speed'), rate(speed));
    setText(find('pill-speed'), rate(speed));
    const requests = number(status.requests_total);
    const asked = `${count(requests)} ${requests === 1 ? 'request' : 'requests'}`;
    setText(find('totals'), prefill > 0 ? `reading a prompt at ${rate(prefill)} tokens/s`
      : `${count(number(status.tokens_total))} tokens in ${asked}`);
    this.sparkline.draw(find('spark'));
    this.sparkline.draw(document.querySelector('.spark-mini'));
  }

  #limit(status) {
    find('limit').hidden = !Number.isFinite(status.fraction_of_limit);
    const fraction = number(status.fraction_of_limit),
          kind = typeof status.limit === 'string' && status.limit ? `${status.limit} ` : '';
    setBar(find('limit-bar'), fraction);
    setText(find('limit-text'), `${percent(fraction)} of the machine’s ${kind}limit`);
    const most = number(status.limit_read_gb_per_s);
    setText(
      find('limit-sub'), most ? `reading ${number(status.read_gb_per_s).toFixed(1)} of ${most.toFixed(1)} GB/s` : '');
  }

  #cache({ total, held, cached }) {
    const whole = number(total) || 1;
    setBar(find('kv-bar'), number(held) / whole, number(cached) / whole);
    setText(find('kv-text'), percent((number(held) + number(cached)) / whole));
    setText(
      find('kv-sub'), `${count(number(held))} in use, ${count(number(cached))} reusable, of ${count(number(total))}`);
  }

  #requests({ running, waiting, max_running: most }) {
    setText(find('requests-text'), `${count(number(running))} running, ${count(number(waiting))} waiting`);
    const slots = find('slots'), shown = Math.min(number(most), 32);
    while (slots.childNodes.length < shown) slots.append(h('i'));
    while (slots.childNodes.length > shown) slots.lastChild.remove();
    slots.childNodes.forEach((slot, k) => slot.classList.toggle('on', k < number(running)));
  }

  #facts(status) {
    const rows = [
      ['Experts', status.experts_format], ['Instructions', status.isa], ['Threads', status.threads],
      ['GPU', status.gpu && gpuText(status.gpu)], ['Context', status.context && `${count(status.context)} tokens`],
      ['Up for', Number.isFinite(status.uptime_s) && duration(status.uptime_s)],
      ['Version', status.version && `KT ${status.version}`]
    ];
    const text = rows.filter(([, value]) => value).map(([name, value]) => [name, String(value)]);
    const key = JSON.stringify(text);
    if (key === this.facts) return;
    this.facts = key;
    find('facts').replaceChildren(...text.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value))));
  }
}
